"""Adapter for the continuous batching of ``transformers``, releases 5.17 to 5.24.

Importing it imports neither transformers nor torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvcanary.canary import Canary

_PACKAGE = "transformers.generation.continuous_batching"


class TransformersAdapter:
    """Watches a ``ContinuousBatchingManager``, or a model that will make one.

    A manager may be given before or after ``start()``; a model covers ``init_continuous_batching``,
    ``generate_batch`` and the context manager, also for managers that are kept for the next session.
    """

    name = "transformers"
    facts = frozenset({"admit", "finish", "preempt", "rewind", "alloc", "free", "publish", "evict", "reuse", "move"})

    quarantines = True
    """From 5.18 on; :meth:`attach` refuses the mode with an older release."""

    def matches(self, engine: object) -> bool:
        """Whether a class of continuous batching is among the bases of the engine's type."""
        return any(
            base.__module__.startswith(_PACKAGE)
            and base.__qualname__ in ("ContinuousBatchingManager", "ContinuousMixin")
            for base in type(engine).__mro__
        )

    def attach(self, engine: Any, canary: Canary) -> Callable[[], None]:
        """Watch a manager or a model; returns what undoes it.

        Raises:
            ConfigError: the release is too old, lacks something that is needed, or the pool cannot be viewed.
        """
        from kvcanary.engines.base import unarmed_checks
        from kvcanary.engines.transformers.attach import attach

        return attach(engine, canary, unarmed_checks(self))
