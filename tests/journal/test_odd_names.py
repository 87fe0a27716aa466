"""Request ids come from clients: newlines, terminal commands, and halves of characters, which JSON lets them send."""

from __future__ import annotations

import io
import json
import time
from pathlib import Path
from typing import Any

import pytest

from kvcanary.cli import main
from kvcanary.events import IncidentOpened, ObserverFailed, OwnershipViolated, PageRun, PagesAllocated
from kvcanary.journal import store
from kvcanary.journal.reader import Query
from kvcanary.observers.log import LogSink
from kvcanary.replay import Replay
from kvcanary.text import encodable, printable
from kvcanary.wire import FactWriter, unpack
from tests.journal.recording import Recording, recording, violation

NAMES = {
    "lines": "a\nfake line\r\n",
    "terminal": "\x1b[31mred\x1b[0m\x07",
    "half": "x\ud800y",
    "separator": "a\x1fb",
    "zero": "a\0b",
    "backwards": "\u202eabc",
    "long": "n" * 10_240,
}


def allotted(forward: int, request: str) -> PagesAllocated:
    return PagesAllocated(forward=forward, retired=0, group="full", requests=(request,), runs=(PageRun(0, 3, 1),))


@pytest.fixture(params=NAMES)
def name(request: pytest.FixtureRequest) -> str:
    return NAMES[request.param]


def trouble_with(name: str, folder: Path, log: io.BytesIO | None = None) -> Recording:
    """A run in which a request called ``name`` is given another's page, and reads it."""
    with recording(folder) as made:
        if log is not None:
            made.bus.subscribe(LogSink(log))
        found = violation(2, request=name)
        made.publish([allotted(1, "other"), allotted(2, name), found])
        assert made.flush()
        assert made.bus.flush(time.monotonic() + 10)
    return made


def test_the_journal_keeps_it_and_finds_it_and_replays_it(tmp_path: Path, name: str) -> None:
    made = trouble_with(name, tmp_path)
    with made.open() as file:
        assert file.gaps() == []
        assert any(row.request == encodable(name) for row in file.findings())
        assert any(isinstance(event, PagesAllocated) for event in file.events(Query(request=name)))
        replay = Replay(file)
        assert sum(len(events) for events in replay) > 5
        assert replay.verdict.holds


def test_the_words_of_findings_are_one_line(tmp_path: Path, name: str) -> None:
    made = trouble_with(name, tmp_path)
    incidents = [event for event in made.published if isinstance(event, IncidentOpened)]
    broken = [event for event in made.published if isinstance(event, OwnershipViolated)]
    assert incidents
    assert broken
    for text in (*(one.headline for one in incidents), *(one.detail for one in broken)):
        assert text.isprintable()
    assert printable(name) in incidents[0].headline


def test_a_log_is_whole_lines_of_json(tmp_path: Path, name: str) -> None:
    log = io.BytesIO()
    trouble_with(name, tmp_path, log)
    lines = [json.loads(line) for line in log.getvalue().decode().splitlines()]
    assert any(encodable(name) in line.get("requests", ()) for line in lines)


@pytest.mark.parametrize(
    "words", [("journal", "--request"), ("journal", "--incidents"), ("journal", "--seq", "1:"), ("replay",)]
)
def test_commands_print_nothing_that_breaks_a_line_or_commands_a_terminal(
    tmp_path: Path, name: str, words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    trouble_with(name, tmp_path)
    asked = [name] if "--request" in words else []
    assert main([words[0], str(tmp_path), *words[1:], *asked]) == 0
    out = capsys.readouterr().out
    assert all(line.isprintable() for line in out.split("\n"))
    assert "fake line" not in {line.strip() for line in out.split("\n")}


def test_facts_for_another_process_take_it(name: str) -> None:
    writer = FactWriter()
    writer.admit(name)
    ((call, arguments),) = unpack(writer.pack())
    assert (call, arguments["request"]) == ("admit", encodable(name))


def test_a_journal_that_meets_what_it_cannot_write_stops_with_a_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise ValueError("nobody thought of it")

    made = Recording(tmp_path)
    monkeypatch.setattr(store.Store, "write", fail)
    made.begin()
    began = time.monotonic()
    assert not made.flush()
    assert made.journal.wait(time.monotonic() + 10)
    (failed,) = (event for event in made.bus.pump() if isinstance(event, ObserverFailed))
    assert (failed.observer, failed.action, failed.error) == (
        "journal",
        "stopped",
        "ValueError: nobody thought of it",
    )
    report = made.journal.report()
    assert (report.state, report.error, report.delivered) == ("stopped", failed.error, 0)
    made.bus.end_run("done")
    made.bus.close(time.monotonic() + 10)
    assert time.monotonic() - began < 10
