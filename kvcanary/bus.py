"""The event bus: runs, subscriptions, and what the bus itself has to say.

One thread, the drain's, publishes: events are numbered and folded (:mod:`kvcanary.folding`), then queued for
the sinks that want them (:mod:`kvcanary.delivery`). Publishing waits for nobody.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from kvcanary.delivery import Outlet, Recipient, SinkReport
from kvcanary.errors import CanaryStalledError, ConfigError
from kvcanary.events import Event, RunStarted, RunStopped
from kvcanary.folding import Folding, Losses
from kvcanary.observers.base import Fold, Observer, ObserverSpec, as_observer, is_fold

SINK_QUEUE = 8192
"""Events that a sink may lag behind, where it names no bound of its own."""
DROP_REPORT_SECONDS = 1.0
"""How often others are told of one sink's losses."""


class Subscription:
    """A sink on a bus."""

    def __init__(self, outlet: Outlet) -> None:
        self._outlet = outlet

    @property
    def name(self) -> str:
        """The sink's name on its bus."""
        return self._outlet.name

    @property
    def active(self) -> bool:
        """Whether it receives events."""
        return self._outlet.running

    def report(self) -> SinkReport:
        """What became of its events so far."""
        return self._outlet.report()

    def close(self) -> None:
        """Receive no more events; what is queued is still delivered. Any thread; does not wait."""
        self._outlet.finish()

    def wait(self, timeout: float) -> bool:
        """Whether everything was delivered and the sink was closed within ``timeout`` seconds."""
        return self._outlet.wait(time.monotonic() + timeout)


