"""A recording goes through the folds again, and a difference is named."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from msgspec.structs import replace

from kvcanary.cli.benches.stream import make_events
from kvcanary.events import (
    Event,
    EventsDropped,
    IncidentOpened,
    OwnershipViolated,
    PageRun,
    PagesAllocated,
    PagesFreed,
    RunStarted,
    ViolationDetected,
    event_name,
    msgpack_codec,
)
from kvcanary.journal.format import EventEncoder, Frame, Segment, unpack
from kvcanary.journal.reader import JournalFile, open_files
from kvcanary.journal.recorder import NOT_KEPT
from kvcanary.journal.writer import Bounds
from kvcanary.replay import Replay, Verdict, config_of, in_order
from tests.journal.recording import CONFIG, Small, at, faulty, record, recording, seconds_of, started, violation


def judge(path: Path, first_seq: int = 0) -> tuple[Verdict, list[Event]]:
    with JournalFile(path) as file:
        replay = Replay(file, first_seq=first_seq)
        events = [event for events in replay for event in events]
    return replay.verdict, events


def freed_twice(forward: int) -> PagesFreed:
    return PagesFreed(forward=forward, retired=forward - 1, group="full", requests=("",), runs=(PageRun(0, 5, 1),))


@pytest.mark.parametrize("redact", [True, False])
def test_the_folds_derive_from_a_recording_what_they_derived_before(tmp_path: Path, redact: bool) -> None:
    path = record(tmp_path, [*faulty(), freed_twice(70), freed_twice(71)], redact=redact)
    verdict, events = judge(path)
    assert verdict.holds
    assert verdict.compared > 10
    assert (verdict.different, verdict.skipped, verdict.gaps) == (0, {}, [])
    derived = {event_name(event) for event in events}
    assert {"incident.opened", "incident.updated", "ownership.violated", "health.checked", "stats.reported"} <= derived


def test_a_replay_gives_every_event_with_its_number(tmp_path: Path) -> None:
    with recording(tmp_path, redact=False) as made:
        made.publish(faulty())
    _, events = judge(made.path)
    assert events[1:-1] == made.published[1:]


def test_checkpoints_are_compared_with_the_books(tmp_path: Path) -> None:
    with recording(tmp_path, bounds=Small._replace(segment=60_000)) as made:
        for _, events in seconds_of(8, 300):
            made.publish(events)
    verdict, events = judge(made.path)
    assert verdict.holds
    assert sum(event_name(event) == "ownership.checkpointed" for event in events) > 2


def tamper(path: Path, change: Callable[[Event], Event]) -> None:
    """Rewrite the frames of a file, each event as ``change`` has it; checksums fit."""
    with JournalFile(path) as file:
        frames = [
            [file._decode(bytes(raw), first + at) for at, raw in enumerate(unpack(data, crc))]
            for first, crc, data in frames_of(path)
        ]
    with sqlite3.connect(path) as db:
        for events in frames:
            chunk = EventEncoder().encode([change(event) for event in events])
            first = events[0].seq
            row = Frame(Segment(1, 1, ""), first, first, 0, 0, 0, 0, [chunk], len(chunk)).row()
            db.execute("UPDATE frames SET crc = ?, events = ? WHERE first_seq = ?", (row[7], row[10], first))
    db.close()


def frames_of(path: Path) -> Sequence[tuple[int, int, bytes]]:
    with sqlite3.connect(path) as db:
        rows = db.execute("SELECT first_seq, crc, events FROM frames").fetchall()
    db.close()
    return rows


def test_an_incident_that_was_changed_afterwards_is_a_difference(tmp_path: Path) -> None:
    path = record(tmp_path, faulty())
    tamper(path, lambda event: replace(event, likely_cause="nothing") if isinstance(event, IncidentOpened) else event)
    verdict, _ = judge(path)
    assert not verdict.holds
    assert verdict.different == 2
    (first, _) = verdict.differences
    assert isinstance(first.recorded, IncidentOpened)
    assert isinstance(first.derived, IncidentOpened)
    assert (first.recorded.likely_cause, first.derived.likely_cause[:4]) == ("nothing", "lost")


def test_a_finding_that_was_changed_afterwards_is_a_difference(tmp_path: Path) -> None:
    path = record(tmp_path, faulty())
    tamper(path, lambda e: replace(e, slot=58) if isinstance(e, ViolationDetected) and e.slot == 57 else e)
    verdict, _ = judge(path)
    assert [type(one.recorded) for one in verdict.differences] == [IncidentOpened]


def test_a_fact_that_was_changed_afterwards_is_a_difference_in_the_next_checkpoint(tmp_path: Path) -> None:
    with recording(tmp_path, bounds=Small._replace(segment=60_000)) as made:
        for _, events in seconds_of(4, 300):
            made.publish(events)
    tamper(made.path, lambda e: replace(e, runs=()) if isinstance(e, PagesAllocated) and e.forward == 30 else e)
    verdict, _ = judge(made.path)
    assert {event_name(one.recorded) for one in verdict.differences if one.recorded} == {"ownership.checkpointed"}


# --- not from the beginning ---------------------------------------------------------------------------------


def test_what_the_flight_recorder_kept_is_compared_as_far_as_it_goes(tmp_path: Path) -> None:
    with recording(tmp_path, "incidents", bounds=Small, after_s=2) as made:
        for second, events in seconds_of(60, 200):
            made.publish(events)
            if second in (30, 45):
                made.publish(at(second, [violation(second * 50, slot=second * 100, request=f"r{second}")]))
                made.publish(at(second, [freed_twice(second * 50), freed_twice(second * 50 + 1)]))
    verdict, events = judge(made.path)
    assert verdict.different == 0
    assert verdict.holds
    assert {gap.reason for gap in verdict.gaps} == {NOT_KEPT}
    assert sum(isinstance(event, IncidentOpened) for event in events) == 4
    assert verdict.compared >= 6
    assert sum(verdict.skipped.values()) > 5


def test_a_gap_takes_the_place_of_its_events_and_claims_nothing_after_it(tmp_path: Path) -> None:
    path = record(tmp_path, [*make_events(3000), freed_twice(800)], bounds=Bounds(queue=1))
    verdict, events = judge(path)
    assert verdict.gaps
    told = [e.count for e in events if isinstance(e, EventsDropped) and e.seq == e.last_seq]
    assert told == [gap.size for gap in verdict.gaps]
    assert not [event for event in events if isinstance(event, OwnershipViolated)]
    assert verdict.different == 0


def test_a_replay_from_the_middle_begins_at_the_checkpoint_before_it(tmp_path: Path) -> None:
    with recording(tmp_path, bounds=Small._replace(segment=60_000)) as made:
        for second, events in seconds_of(8, 300):
            made.publish(events)
            if second == 6:
                made.publish(at(6.5, [freed_twice(900), freed_twice(901)]))
    with made.open() as file:
        start = file.segments()[2].first_seq
    verdict, events = judge(made.path, start + 100)
    assert verdict.holds
    assert verdict.events < made.published[-1].seq - start + 3
    first, *rest = events
    assert isinstance(first, RunStarted)
    assert min(event.seq for event in rest) >= start + 100
    broken = [event for event in events if isinstance(event, OwnershipViolated)]
    assert broken
    assert all(event in made.published for event in broken)


def test_where_nothing_can_be_compared_the_recording_does_not_hold(tmp_path: Path) -> None:
    path = record(tmp_path, make_events(400))
    with sqlite3.connect(path) as db:
        db.execute("UPDATE meta SET value = ? WHERE key = 'started'", (msgpack_codec().encode(started(config=OFF)),))
    db.close()
    verdict, _ = judge(path)
    assert verdict.compared == 0
    assert not verdict.holds


OFF = replace(CONFIG, track_ownership=False, stats_every=0, health_every=0)


# --- several runs -------------------------------------------------------------------------------------------


def test_the_runs_of_many_ranks_are_replayed_in_the_order_of_time(tmp_path: Path) -> None:
    for rank in range(3):
        with recording(tmp_path) as made:
            made.begin(f"rank{rank}", tp_rank=rank, time_ns=rank)
            for second in range(5):
                made.publish(
                    at(second + rank / 10, [violation(second * 1000 + 1, slot=second * 16, request=f"q{second}")])
                )
        (tmp_path / "kvcanary-r1.sqlite").unlink()
    with open_files(tmp_path) as files:
        replays = [Replay(file) for file in files]
        order = [
            (replay.file.started.run, event.monotonic_ns)
            for replay, events in in_order(replays)
            for event in events
            if isinstance(event, ViolationDetected)
        ]
    assert [run for run, _ in order[:6]] == ["rank0", "rank1", "rank2"] * 2
    assert [moment for _, moment in order] == sorted(moment for _, moment in order)
    assert all(replay.verdict.holds for replay in replays)


def test_the_ledger_of_each_rank_is_judged_apart(tmp_path: Path) -> None:
    """The same page of the same group is another page on another rank, and each has its own requests."""
    for run, request in (("r1", "a"), ("r2", "b")):
        with recording(tmp_path) as made:
            made.bus.end_run("done")
            made.begin(run)
            taken = PagesAllocated(
                forward=1, retired=0, group="full", requests=(request,), runs=(PageRun(0, 5, 1),), time_ns=1
            )
            made.publish([taken])
    with open_files(tmp_path) as files:
        replays = [Replay(file) for file in files if len(list(file.events())) > 2]
        events = [event for _, events in in_order(replays) for event in events]
    assert sum(isinstance(event, PagesAllocated) for event in events) == 2
    assert not any(isinstance(event, OwnershipViolated) for event in events)
    assert all(replay.verdict.holds for replay in replays)


def test_the_recorded_configuration_makes_the_folds_as_far_as_it_is_known() -> None:
    event = started()
    assert config_of(event) == CONFIG
    newer = replace(event, config={**event.config, "newer_setting": 3, "key": "(set)"}, mode="raise")
    assert config_of(newer) == replace(CONFIG, mode="raise")


def test_a_check_of_a_damaged_recording_never_passes(tmp_path: Path) -> None:
    path = record(tmp_path, make_events(4000))
    assert judge(path)[0].lost == []
    with sqlite3.connect(path) as db:
        db.execute("UPDATE frames SET events = zeroblob(40) WHERE first_seq > 1 AND first_seq < 3000")
    db.close()
    verdict, _ = judge(path)
    assert verdict.lost
    assert not verdict.holds


def test_a_check_of_a_run_of_which_nothing_was_kept_does_not_hold(tmp_path: Path) -> None:
    with recording(tmp_path, level="incidents") as made:
        made.publish(make_events(500))
    verdict, _ = judge(made.path)
    assert (verdict.compared, verdict.lost) == (0, [])
    assert verdict.gaps
    assert not verdict.holds
