"""The front door: find the adapter, attach, start the stream, and undo all three.

Importing this module imports no torch; only a mode other than ``off`` does.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from kvcanary.config import CanaryConfig, no_quarantine, resolve
from kvcanary.errors import ConfigError

if TYPE_CHECKING:
    from kvcanary.bus import Subscription
    from kvcanary.canary import Canary
    from kvcanary.events import Event
    from kvcanary.observers.base import Observer


def install_canary(
    engine: Any, config: CanaryConfig | None = None, *, observers: Sequence[Observer] = ()
) -> Canary | None:
    """Attach a canary to ``engine`` and start its stream; for engine authors and plugins.

    Args:
        engine: anything that an adapter knows.
        config: taken whole (only ``KVCANARY_MODE=off`` wins over it); None: from the environment.
        observers: in addition to the configured ones.

    Returns:
        The canary, or None when the mode is ``off``. Its pool may come later (``canary.bound``). Undo with
        :func:`uninstall_canary`.

    Raises:
        ConfigError: unknown engine, version or feature; the engine is left exactly as it was.
    """
    watch_ = Watch(engine, resolve(config, None), observers)
    watch_.start()
    if watch_.canary is not None:
        _INSTALLED[id(watch_.canary)] = watch_
    return watch_.canary


def uninstall_canary(canary: Canary) -> None:
    """Undo :func:`install_canary`; the engine is as it was. Idempotent; raises nothing that was found."""
    watch_ = _INSTALLED.pop(id(canary), None)
    if watch_ is not None:
        watch_.stop(raise_found=False)


_INSTALLED: dict[int, Watch] = {}


def watch(
    engine: Any,
    mode: str | None = None,
    *,
    observers: Sequence[Observer] = (),
    config: CanaryConfig | None = None,
) -> Watch:
    """Watch an engine's KV cache: ``with kvcanary.watch(engine, mode="log"): ...`` (or ``async with``).

    Args:
        engine: for example a transformers ``ContinuousBatchingManager``, or the model that will make one.
        mode: ``off``, ``log``, ``raise`` or ``quarantine``; None: that of ``config``, or of the environment.
        observers: functions and objects that receive events, in addition to the configured ones.
        config: taken whole; None: from the environment.

    Raises:
        ConfigError: a setting or the engine cannot be used; the engine is left exactly as it was.
    """
    return Watch(engine, resolve(config, mode), observers)


class Watch:
    """A watched engine. Exists in ``off`` mode too, and then does nothing.

    Leaving it stops the stream, undoes every hook and, in ``raise`` mode, raises what was found, because
    engines swallow exceptions.
    """

    def __init__(self, engine: Any, config: CanaryConfig, observers: Sequence[Observer] = ()) -> None:
        self._engine = engine
        self._config = config
        self._observers = tuple(observers)
        self._undo: Callable[[], None] | None = None
        self._canary: Canary | None = None

    @property
    def canary(self) -> Canary | None:
        """The canary; None in ``off`` mode and before :meth:`start`."""
        return self._canary

    @property
    def error(self) -> BaseException | None:
        """What ``raise`` mode found, or None."""
        return self._canary.error if self._canary is not None else None

    @property
    def status(self) -> dict[str, Any]:
        """Plain values for a readiness probe; see :meth:`kvcanary.reporting.Reporting.status`."""
        if self._canary is None:
            return {"mode": self._config.mode, "watching": False, "healthy": self._config.mode == "off"}
        return self._canary.status()

    def subscribe(self, observer: Observer) -> Subscription | None:
        """Add an observer; async ones run on the caller's loop. None in ``off`` mode.

        Raises:
            ConfigError: the watch has not started.
        """
        if self._config.mode == "off":
            return None
        return self._require().subscribe(observer)

    async def events(self, *types: type[Event]) -> AsyncIterator[Event]:
        """Events of ``types`` (all, without any) as an async iterator; ends with the watch."""
        if self._config.mode == "off":
            return
        from kvcanary.streams import event_stream

        async for event in event_stream(self._require().bus, types):
            yield event

    def start(self) -> Self:
        """Attach and start; what ``with`` does on entry. Idempotent."""
        if self._config.mode == "off" or self._canary is not None:
            return self
        from kvcanary.canary import Canary
        from kvcanary.engines.base import find_adapter

        adapter = find_adapter(self._engine)
        if self._config.mode == "quarantine" and not adapter.quarantines:
            raise no_quarantine(adapter.name)
        canary = Canary(self._config, observers=self._observers)
        try:
            # The stream runs before the pool is bound, so that the first event finds its readers.
            canary.start()
            self._undo = adapter.attach(self._engine, canary)
        except BaseException:
            canary.stop()
            raise
        self._canary = canary
        return self

    def stop(self, *, raise_found: bool = True) -> None:
        """Undo every hook, deliver what is queued, and raise what ``raise`` mode found. Idempotent."""
        undo, self._undo = self._undo, None
        canary = self._canary
        if undo is None or canary is None:
            return
        try:
            undo()
        finally:
            canary.stop()
        if raise_found and canary.error is not None:
            raise canary.error.with_traceback(None)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        # Whatever the engine raised stays the error that is seen; what was found is still in `error`.
        self.stop(raise_found=error is None)

    async def __aenter__(self) -> Self:
        return self.start()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        import anyio

        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(lambda: self.stop(raise_found=False))
        if error is None and self.error is not None:
            raise self.error.with_traceback(None)

    def _require(self) -> Canary:
        if self._canary is None:
            raise ConfigError("the watch has not started; use it as a context manager, or call start()")
        return self._canary
