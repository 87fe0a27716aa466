from __future__ import annotations

import math
import os
import random
import subprocess
import sys
import textwrap
import threading
import time
import warnings
from collections import deque
from collections.abc import Iterator, Sequence

import anyio
import pytest

from kvcanary import pipeline
from kvcanary.bus import Bus
from kvcanary.delivery import SinkReport
from kvcanary.errors import CanaryStalledError
from kvcanary.events import (
    Event,
    EventsDropped,
    FactsLost,
    FaultInjected,
    HazardCounted,
    ObserverFailed,
    Origin,
    PagesFreed,
    RunStarted,
    RunStopped,
    SnapshotTaken,
    Ticked,
)
from kvcanary.facts import FactLog
from kvcanary.observers.base import ObserverSpec, observer
from kvcanary.pipeline import SUBMIT_CAPACITY, Drain, DrainReport

SOON = 10.0
"""Seconds after which a test that waits for something has failed."""


class Queue:
    """A source that is filled by hand."""

    def __init__(self) -> None:
        self.ready: deque[Event] = deque()
        self.runs: deque[RunStarted] = deque()
        self.in_flight = False
        self.error: Exception | None = None
        self.collected = 0

    def collect(self) -> list[Event]:
        self.collected += 1
        if self.error is not None:
            raise self.error
        return [self.ready.popleft() for _ in range(len(self.ready))]

    def next_run(self) -> RunStarted | None:
        return self.runs.popleft() if self.runs else None


class Everything:
    """A sink that keeps all it gets."""

    name, interests = "everything", (Event,)

    def __init__(self) -> None:
        self.seen: list[Event] = []
        self.changed = threading.Condition()

    def handle_batch(self, events: Sequence[Event]) -> None:
        with self.changed:
            self.seen += events
            self.changed.notify_all()

    def of(self, kind: type[Event]) -> list[Event]:
        return [event for event in self.seen if isinstance(event, kind)]

    def wait_for(self, kind: type[Event], count: int = 1) -> list[Event]:
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.of(kind)) >= count, SOON)
        return self.of(kind)


def started(run: str = "r") -> RunStarted:
    return RunStarted(run=run, origin=Origin(), monotonic_ns=time.monotonic_ns())


class Rig:
    """A drain with its source, bus and one sink, in a run."""

    def __init__(self) -> None:
        self.source, self.sink, self.bus = Queue(), Everything(), Bus()
        self.failures: list[CanaryStalledError] = []
        self.bus.subscribe(self.sink)
        self.drain = Drain(self.source, self.bus, on_failure=self.failures.append)
        self.source.runs.append(started())
        self.drain.start()
        self.sink.wait_for(RunStarted)


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    rig.source.in_flight = False
    rig.drain.stop(SOON)


def test_what_the_source_has_is_numbered_and_delivered(rig: Rig) -> None:
    rig.source.ready.extend(HazardCounted(hazard="x", count=n) for n in range(50))
    rig.drain.wake()
    events = rig.sink.wait_for(HazardCounted, 50)
    assert [event.seq for event in events] == list(range(2, 52))


def test_a_flush_covers_all_that_was_there_at_the_call(rig: Rig) -> None:
    for count in range(1, 20):
        rig.source.ready.append(HazardCounted(hazard="x", count=count))
        assert rig.drain.flush(SOON)
        assert rig.bus.flush(time.monotonic() + SOON)
        assert len(rig.sink.of(HazardCounted)) == count


def test_who_has_no_deadline_may_wait_for_ever(rig: Rig) -> None:
    """The standard library's locks refuse to wait for infinity, or for longer than they can count."""
    rig.source.ready.append(HazardCounted(hazard="x", count=1))
    assert rig.drain.flush(math.inf)
    assert rig.bus.flush(math.inf)
    assert rig.drain.stop(math.inf).clean


def test_a_flush_ends_with_its_timeout_when_the_source_blocks() -> None:
    gate, entered = threading.Event(), threading.Event()

    class Stuck(Queue):
        def collect(self) -> list[Event]:
            entered.set()
            gate.wait(SOON)
            return []

    source = Stuck()
    source.runs.append(started())
    drain = Drain(source, Bus())
    drain.start()
    assert entered.wait(SOON)
    assert drain.flush(0.05) is False
    gate.set()
    drain.stop(SOON)


