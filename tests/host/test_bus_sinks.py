from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcanary import delivery
from kvcanary.bus import Bus
from kvcanary.delivery import SinkReport
from kvcanary.errors import ConfigError
from kvcanary.events import (
    Event,
    EventsDropped,
    HazardCounted,
    ObserverFailed,
    RunStarted,
    RunStopped,
    Ticked,
    json_codec,
)
from kvcanary.observers.base import MAX_FAILURES, ObserverSpec, OnFull, observer
from kvcanary.queues import EventQueue, ThreadSignal
from tests.host.samples import started, ticks

SOON = 10.0
"""Seconds after which a test that waits for something has failed."""


class Collector:
    """A sink that keeps all it gets, and can be held back."""

    def __init__(
        self,
        interests: tuple[type[Event], ...] = (Event,),
        *,
        name: str = "collector",
        queue: int | None = None,
        on_full: OnFull = "drop_oldest",
    ) -> None:
        self.interests, self.name, self.queue, self.on_full = interests, name, queue, on_full
        self.seen: list[Event] = []
        self.changed = threading.Condition()
        self.entered = threading.Event()
        self.gate = threading.Event()
        self.gate.set()

    def handle(self, event: Event) -> None:
        self.entered.set()
        self.gate.wait(SOON)
        with self.changed:
            self.seen.append(event)
            self.changed.notify_all()

    def wait_for(self, number: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: number in self.numbers, SOON)

    @property
    def numbers(self) -> list[int]:
        return [event.seq for event in self.seen]


@pytest.fixture
def bus() -> Iterator[Bus]:
    bus = Bus()
    yield bus
    bus.close(time.monotonic() + SOON)


def flush(bus: Bus) -> None:
    assert bus.flush(time.monotonic() + SOON)


def test_every_sink_gets_every_event_in_order(bus: Bus) -> None:
    sinks = [Collector(name=str(n)) for n in range(3)]
    for sink in sinks:
        bus.subscribe(sink)
    bus.begin_run(started())
    bus.publish(ticks(100))
    flush(bus)
    assert [sink.numbers for sink in sinks] == [list(range(1, 102))] * 3


def test_a_filter_is_applied_before_the_queue(bus: Bus) -> None:
    sink = Collector((HazardCounted,), queue=1)
    subscription = bus.subscribe(sink)
    bus.begin_run(started())
    bus.publish([*ticks(50), HazardCounted(hazard="x", count=1), *ticks(50)])
    flush(bus)
    assert sink.numbers == [52]
    assert subscription.report() == SinkReport(delivered=1)


def test_a_batch_sink_gets_all_that_is_queued_at_once(bus: Bus) -> None:
    batches: list[list[int]] = []
    gate, entered = threading.Event(), threading.Event()

    @observer
    def sink(events: Sequence[Event]) -> None:
        entered.set()
        gate.wait(SOON)
        batches.append([event.seq for event in events])

    bus.subscribe(sink)
    bus.begin_run(started())
    assert entered.wait(SOON)
    bus.publish(ticks(3))
    bus.publish(ticks(2))
    gate.set()
    flush(bus)
    assert batches == [[1], [2, 3, 4, 5, 6]]


def test_a_late_subscriber_gets_the_first_event_of_the_run_first(bus: Bus) -> None:
    bus.begin_run(started())
    bus.publish(ticks(5))
    sink = Collector()
    bus.subscribe(sink)
    bus.publish(ticks(1))
    flush(bus)
    assert sink.numbers == [1, 7]
    assert isinstance(sink.seen[0], RunStarted)


def test_a_filtered_late_subscriber_is_not_given_what_it_did_not_ask_for(bus: Bus) -> None:
    bus.begin_run(started())
    sink = Collector((Ticked,))
    bus.subscribe(sink)
    bus.publish(ticks(1))
    flush(bus)
    assert sink.numbers == [2]


def test_who_subscribes_between_runs_waits_for_the_next(bus: Bus) -> None:
    bus.begin_run(started("a"))
    bus.end_run("over")
    sink = Collector()
    bus.subscribe(sink)
    bus.begin_run(started("b"))
    flush(bus)
    assert [event.run for event in sink.seen if isinstance(event, RunStarted)] == ["b"]


