"""Slot numbers for the ledger: copied to the host without waiting, told once they are there.

The ledger learns of everything in order and a forward or two late, so what it says of order holds, and what it says of
forwards is that they were not earlier.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from kvcanary.events import FactsLost

if TYPE_CHECKING:
    from kvcanary.canary import Canary


@dataclass(frozen=True, slots=True)
class _Told:
    kind: str
    request: str
    start: int
    numbers: torch.Tensor
    done: Any
    """event on the copying stream; None: the numbers are there"""
    call: Callable[[], object] | None = None


class LateLedger:
    """What happens to pages of one group, for the ledger.

    Args:
        canary: whose ledger it is.
        group: whose pages they are.
        capacity: numbers that can be on their way at a time; what does not fit is told as lost facts, after which the
            ledger knows nothing of a page until it is handed out anew.
        device: where the numbers come from.
    """

    def __init__(self, canary: Canary, group: str, capacity: int, device: torch.device) -> None:
        self.group = group
        self._canary = canary
        self._cuda = device.type == "cuda"
        self._wanted = canary.config.track_ownership
        self._ring = torch.zeros(capacity, dtype=torch.int64, pin_memory=self._cuda)
        self._next = 0
        self._waiting: deque[_Told] = deque()
        self._events: list[Any] = []

    def tell(self, kind: str, request: str, pages: torch.Tensor) -> None:
        """Pages (``[n]``, on the device) changed hands; ``kind`` as in :data:`kvcanary.facts.PAGE_KINDS`."""
        count = pages.shape[0]
        if not count or not self._wanted or not self._canary.bound:
            return
        start = self._place(count)
        if start < 0:
            self._canary.facts.append(FactsLost(count=1))
            return
        self._next = start + count
        numbers = self._ring[start : self._next]
        numbers.copy_(pages, non_blocking=True)
        self._waiting.append(_Told(kind, request, start, numbers, self._mark()))

    def later(self, call: Callable[[], object]) -> None:
        """Make a call when all that was told before it is told."""
        if self._canary.bound:
            self._waiting.append(_Told("", "", self._next, self._ring[:0], None, call))

    def settle(self) -> None:
        """Tell what has arrived, in order."""
        waiting, facts = self._waiting, self._canary.facts
        while waiting and (waiting[0].done is None or waiting[0].done.query()):
            told = waiting.popleft()
            if told.call is not None:
                told.call()
                continue
            if told.done is not None:
                self._events.append(told.done)
            facts.pages(told.kind, self.group, told.request, told.numbers.tolist())

    def drop(self) -> None:
        """All pages are free and all books closed: what is on its way is of no interest any more."""
        self._waiting.clear()
        self._events.clear()  # they may not have come yet
        self._next = 0

    def _place(self, count: int) -> int:
        """Where ``count`` numbers fit that follow one another; -1: nowhere as yet."""
        size, start = self._ring.shape[0], self._next
        oldest = self._waiting[0].start if self._waiting else -1
        if oldest < 0:
            start = 0 if start + count > size else start
            return start if count <= size else -1
        if oldest >= start:
            return start if start + count <= oldest else -1
        if start + count <= size:
            return start
        return 0 if count <= oldest else -1

    def _mark(self) -> Any:
        if not self._cuda:
            return None
        event = self._events.pop() if self._events else torch.cuda.Event()
        event.record()
        return event
