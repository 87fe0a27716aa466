from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcanary.bus import Bus
from kvcanary.errors import CanaryStalledError, ConfigError
from kvcanary.events import (
    Derived,
    Event,
    FactsLost,
    HazardCounted,
    HealthChecked,
    ObserverFailed,
    SnapshotTaken,
    StatsReported,
    Ticked,
)
from kvcanary.folding import MAX_FAILURES
from kvcanary.observers.base import ObserverSpec
from tests.host.samples import started


class Plain:
    """A fold made of a function."""

    def __init__(
        self,
        name: str,
        interests: tuple[type[Event], ...],
        handle: Callable[[Any], Iterable[Event] | None] = lambda _: None,
        *,
        guard: bool = False,
        emits: tuple[type[Event], ...] = (),
    ) -> None:
        self.name, self.interests, self.guard, self.emits = name, interests, guard, emits
        self.seen: list[Event] = []
        self._handle = handle

    def handle(self, event: Event) -> Iterable[Event] | None:
        self.seen.append(event)
        return self._handle(event)


def explode(_: Event) -> None:
    raise ValueError("boom")


def hazard(name: str) -> Callable[[Event], list[Event]]:
    return lambda _: [HazardCounted(hazard=name, count=1)]


def test_a_run_starts_with_its_first_event_and_is_numbered_without_gaps() -> None:
    bus = Bus()
    bus.begin_run(started())
    first = bus.publish([Ticked(), Ticked()])
    second = bus.publish([Ticked()])
    assert [event.seq for event in first + second] == [2, 3, 4]


def test_a_new_run_is_numbered_from_one_again_and_ends_the_old_one() -> None:
    fold = Plain("f", (Event,))
    bus = Bus([fold])
    bus.begin_run(started("a"))
    bus.publish([Ticked()])
    bus.begin_run(started("b"))
    assert [(event.seq, type(event).__name__) for event in fold.seen] == [
        (1, "RunStarted"),
        (2, "Ticked"),
        (3, "RunStopped"),
        (1, "RunStarted"),
    ]


def test_publishing_outside_a_run_is_refused() -> None:
    with pytest.raises(ConfigError, match="begin_run"):
        Bus().publish([Ticked()])


def test_what_a_fold_derives_follows_its_cause_with_the_envelope_filled() -> None:
    bus = Bus([Plain("one", (Ticked,), hazard("x"))])
    bus.begin_run(started())
    tick, derived, last = bus.publish([Ticked(forward=7, time_ns=11, monotonic_ns=12), SnapshotTaken()])
    assert isinstance(derived, HazardCounted)
    assert (tick.seq, derived.seq, last.seq) == (2, 3, 4)
    assert (derived.cause, derived.by, derived.forward) == (2, "one", 7)
    assert (derived.time_ns, derived.monotonic_ns) == (11, 12)


def test_an_envelope_that_the_fold_filled_itself_stays() -> None:
    mine = HazardCounted(hazard="x", count=1, cause=1, by="me", forward=3, time_ns=9, monotonic_ns=8)
    bus = Bus([Plain("one", (Ticked,), lambda _: [mine])])
    bus.begin_run(started())
    derived = bus.publish([Ticked(forward=7, time_ns=11)])[1]
    assert isinstance(derived, HazardCounted)
    assert (derived.cause, derived.by, derived.forward, derived.time_ns) == (1, "me", 3, 9)


def test_derived_events_go_to_later_folds_only() -> None:
    before, after = Plain("before", (HazardCounted,)), Plain("after", (HazardCounted,))
    bus = Bus([before, Plain("middle", (Ticked,), hazard("x")), after])
    bus.begin_run(started())
    bus.publish([Ticked()])
    assert [type(event) for event in before.seen] == []
    assert [type(event) for event in after.seen] == [HazardCounted]


