"""What attaching refuses, and what it leaves behind: looked at on a real scheduler, told as plain values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

from kvcanary.errors import ConfigError
from kvcanary.watching import watch
from tests.engines.sglang.rig import Rig


def report(rig: Rig) -> dict[str, Any]:
    """Everything, by name."""
    scheduler = rig.scheduler
    before = _attributes(scheduler)
    with watch(scheduler, mode="log") as first:
        second = refusal(lambda: watch(scheduler, mode="log").start())
        armed = first.status["armed"]
    return {
        "armed": armed,
        "twice": second,
        "left_behind": sorted(_attributes(scheduler) ^ before),
        "off": sorted(_off(scheduler) ^ before),
        "hisparse": changed(scheduler, "enable_hisparse", value=True),
        "hierarchical": changed(scheduler, "enable_hierarchical_cache", value=True),
        "two_streams": changed(scheduler, "enable_pdmux", value=True),
        "renamed": changed(scheduler, "pause_generation", value=None),
        "pool": changed(scheduler.tp_worker.model_runner, "token_to_kv_pool", value=object(), engine=scheduler),
        "layout": _other_layout(scheduler),
        "version": _other_version(scheduler),
        "after_refusals": sorted(_attributes(scheduler) ^ before),
    }


def refusal(start: Callable[[], object]) -> str:
    """The words of the ConfigError; "" when there was none."""
    try:
        start()
    except ConfigError as error:
        return str(error)
    return ""


def changed(owner: Any, name: str, *, value: Any, engine: Any = None) -> str:
    """What attaching says while ``owner.name`` is something else."""
    missing = object()
    own = vars(owner).get(name, missing)
    setattr(owner, name, value)
    try:
        return refusal(lambda: watch(engine or owner, mode="log").start())
    finally:
        if own is missing:
            delattr(owner, name)
        else:
            setattr(owner, name, own)


def _attributes(scheduler: Any) -> set[tuple[str, str]]:
    """Attributes of every object that is hooked."""
    owners = {
        "scheduler": scheduler,
        "runner": scheduler.tp_worker.model_runner,
        "allocator": scheduler.token_to_kv_pool_allocator,
        "table": scheduler.req_to_token_pool,
    }
    return {(name, attribute) for name, owner in owners.items() for attribute in vars(owner)}


def _off(scheduler: Any) -> set[tuple[str, str]]:
    with watch(scheduler, mode="off"):
        return _attributes(scheduler)


def _other_layout(scheduler: Any) -> str:
    """A release that writes keys where the layout says values are."""
    pool = scheduler.tp_worker.model_runner.token_to_kv_pool
    pool.k_buffer, pool.v_buffer = pool.k_buffer[1:] + pool.k_buffer[:1], pool.v_buffer
    stored = pool._store_kv_layer
    pool._store_kv_layer = lambda layer, *rest: stored((layer + 1) % len(pool.k_buffer), *rest)
    try:
        return refusal(lambda: watch(scheduler, mode="log").start())
    finally:
        del pool._store_kv_layer
        pool.k_buffer = pool.k_buffer[-1:] + pool.k_buffer[:-1]


def _other_version(scheduler: Any) -> str:
    with patch("kvcanary.engines.sglang.attach.version", lambda _: "0.4.9"):
        return refusal(lambda: watch(scheduler, mode="log").start())
