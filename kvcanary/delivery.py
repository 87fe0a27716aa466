"""Sinks at work: a filter, a queue, and a thread or a task that empties it.

The runner is one coroutine. On an event loop it is a task there; for a synchronous sink it waits by blocking
its own thread, never yields, and one step runs it to its end. So both have the same rules for failures.
"""

from __future__ import annotations

import asyncio
import inspect
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import anyio
import anyio.lowlevel
import msgspec

from kvcanary.endings import seconds_left
from kvcanary.errors import words_of
from kvcanary.events import Event, EventsDropped, ObserverFailed, event_name
from kvcanary.observers.base import ObserverSpec
from kvcanary.queues import EventQueue, Gap, SocketSignal, ThreadSignal

MOST_AT_ONCE = 1024
"""Events of one batch at most."""
_REPORTS_PER_SECOND = 10
_CLOSE_SECONDS = 1.0
_TURN_SECONDS = 0.002  # how long an asynchronous sink that never waits may keep its loop from the others
FIRST_REST_SECONDS, LONGEST_REST_SECONDS = 0.05, 5.0
"""Between a failure and the next opening of a sink that is restarted; each failure in a row doubles it."""
_ACTIONS = {"continue": "continued", "restart": "restarted", "stop": "stopped"}


class SinkReport(msgspec.Struct, frozen=True, kw_only=True):
    """What became of the events that one sink wanted: the four counts add up to their number."""

    delivered: int = 0
    failed: int = 0
    """handed over, and the sink raised"""
    dropped: int = 0
    """given up by its full queue"""
    undelivered: int = 0
    """still queued or in the sink's hands"""
    state: str = "running"
    """``running``, ``failing`` (it raised at its last event, or could not be opened), ``closed``,
    ``stopped`` (by its failures), ``cancelled`` (with its loop) or ``abandoned``"""
    error: str = ""
    """what it raised, while it is failing or stopped by that"""


class Recipient(Protocol):
    """Who takes events from the bus: an :class:`Outlet`, or something with a queue of its own kind."""

    @property
    def name(self) -> str:
        """Unique on its bus."""
        ...

    @property
    def label(self) -> str:
        """The name of its thread or task."""
        ...

    @property
    def thread(self) -> int:
        """Identity of the thread that it runs on."""
        ...

    @property
    def running(self) -> bool:
        """Whether it takes events."""
        ...

    @property
    def ended(self) -> bool:
        """Whether its runner is gone."""
        ...

    def wants(self, event_type: type[Event]) -> bool:
        """Whether it takes events of that type. Any thread."""
        ...

    @property
    def pending(self) -> int:
        """Events queued or in its hands."""
        ...

    @property
    def unreported(self) -> Gap:
        """Losses that others have not been told of; belongs to the drain's thread."""
        ...

    def offer(self, events: Sequence[Event], *, notices: bool = False) -> None:
        """Take events, on the drain's thread; waits for nobody. ``notices``: some may be about itself."""

    def finish(self) -> None:
        """Deliver what is queued, then end. Does not wait."""

    def wait(self, until: float) -> bool:
        """Whether the runner ended before the monotonic time ``until``."""
        ...

    def wait_idle(self, until: float) -> bool:
        """Whether everything queued was handled before the monotonic time ``until``."""
        ...

    def abandon(self) -> None:
        """Give up on a runner that did not end in time."""

    def report(self) -> SinkReport:
        """The counts so far."""
        ...


