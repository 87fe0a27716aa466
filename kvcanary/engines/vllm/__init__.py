"""Adapter for vLLM 0.33, both model runners.

Importing it imports neither vLLM nor torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvcanary.canary import Canary


class VllmAdapter:
    """Watches an ``LLM`` or ``LLMEngine`` whose scheduler and worker live in the caller's process.

    Engines that start processes of their own are watched by the environment: ``KVCANARY_MODE=log`` beside an
    installed kvcanary is enough, see :mod:`kvcanary.engines.vllm.plugin`.
    """

    name = "vllm"
    facts = frozenset({"admit", "finish", "preempt", "alloc", "free", "publish", "evict", "reuse", "move", "weights"})
    quarantines = True

    def matches(self, engine: object) -> bool:
        """Whether the engine's type is one of vLLM's front doors."""
        return any(
            base.__module__.partition(".")[0] == "vllm"
            and base.__qualname__ in ("LLM", "LLMEngine", "AsyncLLM", "EngineCore")
            for base in type(engine).__mro__
        )

    def attach(self, engine: Any, canary: Canary) -> Callable[[], None]:
        """Watch an engine; returns what undoes it.

        Raises:
            ConfigError: the release is not supported, the engine's processes are out of reach, it uses a feature that
                cannot be followed, or it is watched already.
        """
        from kvcanary.engines.vllm.attach import attach

        return attach(engine, canary)
