"""AddressSanitizer, scrubber and flight recorder for the KV caches of LLM inference engines.

The public names are loaded on first use: importing the package imports neither torch nor anything else.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvcanary._version import __version__
    from kvcanary.batch import ForwardBatch, GroupBatch, PageTable
    from kvcanary.canary import Canary
    from kvcanary.config import CanaryConfig
    from kvcanary.errors import BatchError, CanaryStalledError, ConfigError, KVCorruptionError, LayoutError
    from kvcanary.events import Event, IncidentOpened, IncidentUpdated, KernelStalled, StatsReported, ViolationDetected
    from kvcanary.layout import AttentionGroup, KVSource, PoolLayout
    from kvcanary.observers.base import observer
    from kvcanary.watching import Watch, install_canary, watch

__all__ = [
    "AttentionGroup",
    "BatchError",
    "Canary",
    "CanaryConfig",
    "CanaryStalledError",
    "ConfigError",
    "Event",
    "ForwardBatch",
    "GroupBatch",
    "IncidentOpened",
    "IncidentUpdated",
    "KVCorruptionError",
    "KVSource",
    "KernelStalled",
    "LayoutError",
    "PageTable",
    "PoolLayout",
    "StatsReported",
    "ViolationDetected",
    "Watch",
    "__version__",
    "install_canary",
    "observer",
    "watch",
]

_MODULES = {
    "__version__": "_version",
    "AttentionGroup": "layout",
    "BatchError": "errors",
    "Canary": "canary",
    "CanaryConfig": "config",
    "CanaryStalledError": "errors",
    "ConfigError": "errors",
    "Event": "events",
    "ForwardBatch": "batch",
    "GroupBatch": "batch",
    "IncidentOpened": "events",
    "IncidentUpdated": "events",
    "KVCorruptionError": "errors",
    "KVSource": "layout",
    "KernelStalled": "events",
    "LayoutError": "errors",
    "PageTable": "batch",
    "PoolLayout": "layout",
    "StatsReported": "events",
    "ViolationDetected": "events",
    "Watch": "watching",
    "install_canary": "watching",
    "observer": "observers.base",
    "watch": "watching",
}


if not TYPE_CHECKING:  # a checker that saw it would let every misspelt name pass

    def __getattr__(name: str) -> Any:
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted(__all__)