class Outlet:
    """One sink at work.

    Args:
        name: unique on its bus.
        spec: what to call.
        capacity: bound of the queue in events.
        tell: takes :class:`ObserverFailed` from the runner's thread.
        private: run an asynchronous sink on a thread of its own even if the caller has a loop.
    """

    def __init__(
        self, name: str, spec: ObserverSpec, capacity: int, tell: Callable[[Event], None], *, private: bool = False
    ) -> None:
        self.name = name
        self.thread = 0
        """identity of the thread that the sink runs on"""
        self._spec = spec
        self._tell = tell
        self._filter = _Filter(spec.interests)
        self._signal = SocketSignal() if spec.is_async else ThreadSignal()
        self._queue = EventQueue(
            name, spec.queue or capacity, spec.on_full, announce=spec.wants(EventsDropped), signal=self._signal
        )
        self._state = "running"
        self._opened = False
        self._in_a_row = self._failures = 0
        self._error = ""
        self._rest = 0.0
        self._delivered = self._failed = 0
        self._left_behind: int | None = None
        self._budget = _Budget()
        self._ended = threading.Event()
        self._task: asyncio.Task[None] | None = None
        self._start(private=private)

    def offer(self, events: Sequence[Event], *, notices: bool = False) -> None:
        """Queue what the sink wants. ``notices``: some may be about the sink itself; those are not for it."""
        wanted = events
        if not self._filter.everything:
            accepts = self._filter
            wanted = [event for event in events if accepts[type(event)]]
        if notices:
            wanted = [event for event in wanted if not self._is_subject_of(event)]
        if wanted:
            self._queue.put(wanted)

    def wants(self, event_type: type[Event]) -> bool:
        """Whether events of a type would be queued."""
        return self._filter.everything or self._filter[event_type]

    def _is_subject_of(self, event: Event) -> bool:
        return isinstance(event, (EventsDropped, ObserverFailed)) and event.observer == self.name

    @property
    def running(self) -> bool:
        """Whether it takes events."""
        return not self._queue.closed

    @property
    def ended(self) -> bool:
        """Whether its runner is gone."""
        return self._ended.is_set()

    @property
    def unreported(self) -> Gap:
        """Losses that others have not been told of; belongs to the drain's thread."""
        return self._queue.unreported

    @property
    def pending(self) -> int:
        """Events queued or in the sink's hands."""
        return self._queue.pending

    @property
    def label(self) -> str:
        """The name of its thread or task."""
        return f"kvcanary-sink-{self.name}"

    def finish(self) -> None:
        """Deliver what is queued, then end. Does not wait."""
        self._queue.close()

    def wait(self, until: float) -> bool:
        """Whether the runner ended before the monotonic time ``until``."""
        return self._ended.wait(seconds_left(until))

    def wait_idle(self, until: float) -> bool:
        """Whether everything queued was handled before the monotonic time ``until``."""
        return self._queue.wait_idle(until)

    def abandon(self) -> None:
        """Give up on a runner that did not end in time; whenever it comes back, it delivers nothing more."""
        if not self._ended.is_set():
            self._state = "abandoned"
            self._left_behind = self._queue.close(discard=True)
            self._signal.hang_up()

    def report(self) -> SinkReport:
        """The counts so far."""
        return SinkReport(
            delivered=self._delivered,
            failed=self._failed,
            dropped=self._queue.dropped,
            undelivered=self.pending if self._left_behind is None else self._left_behind,
            state="failing" if self._error and self._state == "running" else self._state,
            error=self._error if self._state in {"running", "stopped"} else "",
        )

    # --- the runner ---------------------------------------------------------------------------------------

    async def main(self) -> None:
        """Open, deliver, close. Lets nothing through but cancellation and interrupts."""
        ending = "cancelled"
        try:
            await self._serve()
            ending = "closed"
        except GeneratorExit:  # its loop is gone: nothing can be awaited any more
            self._opened = False
            raise
        except Exception as error:  # noqa: BLE001 - on some loops an exception that leaves a task ends the host
            ending, self._error = "stopped", words_of(error)
            self._tell(failure(self.name, error, "", self._failures + 1, ending))
        finally:
            await self._close_sink()
            if self._state == "running":
                self._state = ending
            self._queue.release()
            self._ended.set()

    def _start(self, *, private: bool) -> None:
        if self._spec.is_async and not private and self._spawn_here():
            self.thread = threading.get_ident()
            return
        run = self._run_loop if self._spec.is_async else self._run_thread
        thread = threading.Thread(target=run, name=self.label, daemon=True)
        thread.start()
        self.thread = thread.ident or 0

    def _spawn_here(self) -> bool:
        """Start the runner as a task of the loop that runs in this thread; False: there is none."""
        trio = sys.modules.get("trio")
        if trio is not None and trio.lowlevel.in_trio_task():
            trio.lowlevel.spawn_system_task(self._run_in_trio, name=self.label)
            return True
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            return False
        self._task = loop.create_task(self.main(), name=self.label)  # kept: a loop holds its tasks weakly
        return True

    def _run_thread(self) -> None:
        try:
            self.main().send(None)
        except (StopIteration, KeyboardInterrupt, SystemExit):
            return

    def _run_loop(self) -> None:
        try:
            anyio.run(self.main)
        except (KeyboardInterrupt, SystemExit):
            return

    async def _run_in_trio(self) -> None:
        try:
            await self.main()
        except (KeyboardInterrupt, SystemExit):
            return  # what leaves a system task would crash the host

    async def _serve(self) -> None:
        one_by_one = not self._spec.batch
        limit = 1 if one_by_one else MOST_AT_ONCE
        turn = time.monotonic()
        await self._open_early()
        while self._state == "running":
            if self._rest:
                await self._recover()
            batch, count = self._queue.take(limit)
            if one_by_one:
                for event in batch:  # the announcement of a gap may come first; it is no event of the run
                    await self._hand_over(event, type(event), count if event is batch[-1] else 0)
            elif batch:
                await self._hand_over(batch, type(batch[0]), count)
            if not batch:
                if self._queue.closed:
                    return
                await self._signal.sleep()
                turn = time.monotonic()
            elif self._spec.is_async and time.monotonic() - turn > _TURN_SECONDS:
                await anyio.lowlevel.checkpoint()
                turn = time.monotonic()

    async def _hand_over(self, item: Any, first: type[Event], count: int) -> None:
        try:
            if not self._opened:
                await self._open_sink()
            result = self._spec.call(item)
            if result is not None:
                await self._settle(result)
        except Exception as error:  # noqa: BLE001 - whatever a sink raises is its own failure
            self._failed += count
            self._queue.done()
            await self._fail(error, event_name(first))
        else:
            self._delivered += count
            self._in_a_row, self._error = 0, ""
            self._queue.done()

    async def _fail(self, error: Exception, event_type: str) -> None:
        self._failures += 1
        self._in_a_row += 1
        self._error = words_of(error)
        action = "stopped" if self._in_a_row >= self._spec.max_failures else _ACTIONS[self._spec.restart]
        if action == "stopped":
            self._state = action
            self._queue.close()
        elif action == "restarted":
            await self._close_sink()
            self._rest = min(LONGEST_REST_SECONDS, FIRST_REST_SECONDS * 2 ** (self._in_a_row - 1))
        if action == "stopped" or self._budget.allows():
            self._tell(failure(self.name, error, event_type, self._failures, action))

    async def _recover(self) -> None:
        """Leave what failed alone for a while; its queue bounds what it misses. The end of the stream cuts it short."""
        until, self._rest = time.monotonic() + self._rest, 0.0
        while (left := until - time.monotonic()) > 0 and self._queue.rest():
            await self._signal.sleep(left)

    async def _open_early(self) -> None:
        """Before the first event, which tries again if this fails."""
        try:
            await self._open_sink()
        except Exception as error:  # noqa: BLE001 - as in _hand_over
            await self._fail(error, "")

    async def _open_sink(self) -> None:
        if self._spec.open is not None:
            await self._settle(self._spec.open())
        self._opened = True

    async def _close_sink(self) -> None:
        if not self._opened or self._spec.close is None:
            return
        self._opened = False
        try:
            if self._spec.is_async:
                with anyio.move_on_after(_CLOSE_SECONDS, shield=True):
                    await self._settle(self._spec.close())
            else:
                await self._settle(self._spec.close())
        except Exception as error:  # noqa: BLE001 - as in _hand_over
            self._tell(failure(self.name, error, "", self._failures + 1, "closed"))

    async def _settle(self, result: Any) -> None:
        if result is None or not inspect.isawaitable(result):
            return
        if self._spec.is_async:
            await result
            return
        if inspect.iscoroutine(result):
            result.close()
        raise TypeError(
            f"observer {self.name!r} is a plain function that returned {type(result).__name__}, and its thread has no "
            f"loop to await it on; make it an `async def`"
        )


class _Filter(dict[type[Event], bool]):
    """Whether a sink wants events of a type; remembers the answers."""

    def __init__(self, interests: tuple[type[Event], ...]) -> None:
        super().__init__()
        self._interests = interests
        self.everything = Event in interests

    def __missing__(self, event_type: type[Event]) -> bool:
        self[event_type] = wanted = issubclass(event_type, self._interests)
        return wanted


class _Budget:
    """So many reports a second. What is withheld is in the count of the next one."""

    def __init__(self) -> None:
        self._second = self._used = 0

    def allows(self) -> bool:
        second = int(time.monotonic())
        if second != self._second:
            self._second, self._used = second, 0
        self._used += 1
        return self._used <= _REPORTS_PER_SECOND


def failure(observer: str, error: BaseException, event_type: str, failures: int, action: str) -> ObserverFailed:
    """The event that tells of an observer's exception."""
    return ObserverFailed(
        time_ns=time.time_ns(),
        monotonic_ns=time.monotonic_ns(),
        observer=observer,
        error=words_of(error),
        event_type=event_type,
        failures=failures,
        action=action,
    )
