"""A device that works when it is told to: launches wait in a queue, in order, as on a real stream."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from kvcanary.errors import KVCanaryError


class QueueError(KVCanaryError, RuntimeError):
    """A forward is told to run that its stream cannot run yet, or does not know."""


class _Work(NamedTuple):
    label: str
    do: Callable[[], None]


class DeviceQueue:
    """One stream of work.

    What is launched between :meth:`begin` and the next one belongs to a named forward. Forwards that are held, and all
    behind them, wait for :meth:`release`; everything else is done at once.
    """

    def __init__(self, held: Sequence[str]) -> None:
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
