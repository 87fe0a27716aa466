"""The bounded queue of one sink, and how its consumer sleeps.

One producer (the drain) puts, one consumer (the sink's runner) takes. The lock between them is held for a few
list operations and never while anybody's code runs, so no sink can hold up the drain or another sink.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Protocol

import anyio

from kvcanary.endings import seconds_left
from kvcanary.events import Event, EventsDropped
from kvcanary.observers.base import OnFull


class Signal(Protocol):
    """How a consumer sleeps and is woken."""

    def wake(self) -> None:
        """Let the consumer's present or next sleep end. Any thread, never blocks."""

    async def sleep(self, seconds: float | None = None) -> None:
        """Until somebody woke it, or so many seconds have passed."""

    def close(self) -> None:
        """The consumer has ended."""

    def hang_up(self) -> None:
        """The producer will wake nobody any more; ends a sleep."""


class ThreadSignal:
    """For a consumer with a thread of its own: sleeping blocks the thread.

    A lock that is free when somebody woke it; an ``Event`` of the standard library makes one for each sleep.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()

    def wake(self) -> None:
        """Let the thread's present or next sleep end."""
        with contextlib.suppress(RuntimeError):  # it is free: somebody else woke it, or it does not sleep
            self._lock.release()

    def wait(self, seconds: float | None = None) -> None:
        """Block until somebody woke it, or so many seconds have passed."""
        self._lock.acquire(timeout=-1 if seconds is None else seconds)

    async def sleep(self, seconds: float | None = None) -> None:
        """:meth:`wait`; yields to no loop."""
        self.wait(seconds)

    def close(self) -> None:
        """Nothing to release."""

    def hang_up(self) -> None:
        """Wake a last time."""
        self.wake()


class SocketSignal:
    """For a consumer on an event loop: a waking byte, which asyncio, uvloop and trio all can wait for."""

    def __init__(self) -> None:
        self._reader, self._writer = socket.socketpair()
        self._reader.settimeout(0)
        self._writer.settimeout(0)

    def wake(self) -> None:
        """Send the byte. One that cannot be sent is not needed: others are still unread, or nobody reads."""
        with contextlib.suppress(OSError):
            self._writer.send(b"\0")

    async def sleep(self, seconds: float | None = None) -> None:
        """Until a byte came."""
        with anyio.move_on_after(seconds):
            await anyio.wait_readable(self._reader)
        with contextlib.suppress(BlockingIOError):
            self._reader.recv(64)

    def close(self) -> None:
        """Release both ends."""
        self._reader.close()
        self._writer.close()

    def hang_up(self) -> None:
        """End of file wakes a loop that still runs, and asks nothing of one that does not."""
        self._writer.close()


class Gap:
    """Losses of a queue that nobody was told of yet."""

    __slots__ = ("count", "first", "last")

    def __init__(self) -> None:
        self.count = self.first = self.last = 0

    def add(self, lost: Sequence[Event]) -> None:
        """Count these events too."""
        self.first = self.first or lost[0].seq
        self.last = lost[-1].seq
        self.count += len(lost)

    def tell(self, observer: str, *, seq: int = 0) -> EventsDropped:
        """The event that tells of it; afterwards the gap is empty."""
        event = EventsDropped(
            seq=seq,
            time_ns=time.time_ns(),
            monotonic_ns=time.monotonic_ns(),
            observer=observer,
            count=self.count,
            first_seq=self.first,
            last_seq=self.last,
        )
        self.count = self.first = self.last = 0
        return event


