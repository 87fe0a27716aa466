"""What the order of events promises, and what does not depend on when the drain looked."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from kvcanary.bus import Bus
from kvcanary.config import CanaryConfig
from kvcanary.events import (
    Event,
    ForwardLaunched,
    GroupInfo,
    IncidentOpened,
    IncidentUpdated,
    Origin,
    OwnershipViolated,
    RunStarted,
    SnapshotsSkipped,
    SnapshotTaken,
    Ticked,
    ViolationDetected,
)
from kvcanary.facts import FactLog
from kvcanary.mailbox import Mailbox
from kvcanary.observers import default_folds

PAGES, PAGE = 12, 16
Call = Callable[[FactLog], None]
Incident = tuple[list[tuple[str, int]], list[str]]
"""How often each kind was found, and in which requests."""


@dataclass
class Forward:
    """What an engine tells before one forward, and what the device finds in it."""

    calls: list[Call] = field(default_factory=list[Call])
    late_calls: list[Call] = field(default_factory=list[Call])
    """after the step began"""
    retired: int = 0
    found: list[ViolationDetected] = field(default_factory=list[ViolationDetected])


def make_program(seed: int, forwards: int = 14) -> list[Forward]:
    """Lifecycle calls of an engine that makes mistakes, and a device that finds some; the same each time."""
    chance = random.Random(seed)
    program: list[Forward] = []
    for number in range(1, forwards + 1):
        step = Forward(retired=max(0, number - chance.randrange(1, 4)))
        for _ in range(chance.randrange(6)):
            chance.choice([step.calls, step.calls, step.late_calls]).append(_call(chance, number))
        for _ in range(chance.choice([0, 0, 1, 2])):
            step.found.append(_violation(chance, number))
        program.append(step)
    return program


def _call(chance: random.Random, number: int) -> Call:
    request, page = f"r{chance.randrange(4)}", chance.randrange(PAGES)
    transfer = f"t{chance.randrange(3)}"
    kind = chance.choice(["alloc", "alloc", "free", "publish", "reuse", "evict"])
    ordered = chance.random() < 0.3
    return chance.choice(
        [
            lambda log: log.pages(kind, "full", request, [page]),
            lambda log: log.pages(kind, "full", request, [page]),
            lambda log: log.pages(kind, "full", request, [page, (page + 1) % PAGES]),
            lambda log: log.admitted(request, 0, number, 0),
            lambda log: log.finished(request, number, 0),
            lambda log: log.transfer_started(transfer, "full", request, [page], "out", ordered=ordered),
            lambda log: log.transfer_landed(transfer),
        ]
    )


def _violation(chance: random.Random, number: int) -> ViolationDetected:
    page = chance.randrange(PAGES)
    return ViolationDetected(
        time_ns=number,
        monotonic_ns=number,
        forward=number,
        kind=chance.choice(["DIGEST", "CONTENT", "WRITE_FOREIGN"]),
        role="check",
        group="full",
        slot=page * PAGE,
        page=page,
        request=f"r{chance.randrange(4)}",
    )


class World:
    """A log and a device, looked at whenever a schedule wants to; what a real feed does, without threads."""

    def __init__(self, schedule: random.Random) -> None:
        self.chance = schedule
        self.log = FactLog(1 << 12)
        self.log.enabled = True
        self.bus = Bus(default_folds(CanaryConfig(mode="log"), Mailbox()))
        self.waiting: list[tuple[int, list[ViolationDetected]]] = []
        group = GroupInfo(
            name="full",
            kind="full",
            num_slots=PAGES * PAGE,
            page_size=PAGE,
            token_bytes=1,
            sources=1,
            parts=("target",),
        )
        started = RunStarted(run="r", origin=Origin(), mode="log", groups=(group,), time_ns=1, monotonic_ns=1)
        self.out: list[Event] = self.bus.begin_run(started)

    def run(self, program: Sequence[Forward]) -> list[Event]:
        """All events of the program under this schedule, the end of the run included."""
        for forward, step in enumerate(program, 1):
            for call in step.calls:
                call(self.log)
                self.look()
            self.log.step(forward, step.retired)
            for call in step.late_calls:
                call(self.log)
                self.look()
            self.log.launched(forward, step.retired, 1, 1, 1, {})
            self.waiting.append((forward, step.found))
            self.look()
        self.chance = random.Random(0)
        self.log.hurry()
        self.publish(len(self.waiting), everything=True)
        self.out += self.bus.publish([Ticked(time_ns=99, monotonic_ns=99)])
        return self.out

    def look(self) -> None:
        """Perhaps look: at some of the snapshots first, then at the facts."""
        if self.chance.random() < 0.4:
            self.publish(self.chance.randrange(len(self.waiting) + 1))

    def publish(self, ready: int, *, everything: bool = False) -> None:
        snapshots, self.waiting = self.waiting[:ready], self.waiting[ready:]
        events: list[Event] = list(self.log.take(everything=everything))
        skipped = 0
        pending: list[ViolationDetected] = []
        for place, (forward, found) in enumerate(snapshots):
            pending += found
            if place < len(snapshots) - 1 and self.chance.random() < 0.3:  # overwritten before it was read
                skipped += 1
                continue
            events.append(SnapshotTaken(forward=forward, time_ns=forward, monotonic_ns=forward))
            events += [_copy(one) for one in pending]
            pending.clear()
        if skipped:
            events.append(SnapshotsSkipped(count=skipped))
        self.out += self.bus.publish(events)


def _copy(event: ViolationDetected) -> ViolationDetected:
    return ViolationDetected(**{name: getattr(event, name) for name in event.__struct_fields__ if name != "seq"})


def verdicts(events: Sequence[Event]) -> tuple[list[object], list[Incident]]:
    """What was found, however it was numbered; and which of it was taken for one cause."""
    found: list[object] = []
    for event in events:
        if isinstance(event, OwnershipViolated):
            found.append(("ledger", event.kind, event.forward, event.page, event.request, event.other, event.detail))
        elif isinstance(event, ViolationDetected):
            found.append(("device", event.kind, event.forward, event.page, event.request, "", ""))
    last: dict[str, Incident] = {}
    for event in events:
        if isinstance(event, IncidentUpdated):
            last[event.incident] = (sorted(event.kinds.items()), sorted(event.requests))
        elif isinstance(event, IncidentOpened):
            last[event.incident] = ([(event.kind, 1)], sorted(event.requests))
    return sorted(found, key=repr), sorted(last.values(), key=repr)


SEEDS = st.integers(0, 1 << 30)


@settings(deadline=None, max_examples=60)
@given(program=SEEDS, schedule=SEEDS)
def test_what_is_found_does_not_depend_on_when_the_drain_looked(program: int, schedule: int) -> None:
    steps = make_program(program)
    at_once = World(random.Random(1)).run(steps)
    assert verdicts(World(random.Random(schedule)).run(steps))[0] == verdicts(at_once)[0]


@settings(deadline=None, max_examples=60)
@given(program=SEEDS, schedule=SEEDS, device=st.booleans())
def test_the_incidents_of_one_kind_of_finding_do_not_depend_on_when_the_drain_looked(
    program: int, schedule: int, *, device: bool
) -> None:
    steps = make_program(program)
    for step in steps:  # findings of the device and of the ledger together are grouped as they come
        if device:
            step.calls, step.late_calls = [], []
        else:
            step.found = []
    at_once = World(random.Random(1)).run(steps)
    assert verdicts(World(random.Random(schedule)).run(steps))[1] == verdicts(at_once)[1]


@settings(deadline=None, max_examples=40)
@given(program=SEEDS, schedule=SEEDS)
def test_every_finding_is_counted_in_one_incident(program: int, schedule: int) -> None:
    found, incidents = verdicts(World(random.Random(schedule)).run(make_program(program)))
    counted = [count for kinds, _ in incidents for _, count in kinds]
    assert sum(counted) == len(found)


@settings(deadline=None, max_examples=60)
@given(program=SEEDS, schedule=SEEDS)
def test_numbers_have_no_gap_and_a_launch_precedes_all_that_was_found_in_it(program: int, schedule: int) -> None:
    events = World(random.Random(schedule)).run(make_program(program))
    assert [event.seq for event in events] == list(range(1, len(events) + 1))
    launched = 0
    for event in events:
        if isinstance(event, ForwardLaunched):
            launched = event.forward
        elif isinstance(event, (SnapshotTaken, ViolationDetected)):
            assert event.forward <= launched


def test_the_programs_of_these_tests_find_something_of_both_kinds() -> None:
    kinds = {type(event) for seed in range(8) for event in World(random.Random(seed)).run(make_program(seed))}
    assert {OwnershipViolated, ViolationDetected, IncidentOpened, SnapshotsSkipped} <= kinds