def test_a_flush_on_the_drains_own_thread_does_not_wait_for_itself() -> None:
    answers: list[bool] = []

    class Flusher:
        name, interests, guard = "flusher", (HazardCounted,), False

        def handle(self, event: Event) -> None:
            answers.append(drain.flush(SOON))

    source = Queue()
    source.runs.append(started())
    drain = Drain(source, Bus([Flusher()]))
    drain.start()
    source.ready.append(HazardCounted(hazard="x", count=1))
    assert drain.flush(SOON)
    assert answers == [False]
    drain.stop(SOON)


def test_an_idle_drain_is_woken_and_an_awake_one_is_not_disturbed(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    roused: list[int] = []
    rouse = rig.drain._rouse

    def count_and_rouse() -> None:
        roused.append(1)
        rouse()

    monkeypatch.setattr(rig.drain, "_rouse", count_and_rouse)
    rig.source.in_flight = True
    rig.drain.wake()
    assert rig.drain.flush(SOON)
    roused.clear()
    for _ in range(1000):
        rig.drain.wake()
    assert len(roused) <= 2


def test_beside_a_thread_that_is_busy_in_python_the_drain_looks_rarely_and_nobody_wakes_it(rig: Rig) -> None:
    rig.source.in_flight = True
    until, before = time.monotonic() + 0.6, rig.source.collected
    while time.monotonic() < until:
        rig.drain.wake()
    looks = rig.source.collected - before
    assert looks < 2 * 0.6 / pipeline.BUSY_SECONDS
    rig.source.in_flight = False
    assert rig.drain.flush(SOON)


def test_a_sleeping_drain_need_not_be_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "IDLE_SECONDS", 100 * SOON)
    rig = Rig()
    for _ in range(200):
        rig.source.ready.append(HazardCounted(hazard="x", count=1))
        assert rig.drain.flush(SOON)
    assert rig.drain.stop(SOON).clean
    assert len(rig.sink.of(HazardCounted)) == 200


def test_what_comes_between_a_look_and_falling_asleep_is_not_slept_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "IDLE_SECONDS", 100 * SOON)

    class Late(Queue):
        def collect(self) -> list[Event]:
            events = super().collect()
            if not events:
                self.ready.append(HazardCounted(hazard="late", count=self.collected))
                drain.wake()
            return events if self.collected < 50 else []

    source, bus, sink = Late(), Bus(), Everything()
    bus.subscribe(sink)
    drain = Drain(source, bus)
    source.runs.append(started())
    drain.start()
    sink.wait_for(HazardCounted, 10)
    drain.stop(1.0)


