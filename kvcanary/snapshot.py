"""From the device to the host without waiting: pinned headers and violation rows.

The engine's thread only pushes a number and records an event from a fixed pool; the drain's thread does all
the reading. A header's sequence word, stored last, says that a forward is done; the event is asked only when that
word does not come. Headers are cumulative, so one that was skipped or overwritten costs time resolution and nothing
else.
"""

from __future__ import annotations

import time
from collections import deque
from typing import Any, NamedTuple

import torch

from kvcanary.record import NUM_KINDS
from kvcanary.state import KIND_COUNTS, OUTBOX_ROWS, DeviceState, OutboxWord, ViolationWord, Word, group_base

_LATE_NS = 1_000_000_000


class Fence(NamedTuple):
    """One step whose device work is under way."""

    forward: int
    event: Any
    """a ``torch.cuda.Event``; None on a CPU, where the work is done when the call returns"""
    pushed_ns: int
    host_ns: int
    due: dict[str, int]


class Snapshot(NamedTuple):
    """What one look at the device found."""

    fence: Fence
    words: list[int]
    violations: list[list[int]]
    outbox: list[list[int]]
    missed: int
    """violation rows that were given out but never fitted the ring"""


class SnapshotRing:
    """Fences, headers and rings of one run.

    Attributes:
        skipped: headers that were overwritten before they were read, and steps for which no event was left.
        retired: the last forward that is known to be done.
        in_step: the engine's thread is within a step, and may be capturing a graph.
    """

    def __init__(self, state: DeviceState) -> None:
        self._state = state
        self._cuda = state.device.type == "cuda"
        # One event fewer than headers: a header is rewritten only after its fence was seen or given up.
        self._most = max(state.limits.snapshots - 1, 1)
        pool = [torch.cuda.Event() for _ in range(self._most)] if self._cuda else []
        self._pool: deque[Any] = deque(pool)
        self._fences: deque[Fence] = deque()
        self._taken = 0
        self._audits = 0
        self.skipped = 0
        self.retired = 0
        self.in_step = False

    @property
    def in_flight(self) -> int:
        """Steps whose fence has not been seen yet."""
        return len(self._fences)

    def push(self, forward: int, pushed_ns: int, host_ns: int, due: dict[str, int], stream: Any = None) -> None:
        """Fence the step that ended with ``forward``. Engine's thread; never waits, creates nothing on the device."""
        if len(self._fences) >= self._most or (self._cuda and not self._pool):  # nobody reads, or not in time
            self.skipped += 1
            return
        event = None
        if self._cuda:
            event = self._pool.popleft()
            event.record(stream)
        self._fences.append(Fence(forward, event, pushed_ns, host_ns, due))

    def poll(self) -> list[Snapshot]:
        """All snapshots whose fence has passed, oldest first. The drain's thread."""
        found: list[Snapshot] = []
        while self._fences:
            fence = self._fences[0]
            words = self._header(fence.forward)
            if words[Word.SEQUENCE] < fence.forward and not self._is_over(fence, found):
                break
            self._fences.popleft()
            if fence.event is not None:
                self._pool.append(fence.event)
            if not 0 < words[Word.SEQUENCE] <= fence.forward:
                self.skipped += 1
                continue
            found.append(self._read(fence, words))
        return found

    def final(self, fence: Fence) -> Snapshot:
        """A look at the counters themselves. Waits for the device: only when a run ends."""
        words = self._state.counters.tolist()
        words[Word.FORWARD] -= 1
        words[Word.SEQUENCE] = words[Word.FORWARD]
        return self._read(fence, words)

    def _header(self, forward: int) -> list[int]:
        """The header that the forward left, or the newest one if it left none.

        The sequence word is stored last and read twice, so half a header is never taken for a whole one.
        """
        headers = self._state.headers
        slot = headers[forward % headers.shape[0]]
        if int(slot[Word.SEQUENCE]) >= forward:
            words: list[int] = slot.tolist()
            if int(slot[Word.SEQUENCE]) == words[Word.SEQUENCE] == words[Word.FORWARD]:
                return words
        newest: list[int] = max(headers.tolist(), key=lambda row: int(row[Word.SEQUENCE]))
        return newest

    def _is_over(self, fence: Fence, found: list[Snapshot]) -> bool:
        try:
            return self._gave_up(fence)
        except Exception:
            if found:  # a CUDA error, which the next look meets again: what was read before it is not lost with it
                return False
            raise

    def _gave_up(self, fence: Fence) -> bool:
        """Whether the step is over and left no header: the device counts otherwise (a graph without the canary).

        Events are asked only then, and not within a step: a query would spoil a graph that the engine captures on
        its own thread at that moment.
        """
        late = time.monotonic_ns() - fence.pushed_ns > _LATE_NS
        return late and not self.in_step and (fence.event is None or bool(fence.event.query()))

    def _read(self, fence: Fence, words: list[int]) -> Snapshot:
        self.retired = max(self.retired, words[Word.FORWARD])
        rows, missed = self._violations(words[Word.STORED])
        audits = self._outbox(words[Word.OUTBOX])
        self._acknowledge(words)
        return Snapshot(fence, words, rows, audits, missed)

    def _violations(self, stored: int) -> tuple[list[list[int]], int]:
        ring = self._state.violations
        rows: list[list[int]] = []
        missed = 0
        for number in range(self._taken, stored):
            row: list[int] = ring[number % ring.shape[0]].tolist()
            if row[ViolationWord.SEQUENCE] == number + 1:
                rows.append(row)
            else:
                missed += 1
        self._taken = max(self._taken, stored)
        return rows, missed

    def _outbox(self, count: int) -> list[list[int]]:
        first = max(self._audits, count - OUTBOX_ROWS)
        rows = [self._state.outbox[number % OUTBOX_ROWS].tolist() for number in range(first, count)]
        self._audits = max(self._audits, count)
        return [row for number, row in enumerate(rows, first) if row[OutboxWord.SEQUENCE] == number + 1]

    def _acknowledge(self, words: list[int]) -> None:
        acked = self._state.acked
        if int(acked[-1]) == words[Word.STORED]:
            return
        counts = [
            words[group_base(group) + KIND_COUNTS + kind]
            for group in range(len(self._state.layout.groups))
            for kind in range(NUM_KINDS)
        ]
        acked[:-1] = torch.tensor(counts, dtype=torch.int64)
        acked[-1] = words[Word.STORED]
