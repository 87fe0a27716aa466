"""A small paged engine that knows when it goes wrong: the oracle of the property tests, the target of faults.

``kvcanary.watch(SimulatedEngine("ring"), mode="log")`` works as with any other engine. Importing this package imports
no torch; the engine itself does.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kvcanary.engines.base import FACTS, unarmed_checks

if TYPE_CHECKING:
    from kvcanary.canary import Canary
    from kvcanary.engines.simulated.engine import SimulatedEngine
    from kvcanary.engines.simulated.oracle import Wrong
    from kvcanary.engines.simulated.style import STYLES, Style

__all__ = ["STYLES", "SimulatedAdapter", "SimulatedEngine", "Style", "Wrong"]

_MODULES = {"STYLES": "style", "SimulatedEngine": "engine", "Style": "style", "Wrong": "oracle"}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)


class SimulatedAdapter:
    """Watches a :class:`~kvcanary.engines.simulated.engine.SimulatedEngine`; tells all facts."""

    name = "simulated"
    facts = FACTS
    quarantines = False

    def matches(self, engine: object) -> bool:
        """Whether it is one."""
        where = "kvcanary.engines.simulated.engine"
        return any(base.__module__ == where for base in type(engine).__mro__)

    def attach(self, engine: Any, canary: Canary) -> Callable[[], None]:
        """Watch an engine; returns what undoes it.

        Raises:
            ConfigError: another canary watches it already.
        """
        from kvcanary.engines.simulated.adapter import attach

        return attach(engine, canary, unarmed_checks(self))
