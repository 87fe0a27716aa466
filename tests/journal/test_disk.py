"""Disks that are full, bounds of files and directories, and files that were damaged."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvcanary.cli.benches.stream import make_events
from kvcanary.events import Event, ObserverFailed, StatsReported, Ticked
from kvcanary.journal.format import Gap
from kvcanary.journal.reader import DAMAGED, UNEXPLAINED, JournalError, JournalFile, find_files
from kvcanary.journal.retention import make_room
from kvcanary.journal.store import PRUNED
from tests.journal.recording import Recording, Small, faulty, record, recording, seconds_of, seqs, started

PROGRAM = Path(__file__).parents[1] / "programs" / "journal_full.py"


# --- full -----------------------------------------------------------------------------------------------------


def test_a_full_disk_is_a_counted_and_told_gap_and_stops_nobody(tmp_path: Path) -> None:
    """By the limit on the size of a process's files, which is what a quota or a full disk looks like to SQLite."""
    done = subprocess.run(
        [sys.executable, "-W", "error", PROGRAM, tmp_path], check=False, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    *said, dropped = done.stdout.split()
    assert said == ["published", "dropped", "told", "flushed"]
    with JournalFile(*find_files(tmp_path)) as file:
        (gap,) = file.gaps()
        kept = list(file.events())
        assert file.stopped is not None
    assert "the disk did not take it" in gap.reason
    assert len(kept) + gap.size == kept[-1].seq
    assert int(dropped) == gap.size
    stats = [event for event in kept if isinstance(event, StatsReported)]
    assert stats[-1].events_dropped == gap.size


def test_a_file_that_cannot_grow_any_more_does_not_block_the_end(tmp_path: Path) -> None:
    made = Recording(tmp_path, bounds=Small._replace(pages=60, file=1 << 30, queue=16 << 20))
    made.begin()
    made.publish(make_events(40_000))
    assert not made.flush(0.2)
    made.bus.end_run("done")
    began = time.monotonic()
    reports, abandoned = made.bus.close(began + 0.5)
    assert abandoned == ("kvcanary-sink-journal",)
    assert time.monotonic() - began < 5
    report = reports["journal"]
    assert report.undelivered + report.dropped > 0
    assert report.state == "abandoned"
    with JournalFile(*find_files(tmp_path)) as file:
        kept = list(file.events())
    assert seqs(kept) == list(range(1, len(kept) + 1))


def test_a_flush_is_not_true_after_events_were_given_up(tmp_path: Path) -> None:
    with recording(tmp_path, bounds=Small._replace(queue=1)) as made:
        made.publish(make_events(2000))
        assert made.journal.dropped
        assert not made.flush()
        assert made.flush()


def test_after_a_gap_a_new_segment_begins_with_a_checkpoint(tmp_path: Path) -> None:
    with recording(tmp_path, bounds=Small._replace(queue=1)) as made:
        for _, events in seconds_of(3, 500):
            made.publish(events[:-1])
            made.flush()
            made.publish(events[-1:])
            made.flush()
    with made.open() as file:
        gaps, segments = file.gaps(), file.segments()
    assert gaps
    assert {gap.reason for gap in gaps} == {"the disk did not keep up: the queue was full"}
    assert any(segment.opened_by == "ownership.checkpointed" for segment in segments)


def test_a_file_that_is_deleted_under_a_run_is_told_begun_anew_and_its_loss_is_seen(tmp_path: Path) -> None:
    with recording(tmp_path) as made:
        made.publish(make_events(500))
        assert made.flush()
        before = made.bus.seq
        made.path.unlink()
        made.publish(make_events(500))
        assert made.flush()
        made.published += made.bus.pump()
    (failed,) = (event for event in made.published if isinstance(event, ObserverFailed))
    assert "somebody deleted" in failed.error
    with made.open() as file:
        gaps = file.gaps()
    assert (gaps[0].first_seq, gaps[-1].last_seq) == (1, before)
    assert {gap.reason for gap in gaps} == {UNEXPLAINED}


def test_a_time_that_no_file_can_hold_costs_its_event_and_no_other(tmp_path: Path) -> None:
    with recording(tmp_path) as made:
        made.publish([Ticked(time_ns=1 << 63)])
        made.publish(make_events(100))
        made.flush()
    with made.open() as file:
        (gap,) = file.gaps()
        assert file.stopped is not None
    assert (gap.first_seq, gap.last_seq) == (2, 2)
    assert "does not fit 64 bits" in gap.reason


# --- retention --------------------------------------------------------------------------------------------------


def test_a_file_keeps_within_its_bound_and_lets_its_oldest_segments_go(tmp_path: Path) -> None:
    with recording(tmp_path, bounds=Small._replace(file=150_000, segment=60_000)) as made:
        for _, events in seconds_of(40, 500):
            made.publish(events)
            made.flush()
    with made.open() as file:
        (gap,) = file.gaps()
        segments, kept, found = file.segments(), list(file.events()), file.findings()
    assert made.path.stat().st_size < 150_000 * 1.6
    assert (gap.first_seq, gap.last_seq, gap.reason) == (1, kept[0].seq - 1, PRUNED)
    assert segments[0].first_seq == kept[0].seq
    assert segments[0].opened_by == "ownership.checkpointed"
    assert all(row.seq >= kept[0].seq for row in found)


def test_a_directory_keeps_within_its_bound_and_lets_its_oldest_runs_go(tmp_path: Path) -> None:
    for number in range(5):
        path = record(tmp_path, make_events(4000))
        os.utime(path, ns=(number, number))
    size = sum(path.stat().st_size for path in tmp_path.iterdir())
    made = Recording(tmp_path, bounds=Small._replace(file=1, directory=size * 3 // 5))
    made.begin("new")
    made.close()
    names = {path.name for path in tmp_path.iterdir()}
    assert {"kvcanary-r1-4.sqlite", "kvcanary-r1-5.sqlite", "kvcanary-new.sqlite"} <= names
    assert "kvcanary-r1.sqlite" not in names


def test_a_run_that_goes_on_is_never_deleted(tmp_path: Path) -> None:
    with recording(tmp_path) as made:
        made.bus.begin_run(started("alive", pid=os.getpid()))
        made.publish(make_events(1000))
        made.flush()
        alive = made.path
        os.utime(alive, ns=(1, 1))
        assert make_room(tmp_path, 0, keep=tmp_path / "none") == [tmp_path / "kvcanary-r1.sqlite"]
        assert alive.exists()


def test_a_killed_runs_file_may_be_deleted(tmp_path: Path) -> None:
    with recording(tmp_path) as made:
        with subprocess.Popen([sys.executable, "-c", ""]) as gone:
            pass
        import socket

        from msgspec.structs import replace

        begun = started("killed", pid=gone.pid)
        made.bus.begin_run(replace(begun, origin=replace(begun.origin, host=socket.gethostname())))
        made.flush()
        assert made.path in make_room(tmp_path, 0, keep=tmp_path / "none")


def test_what_is_no_journal_is_never_deleted(tmp_path: Path) -> None:
    mine = tmp_path / "kvcanary-mine.sqlite"
    with sqlite3.connect(mine) as db:
        db.execute("CREATE TABLE mine (a)")
    db.close()
    (tmp_path / "kvcanary-text.sqlite").write_text("notes")
    assert make_room(tmp_path, 0, keep=tmp_path / "none") == []
    assert mine.exists()


# --- damage -----------------------------------------------------------------------------------------------------


def test_a_frame_that_was_changed_is_a_gap_that_says_so(tmp_path: Path) -> None:
    with recording(tmp_path) as made:
        made.publish(make_events(4000))
    with sqlite3.connect(made.path) as db:
        db.execute("UPDATE frames SET events = zeroblob(40) WHERE first_seq > 1 AND first_seq < 3000")
    db.close()
    with made.open() as file:
        items = list(file.read())
    damaged = [item for item in items if isinstance(item, Gap)]
    assert damaged
    assert all(DAMAGED in gap.reason for gap in damaged)
    assert sum(gap.size for gap in damaged) + sum(not isinstance(i, Gap) for i in items) == file_end(made.path)


def file_end(path: Path) -> int:
    with JournalFile(path) as file:
        return file.last_seq


def test_a_frame_that_was_taken_out_is_a_gap_without_a_reason(tmp_path: Path) -> None:
    path = record(tmp_path, make_events(4000))
    with sqlite3.connect(path) as db:
        db.execute("DELETE FROM frames WHERE first_seq > 1 AND last_seq < 2000")
    db.close()
    with JournalFile(path) as file:
        assert {gap.reason for gap in file.gaps()} == {UNEXPLAINED}


@pytest.mark.parametrize("share", [0.9, 0.6])
def test_of_a_file_with_a_lost_tail_the_rest_is_read_and_the_loss_is_said(tmp_path: Path, share: float) -> None:
    path = record(tmp_path, make_events(30_000))
    os.truncate(path, int(path.stat().st_size * share) // 4096 * 4096)
    with JournalFile(path) as file:
        items = list(file.read())
    kept = [item.seq for item in items if not isinstance(item, Gap)]
    assert kept == sorted(kept)
    assert len(kept) > 1000
    assert any(isinstance(item, Gap) and DAMAGED in item.reason for item in items)


def test_of_a_file_with_a_broken_place_what_is_behind_it_is_read_as_well(tmp_path: Path) -> None:
    path = record(tmp_path, make_events(60_000))
    with sqlite3.connect(path) as db:
        (last,) = db.execute("SELECT max(seq) FROM (SELECT last_seq AS seq FROM frames)").fetchone()
        query = "SELECT pageno FROM dbstat WHERE name = 'frames' AND pagetype = 'leaf' ORDER BY path"
        pages = [number for (number,) in db.execute(query)]
    db.close()
    with path.open("r+b") as file:
        file.seek((pages[len(pages) // 2] - 1) * 4096)
        file.write(bytes(4096))
    with JournalFile(path) as file:
        items = list(file.read())
        gaps = file.gaps()
        assert file.damage
    assert [item for item in items if isinstance(item, Gap)] == gaps
    (gap,) = gaps
    assert DAMAGED in gap.reason
    kept = seqs([item for item in items if not isinstance(item, Gap)])
    assert kept == [seq for seq in range(1, last + 1) if not gap.first_seq <= seq <= gap.last_seq]
    assert kept[0] == 1
    assert kept[-1] == last


def test_no_flipped_bit_of_an_index_has_a_file_read_for_ever(tmp_path: Path) -> None:
    path = record(tmp_path, make_events(2500))
    with contextlib.closing(sqlite3.connect(path)) as db:
        ((root,),) = db.execute("SELECT rootpage FROM sqlite_master WHERE name = 'frames'")
        ((size,),) = db.execute("PRAGMA page_size")
    whole, start = path.read_bytes(), (root - 1) * size
    damaged = 0
    for offset in (*range(24), *range(size - 40, size)):
        for bit in range(8):
            changed = bytearray(whole)
            changed[start + offset] ^= 1 << bit
            path.write_bytes(changed)
            with contextlib.suppress(JournalError), JournalFile(path) as file:
                numbers = seqs([event for event in file.read() if isinstance(event, Event)])
                assert numbers == sorted(set(numbers))
                damaged += bool(file.damage)
    assert damaged > 10


def test_a_frame_at_the_end_that_was_taken_out_is_missed(tmp_path: Path) -> None:
    path = record(tmp_path, make_events(4000))
    with sqlite3.connect(path) as db:
        db.execute("DELETE FROM frames WHERE first_seq > 1000")
    db.close()
    with JournalFile(path) as file:
        (gap,) = file.gaps()
        assert file.stopped is not None
        assert (gap.last_seq, gap.reason) == (file.stopped.seq, UNEXPLAINED)


def test_a_gap_that_is_told_while_the_file_is_read_is_explained(tmp_path: Path) -> None:
    with recording(tmp_path, bounds=Small._replace(queue=1)) as made:
        made.publish(make_events(2000))
        made.flush()
        with made.open() as file:
            items = iter(file.read())
            next(items)
            made.publish(make_events(500))
            made.flush()
            made.publish(make_events(500))
            made.flush()
            reasons = {item.reason for item in items if isinstance(item, Gap)}
    assert UNEXPLAINED not in reasons


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("absent.sqlite", None, "there is no journal .*absent.sqlite"),
        ("text.sqlite", b"hello " * 1000, "cannot be read .*no journal of kvcanary, or damaged"),
        ("empty.sqlite", b"", "is a database of something else"),
    ],
)
def test_a_file_that_is_no_journal_is_refused_with_what_was_found(
    tmp_path: Path, name: str, content: bytes | None, message: str
) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(JournalError, match=message):
        JournalFile(tmp_path / name)


def test_a_database_of_something_else_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.sqlite"
    with sqlite3.connect(path) as db:
        db.execute("CREATE TABLE meta (key, value)")
    db.close()
    with pytest.raises(JournalError, match="database of something else"):
        JournalFile(path)


def test_a_journal_of_a_newer_format_is_refused(tmp_path: Path) -> None:
    path = record(tmp_path, faulty())
    with sqlite3.connect(path) as db:
        db.execute("PRAGMA user_version = 99")
    db.close()
    with pytest.raises(JournalError, match="has format 99, this version reads up to 1; use a newer kvcanary"):
        JournalFile(path)


def test_a_directory_without_journals_is_an_error_that_says_what_was_looked_for(tmp_path: Path) -> None:
    with pytest.raises(JournalError, match=r"holds no journal \(kvcanary-\*\.sqlite\)"):
        find_files(tmp_path)
