"""Files of other versions: what is known is read, what is not keeps its bytes."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvcanary.cli import main
from kvcanary.events import SCHEMA_VERSION, CanaryArmed, UnknownEvent, ViolationDetected, msgpack_codec
from kvcanary.journal.format import Frame, Segment
from kvcanary.journal.reader import JournalFile
from kvcanary.replay import Replay
from tests.journal.recording import record, violation

NEWER: list[dict[str, Any]] = [
    {"type": "canary.armed", "seq": 2, "forward": 7, "added": {"later": [1, 2]}},
    {"type": "cache.sharded", "seq": 3, "forward": 8, "shards": [1, {"a": None}], "ratio": 0.5},
    {"type": "violation.detected", "seq": 4, "kind": 7},
    {"type": "facts.lost", "seq": 5},
]
LAST = {"type": "run.stopped", "seq": 6}


@pytest.fixture
def newer(tmp_path: Path) -> Path:
    """A journal whose events come from a later version."""
    path = record(tmp_path, [CanaryArmed() for _ in NEWER])
    chunk = msgspec.msgpack.encode([{"type": "run.started", "seq": 1, "run": "r1", "origin": {}}, *NEWER, LAST])
    row = Frame(Segment(1, 1, ""), 1, 6, 0, 0, 0, 0, [chunk], len(chunk)).row()
    with sqlite3.connect(path) as db:
        db.execute("DELETE FROM frames")
        db.execute("INSERT INTO frames VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", row)
        db.execute("UPDATE meta SET value = ? WHERE key = 'schema_version'", (SCHEMA_VERSION + 1,))
    db.close()
    return path


def test_unknown_fields_are_passed_over_and_unknown_types_keep_their_bytes(newer: Path) -> None:
    with JournalFile(newer) as file:
        _, armed, sharded, misshapen, lost, _ = file.events()
        assert file.schema_version == SCHEMA_VERSION + 1
    assert armed == CanaryArmed(seq=2, forward=7)
    for event, sent in ((sharded, NEWER[1]), (misshapen, NEWER[2]), (lost, NEWER[3])):
        assert isinstance(event, UnknownEvent)
        assert (event.type_name, event.seq) == (sent["type"], sent["seq"])
        assert msgpack_codec().encode(event) == msgspec.msgpack.encode(sent)


def test_a_replay_passes_unknown_events_on(newer: Path) -> None:
    with JournalFile(newer) as file:
        events = [event for events in Replay(file) for event in events]
    assert [event.seq for event in events] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("command", ["journal", "replay"])
def test_the_commands_say_that_the_schema_is_newer(
    newer: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, str(newer), "--json"]) == 0
    assert f"has events of schema {SCHEMA_VERSION + 1}, this version knows {SCHEMA_VERSION}" in capsys.readouterr().err


def test_an_unknown_event_is_shown_with_all_its_fields(newer: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["journal", str(newer), "--where", "cache.sharded", "--json"]) == 0
    assert msgspec.json.decode(capsys.readouterr().out) == {"run": "r1", **NEWER[1]}


def test_fields_that_an_old_file_lacks_have_their_defaults(tmp_path: Path) -> None:
    path = record(tmp_path, [violation()])
    old = {"type": "violation.detected", "seq": 2, "kind": "CONTENT", "role": "check", "group": "full"}
    chunk = msgspec.msgpack.encode([old])
    row = Frame(Segment(1, 1, ""), 2, 2, 0, 0, 0, 0, [chunk], len(chunk)).row()
    with sqlite3.connect(path) as db:
        db.execute("DELETE FROM frames")
        db.execute("INSERT INTO frames VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", row)
    db.close()
    with JournalFile(path) as file:
        assert list(file.events()) == [ViolationDetected(seq=2, kind="CONTENT", role="check", group="full")]
