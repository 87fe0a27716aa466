"""Observers: folds that conclude, and sinks that take things out of the process.

Each module is imported when something asks for it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from kvcanary.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvcanary.config import CanaryConfig
    from kvcanary.mailbox import Mailbox
    from kvcanary.observers.base import Fold, ObserverSpec

__all__ = ["default_folds", "default_sinks", "load_observer"]


def default_folds(
    config: CanaryConfig, mailbox: Mailbox, checkpoint_due: Callable[[], bool] | None = None
) -> list[Fold]:
    """The folds that a configuration switches on, in the order in which they must run.

    Ownership comes first: what it derives is for the violations fold to judge, which also asks it for a page's owners.
    ``checkpoint_due``: asked by it each second, whether a journal wants the books.
    """
    from kvcanary.observers.violations import ViolationsFold

    folds: list[Fold] = []
    if config.track_ownership:
        from kvcanary.observers.ownership import OwnershipFold

        ledger = OwnershipFold(checkpoint_due)
        folds += [ledger, ViolationsFold(config.mode, mailbox, ledger.owners)]
    else:
        folds.append(ViolationsFold(config.mode, mailbox))
    if config.health_every:
        from kvcanary.observers.health import HealthFold

        folds.append(HealthFold(config.health_every, config.health_warmup, config.mode, mailbox))
    if config.stats_every:
        from kvcanary.observers.stats import StatsFold

        folds.append(StatsFold(config.stats_every))
    if config.swa_divergence_every:
        from kvcanary.observers.swa_divergence import SwaDivergenceFold

        folds.append(SwaDivergenceFold())
    return folds


def default_sinks(config: CanaryConfig) -> list[ObserverSpec]:
    """The sinks that a configuration switches on: the log, metrics, and those it names.

    The journal has a queue of its own kind.

    Raises:
        ConfigError: one of them cannot be made.
    """
    from kvcanary.observers.base import as_observer

    sinks: list[ObserverSpec] = []
    if config.log is not None:
        from kvcanary.observers.log import LogSink
        from kvcanary.observers.trace_context import around_this

        log = LogSink(
            config.log,
            profile=config.log_profile,
            service=config.log_service,
            redact=config.redact,
            processors=around_this(),
        )
        sinks.append(as_observer(log))
    if config.prometheus is not None:
        from kvcanary.observers.prometheus import served

        sinks.append(as_observer(served(config.prometheus)))
    return sinks + [load_observer(target) for target in config.observers]


def load_observer(target: str) -> ObserverSpec:
    """The observer that ``package.module:attribute`` names: a function, an object, or a class made without arguments.

    Raises:
        ConfigError: it cannot be imported, or is no observer.
    """
    from kvcanary.observers.base import as_observer, is_fold

    module, _, attribute = target.partition(":")
    try:
        found: object = importlib.import_module(module)
        for name in attribute.split("."):
            found = getattr(found, name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"observers names {target!r}, which cannot be loaded ({error}); expected 'package.module:attribute' of "
            f"something that can be imported in this process"
        ) from error
    if is_fold(found):
        raise ConfigError(f"observers names {target!r}, which is a fold; only sinks can be named in a configuration")
    return as_observer(found)