def test_a_thread_that_subscribes_during_publishing_gets_a_gapless_tail(bus: Bus) -> None:
    sinks = [Collector(name=f"s{n}", queue=1 << 20) for n in range(20)]
    bus.begin_run(started())

    def subscribe() -> None:
        for sink in sinks:
            bus.subscribe(sink)

    thread = threading.Thread(target=subscribe)
    thread.start()
    while thread.is_alive():
        bus.publish(ticks(3))
    thread.join()
    bus.publish(ticks(3))
    flush(bus)
    for sink in sinks:
        tail = sink.numbers[1:]
        assert sink.numbers[0] == 1
        assert tail == list(range(tail[0], bus.seq + 1))


def test_names_are_made_unique(bus: Bus) -> None:
    names = [bus.subscribe(Collector(name="log")).name for _ in range(3)]
    assert names == ["log", "log#2", "log#3"]


def test_a_fold_cannot_subscribe(bus: Bus) -> None:
    class Fold:
        name, interests, guard = "late fold", (Ticked,), False

        def handle(self, event: Event) -> None: ...

    with pytest.raises(ConfigError, match="'late fold' is a fold"):
        bus.subscribe(Fold())


def test_a_closed_subscription_delivers_what_is_queued_and_no_more(bus: Bus) -> None:
    sink = Collector()
    sink.gate.clear()
    subscription = bus.subscribe(sink)
    bus.begin_run(started())
    bus.publish(ticks(3))
    subscription.close()
    bus.publish(ticks(3))
    sink.gate.set()
    assert subscription.wait(SOON)
    assert sink.numbers == [1, 2, 3, 4]
    assert not subscription.active
    assert subscription.report() == SinkReport(delivered=4, state="closed")


# --- overflow -----------------------------------------------------------------------------------------------


def blocked(bus: Bus, sink: Collector) -> None:
    """The sink holds the run's first event in its hands and lets its queue fill up."""
    sink.gate.clear()
    bus.subscribe(sink)
    bus.begin_run(started())
    assert sink.entered.wait(SOON)


def test_a_full_queue_drops_the_oldest_and_says_so_before_the_next_event(bus: Bus) -> None:
    sink = Collector(queue=2)
    blocked(bus, sink)
    bus.publish(ticks(5))
    sink.gate.set()
    flush(bus)
    assert sink.numbers == [1, 4, 5, 6]
    told = sink.seen[1]
    assert isinstance(told, EventsDropped)
    assert (told.observer, told.count, told.first_seq, told.last_seq) == ("collector", 3, 2, 4)


def test_a_full_queue_drops_the_newest_and_says_so_where_they_would_have_been(bus: Bus) -> None:
    sink = Collector(queue=2, on_full="drop_newest")
    blocked(bus, sink)
    bus.publish(ticks(5))
    sink.gate.set()
    flush(bus)
    bus.publish(ticks(1))
    flush(bus)
    assert sink.numbers == [1, 2, 3, 6, 7]
    told = sink.seen[3]
    assert isinstance(told, EventsDropped)
    assert (told.count, told.first_seq, told.last_seq) == (3, 4, 6)


def test_a_filtered_sink_is_told_of_losses_only_if_it_asks_but_they_are_counted(bus: Bus) -> None:
    sink = Collector((RunStarted, Ticked), queue=1)
    blocked(bus, sink)
    bus.publish(ticks(4))
    sink.gate.set()
    flush(bus)
    assert sink.numbers == [1, 5]
    assert bus.reports()["collector"] == SinkReport(delivered=2, dropped=3)


def test_others_are_told_of_a_sinks_losses_and_it_itself_only_once(bus: Bus) -> None:
    sink, other = Collector(queue=2, name="slow"), Collector(name="other")
    bus.subscribe(other)
    blocked(bus, sink)
    bus.publish(ticks(5))
    (told,) = bus.pump(everything=True)
    sink.gate.set()
    flush(bus)
    assert isinstance(told, EventsDropped)
    assert (told.observer, told.count, told.first_seq, told.last_seq, told.seq) == ("slow", 3, 2, 4, 7)
    assert [event for event in other.seen if isinstance(event, EventsDropped)] == [told]
    assert [event.seq for event in sink.seen if isinstance(event, EventsDropped)] == [4]
    assert bus.losses.events == 3