def test_events_derived_from_derived_events_follow_right_behind_them() -> None:
    relay = Plain(
        "relay", (HazardCounted,), lambda event: [HealthChecked(healthy=True)] if event.hazard == "x" else None
    )
    bus = Bus([Plain("one", (Ticked,), lambda _: [HazardCounted(hazard=h, count=1) for h in "xy"]), relay])
    bus.begin_run(started())
    out = bus.publish([Ticked()])
    assert [type(event).__name__ for event in out] == ["Ticked", "HazardCounted", "HealthChecked", "HazardCounted"]
    assert [event.cause for event in out if isinstance(event, Derived)] == [2, 3, 2]


def test_every_fold_sees_ascending_numbers_even_when_an_earlier_one_derives() -> None:
    late = Plain("late", (Event,))
    bus = Bus([Plain("early", (Ticked,), hazard("x")), late])
    bus.begin_run(started())
    bus.publish([Ticked(), Ticked()])
    numbers = [event.seq for event in late.seen]
    assert numbers == sorted(numbers) == [1, 2, 3, 4, 5]


def test_an_interest_in_a_base_class_takes_its_subclasses() -> None:
    fold = Plain("all derived", (Derived,))
    bus = Bus([Plain("one", (Ticked,), hazard("x")), fold])
    bus.begin_run(started())
    bus.publish([Ticked()])
    assert [type(event) for event in fold.seen] == [HazardCounted]


def test_an_event_that_already_has_a_number_is_copied_not_changed() -> None:
    recorded = Ticked(seq=77)
    bus = Bus()
    bus.begin_run(started())
    (published,) = bus.publish([recorded])
    assert (recorded.seq, published.seq) == (77, 2)


def test_one_object_published_twice_gets_two_numbers() -> None:
    event = Ticked()
    bus = Bus()
    bus.begin_run(started())
    assert [published.seq for published in bus.publish([event, event])] == [2, 3]


def test_a_generator_of_derived_events_is_taken_too() -> None:
    bus = Bus([Plain("one", (Ticked,), lambda _: (HazardCounted(hazard=h, count=1) for h in "xyz"))])
    bus.begin_run(started())
    assert len(bus.publish([Ticked()])) == 4


def test_a_fold_that_consumes_what_only_a_later_one_emits_is_refused() -> None:
    consumer = Plain("consumer", (HazardCounted,))
    producer = Plain("producer", (Ticked,), emits=(HazardCounted,))
    with pytest.raises(ConfigError, match=r"'consumer' consumes hazard.counted, which only 'producer' emits"):
        Bus([consumer, producer])
    Bus([producer, consumer])


def test_a_circle_of_folds_is_refused_in_any_order() -> None:
    one = Plain("one", (StatsReported,), emits=(HazardCounted,))
    two = Plain("two", (HazardCounted,), emits=(StatsReported,))
    for order in ([one, two], [two, one]):
        with pytest.raises(ConfigError, match="change the order or the interests"):
            Bus(order)


def test_a_fold_that_waits_for_its_own_events_is_refused() -> None:
    with pytest.raises(ConfigError, match="which only itself emits"):
        Bus([Plain("narcissus", (HazardCounted,), emits=(HazardCounted,))])


def test_two_folds_of_one_name_are_refused() -> None:
    with pytest.raises(ConfigError, match="two folds are named 'same'"):
        Bus([Plain("same", (Ticked,)), Plain("same", (Ticked,))])


def test_a_failing_fold_is_reported_and_the_others_go_on() -> None:
    other = Plain("other", (Ticked, ObserverFailed))
    bus = Bus([Plain("bad", (Ticked,), explode), other])
    bus.begin_run(started())
    out = bus.publish([Ticked()])
    failed = out[1]
    assert isinstance(failed, ObserverFailed)
    assert (failed.observer, failed.error, failed.event_type) == ("bad", "ValueError: boom", "run.ticked")
    assert (failed.action, failed.failures) == ("continued", 1)
    assert other.seen == out


def test_a_fold_that_returns_something_else_than_events_has_failed() -> None:
    bus = Bus([Plain("bad", (Ticked,), lambda _: ["nonsense"])])  # type: ignore[list-item]
    bus.begin_run(started())
    failed = bus.publish([Ticked()])[1]
    assert isinstance(failed, ObserverFailed)
    assert "a fold returns events, got str" in failed.error


