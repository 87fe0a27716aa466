"""Where a manager, a model and a pool are hooked, and how all of it is undone."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING, Any

from kvcanary.engines.base import Patches
from kvcanary.engines.transformers.contract import check_manager, check_mode, check_version
from kvcanary.engines.transformers.pool_watch import PoolWatch
from kvcanary.errors import ConfigError

if TYPE_CHECKING:
    from kvcanary.canary import Canary


def attach(engine: Any, canary: Canary, unarmed: dict[str, str]) -> Callable[[], None]:
    """Watch a ``ContinuousBatchingManager`` or a model; returns what undoes it.

    ``unarmed``: checks that lack facts, each with its reason.

    Raises:
        ConfigError: it cannot be watched; it is left as it was.
    """
    import transformers

    check_version(transformers.__version__)
    check_mode(transformers.__version__, canary.config.mode)
    is_manager = any(base.__qualname__ == "ContinuousBatchingManager" for base in type(engine).__mro__)
    make = _ManagerWatch if is_manager else _ModelWatch
    watch = make(engine, canary, unarmed)
    try:
        watch.begin()
    except BaseException:
        watch.end()
        raise
    return watch.end


class _ModelWatch:
    """A model that will make managers: one at a time is watched, the newest."""

    def __init__(self, model: Any, canary: Canary, unarmed: dict[str, str]) -> None:
        self._model = model
        self._canary = canary
        self._unarmed = unarmed
        self._patches = Patches()
        self._manager: _ManagerWatch | None = None

    def begin(self) -> None:
        self._patches.claim(self._model)
        self._patches.wrap(self._model, "init_continuous_batching", self._init_continuous_batching)
        kept = vars(self._model).get("_cached_continuous_batching_manager")
        if kept is not None:
            self._watch(kept)

    def end(self) -> None:
        self._patches.undo()
        if self._manager is not None:
            self._manager.end()
            self._manager = None

    def _init_continuous_batching(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def init_continuous_batching(*args: Any, **kwargs: Any) -> Any:
            manager = original(*args, **kwargs)
            self._watch(manager)
            return manager

        return init_continuous_batching

    def _watch(self, manager: Any) -> None:
        if self._manager is not None:
            if self._manager.manager is manager:
                return
            if self._manager.manager.is_running():
                raise ConfigError(
                    "this model makes a second continuous batching manager while the first one runs; a canary watches "
                    "one pool, so stop the first manager, or watch each manager with a canary of its own"
                )
            self._manager.end()
        watch = self._manager = _ManagerWatch(manager, self._canary, self._unarmed)
        try:
            watch.begin()
        except BaseException:
            watch.end()
            self._manager = None
            raise


class _ManagerWatch:
    """A manager: its pool is watched from its making until the engine drops it."""

    def __init__(self, manager: Any, canary: Canary, unarmed: dict[str, str]) -> None:
        import transformers

        self.manager = manager
        self._version: str = transformers.__version__
        self._canary = canary
        self._unarmed = unarmed
        self._patches = Patches()
        self._pool: PoolWatch | None = None
        self._lock = threading.RLock()

    def begin(self) -> None:
        manager = self.manager
        check_manager(manager, self._version)
        self._patches.claim(manager)
        self._patches.wrap(manager, "_create_batch_processor", self._create_batch_processor)
        self._patches.wrap(manager, "stop", self._stop)
        self._patches.wrap(manager, "_run_generation_loop", self._run_generation_loop)
        if manager.batch_processor is None:
            return
        pausable = hasattr(manager, "pause")
        if manager.is_running() and not pausable and manager.model.device.type == "cuda":
            raise ConfigError(
                f"transformers {self._version} cannot be paused, so a manager that runs on a GPU cannot be attached to "
                "safely; attach before start(), or use 5.18 or later"
            )
        with _held(manager):
            self._enter(manager.batch_processor, idle=pausable or not manager.is_running())

    def end(self) -> None:
        """Take every hook out and leave the pool. Idempotent."""
        self._patches.undo()
        # Graphs are dropped then, which must not be while one is replayed.
        with _held(self.manager) if self._pool is not None and self._pool.has_graphs else nullcontext():
            self._leave()

    def _enter(self, processor: Any, *, idle: bool) -> None:
        with self._lock:
            if self._pool is not None:
                if self._pool.processor is processor:
                    return
                self._leave()
            pool = self._pool = PoolWatch(self.manager, processor, self._canary, self._version, self._unarmed)
            try:
                pool.begin(idle=idle)
            except BaseException:
                self._leave()
                raise

    def _leave(self) -> None:
        with self._lock:
            pool, self._pool = self._pool, None
            if pool is not None:
                pool.end()

    def _leave_if_dropped(self) -> None:
        # The watch must not keep the memory of a pool alive that the engine let go.
        with self._lock:
            if self._pool is not None and self.manager.batch_processor is not self._pool.processor:
                self._leave()

    def _create_batch_processor(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def create_batch_processor(*args: Any, **kwargs: Any) -> Any:
            processor = original(*args, **kwargs)
            self._enter(processor, idle=True)
            return processor

        return create_batch_processor

    def _stop(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def stop(*args: Any, **kwargs: Any) -> Any:
            try:
                return original(*args, **kwargs)
            finally:
                if not self.manager.is_running():
                    self._leave_if_dropped()

        return stop

    def _run_generation_loop(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def run_generation_loop(*args: Any, **kwargs: Any) -> Any:
            try:
                return original(*args, **kwargs)
            finally:
                # stop(block=False) dropped the pool while this thread was still using it.
                self._leave_if_dropped()

        return run_generation_loop


@contextmanager
def _held(manager: Any) -> Generator[None]:
    """The engine's loop at rest between two batches, where the release can do that."""
    with ExitStack() as stack:
        if manager.is_running() and hasattr(manager, "pause"):
            # It raises when the loop ends while it waits; then nothing runs either.
            with suppress(RuntimeError):
                stack.enter_context(manager.pause())
        yield