class EventQueue:
    """Bounded, and exact about what it gives up.

    A gap is told in its place in the order: its :class:`EventsDropped` carries the number of the last lost
    event, so that the reader sees ascending numbers. It takes no room and counts as no event.

    Args:
        name: the sink's, for the announcement.
        capacity: most events at a time.
        on_full: whether the oldest or the newest events give way.
        announce: whether the reader wants to be told of gaps.
        signal: wakes a sleeping consumer.

    Attributes:
        closed: takes no more events.
        dropped: events given up so far.
        unreported: gap that others have not been told of; belongs to the producer.
    """

    def __init__(self, name: str, capacity: int, on_full: OnFull, *, announce: bool, signal: Signal) -> None:
        self.name = name
        self.closed = False
        self.dropped = 0
        self.unreported = Gap()
        self._capacity = capacity
        self._oldest = on_full == "drop_oldest"
        self._announce = announce
        self._signal = signal
        self._items: deque[Event] = deque()
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)
        self._gap = Gap()
        self._told = 0  # announcements among the items
        self._in_hand = 0
        self._asleep = self._resting = False
        self._released = False

    @property
    def pending(self) -> int:
        """Events queued or in the consumer's hands."""
        return len(self._items) - self._told + self._in_hand

    def put(self, events: Sequence[Event]) -> None:
        """Append what fits; give up and count the rest. Never waits for the consumer."""
        with self._lock:
            if self.closed:
                return
            over = len(self._items) - self._told + len(events) - self._capacity
            if over > 0:
                events = self._evict(events, over) if self._oldest else self._refuse(events, over)
            elif self._gap.count and not self._oldest:
                self._items.append(self._gap.tell(self.name, seq=self._gap.last))
                self._told += 1
            self._items.extend(events)
            self._rouse()

    def take(self, limit: int) -> tuple[list[Event], int]:
        """What is next, and how many events of the run are in it: at most ``limit``. Nothing: the consumer may sleep.

        Taking means that what was taken before is done with.
        """
        with self._lock:
            batch: list[Event] = []
            if self._gap.count and (self._oldest or not self._items):
                batch.append(self._gap.tell(self.name, seq=self._gap.last))
            taken = self._next(limit)
            told = sum(map(self._tells_of_gap, taken)) if self._told else 0
            self._told -= told
            self._in_hand = len(taken) - told
            batch += taken
            if not batch:
                self._asleep = not self.closed
                self._idle.notify_all()
            return batch, self._in_hand

    def done(self) -> None:
        """The consumer is done with what it took."""
        self._in_hand = 0

    def rest(self) -> bool:
        """The consumer sleeps whatever comes; only :meth:`close` wakes it. False: it is closed already."""
        with self._lock:
            self._resting = not self.closed
            return self._resting

    def close(self, *, discard: bool = False) -> int:
        """Take no more events; ``discard`` forgets the queued ones. Returns how many were pending."""
        with self._lock:
            self.closed = True
            pending = self.pending
            if discard:
                self._items.clear()
                self._told = 0
                self._idle.notify_all()
            self._asleep |= self._resting
            self._resting = False
            self._rouse()
            return pending

    def release(self) -> None:
        """The consumer has ended: wake it no more."""
        with self._lock:  # a byte that is being sent must not meet a closed descriptor
            self.closed = self._released = True
            self._asleep = False
            self._signal.close()
            self._idle.notify_all()

    def wait_idle(self, until: float) -> bool:
        """Whether all was taken and done with, or the consumer ended, before the monotonic time ``until``."""
        with self._lock:
            return self._idle.wait_for(lambda: self._released or not self.pending, seconds_left(until))

    def _next(self, limit: int) -> list[Event]:
        if len(self._items) > limit:
            return [self._items.popleft() for _ in range(limit)]
        taken = list(self._items)
        self._items.clear()
        return taken

    def _rouse(self) -> None:
        if self._asleep:
            self._asleep = False
            self._signal.wake()

    def _evict(self, events: Sequence[Event], over: int) -> Sequence[Event]:
        queued = min(over, len(self._items))
        self._lose([*(self._items.popleft() for _ in range(queued)), *events[: over - queued]])
        return events[over - queued :]

    def _refuse(self, events: Sequence[Event], over: int) -> Sequence[Event]:
        room = max(0, len(events) - over)
        kept: list[Event] = list(events[:room])
        if kept and self._gap.count:
            kept.insert(0, self._gap.tell(self.name, seq=self._gap.last))
            self._told += 1
        self._lose(events[room:])
        return kept

    def _lose(self, lost: Sequence[Event]) -> None:
        self.dropped += len(lost)
        self.unreported.add(lost)
        if self._announce:
            self._gap.add(lost)

    def _tells_of_gap(self, event: Event) -> bool:
        return isinstance(event, EventsDropped) and event.observer == self.name