def test_reports_of_losses_come_at_a_bounded_rate_and_lose_no_count(bus: Bus) -> None:
    sink = Collector(queue=1)
    blocked(bus, sink)
    told: list[Event] = []
    for _ in range(50):
        bus.publish(ticks(2))
        told += bus.pump()
    assert len(told) <= 5
    told += bus.pump(everything=True)
    assert sum(event.count for event in told if isinstance(event, EventsDropped)) == 99
    sink.gate.set()


@pytest.mark.parametrize("on_full", ["drop_oldest", "drop_newest"])
@given(
    capacity=st.integers(1, 6),
    schedule=st.lists(st.one_of(st.integers(1, 9), st.tuples(st.just("take"), st.integers(1, 5))), max_size=40),
    announce=st.booleans(),
)
def test_whatever_the_schedule_every_event_is_taken_or_counted_as_dropped(
    on_full: OnFull, capacity: int, schedule: list[int | tuple[str, int]], *, announce: bool
) -> None:
    queue = EventQueue("q", capacity, on_full, announce=announce, signal=ThreadSignal())
    seq, taken, gaps = 0, list[int](), list[EventsDropped]()

    def take(limit: int) -> bool:
        batch, count = queue.take(limit)
        told = [event for event in batch if isinstance(event, EventsDropped)]
        assert [event.seq for event in batch] == sorted(event.seq for event in batch)
        assert count == len(batch) - len(told) <= limit
        taken.extend(event.seq for event in batch if not isinstance(event, EventsDropped))
        gaps.extend(told)
        queue.done()
        return bool(batch)

    for action in schedule:
        if isinstance(action, tuple):
            take(action[1])
        else:
            queue.put([Ticked(seq=seq + n) for n in range(1, action + 1)])
            seq += action
            assert queue.pending <= capacity
    while take(3):
        pass
    missing = sorted(set(range(1, seq + 1)) - set(taken))
    assert taken == sorted(taken)
    assert len(missing) == queue.dropped
    if announce:
        told = [n for gap in gaps for n in range(gap.first_seq, gap.last_seq + 1)]
        assert sorted(told) == missing
        assert [gap.count for gap in gaps] == [gap.last_seq - gap.first_seq + 1 for gap in gaps]


@settings(max_examples=15, deadline=None)
@given(
    capacity=st.integers(1, 5),
    batches=st.lists(st.integers(1, 20), max_size=15),
    failing=st.sets(st.integers(1, 100)),
)
def test_with_a_real_thread_the_four_counts_add_up_to_what_was_wanted(
    capacity: int, batches: list[int], failing: set[int]
) -> None:
    seen: list[Event] = []

    def handle(event: Event) -> None:
        seen.append(event)
        if event.seq in failing:
            raise RuntimeError(event.seq)

    bus = Bus()
    subscription = bus.subscribe(ObserverSpec("s", (Event,), handle, queue=capacity, max_failures=10**6))
    bus.begin_run(started())
    for count in batches:
        bus.publish(ticks(count))
    published = bus.seq
    bus.close(time.monotonic() + SOON)
    report = subscription.report()
    assert report.delivered + report.failed + report.dropped + report.undelivered == published
    assert report.undelivered == 0
    told = sum(event.count for event in seen if isinstance(event, EventsDropped))
    assert told == report.dropped


# --- failures -----------------------------------------------------------------------------------------------


def failing(count: int = 10**9, error: type[BaseException] = RuntimeError) -> Collector:
    """A sink whose first ``count`` events fail."""

    class Failing(Collector):
        def handle(self, event: Event) -> None:
            super().handle(event)
            if len(self.seen) <= count:
                raise error(f"number {event.seq}")

    return Failing(name="bad")


def failures_of(bus: Bus) -> list[ObserverFailed]:
    return [event for event in bus.pump() if isinstance(event, ObserverFailed)]


def test_a_crashing_sink_does_not_stop_the_others(bus: Bus) -> None:
    bad, good = failing(), Collector(name="good")
    bus.subscribe(bad)
    bus.subscribe(good)
    bus.begin_run(started())
    bus.publish(ticks(30))
    flush(bus)
    assert good.numbers == list(range(1, 32))