def test_a_fold_that_keeps_failing_is_detached_until_the_next_run() -> None:
    bad = Plain("bad", (Ticked,), explode)
    bus = Bus([bad])
    bus.begin_run(started())
    out = bus.publish([Ticked() for _ in range(2 * MAX_FAILURES)])
    failures = [event for event in out if isinstance(event, ObserverFailed)]
    assert len(bad.seen) == len(failures) == MAX_FAILURES
    assert failures[-1].action == "stopped"
    bus.begin_run(started())
    bus.publish([Ticked()])
    assert len(bad.seen) == MAX_FAILURES + 1


def test_a_failing_guard_marks_the_run_degraded_and_tells_once() -> None:
    told: list[CanaryStalledError] = []
    bus = Bus([Plain("watchman", (Ticked,), explode, guard=True)], on_guard_failure=told.append)
    bus.begin_run(started())
    out = bus.publish([Ticked(), Ticked()])
    assert [event.action for event in out if isinstance(event, ObserverFailed)] == ["degraded", "degraded"]
    assert list(bus.degraded) == ["watchman"]
    assert len(told) == 1
    assert "guard 'watchman' failed on run.ticked" in str(told[0])
    assert isinstance(told[0].__cause__, ValueError)
    bus.begin_run(started())
    assert not bus.degraded


def test_losses_are_counted_per_run() -> None:
    bus = Bus()
    bus.begin_run(started())
    bus.publish([FactsLost(count=3), FactsLost(count=4), SnapshotTaken(monotonic_ns=99)])
    assert (bus.losses.facts, bus.losses.last_snapshot_ns) == (7, 99)
    bus.begin_run(started())
    assert bus.losses.facts == 0


def derive(event: Event) -> list[Event]:
    """Deterministic, and now and then it fails."""
    if event.forward % 5 == 4:
        raise RuntimeError("on purpose")
    return [HazardCounted(hazard=str(n), count=n) for n in range(event.forward % 3)]


@given(st.lists(st.lists(st.integers(0, 20), max_size=6), max_size=8))
def test_however_events_are_batched_the_outcome_is_the_same_and_a_replay_equals_it(batches: list[list[int]]) -> None:
    def run(groups: list[list[Event]]) -> list[Event]:
        relay = Plain("relay", (HazardCounted,), lambda event: [StatsReported(protected_tokens=event.count)])
        bus = Bus([Plain("first", (Ticked,), derive), relay])
        out = bus.begin_run(started())
        for group in groups:
            out += bus.publish(group)
        return out

    live = run([[Ticked(forward=n, time_ns=n + 1, monotonic_ns=n + 1) for n in batch] for batch in batches])
    assert [event.seq for event in live] == list(range(1, len(live) + 1))
    primary = [event for event in live[1:] if isinstance(event, Ticked)]
    replayed = run([[event] for event in primary])

    assert replayed == live


def test_the_bus_knows_what_nobody_wants_and_learns_when_somebody_does() -> None:
    bus = Bus([Plain("ticks", (Ticked,))])
    assert (bus.wants(Ticked), bus.wants(HazardCounted), bus.wants(StatsReported)) == (True, False, False)
    subscription = bus.subscribe(ObserverSpec("derived", (Derived,), lambda _: None))
    assert (bus.wants(HazardCounted), bus.wants(StatsReported), bus.wants(SnapshotTaken)) == (True, True, True)
    subscription.close()
    bus.close(time.monotonic() + 10)


def test_one_that_wants_all_wants_types_that_are_not_known_yet() -> None:
    class Mine(Event, frozen=True, kw_only=True, tag="test.mine"):
        pass

    bus = Bus()
    assert not bus.wants(Mine)
    bus.subscribe(ObserverSpec("all", (Event,), lambda _: None))
    assert bus.wants(Mine)
    bus.close(time.monotonic() + 10)
