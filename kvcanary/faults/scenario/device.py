"""A device that works when it is told to: launches wait in a queue, in order, as on a real stream."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from kvcanary.batch import ForwardBatch
from kvcanary.errors import KVCanaryError
from kvcanary.kernels import DeviceFact, Kernels
from kvcanary.state import DeviceState, PoisonMode


class QueueError(KVCanaryError, RuntimeError):
    """A forward is told to run that its stream cannot run yet, or does not know."""


class _Work(NamedTuple):
    label: str
    do: Callable[[], None]


class DeviceQueue:
    """Implements :class:`kvcanary.kernels.Kernels` around real ones, on one stream.

    What is launched between :meth:`begin` and the next one belongs to a named forward. Forwards that are held, and all
    behind them, wait for :meth:`release`; everything else is done at once.
    """

    def __init__(self, kernels: Kernels, held: Sequence[str]) -> None:
        self._kernels = kernels
        self.name = kernels.name
        self._held = set(held)
        self._queue: deque[_Work] = deque()
        self._label = ""

    def begin(self, label: str) -> None:
        """What is put from now on belongs to this forward; "" to none."""
        self._label = label

    def put(self, do: Callable[[], None]) -> None:
        """Do something on the device, after all that was put before."""
        self._queue.append(_Work(self._label, do))

    def advance(self) -> None:
        """Do what no held forward stands in front of."""
        while self._queue and self._queue[0].label not in self._held:
            self._queue.popleft().do()

    def release(self, label: str) -> None:
        """A held forward is worked on.

        Raises:
            QueueError: another held forward stands before it.
        """
        self._held.discard(label)
        self.advance()
        if any(work.label == label for work in self._queue):
            raise QueueError(f"forward {label} waits behind forward {self._queue[0].label}; one stream runs in order")

    # --- the kernels' operations --------------------------------------------------------------------------

    def prepare(self, state: DeviceState) -> None:
        """As the real ones."""
        self._kernels.prepare(state)

    def facts(self, state: DeviceState, facts: Sequence[DeviceFact]) -> None:
        """Queued."""
        self.put(lambda: self._kernels.facts(state, facts))

    def mark(
        self, state: DeviceState, batch: ForwardBatch, groups: Sequence[int], *, first: bool, poison: str = ""
    ) -> None:
        """Queued."""
        self.put(lambda: self._kernels.mark(state, batch, groups, first=first, poison=poison))

    def check(self, state: DeviceState, batch: ForwardBatch, groups: Sequence[int]) -> None:
        """Queued."""
        self.put(lambda: self._kernels.check(state, batch, groups))

    def seal(
        self,
        state: DeviceState,
        part: str,
        scrub_bytes: int,
        *,
        last: bool,
        nonfinite: bool,
        poison: PoisonMode = "off",
    ) -> None:
        """Queued."""
        self.put(lambda: self._kernels.seal(state, part, scrub_bytes, last=last, nonfinite=nonfinite, poison=poison))

    def abandon(self, state: DeviceState) -> None:
        """Queued."""
        self.put(lambda: self._kernels.abandon(state))

    def window(self, state: DeviceState, batch: ForwardBatch, full: int, swa: int, *, every: int) -> None:
        """Queued."""
        self.put(lambda: self._kernels.window(state, batch, full, swa, every=every))

    def fingerprint(self, state: DeviceState, group: int, part: str, slots: torch.Tensor) -> torch.Tensor:
        """Of the bytes as they are now: whoever asks has waited for the device."""
        return self._kernels.fingerprint(state, group, part, slots)