def test_a_crash_is_an_event_that_names_the_sink_the_error_and_what_happens(bus: Bus) -> None:
    bus.subscribe(failing(1))
    bus.begin_run(started())
    bus.publish(ticks(1))
    flush(bus)
    (failed,) = failures_of(bus)
    assert (failed.observer, failed.error) == ("bad", "RuntimeError: number 1")
    assert (failed.event_type, failed.failures, failed.action) == ("run.started", 1, "continued")
    assert bus.reports()["bad"] == SinkReport(delivered=1, failed=1)


def test_a_sink_is_failing_from_an_error_until_it_handles_an_event_again(bus: Bus) -> None:
    bad = failing(2)
    bus.subscribe(bad)
    bus.begin_run(started())
    flush(bus)
    assert bus.reports()["bad"] == SinkReport(failed=1, state="failing", error="RuntimeError: number 1")
    bus.publish(ticks(2))
    flush(bus)
    assert bus.reports()["bad"] == SinkReport(delivered=1, failed=2)


class UnspeakableError(Exception):
    """Cannot say what happened."""

    def __str__(self) -> str:
        raise RuntimeError("no words")


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (UnspeakableError(), "UnspeakableError (and no text, since its __str__ raises)"),
        (ValueError("\ud800"), "ValueError: \\ud800"),
        (ValueError("x" * 10_000), f"ValueError: {'x' * 2000}... (10,000 characters)"),
    ],
)
def test_an_error_is_told_in_words_that_can_be_written_whatever_it_is(bus: Bus, error: Exception, words: str) -> None:
    def fail(_: Event) -> None:
        raise error

    bus.subscribe(ObserverSpec("bad", (Event,), fail))
    bus.begin_run(started())
    flush(bus)
    (failed,) = failures_of(bus)
    assert failed.error == words
    assert json_codec().decode(json_codec().encode(failed)) == failed


def test_a_sink_is_stopped_after_failures_in_a_row(bus: Bus) -> None:
    bad = failing()
    subscription = bus.subscribe(ObserverSpec("bad", (Event,), bad.handle, max_failures=3))
    bus.begin_run(started())
    bus.publish(ticks(10))
    assert subscription.wait(SOON)
    assert [failed.action for failed in failures_of(bus)] == ["continued", "continued", "stopped"]
    report = SinkReport(failed=3, undelivered=8, state="stopped", error="RuntimeError: number 3")
    assert subscription.report() == report
    assert len(bad.seen) == 3


def test_a_success_in_between_starts_the_count_anew(bus: Bus) -> None:
    seen: list[int] = []

    def every_other(event: Event) -> None:
        seen.append(event.seq)
        if event.seq % 2:
            raise RuntimeError

    bus.subscribe(ObserverSpec("shaky", (Event,), every_other, max_failures=2))
    bus.begin_run(started())
    bus.publish(ticks(20))
    flush(bus)
    assert seen == list(range(1, 22))


def test_the_policy_stop_ends_a_sink_at_its_first_failure(bus: Bus) -> None:
    bad = failing(1)
    subscription = bus.subscribe(ObserverSpec("bad", (Event,), bad.handle, restart="stop"))
    bus.begin_run(started())
    assert subscription.wait(SOON)
    assert [failed.action for failed in failures_of(bus)] == ["stopped"]


def test_the_policy_restart_closes_and_opens_again(bus: Bus) -> None:
    calls: list[str] = []
    bad = failing(1)
    spec = ObserverSpec(
        "bad",
        (Event,),
        bad.handle,
        restart="restart",
        open=lambda: calls.append("open"),
        close=lambda: calls.append("close"),
    )
    subscription = bus.subscribe(spec)
    bus.begin_run(started())
    bus.publish(ticks(1))
    flush(bus)
    subscription.close()
    assert subscription.wait(SOON)
    assert calls == ["open", "close", "open", "close"]
    assert [failed.action for failed in failures_of(bus)] == ["restarted"]