def test_waking_from_many_threads_loses_nothing(rig: Rig) -> None:
    def produce() -> None:
        for _ in range(200):
            rig.source.ready.append(HazardCounted(hazard="x", count=1))
            rig.drain.wake()

    threads = [threading.Thread(target=produce) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert rig.drain.flush(SOON)
    rig.sink.wait_for(HazardCounted, 800)


def test_events_of_ones_own_are_stamped_and_delivered(rig: Rig) -> None:
    before = time.time_ns()
    assert rig.drain.submit(FaultInjected(fault="flip"))
    (event,) = rig.sink.wait_for(FaultInjected)
    assert before <= event.time_ns <= time.time_ns()


def test_events_of_ones_own_that_find_no_room_are_counted() -> None:
    source, bus, sink = Queue(), Bus(), Everything()
    bus.subscribe(ObserverSpec("all", (Event,), sink.handle_batch, batch=True, queue=2 * SUBMIT_CAPACITY))
    drain = Drain(source, bus)
    event = FaultInjected(fault="flip", time_ns=1)
    accepted = sum(drain.submit(event) for _ in range(SUBMIT_CAPACITY + 3))
    source.runs.append(started())
    drain.start()
    (told,) = sink.wait_for(EventsDropped)
    assert isinstance(told, EventsDropped)
    assert (accepted, told.observer, told.count) == (SUBMIT_CAPACITY, "submit", 3)
    drain.stop(SOON)


def test_it_ticks_each_second_with_the_age_of_the_last_snapshot(rig: Rig) -> None:
    rig.source.in_flight = True
    (first,) = rig.sink.wait_for(Ticked)
    rig.source.ready.append(SnapshotTaken(monotonic_ns=time.monotonic_ns()))
    second = rig.sink.wait_for(Ticked, 2)[1]
    assert isinstance(first, Ticked)
    assert isinstance(second, Ticked)
    assert first.in_flight == 1
    assert 0.9 < first.seconds_since_snapshot < 1.5
    assert second.seconds_since_snapshot < 1.2
    assert 0.9e9 < second.monotonic_ns - first.monotonic_ns < 1.6e9


def test_a_sinks_crash_is_published_without_anything_else_happening(rig: Rig) -> None:
    def bad(_: Event) -> None:
        raise ValueError("boom")

    rig.bus.subscribe(ObserverSpec("bad", (HazardCounted,), bad))
    rig.drain.submit(HazardCounted(hazard="x", count=1))
    (failed,) = rig.sink.wait_for(ObserverFailed)
    assert isinstance(failed, ObserverFailed)
    assert failed.observer == "bad"


# --- runs ---------------------------------------------------------------------------------------------------


def test_a_new_run_follows_the_old_ones_last_event_and_is_numbered_anew(rig: Rig) -> None:
    rig.source.ready.append(HazardCounted(hazard="old", count=1))
    assert rig.drain.flush(SOON)
    rig.source.runs.append(started("second"))
    rig.drain.wake()
    rig.sink.wait_for(RunStarted, 2)
    rig.drain.submit(HazardCounted(hazard="new", count=1))
    rig.sink.wait_for(HazardCounted, 2)
    assert [(event.seq, type(event).__name__) for event in rig.sink.seen] == [
        (1, "RunStarted"),
        (2, "HazardCounted"),
        (3, "RunStopped"),
        (1, "RunStarted"),
        (2, "HazardCounted"),
    ]


def test_events_of_ones_own_wait_for_the_first_run() -> None:
    source, bus, sink = Queue(), Bus(), Everything()
    bus.subscribe(sink)
    drain = Drain(source, bus)
    drain.start()
    drain.submit(FaultInjected(fault="early"))
    assert drain.flush(SOON)
    assert sink.seen == []
    source.runs.append(started())
    drain.wake()
    sink.wait_for(FaultInjected)
    assert [event.seq for event in sink.seen] == [1, 2]
    drain.stop(SOON)


def test_a_drain_can_be_started_again_after_it_stopped(rig: Rig) -> None:
    assert rig.drain.stop(SOON).clean
    again = Everything()
    rig.bus.subscribe(again)
    rig.source.runs.append(started("second"))
    rig.drain.start()
    again.wait_for(RunStarted)
    report = rig.drain.stop(SOON)
    assert [type(event) for event in again.seen] == [RunStarted, RunStopped]
    assert report.events == 2


# --- the source fails ---------------------------------------------------------------------------------------


def test_an_error_of_the_source_ends_the_run_with_its_reason(rig: Rig) -> None:
    rig.source.error = RuntimeError("CUDA error: an illegal memory access")
    rig.drain.wake()
    (stopped,) = rig.sink.wait_for(RunStopped)
    assert isinstance(stopped, RunStopped)
    assert stopped.reason == "RuntimeError: CUDA error: an illegal memory access"
    assert not stopped.clean
    assert rig.drain.flush(SOON)
    assert [str(error.__cause__) for error in rig.failures] == ["CUDA error: an illegal memory access"]


def test_after_an_error_the_drain_lives_on_and_a_new_run_can_begin(rig: Rig) -> None:
    rig.source.error = RuntimeError("CUDA error")
    rig.drain.wake()
    rig.sink.wait_for(RunStopped)
    collected = rig.source.collected
    assert rig.drain.flush(SOON)
    assert rig.source.collected == collected
    rig.source.error = None
    rig.source.runs.append(started("second"))
    rig.source.ready.append(HazardCounted(hazard="x", count=1))
    rig.drain.wake()
    rig.sink.wait_for(HazardCounted)
    assert rig.drain.stop(SOON).reason == "stopped"


def test_the_report_keeps_the_reason_of_an_error(rig: Rig) -> None:
    rig.source.error = RuntimeError("CUDA error")
    rig.drain.wake()
    rig.sink.wait_for(RunStopped)
    report = rig.drain.stop(SOON)
    assert (report.reason, report.clean) == ("RuntimeError: CUDA error", False)


def test_an_error_of_in_flight_is_data_too() -> None:
    class Broken(Queue):
        @property
        def in_flight(self) -> bool:
            raise RuntimeError("driver gone")

        @in_flight.setter
        def in_flight(self, value: bool) -> None: ...

    source, bus, sink = Broken(), Bus(), Everything()
    bus.subscribe(sink)
    source.runs.append(started())
    drain = Drain(source, bus)
    drain.start()
    (stopped,) = sink.wait_for(RunStopped)
    assert isinstance(stopped, RunStopped)
    assert stopped.reason == "RuntimeError: driver gone"
    drain.stop(SOON)


# --- stopping -----------------------------------------------------------------------------------------------


def test_stopping_reads_the_rest_and_says_so_last(rig: Rig) -> None:
    rig.source.ready.extend([HazardCounted(hazard="x", count=1), FactsLost(count=3)])
    report = rig.drain.stop(SOON)
    last = rig.sink.seen[-1]
    assert isinstance(last, RunStopped)
    assert (last.reason, last.clean, last.facts_lost, last.undelivered) == ("stopped", True, 3, {})
    assert report.clean
    assert (report.events, report.facts_lost, report.abandoned) == (4, 3, ())
    assert report.sinks == {"everything": SinkReport(delivered=4, state="closed")}


def test_stopping_waits_for_what_is_in_flight(rig: Rig) -> None:
    rig.source.in_flight = True

    def land() -> None:
        rig.source.ready.append(HazardCounted(hazard="late", count=1))
        rig.source.in_flight = False

    timer = threading.Timer(0.05, land)
    timer.start()
    report = rig.drain.stop(SOON)
    timer.join()
    assert report.clean
    assert len(rig.sink.of(HazardCounted)) == 1


def test_stopping_says_when_the_last_forwards_did_not_end_in_time(rig: Rig) -> None:
    rig.source.in_flight = True
    report = rig.drain.stop(0.2)
    assert not report.clean
    assert report.reason == "stopped before the last forwards were done"


def test_stopping_twice_and_from_many_threads_gives_one_report(rig: Rig) -> None:
    reports: list[DrainReport] = []
    threads = [threading.Thread(target=lambda: reports.append(rig.drain.stop(SOON))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    reports.append(rig.drain.stop(SOON))
    assert all(report is reports[0] for report in reports)
    assert len(rig.sink.of(RunStopped)) == 1


def test_stopping_what_never_started_ends_the_sinks() -> None:
    bus = Bus()
    subscription = bus.subscribe(Everything())
    assert Drain(Queue(), bus).stop(SOON).clean
    assert not subscription.active


def test_a_sink_that_blocks_for_ever_is_named_and_the_deadline_is_kept(rig: Rig) -> None:
    gate, entered = threading.Event(), threading.Event()

    @observer(name="stuck")
    def stuck(event: Event) -> None:
        entered.set()
        gate.wait(2 * SOON)

    rig.bus.subscribe(stuck)
    assert entered.wait(SOON)
    rig.drain.submit(HazardCounted(hazard="x", count=1))
    began = time.monotonic()
    report = rig.drain.stop(0.5)
    assert time.monotonic() - began < 0.65
    assert report.abandoned == ("kvcanary-sink-stuck",)
    assert report.sinks["stuck"] == SinkReport(undelivered=3, state="abandoned")
    assert not report.clean
    last = rig.sink.seen[-1]
    assert isinstance(last, RunStopped)
    assert last.undelivered == {"stuck": 2}
    gate.set()


def test_a_source_that_blocks_for_ever_keeps_nobody_beyond_the_deadline() -> None:
    gate, entered = threading.Event(), threading.Event()

    class Stuck(Queue):
        def collect(self) -> list[Event]:
            entered.set()
            gate.wait(2 * SOON)
            return []

    source = Stuck()
    source.runs.append(started())
    drain = Drain(source, Bus())
    drain.start()
    assert entered.wait(SOON)
    began = time.monotonic()
    report = drain.stop(0.2)
    assert time.monotonic() - began < 1.0
    assert report.abandoned == ("kvcanary-drain",)
    assert "its source or a fold blocks" in report.reason
    gate.set()


def test_a_sink_may_stop_the_drain(rig: Rig) -> None:
    reports: list[DrainReport] = []
    done = threading.Event()

    @observer(name="stopper")
    def stopper(event: HazardCounted) -> None:
        began = time.monotonic()
        reports.append(rig.drain.stop(SOON))
        assert time.monotonic() - began < SOON / 2
        done.set()

    rig.bus.subscribe(stopper)
    rig.drain.submit(HazardCounted(hazard="x", count=1))
    assert done.wait(SOON)
    assert isinstance(rig.sink.seen[-1], RunStopped)


def test_after_stopping_nothing_is_accepted_and_nothing_breaks(rig: Rig) -> None:
    rig.drain.stop(SOON)
    rig.drain.wake()
    rig.drain.submit(HazardCounted(hazard="x", count=1))
    assert rig.drain.flush(0.1) is False
    assert not rig.drain.running


async def test_stopping_on_a_loop_lets_its_sinks_finish() -> None:
    seen: list[int] = []
    source, bus = Queue(), Bus()

    @observer
    async def slow(event: Event) -> None:
        await anyio.sleep(0.001)
        seen.append(event.seq)

    bus.subscribe(slow)
    drain = Drain(source, bus)
    source.runs.append(started())
    source.ready.extend(HazardCounted(hazard="x", count=1) for _ in range(20))
    drain.start()
    report = await drain.astop(SOON)
    assert report.clean
    assert seen == list(range(1, 23))


def run_script(script: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=60, check=False
    )


def test_a_forgotten_drain_delivers_at_exit() -> None:
    done = run_script(
        """
        from collections import deque
        from kvcanary.bus import Bus
        from kvcanary.events import Event, HazardCounted, Origin, RunStarted
        from kvcanary.observers.base import observer
        from kvcanary.pipeline import Drain

        class Source:
            in_flight = False
            runs = deque([RunStarted(run="r", origin=Origin())])
            def collect(self): return []
            def next_run(self): return self.runs.popleft() if self.runs else None

        @observer
        def show(event: Event) -> None:
            print(type(event).__name__, flush=True)

        bus = Bus()
        bus.subscribe(show)
        drain = Drain(Source(), bus)
        drain.start()
        drain.submit(HazardCounted(hazard="x", count=1))
        """
    )
    assert (done.stdout.split(), done.stderr) == (["RunStarted", "HazardCounted", "RunStopped"], "")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this platform cannot fork")
def test_a_forked_copy_is_inert_says_so_once_and_leaves_the_parent_alone(rig: Rig) -> None:
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # newer interpreters warn of any fork with threads
        child = os.fork()
    if child == 0:
        code = 1
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                rig.drain.wake()
                answers = (rig.drain.submit(Ticked()), rig.drain.flush(SOON), rig.drain.stop(SOON).clean)
                rig.drain.start()
                os.write(writer, repr((answers, len(caught), rig.drain.running)).encode())
            code = 0
        finally:
            os._exit(code)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        said = pipe.read()
    assert os.waitpid(child, 0)[1] == 0
    assert said == repr(((False, False, False), 1, False))
    rig.drain.submit(HazardCounted(hazard="x", count=1))
    rig.sink.wait_for(HazardCounted)


# --- adversarial schedules ----------------------------------------------------------------------------------


class Engine(Queue):
    """Facts of a log beside snapshots, as a real source joins them."""

    def __init__(self, log: FactLog) -> None:
        super().__init__()
        self.log = log

    def collect(self) -> list[Event]:
        snapshots = super().collect()
        return self.log.take() + snapshots


@pytest.mark.parametrize("seed", range(6))
def test_whatever_the_schedule_the_stream_is_gapless_and_a_launch_precedes_its_snapshot(seed: int) -> None:
    chance = random.Random(seed)
    log = FactLog(1 << 16)
    log.enabled = True
    source, sink = Engine(log), Everything()
    bus = Bus()
    bus.subscribe(ObserverSpec("all", (Event,), sink.handle_batch, batch=True, queue=1 << 16))
    drain = Drain(source, bus)
    drain.start()
    done = threading.Event()

    def other_producer() -> None:
        while not done.is_set():
            drain.submit(FaultInjected(fault="noise"))
            done.wait(0.0005)

    other = threading.Thread(target=other_producer)
    other.start()
    pause = threading.Event()
    forwards = 40
    for run in range(2):
        log.new_run()
        source.runs.append(started(str(run)))
        assert drain.flush(SOON)
        for forward in range(1, forwards + 1):
            for _ in range(chance.randrange(4)):
                log.pages("free", "full", f"r{forward}", [chance.randrange(100)])
            log.step(forward, forward - 1)
            if chance.random() < 0.3:
                log.pages("free", "full", "in step", [forward])
            log.launched(forward, forward - 1, 1, 1, 1, {})
            source.ready.append(SnapshotTaken(forward=forward))
            if chance.random() < 0.5:
                drain.wake()
            if chance.random() < 0.2:
                pause.wait(chance.random() * 0.004)
        log.hurry()
        assert drain.flush(SOON)
    done.set()
    other.join()
    report = drain.stop(SOON)
    assert report.clean
    stops = [index for index, event in enumerate(sink.seen) if isinstance(event, RunStopped)]
    first, second = sink.seen[: stops[0] + 1], sink.seen[stops[0] + 1 :]
    for events in (first, second):
        assert [event.seq for event in events] == list(range(1, len(events) + 1))
        assert isinstance(events[0], RunStarted)
        kinds = [(type(event).__name__, event.forward) for event in events]
        for forward in range(1, forwards + 1):
            assert kinds.index(("ForwardLaunched", forward)) < kinds.index(("SnapshotTaken", forward))
        facts = [event for event in events if isinstance(event, PagesFreed)]
        assert all(fact.retired < fact.forward for fact in facts)


@pytest.mark.parametrize("seed", range(4))
def test_two_threads_of_an_engine_may_record_at_once_and_each_ones_facts_stay_in_order(seed: int) -> None:
    chance = random.Random(seed)
    log = FactLog(1 << 16)
    log.enabled = True
    source, sink = Engine(log), Everything()
    bus = Bus()
    bus.subscribe(ObserverSpec("all", (Event,), sink.handle_batch, batch=True, queue=1 << 16))
    drain = Drain(source, bus)
    source.runs.append(started())
    drain.start()
    count = 400

    def produce(name: str) -> None:
        for page in range(count):
            log.pages("free", f"group of {name}", name, [page * 2])  # never one run with the next

    others = [threading.Thread(target=produce, args=(name,)) for name in ("a", "b")]
    for other in others:
        other.start()
    forward = 1
    while any(other.is_alive() for other in others):
        log.step(forward, forward - 1)
        log.launched(forward, forward - 1, 1, 1, 1, {})
        forward += 1
        time.sleep(chance.random() / 2000)
    log.step(forward, forward - 1)
    log.hurry()
    assert drain.flush(SOON)
    assert drain.stop(SOON).facts_lost == 0
    for name in ("a", "b"):
        facts = [e for e in sink.seen if isinstance(e, PagesFreed) and e.group == f"group of {name}"]
        assert [run.first for fact in facts for run in fact.runs] == [page * 2 for page in range(count)]
        assert [fact.forward for fact in facts] == sorted(fact.forward for fact in facts)


def test_facts_come_before_the_snapshots_of_their_forward_even_when_the_device_is_faster(rig: Rig) -> None:
    """The device may be done, and be looked at, before the launch was recorded: it is not shown before its launch."""
    log = FactLog(64)
    log.enabled = True
    source = Engine(log)
    source.runs.append(started())
    sink, bus = Everything(), Bus()
    bus.subscribe(sink)
    drain = Drain(source, bus)
    drain.start()
    log.step(1, 0)
    log.launched(1, 0, 1, 1, 1, {})
    source.ready.append(SnapshotTaken(forward=1))
    assert drain.flush(SOON)
    drain.stop(SOON)
    names = [type(event).__name__ for event in sink.seen]
    assert names.index("ForwardLaunched") < names.index("SnapshotTaken")
