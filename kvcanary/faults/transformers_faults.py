"""How each fault is done on a running continuous-batching engine of transformers.

Faults are done on the engine's own thread, in its inference mode and on its compute stream, just before a forward is
launched: the index tensors that this forward will use, or bytes of the cache, are changed in place. Wrapping
``compute_batch`` rather than hooking the model means that replays of CUDA graphs are hit as well, and that the
canary's own launches come afterwards.
"""

from __future__ import annotations

import contextlib
import random
import threading
from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Self

import torch

from kvcanary.engines.base import Patches
from kvcanary.errors import ConfigError
from kvcanary.events import FaultInjected
from kvcanary.faults.injectors import Fault, Injection, fault
from kvcanary.faults.transformers_batch import Batch, read_batch
from kvcanary.faults.transformers_ops import OPERATIONS

if TYPE_CHECKING:
    from kvcanary.canary import Canary

_Pending = tuple[Fault, "str | None", "Future[Injection]"]


class TransformersInjector:
    """Plants faults into one ``ContinuousBatchingManager`` that is watched by ``canary``.

    Use it as a context manager inside the watch, once the manager runs: leaving takes the hook out again.

    Raises:
        ConfigError: the manager has not been started, so there is no batch to break yet.
    """

    def __init__(self, manager: Any, canary: Canary, *, seed: int = 0) -> None:
        processor = getattr(manager, "batch_processor", None)
        if processor is None:
            raise ConfigError(
                f"{type(manager).__name__} has no batch processor yet; faults are planted into a running engine: "
                f"call start() and wait for a first result"
            )
        self._processor = processor
        self._canary = canary
        self._random = random.Random(seed)
        self._pending: deque[_Pending] = deque()
        self._lock = threading.Lock()
        self._patches = Patches()

    def __enter__(self) -> Self:
        self._patches.wrap(self._processor.model_runner, "compute_batch", self._before)
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._patches.undo()
        with self._lock:
            for _, _, future in self._pending:
                future.cancel()
            self._pending.clear()

    def _before(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def compute_batch(model: Any, batch_data: Any) -> Any:
            if self._pending:
                self._inject(batch_data)
            return original(model, batch_data)

        return compute_batch

    def plant(self, what: Fault | str, *, group: str | None = None) -> Future[Injection]:
        """Do a fault at the next forward that has a fitting victim. Any thread.

        Args:
            what: the fault, or its name.
            group: name of the attention group to hit; None: any that fits.

        Returns:
            A future of what was done, resolved on the engine's thread before that forward runs; it fails with what
            went wrong if the fault could not be done, and can be cancelled while it waits.

        Raises:
            ConfigError: unknown fault.
            LayoutError: unknown group.
        """
        chosen = fault(what) if isinstance(what, str) else what
        if group is not None:
            self._canary.layout.index(group)
        future: Future[Injection] = Future()
        with self._lock:
            self._pending.append((chosen, group, future))
        return future

    def _inject(self, batch_data: Any) -> None:
        with self._lock:
            waiting, self._pending = list(self._pending), deque()
        with self._on_compute_stream():
            batch = read_batch(batch_data, self._processor.inputs_and_outputs, self._canary)
            for item in waiting:
                if not self._done(item, batch):
                    with self._lock:
                        self._pending.append(item)

    def _done(self, item: _Pending, batch: Batch) -> bool:
        chosen, group, future = item
        if future.cancelled():
            return True
        try:
            hit = OPERATIONS[chosen.name](batch, self._random, group)
        except Exception as error:  # noqa: BLE001 - the engine goes on; who planted the fault is told
            future.set_exception(error)
            return True
        if hit is None:
            return False
        forward = self._canary.next_forward
        injection = Injection(
            fault=chosen, forward=forward, requests=hit.requests, group=hit.group, slot=hit.slot, detail=hit.detail
        )
        self._canary.emit(
            FaultInjected(
                forward=forward,
                fault=chosen.name,
                description=hit.detail,
                expects=chosen.expects,
                request=hit.requests[0] if hit.requests else "",
                group=hit.group,
                slot=hit.slot,
            )
        )
        if future.set_running_or_notify_cancel():
            future.set_result(injection)
        return True

    @contextlib.contextmanager
    def _on_compute_stream(self) -> Generator[None]:
        stream = getattr(self._processor.inputs_and_outputs, "compute_stream", None)
        if not isinstance(stream, torch.cuda.Stream):
            yield
            return
        stream.wait_stream(torch.cuda.current_stream(stream.device))
        with torch.cuda.stream(stream):
            yield
