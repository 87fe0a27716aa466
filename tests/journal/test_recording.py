"""What a journal keeps, and in which order."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvcanary.cli.benches.stream import make_events
from kvcanary.errors import ConfigError
from kvcanary.events import (
    CanaryArmed,
    Event,
    IncidentOpened,
    OwnershipCheckpointed,
    RequestsAdmitted,
    RunStarted,
    RunStopped,
    SnapshotTaken,
    UnknownEvent,
    ViolationDetected,
    event_name,
    register_event,
)
from kvcanary.journal.format import Gap
from kvcanary.journal.reader import JournalFile, Query
from kvcanary.journal.recorder import NOT_KEPT
from kvcanary.journal.sink import Journal
from kvcanary.journal.writer import Bounds
from kvcanary.observers.redact import redact_all
from tests.journal.recording import (
    DIGEST,
    SECOND,
    TOKEN,
    Recording,
    Small,
    at,
    faulty,
    record,
    recording,
    seconds_of,
    seqs,
    tick,
    violation,
)


@register_event
class Unwritable(Event, frozen=True, kw_only=True, gc=False, tag="test.unwritable"):
    what: object = None


def test_every_event_of_a_run_is_in_its_file_as_it_was_published(tmp_path: Path) -> None:
    with recording(tmp_path, redact=False) as made:
        made.publish(faulty())
        made.bus.end_run("done")
    with made.open() as file:
        kept = list(file.read())
    assert kept[1:-1] == made.published[1:]
    assert [event_name(event) for event in kept if isinstance(event, RunStopped)] == ["run.stopped"]
    assert file.started == kept[0]
    assert file.stopped == kept[-1]


def test_each_run_has_a_file_of_its_own(tmp_path: Path) -> None:
    with recording(tmp_path) as made:
        made.publish(make_events(100))
        made.begin("r2")
        made.publish(make_events(60))
    names = sorted(path.name for path in tmp_path.glob("*.sqlite"))
    assert names == ["kvcanary-r1.sqlite", "kvcanary-r2.sqlite"]
    ends = []
    for name in names:
        with JournalFile(tmp_path / name) as file:
            kept = list(file.events())
            ends.append((file.started.run, seqs(kept) == list(range(1, len(kept) + 1)), file.stopped is not None))
    assert ends == [("r1", True, True), ("r2", True, True)]


def test_two_runs_of_one_name_do_not_share_a_file(tmp_path: Path) -> None:
    assert record(tmp_path, make_events(10)) != record(tmp_path, make_events(20))


def test_a_closed_journal_is_one_file_that_can_be_copied(tmp_path: Path) -> None:
    path = record(tmp_path, make_events(1000))
    assert list(tmp_path.iterdir()) == [path]


def test_a_segment_begins_with_a_checkpoint_of_the_ledger(tmp_path: Path) -> None:
    with recording(tmp_path, bounds=Small._replace(segment=60_000)) as made:
        for _, events in seconds_of(8, 300):
            made.publish(events)
    with made.open() as file:
        first, *rest = file.segments()
        assert rest
        assert {segment.opened_by for segment in rest} == {"ownership.checkpointed"}
        opened = [next(file.events(Query(first_seq=segment.first_seq))) for segment in (first, *rest)]
    assert isinstance(opened[0], RunStarted)
    assert all(isinstance(event, OwnershipCheckpointed) and event.state["pages"] for event in opened[1:])


def test_no_checkpoint_is_made_where_no_journal_asks_for_one(tmp_path: Path) -> None:
    with recording(tmp_path) as made:
        made.publish([*make_events(400), tick(1), tick(2)])
    assert not [event for event in made.published if isinstance(event, OwnershipCheckpointed)]


def test_without_a_ledger_segments_are_cut_all_the_same(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "cut", bounds=Small)
    with recording(tmp_path / "other") as made:
        made.publish(make_events(8000))
    for first in range(0, len(made.published), 64):
        journal.offer(made.published[first : first + 64])
    journal.finish()
    assert journal.wait(time.monotonic() + 20)
    assert journal.path is not None
    with JournalFile(journal.path) as file:
        assert {segment.opened_by for segment in file.segments()[1:]} == {"size"}


# --- the flight recorder ------------------------------------------------------------------------------------


def test_the_recorder_keeps_what_came_before_a_finding_and_a_while_after_it(tmp_path: Path) -> None:
    with recording(tmp_path, "incidents", bounds=Small, after_s=2.0) as made:
        for second, events in seconds_of(40, 200):
            made.publish(events)
            if second == 30:
                made.publish(at(30, [violation()]))
    with made.open() as file:
        kept = list(file.events())
        gaps = file.gaps()
    moments = {event.monotonic_ns // SECOND for event in kept[:-1]}
    assert {29, 30, 31, 32} <= moments
    assert moments.isdisjoint({1, 33, 39})
    assert [type(event) for event in kept if isinstance(event, IncidentOpened)] == [IncidentOpened]
    assert {gap.reason for gap in gaps} == {NOT_KEPT}
    assert len(kept) + sum(gap.size for gap in gaps) == kept[-1].seq


def test_what_is_kept_before_a_finding_begins_with_a_checkpoint(tmp_path: Path) -> None:
    with recording(tmp_path, "incidents", bounds=Small) as made:
        for _, events in seconds_of(30, 200):
            made.publish(events)
        made.publish(at(30, [violation()]))
    with made.open() as file:
        first = next(item for item in file.read() if not isinstance(item, Gap))
    assert isinstance(first, OwnershipCheckpointed)


def test_a_run_without_findings_is_a_gap_with_a_reason_and_its_end(tmp_path: Path) -> None:
    path = record(tmp_path, make_events(2000), "incidents", bounds=Small)
    with JournalFile(path) as file:
        (stopped,) = file.events()
        (gap,) = file.gaps()
    assert isinstance(stopped, RunStopped)
    assert (gap.first_seq, gap.last_seq, gap.reason) == (1, stopped.seq - 1, NOT_KEPT)


def test_the_ring_is_bounded_in_bytes(tmp_path: Path) -> None:
    with recording(tmp_path, "incidents", bounds=Small) as made:
        for _, events in seconds_of(50, 300):
            made.publish(events)
            assert made.journal._recorder._ring._bytes <= Small.ring + 20_000


def test_a_second_finding_within_the_while_prolongs_it(tmp_path: Path) -> None:
    with recording(tmp_path, "incidents", after_s=2.0) as made:
        made.publish(at(1, [violation()]))
        made.publish(at(2.5, [violation(forward=900, slot=5000, request="later")]))
        made.publish(at(4, [CanaryArmed()]))
        made.publish(at(5, [CanaryArmed()]))
    with made.open() as file:
        assert [event.monotonic_ns / 1e9 for event in file.events() if isinstance(event, CanaryArmed)] == [4.0]


# --- what is withheld ---------------------------------------------------------------------------------------


def test_no_token_id_and_no_digest_is_in_the_file_unless_asked_for(tmp_path: Path) -> None:
    secrets = [
        RequestsAdmitted(requests=("a",), rows=(0,), tags=(1,), starts=(3,), base_digests=(DIGEST,)),
        SnapshotTaken(digest_sum=DIGEST),
        violation(),
    ]
    told = []
    for redact in (True, False):
        path = record(tmp_path / str(redact), secrets, redact=redact)
        with JournalFile(path) as file:
            told.append((repr(list(file.events())) + repr(file.findings()), file.redacted))
    hidden, whole = told
    assert (hidden[1], whole[1]) == (True, False)
    assert DIGEST not in hidden[0]
    assert str(TOKEN) not in hidden[0]
    assert DIGEST in whole[0]
    assert f"token {TOKEN}" in whole[0]


def test_an_event_of_unknown_type_keeps_its_bytes_or_its_envelope(tmp_path: Path) -> None:
    from kvcanary.events import msgpack_codec

    raw = b"\x82\xa4type\xaanewer.kind\xa6digest\xa3abc"
    unknown = msgpack_codec().decode(raw)
    assert isinstance(unknown, UnknownEvent)
    for redact in (False, True):
        path = record(tmp_path / str(redact), [unknown], redact=redact)
        with JournalFile(path) as file:
            (found,) = [event for event in file.events() if isinstance(event, UnknownEvent)]
        assert (found.type_name, found.seq) == ("newer.kind", 2)
        assert (msgpack_codec().encode(found) == raw) is not redact
        assert (b"abc" in found.raw) is not redact


def test_an_event_that_cannot_be_written_costs_only_itself(tmp_path: Path) -> None:
    path = record(tmp_path, [CanaryArmed(), Unwritable(what=object()), CanaryArmed()])
    with JournalFile(path) as file:
        kept = list(file.events())
    assert [event_name(event) for event in kept[1:4]] == ["canary.armed", "test.unwritable", "canary.armed"]
    assert seqs(kept) == [1, 2, 3, 4, 5]


# --- the bus ------------------------------------------------------------------------------------------------


def test_it_counts_what_it_took(tmp_path: Path) -> None:
    with recording(tmp_path) as made:
        made.publish(make_events(500))
        assert made.flush()
        report = made.bus.reports()["journal"]
        assert (report.delivered, report.dropped, report.undelivered) == (len(made.published), 0, 0)
    assert made.journal.report().state == "closed"


def test_one_journal_to_a_bus(tmp_path: Path) -> None:
    with recording(tmp_path) as made:
        other = Journal(tmp_path)
        with pytest.raises(ConfigError, match="'journal' already"):
            made.bus.attach(other)
        other.finish()
        assert other.wait(time.monotonic() + 20)


def test_one_that_is_attached_within_a_run_begins_with_the_runs_beginning(tmp_path: Path) -> None:
    with recording(tmp_path / "first") as made:
        made.publish([CanaryArmed()])
        late = Journal(tmp_path / "late")
        late.name = "late"
        made.bus.attach(late)
        made.publish([CanaryArmed()])
    assert late.path is not None
    with JournalFile(late.path) as file:
        items = list(file.read())
    assert isinstance(items[0], RunStarted)
    assert isinstance(items[1], Gap)


def told(path: Path) -> list[str]:
    with JournalFile(path) as file:
        return [event_name(event) for event in file.events()]


def test_a_run_whose_beginning_is_lost_is_counted_and_gets_into_no_other_file(tmp_path: Path) -> None:
    def refuse_the_second(events: Sequence[Event]) -> Sequence[Event]:
        if any(isinstance(event, RunStarted) and event.run == "r2" for event in events):
            raise ValueError("not this one")
        return events

    made = Recording(tmp_path, redact=refuse_the_second)
    for run in ("r1", "r2", "r3"):
        before = made.journal.dropped
        made.begin(run)
        made.publish([CanaryArmed()])
        made.bus.end_run("done")
        assert made.flush() is (run != "r2")
        assert (made.journal.dropped > before) is (run == "r2")
    assert not made.bus.close(time.monotonic() + 20)[1]
    first, third = (told(path) for path in sorted(tmp_path.iterdir()))
    assert first == ["run.started", "canary.armed", "run.stopped"]
    assert third == ["run.started", "canary.armed", "events.dropped", "run.stopped"]


@pytest.mark.parametrize("target", ["a_file/inside", "/proc/nowhere"])
def test_a_directory_that_cannot_be_written_is_refused_at_once(tmp_path: Path, target: str) -> None:
    (tmp_path / "a_file").touch()
    with pytest.raises(ConfigError, match="no directory that can be written"):
        Journal(tmp_path / target)


def test_the_index_answers_sql(tmp_path: Path) -> None:
    path = record(tmp_path, faulty())
    with sqlite3.connect(path) as db:
        rows = db.execute("SELECT kind, slot, request FROM findings WHERE type = 'violation.detected'").fetchall()
    db.close()
    assert rows == [("INPUT_TOKEN", 57, "r3")] * 2 + [("INPUT_TOKEN", 900, "r5")]


def test_redacting_before_or_after_a_fold_gives_the_same_incident(tmp_path: Path) -> None:
    with recording(tmp_path, redact=False) as made:
        made.publish(faulty())
    with recording(tmp_path) as other:
        other.publish(redact_all(faulty()))
    opened = [[e for e in redact_all(one.published) if isinstance(e, IncidentOpened)] for one in (made, other)]
    assert opened[0] == opened[1]
    assert any("took" in line or "holds" in line or "held" in line for e in opened[0] for line in e.evidence)
    assert not [e for e in other.published if isinstance(e, ViolationDetected) and e.token_expected is not None]


def test_bounds_have_defaults_that_fit_each_other() -> None:
    bounds = Bounds()
    assert bounds.ring <= bounds.queue <= bounds.file <= bounds.directory