def test_a_sink_that_cannot_open_is_tried_again_with_the_next_event(bus: Bus) -> None:
    attempts: list[int] = []

    def open_it() -> None:
        attempts.append(1)
        if len(attempts) < 3:
            raise OSError("disk full")

    sink = Collector()
    bus.subscribe(ObserverSpec("disk", (Event,), sink.handle, open=open_it))
    bus.begin_run(started())
    bus.publish(ticks(2))
    flush(bus)
    assert sink.numbers == [2, 3]
    assert [failed.error for failed in failures_of(bus)] == ["OSError: disk full"] * 2
    assert bus.reports()["disk"] == SinkReport(delivered=2, failed=1)


def test_a_sink_is_not_told_of_its_own_failures(bus: Bus) -> None:
    bad = failing(2)
    bus.subscribe(bad)
    bus.begin_run(started())
    bus.publish(ticks(5))
    flush(bus)
    assert len(failures_of(bus)) == 2
    flush(bus)
    assert not [event for event in bad.seen if isinstance(event, ObserverFailed)]


def test_two_sinks_that_fail_on_each_others_failures_come_to_rest(bus: Bus) -> None:
    subscriptions = [bus.subscribe(ObserverSpec(name, (Event,), failing().handle)) for name in ("a", "b")]
    woken = threading.Event()
    bus.notify = woken.set
    bus.begin_run(started())
    while any(subscription.active for subscription in subscriptions):
        assert woken.wait(SOON)
        woken.clear()
        bus.pump()
    bus.pump()
    assert bus.seq <= 1 + 2 * MAX_FAILURES


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_ends_the_sink_and_is_no_failure(bus: Bus, interrupt: type[BaseException]) -> None:
    subscription = bus.subscribe(failing(1, interrupt))
    bus.begin_run(started())
    assert subscription.wait(SOON)
    assert failures_of(bus) == []
    report = subscription.report()
    assert (report.failed, report.undelivered, report.state) == (0, 1, "cancelled")


def test_a_plain_function_that_returns_an_awaitable_is_told_to_be_async(bus: Bus) -> None:
    async def forgotten() -> None: ...

    bus.subscribe(ObserverSpec("lambda", (Event,), lambda _: forgotten()))
    bus.begin_run(started())
    flush(bus)
    (failed,) = failures_of(bus)
    assert "make it an `async def`" in failed.error


def test_a_failure_while_closing_is_reported_and_hangs_nothing(bus: Bus) -> None:
    def close() -> None:
        raise OSError("cannot close")

    subscription = bus.subscribe(ObserverSpec("disk", (Event,), lambda _: None, close=close))
    bus.begin_run(started())
    subscription.close()
    assert subscription.wait(SOON)
    assert [failed.error for failed in failures_of(bus)] == ["OSError: cannot close"]


# --- time ---------------------------------------------------------------------------------------------------


def test_a_sink_that_blocks_changes_neither_publishing_nor_what_others_get(bus: Bus) -> None:
    stuck, good = Collector(name="stuck", queue=10), Collector(name="good")
    bus.subscribe(good)
    blocked(bus, stuck)
    began = time.monotonic()
    for _ in range(200):
        bus.publish(ticks(10))
    assert time.monotonic() - began < SOON / 5
    good.wait_for(2001)
    assert good.numbers == list(range(1, 2002))
    assert stuck.seen == []
    stuck.gate.set()


def test_closing_keeps_its_deadline_and_names_who_blocked() -> None:
    bus = Bus()
    stuck, good = Collector(name="stuck"), Collector(name="good")
    bus.subscribe(good)
    blocked(bus, stuck)
    bus.publish(ticks(7))
    began = time.monotonic()
    reports, abandoned = bus.close(began + 0.2)
    assert time.monotonic() - began < 2.0
    assert abandoned == ("kvcanary-sink-stuck",)
    assert reports["stuck"] == SinkReport(undelivered=8, state="abandoned")
    assert reports["good"] == SinkReport(delivered=8, state="closed")
    stuck.gate.set()


def test_an_abandoned_sink_delivers_nothing_more_when_it_comes_back() -> None:
    bus = Bus()
    stuck = Collector(name="stuck")
    stuck.gate.clear()
    subscription = bus.subscribe(stuck)
    bus.begin_run(started())
    assert stuck.entered.wait(SOON)
    bus.publish(ticks(7))
    bus.close(time.monotonic())
    stuck.gate.set()
    assert subscription.wait(SOON)
    assert stuck.numbers == [1]