class Bus:
    """Folds in order, sinks with queues.

    ``begin_run``, ``publish``, ``pump`` and ``end_run`` belong to one thread; the rest to any.

    Args:
        folds: in the order in which they run; see :class:`kvcanary.folding.Folding`.
        sink_queue: bound of a sink's queue in events, where the sink names none.
        on_guard_failure: told of a guard's first failure in a run. In ``raise`` mode it posts to the mailbox.

    Attributes:
        losses: what this run lost.
        notify: called, from any thread, when there is something for :meth:`pump`.

    Raises:
        ConfigError: two folds of one name, or a fold that consumes what only itself or a later one emits.
    """

    def __init__(
        self,
        folds: Sequence[Fold] = (),
        *,
        sink_queue: int = SINK_QUEUE,
        on_guard_failure: Callable[[CanaryStalledError], None] | None = None,
    ) -> None:
        self.losses = Losses()
        self.notify: Callable[[], None] = _nothing
        self._folding = Folding((self.losses, *folds), on_guard_failure)
        self._sink_queue = sink_queue
        self._outlets: tuple[Recipient, ...] = ()
        self._wanted: dict[type[Event], bool] = {}
        self._names = frozenset(fold.name for fold in (self.losses, *folds))
        self._lock = threading.Lock()
        self._notices: deque[Event] = deque()
        self._next_report = 0.0
        self._run: RunStarted | None = None

    @property
    def running(self) -> bool:
        """Whether a run is open."""
        return self._run is not None

    @property
    def seq(self) -> int:
        """Number of the last event of this run."""
        return self._folding.seq

    @property
    def degraded(self) -> tuple[str, ...]:
        """Guards that failed in this run."""
        return tuple(self._folding.degraded)

    def wants(self, event_type: type[Event]) -> bool:
        """Whether a fold or a sink is interested in a type; events that nobody wants need not be made. Any thread."""
        known = self._wanted.get(event_type)
        if known is None:
            outlets = self._outlets
            known = self._folding.wants(event_type) or any(outlet.wants(event_type) for outlet in outlets)
            if outlets is self._outlets:  # else somebody has just subscribed: ask again next time
                self._wanted[event_type] = known
        return known

    def reports(self) -> dict[str, SinkReport]:
        """What became of the events of each sink."""
        return {outlet.name: outlet.report() for outlet in self._outlets}

    # --- subscribing --------------------------------------------------------------------------------------

    def subscribe(self, observer: Observer | ObserverSpec, *, private: bool = False) -> Subscription:
        """Add a sink. Within a run it gets ``RunStarted`` first, if it wants that. Any thread.

        An asynchronous sink becomes a task of the loop that runs in the caller's thread; without one, or if
        ``private``, it gets a thread with a loop of its own. A synchronous one always gets a thread.

        Raises:
            ConfigError: it is no sink.
        """
        if is_fold(observer):
            raise ConfigError(
                f"{observer.name!r} is a fold; folds run in a fixed, checked order and are given when the bus is made"
            )
        spec = as_observer(observer)
        with self._lock:
            name = _unique(spec.name, self._taken_names())
            outlet = Outlet(name, spec, self._sink_queue, self.take_notice, private=private)
            self._add(outlet)
        return Subscription(outlet)

    def attach(self, recipient: Recipient) -> None:
        """Add something with a queue of its own, such as a journal. Any thread, before a run or within it.

        Raises:
            ConfigError: its name is taken.
        """
        with self._lock:
            if recipient.name in self._taken_names():
                raise ConfigError(f"the bus has a {recipient.name!r} already; each needs a name of its own")
            self._add(recipient)

    def _taken_names(self) -> frozenset[str]:
        return self._names | {outlet.name for outlet in self._outlets if not outlet.ended}

    def _add(self, recipient: Recipient) -> None:
        present = tuple(outlet for outlet in self._outlets if not outlet.ended)
        if self._run is not None:
            recipient.offer([self._run])
        self._outlets = (*present, recipient)
        self._wanted = {}

    def take_notice(self, event: Event) -> None:
        """Publish at the next :meth:`pump` what a sink has to say of itself. Any thread."""
        self._notices.append(event)
        self.notify()

    # --- publishing ---------------------------------------------------------------------------------------

    def begin_run(self, started: RunStarted) -> list[Event]:
        """Number from 1 again; ``started`` is the first event, and folds see it first. Ends a run that is open."""
        self.end_run("a new run began")
        self._folding.begin()
        out = self._folding.run([started])
        first = out[0]
        with self._lock:  # who subscribes meanwhile gets the first event from here or from there, never twice
            self._run = first if isinstance(first, RunStarted) else started
            outlets = self._outlets
        _offer(outlets, out)
        return out

    def publish(self, events: Sequence[Event]) -> list[Event]:
        """Number events, run the folds, queue all for the sinks; returns them with what was derived. Never waits.

        Raises:
            ConfigError: no run is open.
        """
        if self._run is None:
            raise ConfigError("publish() outside a run; call begin_run() first, and again after end_run()")
        out = self._folding.run(events)
        _offer(self._outlets, out)
        return out

    def pump(self, *, everything: bool = False) -> list[Event]:
        """Publish what the bus itself has to say: failures of sinks at once, their losses at a bounded rate.

        A sink is not told of itself here: it knows its losses from its own queue, and telling it of its
        failures could make it fail again. ``everything``: all losses, now.
        """
        now = time.monotonic()
        due = everything or now >= self._next_report
        if self._run is None or not (due or self._notices):
            return []
        events = [self._notices.popleft() for _ in range(len(self._notices))]
        if due:
            self._next_report = now + DROP_REPORT_SECONDS
            events += [outlet.unreported.tell(outlet.name) for outlet in self._outlets if outlet.unreported.count]
        out = self._folding.run(events)
        if out:
            _offer(self._outlets, out, notices=True)
        return out

    def end_run(self, reason: str, *, clean: bool = True) -> None:
        """Say what is left to say, then ``RunStopped``. Does nothing when no run is open."""
        if self._run is None:
            return
        # Before what is said now is queued too: who took all until now is not behind.
        undelivered = {outlet.name: outlet.pending for outlet in self._outlets if outlet.pending}
        self.pump(everything=True)
        stopped = RunStopped(
            time_ns=time.time_ns(),
            monotonic_ns=time.monotonic_ns(),
            reason=reason,
            clean=clean,
            facts_lost=self.losses.facts,
            snapshots_skipped=self.losses.snapshots,
            undelivered=undelivered,
        )
        out = self._folding.run([stopped])
        with self._lock:  # who subscribes from here on waits for the next run
            self._run = None
            outlets = self._outlets
        _offer(outlets, out)

    # --- ending -------------------------------------------------------------------------------------------

    def flush(self, until: float, *, own_thread: int = 0) -> bool:
        """Whether all sinks handled what was queued before the monotonic time ``until``.

        ``own_thread``: the thread that waits; sinks that run on it are left out.
        """
        return all(outlet.wait_idle(until) for outlet in self._outlets if outlet.thread != own_thread)

    def close(self, until: float, *, own_thread: int = 0) -> tuple[dict[str, SinkReport], tuple[str, ...]]:
        """Let all sinks deliver what is queued until the monotonic time ``until``, then end them.

        Returns:
            A report per sink, and the names of threads and tasks that did not end and were abandoned. Sinks
            that run on ``own_thread`` are neither waited for nor abandoned: they end once that thread is free.
        """
        with self._lock:
            outlets, self._outlets = self._outlets, ()
        for outlet in outlets:
            outlet.finish()
        late = [outlet for outlet in outlets if outlet.thread != own_thread and not outlet.wait(until)]
        for outlet in late:
            outlet.abandon()
        return {outlet.name: outlet.report() for outlet in outlets}, tuple(outlet.label for outlet in late)


def _offer(outlets: Sequence[Recipient], events: Sequence[Event], *, notices: bool = False) -> None:
    for outlet in outlets:
        outlet.offer(events, notices=notices)


def _unique(name: str, taken: frozenset[str]) -> str:
    number, candidate = 1, name
    while candidate in taken:
        number += 1
        candidate = f"{name}#{number}"
    return candidate


def _nothing() -> None:
    return
