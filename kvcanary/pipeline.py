"""The drain: one daemon thread, from source to bus.

Never the server's loop, where one blocking handler would stop the watch. It polls quickly while forwards are
in flight and slowly otherwise, and waits for no sink, no disk and no loop. What goes wrong in the source
(a CUDA error) is data: the run ends with the reason, and what is known is still delivered.

Beside a thread that is busy in Python each look takes the interpreter from it, and a thread that the look wakes
takes it once more: each time some 50 us are lost to both, besides the work. So looks are then rare, and nobody wakes
the drain.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

import anyio
import anyio.to_thread
import msgspec
from msgspec.structs import replace

from kvcanary.bus import Bus
from kvcanary.delivery import SinkReport
from kvcanary.endings import Deadline, Vigil, seconds_left
from kvcanary.errors import CanaryStalledError, ConfigError, words_of
from kvcanary.events import Event, EventsDropped, RunStarted, Ticked
from kvcanary.queues import ThreadSignal

POLL_SECONDS = 0.001
"""Between looks while forwards are in flight."""
IDLE_SECONDS = 0.05
"""Between looks otherwise; :meth:`Drain.wake` ends it early."""
BUSY_SECONDS = 0.04
"""Between looks while another thread keeps the interpreter busy."""
BUSY_LOOKS = 3
"""So many looks in a row have come late then: one may be the system's doing."""
TICK_SECONDS = 1.0
SUBMIT_CAPACITY = 65536
_READ_SHARE, _FLUSH_SHARE, _CLOSE_SHARE = 0.4, 0.75, 0.95
"""Shares of a deadline by which a stopping drain goes on to its next duty."""
_LAST_STEPS_SECONDS = 5.0


class Source(Protocol):
    """Where events come from. Asked by the drain's thread only.

    ``collect`` looks at the device first and takes facts second, but returns the facts first: so the launch of a
    forward always precedes what was found in it. ``next_run`` is asked before each ``collect``: a run is handed over
    once all of the one before was collected, and nothing of the new one is recorded before it has begun, so whoever
    begins a run flushes before and after. A source may also have ``queued_facts``, for ``Ticked``.
    """

    @property
    def in_flight(self) -> bool:
        """Whether something will be ready soon."""
        ...

    def collect(self) -> Sequence[Event]:
        """All that is ready, in order. Never blocks."""
        ...

    def next_run(self) -> RunStarted | None:
        """The run that begins now, once."""
        ...


class DrainReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a stopped drain delivered and what it lost."""

    reason: str = "stopped"
    clean: bool = True
    """the source was read to its end, and every sink had within the deadline all that it took"""
    events: int = 0
    """events of the last run"""
    facts_lost: int = 0
    snapshots_skipped: int = 0
    sinks: dict[str, SinkReport] = {}
    abandoned: tuple[str, ...] = ()
    """threads and tasks that did not end in time"""
    seconds: float = 0.0


class Drain:
    """Reads a source and publishes on a bus until it is stopped.

    All public methods may be called from any thread. After a fork the copy in the child is inert, and says so once.

    Args:
        source: asked for events and runs.
        bus: publishes them. Its sinks end with the drain.
        on_failure: told when the source failed. In ``raise`` mode it posts to the mailbox.
        settle: called after each look; True: something will be ready soon.
    """

    def __init__(
        self,
        source: Source,
        bus: Bus,
        *,
        on_failure: Callable[[CanaryStalledError], None] | None = None,
        settle: Callable[[], bool] | None = None,
    ) -> None:
        self._source = source
        self._bus = bus
        self._on_failure = on_failure
        self._settle = settle
        self._submitted: deque[Event] = deque()
        self._refused = 0
        self._flushes: deque[threading.Event] = deque()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._vigil: Vigil | None = None
        self._signal = ThreadSignal()
        self._asleep = self._wanted = False
        self._due = 0.0  # when the next look should be
        self._late = 0  # looks in a row that another thread has held up
        self._next_tick = 0.0
        self._failure = ""
        self._stopping: _Stopping | None = None
        self._inert = self._told_inert = False
        bus.notify = self.wake

    @property
    def running(self) -> bool:
        """Whether the thread is at work."""
        thread = self._thread
        return not self._inert and self._stopping is None and thread is not None and thread.is_alive()

    @property
    def inert(self) -> bool:
        """Whether this is a copy in a forked child."""
        return self._inert

    def start(self) -> None:
        """Start the thread. Idempotent; may follow a :meth:`stop` that has ended.

        Raises:
            ConfigError: the last thread did not end within its deadline and is still there.
        """
        if self._is_inert() or self.running:
            return
        with self._lock:
            if self._is_still_there():
                raise ConfigError("the drain is still stopping: its source or a fold blocks; make a new canary")
            self._stopping, self._failure = None, ""
            self._next_tick = time.monotonic() + TICK_SECONDS
            self._vigil = Vigil(self)
            self._thread = threading.Thread(target=self._main, name="kvcanary-drain", daemon=True)
            self._thread.start()

    def _is_still_there(self) -> bool:
        if self._thread is None:
            return False
        if self._stopping is not None and self._stopping.done.is_set():
            self._thread.join(_LAST_STEPS_SECONDS)  # all is done and told; it only has to leave
        return self._thread.is_alive()

    def wake(self) -> None:
        """There is something, or will be: look soon. Two attribute accesses when the drain is awake."""
        self._wanted = True
        if self._asleep:
            self._asleep = False
            self._rouse()

    def submit(self, event: Event) -> bool:
        """Put an event of one's own into the stream, stamped now if it has no time. False: refused, and counted.

        Raises:
            ConfigError: it is no event.
        """
        if not isinstance(event, Event):
            raise ConfigError(f"only events can enter the stream, got {event!r}")
        if self._inert:
            return False
        if len(self._submitted) >= SUBMIT_CAPACITY:
            with self._lock:
                self._refused += 1
            return False
        if not event.time_ns:
            event = replace(event, time_ns=time.time_ns(), monotonic_ns=time.monotonic_ns())
        self._submitted.append(event)
        self.wake()
        return True

    def flush(self, timeout: float) -> bool:
        """Whether all that is there now was folded and queued for the sinks within ``timeout`` seconds."""
        if self._is_inert() or not self.running or threading.current_thread() is self._thread:
            return False
        passed = threading.Event()
        self._flushes.append(passed)
        self._rouse()
        return passed.wait(seconds_left(time.monotonic() + timeout))

    def stop(self, deadline: float = 5.0) -> DrainReport:
        """Read the rest, flush the sinks, say ``RunStopped``, end: all within ``deadline`` seconds. Idempotent.

        On the thread of a loop it cannot wait for the asynchronous sinks of that loop; :meth:`astop` can.
        """
        if self._is_inert():
            return DrainReport(reason="a forked copy; the drain runs in the parent", clean=False)
        with self._lock:
            stopping = self._stopping or _Stopping(deadline)
            first, self._stopping = self._stopping is None, stopping
            thread, vigil = self._thread, self._vigil
        if vigil is not None:
            vigil.end()
        if thread is None or not thread.is_alive():
            if first:
                self._finish(stopping)
        elif thread is threading.current_thread():
            return DrainReport(reason="asked on the drain's own thread, which ends after this event", clean=False)
        else:
            self._rouse()
            stopping.done.wait(seconds_left(stopping.deadline.at(1.0) + 0.1))
        return stopping.report or self._report_stuck(stopping)

    async def astop(self, deadline: float = 5.0) -> DrainReport:
        """:meth:`stop` on an event loop, which goes on running meanwhile."""
        # Cancellation waits for the thread, which ends within the deadline.
        return await anyio.to_thread.run_sync(self.stop, deadline, limiter=anyio.CapacityLimiter(1))

    # --- the drain's thread -------------------------------------------------------------------------------

    def _main(self) -> None:
        while (stopping := self._stopping) is None:
            self._wanted = False
            self._sleep(self._pass())
        self._finish(stopping)

    def _sleep(self, seconds: float) -> None:
        """Until the next look, and find out whether it comes late."""
        busy = self._late >= BUSY_LOOKS
        self._due = time.monotonic() + (BUSY_SECONDS if busy else seconds)
        self._asleep = seconds > POLL_SECONDS and not busy
        if not (self._asleep and self._wanted):  # else something came between the look and the line above
            self._signal.wait(seconds_left(self._due))
        self._asleep = False
        # Who asks a busy thread for the interpreter gets it after a switch interval.
        held_up = time.monotonic() - self._due > sys.getswitchinterval() / 2
        self._late = self._late + 1 if held_up else 0

    def _rouse(self) -> None:
        self._due = time.monotonic()
        self._signal.wake()

    def _pass(self) -> float:
        """Read, publish, tick, answer flushes; returns the seconds until the next look."""
        flushes = [self._flushes.popleft() for _ in range(len(self._flushes))] if self._flushes else ()
        busy = in_flight = False
        try:
            busy = self._read()
            in_flight = self._bus.running and bool(self._source.in_flight)
            self._tick(in_flight=in_flight)
            self._bus.pump()
        except Exception as error:  # noqa: BLE001 - a CUDA error, or a fault of the source: data, like all the rest
            self._fail(error)
        if self._settle is not None and self._settle():
            in_flight = True
        for passed in flushes:
            passed.set()
        return POLL_SECONDS if busy or in_flight else IDLE_SECONDS

    def _read(self) -> bool:
        started = self._source.next_run()
        if started is not None:
            self._bus.begin_run(started)
            self._failure = ""
        if not self._bus.running:
            return False
        events: Sequence[Event] = self._source.collect()
        if self._submitted or self._refused:
            events = [*events, *self._take_submitted()]
        if events:
            self._bus.publish(events)
        return bool(events) or started is not None

    def _take_submitted(self) -> list[Event]:
        events = [self._submitted.popleft() for _ in range(len(self._submitted))]
        if self._refused:
            with self._lock:
                count, self._refused = self._refused, 0
            now = {"time_ns": time.time_ns(), "monotonic_ns": time.monotonic_ns()}
            events.append(EventsDropped(**now, observer="submit", count=count, first_seq=0, last_seq=0))
        return events

    def _tick(self, *, in_flight: bool) -> None:
        now = time.monotonic()
        if now < self._next_tick or not self._bus.running:
            return
        self._next_tick = now + TICK_SECONDS
        monotonic_ns = time.monotonic_ns()
        ticked = Ticked(
            time_ns=time.time_ns(),
            monotonic_ns=monotonic_ns,
            in_flight=int(in_flight),
            queued_facts=int(getattr(self._source, "queued_facts", 0)),
            seconds_since_snapshot=(monotonic_ns - self._bus.losses.last_snapshot_ns) / 1e9,
        )
        self._bus.publish([ticked])

    def _fail(self, error: Exception) -> None:
        if not self._bus.running:
            return
        self._failure = words_of(error)
        self._bus.end_run(self._failure, clean=False)
        if self._on_failure is not None:
            stalled = CanaryStalledError(
                f"the canary cannot read its device any more ({self._failure}); nothing is checked"
            )
            stalled.__cause__ = error
            self._on_failure(stalled)

    # --- ending -------------------------------------------------------------------------------------------

    def _finish(self, stopping: _Stopping) -> None:
        deadline = stopping.deadline
        self._pass()
        while not (quiet := self._pass() >= IDLE_SECONDS) and time.monotonic() < deadline.at(_READ_SHARE):
            time.sleep(POLL_SECONDS)
        clean = quiet and not self._failure
        reason = self._failure or ("stopped" if clean else "stopped before the last forwards were done")
        self._bus.flush(deadline.at(_FLUSH_SHARE), own_thread=stopping.caller)
        self._bus.end_run(reason, clean=clean)
        sinks, abandoned = self._bus.close(deadline.at(_CLOSE_SHARE), own_thread=stopping.caller)
        stopping.report = DrainReport(
            reason=reason,
            clean=clean and not any(sink.undelivered for sink in sinks.values()),
            events=self._bus.seq,
            facts_lost=self._bus.losses.facts,
            snapshots_skipped=self._bus.losses.snapshots,
            sinks=sinks,
            abandoned=abandoned,
            seconds=deadline.spent,
        )
        while self._flushes:
            self._flushes.popleft().set()
        stopping.done.set()

    def _report_stuck(self, stopping: _Stopping) -> DrainReport:
        return DrainReport(
            reason=f"the drain did not end within {stopping.deadline.seconds} s: its source or a fold blocks",
            clean=False,
            events=self._bus.seq,
            sinks=self._bus.reports(),
            abandoned=("kvcanary-drain",),
            seconds=stopping.deadline.spent,
        )

    def forgotten(self) -> None:
        """The interpreter ends: stop."""
        self.stop()

    def forked(self) -> None:
        """This is a copy in a forked child: the thread is not there."""
        self._inert = True
        self._asleep = False

    def _is_inert(self) -> bool:
        if self._inert and not self._told_inert:
            self._told_inert = True
            warnings.warn(
                f"process {os.getpid()} was forked from one with a running canary; its copy does nothing",
                RuntimeWarning,
                stacklevel=3,
            )
        return self._inert


class _Stopping:
    """One request to stop, shared by all who ask."""

    def __init__(self, seconds: float) -> None:
        self.deadline = Deadline(seconds)
        self.caller = threading.get_ident()
        self.done = threading.Event()
        self.report: DrainReport | None = None
