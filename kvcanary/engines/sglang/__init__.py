"""Adapter for SGLang 0.5.23 up to 0.6.

Importing it imports neither SGLang nor torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvcanary.canary import Canary

_MODULE = "sglang.srt.managers.scheduler"


class SGLangAdapter:
    """Watches the ``Scheduler`` of one rank: it holds the runner, the pools, the allocator and the prefix tree.

    Schedulers run in processes of their own, so :mod:`kvcanary.plugins.sglang` attaches there when
    ``KVCANARY_MODE`` says so.
    """

    name = "sglang"
    facts = frozenset({"admit", "finish", "preempt", "alloc", "free", "publish", "evict", "reuse", "move", "weights"})
    quarantines = True

    def matches(self, engine: object) -> bool:
        """Whether it is a scheduler."""
        return any(base.__module__ == _MODULE and base.__qualname__ == "Scheduler" for base in type(engine).__mro__)

    def attach(self, engine: Any, canary: Canary) -> Callable[[], None]:
        """Watch a scheduler; returns what undoes it.

        Raises:
            ConfigError: the release is another, lacks something that is needed, or a feature cannot be watched.
        """
        from kvcanary.engines.base import unarmed_checks
        from kvcanary.engines.sglang.attach import attach

        return attach(engine, canary, unarmed_checks(self))