def test_a_sink_that_closes_the_bus_is_not_waited_for() -> None:
    bus = Bus()
    outcome: list[float] = []
    done = threading.Event()

    def handle(_: Event) -> None:
        began = time.monotonic()
        bus.close(began + SOON, own_thread=threading.get_ident())
        outcome.append(time.monotonic() - began)
        done.set()

    bus.subscribe(ObserverSpec("closer", (RunStarted,), handle))
    bus.begin_run(started())
    assert done.wait(SOON)
    assert outcome[0] < SOON / 2


def test_the_last_event_says_what_was_not_delivered_when_it_was_written() -> None:
    bus = Bus()
    stuck, good = Collector(name="stuck"), Collector(name="good")
    bus.subscribe(good)
    blocked(bus, stuck)
    bus.publish(ticks(3))
    good.wait_for(4)
    bus.flush(time.monotonic() + 0.1)
    bus.end_run("stopped")
    bus.close(time.monotonic() + 0.1)
    last = good.seen[-1]
    assert isinstance(last, RunStopped)
    assert last.undelivered["stuck"] == 4
    assert "good" not in last.undelivered
    stuck.gate.set()


# --- recovery -----------------------------------------------------------------------------------------------


def test_a_sink_that_fails_to_open_is_left_alone_twice_as_long_each_time(bus: Bus) -> None:
    attempts: list[float] = []
    sink = Collector()

    def open_it() -> None:
        attempts.append(time.monotonic())
        if len(attempts) < 4:
            raise OSError("disk full")

    bus.subscribe(ObserverSpec("disk", (Event,), sink.handle, restart="restart", open=open_it))
    bus.begin_run(started())
    bus.publish(ticks(200))
    flush(bus)
    rests = [after - before for before, after in pairwise(attempts)]
    expected = [delivery.FIRST_REST_SECONDS * factor for factor in (1, 2, 4)]
    assert all(rest >= least for rest, least in zip(rests, expected, strict=True))
    assert [failed.action for failed in failures_of(bus)] == ["restarted"] * 3


def test_what_comes_while_a_sink_rests_is_kept_as_far_as_its_queue_goes_and_counted(
    bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delivery, "FIRST_REST_SECONDS", 0.2)
    failed_once = threading.Event()
    seen: list[int] = []

    def handle(event: Event) -> None:
        if not failed_once.is_set():
            failed_once.set()
            raise OSError("disk full")
        seen.append(event.seq)

    spec = ObserverSpec("disk", (Ticked,), handle, restart="restart", queue=5, open=lambda: None)
    subscription = bus.subscribe(spec)
    bus.begin_run(started())
    bus.publish(ticks(1))
    assert failed_once.wait(SOON)
    bus.publish(ticks(20))
    flush(bus)
    assert seen == list(range(18, 23))
    assert subscription.report() == SinkReport(delivered=5, failed=1, dropped=15)


def test_the_end_of_the_stream_does_not_wait_until_a_sink_has_recovered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delivery, "FIRST_REST_SECONDS", 100 * SOON)
    monkeypatch.setattr(delivery, "LONGEST_REST_SECONDS", 100 * SOON)
    bus, sink = Bus(), failing(1)
    told = threading.Event()
    bus.notify = told.set
    bus.subscribe(ObserverSpec("disk", (Event,), sink.handle, restart="restart"))
    bus.begin_run(started())
    assert told.wait(SOON)
    bus.publish(ticks(3))
    began = time.monotonic()
    reports, abandoned = bus.close(began + SOON)
    assert time.monotonic() - began < SOON / 2
    assert abandoned == ()
    assert reports["disk"] == SinkReport(delivered=3, failed=1, state="closed")


def test_a_sink_that_never_recovers_is_stopped_in_the_end(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delivery, "FIRST_REST_SECONDS", 0.001)
    subscription = bus.subscribe(ObserverSpec("disk", (Event,), failing().handle, restart="restart", max_failures=4))
    bus.begin_run(started())
    bus.publish(ticks(10))
    assert subscription.wait(SOON)
    assert [failed.action for failed in failures_of(bus)] == ["restarted"] * 3 + ["stopped"]
