from __future__ import annotations

import asyncio
import json
import os
import sqlite3
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from kvcanary.cli import main
from kvcanary.cli.benches.stream import make_events
from kvcanary.events import CanaryArmed, Event, IncidentOpened, event_name
from kvcanary.observers.base import observer
from tests.journal.recording import Recording, Small, at, faulty, record, recording, seconds_of, violation

Run = Callable[..., tuple[int, str, str]]
SEEN: list[str] = []


@observer
def on_incident(event: IncidentOpened) -> None:
    SEEN.append(event.headline)


@observer
async def on_batch(events: Sequence[Event]) -> None:
    await asyncio.sleep(0)
    SEEN.extend(event_name(event) for event in events)


class Opened:
    """A sink with hooks."""

    interests = (CanaryArmed,)

    def open(self) -> None:
        SEEN.append("open")

    def handle(self, _: Event) -> None:
        SEEN.append("event")

    async def close(self) -> None:
        SEEN.append("close")


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def call(*words: object) -> tuple[int, str, str]:
        SEEN.clear()
        status = main([str(word) for word in words])
        printed = capsys.readouterr()
        return status, printed.out, printed.err

    return call


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A faulty run, and a clean one of the flight recorder."""
    path = tmp_path_factory.mktemp("runs")
    record(path, [*faulty(), CanaryArmed()])
    made = Recording(path, "incidents")
    made.begin("r2", tp_rank=1)
    made.publish(make_events(200))
    made.close()
    return path


def lines(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


# --- journal ----------------------------------------------------------------------------------------------------


def test_it_lists_the_runs_of_a_directory(run: Run, folder: Path) -> None:
    status, out, _ = run("journal", folder)
    assert status == 0
    first, second = (line for line in out.splitlines() if line.startswith("r") and "here:" in line)
    assert first.split()[0] == "r1"
    assert "here:0 tp1" in second
    assert "level incidents: nothing was found" in out
    rows = lines(run("journal", folder, "--json")[1])
    assert [(row["run"], row["ended"], row["incidents"]) for row in rows] == [("r1", "done", 2), ("r2", "done", 0)]
    assert rows[1]["missing"] == rows[1]["missing_because"]["level incidents: nothing was found"] > 200


def test_it_lists_incidents(run: Run, folder: Path) -> None:
    _, out, _ = run("journal", folder, "--incidents")
    assert out.count("INPUT_TOKEN: request") == 2
    (first, second) = lines(run("journal", folder, "--incidents", "--json")[1])
    assert (first["type"], first["run"], first["incident"]) == ("incident.opened", "r1", "r1#1")
    assert second["requests"] == ["r5"]


def test_a_slot_has_the_history_of_its_page_and_its_own_findings(run: Run, folder: Path) -> None:
    events = lines(run("journal", folder, "--slot", "full:57", "--json")[1])
    assert events[0]["type"] == "pages.allocated"
    assert [event["slot"] for event in events if event["type"] == "violation.detected"] == [57, 57]
    other = lines(run("journal", folder, "--slot", "full:58", "--json")[1])
    assert {event["type"] for event in other} <= {"pages.allocated", "pages.freed"}
    page = lines(run("journal", folder, "--page", "full:3", "--json")[1])
    assert len(page) == len(events)


def test_a_request_has_a_history(run: Run, folder: Path) -> None:
    _, out, _ = run("journal", folder / "kvcanary-r1.sqlite", "--request", "r5")
    kinds = [line.split()[-1] if not line.split()[3:] else line for line in out.splitlines()]
    assert "requests.admitted" in out
    assert "incident.opened" in out
    assert len(kinds) > 4
    assert "r2.34" not in out


def test_options_together_narrow_the_search(run: Run, folder: Path) -> None:
    words = ("journal", folder, "--request", "r3", "--where", "input_token", "--forwards", "40", "--json")
    assert {event["forward"] for event in lines(run(*words)[1])} == {40}
    assert run(*words[:-1], "--seq", "1:10")[1].startswith("no such events\n")
    assert [event["seq"] for event in lines(run("journal", folder, "--seq", "3:5", "--json")[1])] == [3, 4, 5]


def test_the_newest_are_shown_and_the_rest_is_a_number(run: Run, folder: Path) -> None:
    _, out, _ = run("journal", folder, "--where", "forward.launched", "--limit", "3")
    assert out.count("32 rows, 32 tokens") == 3
    assert "the newest 3 of" in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--page", "full"), "--page is 'full'; expected GROUP:NUMBER"),
        (("--page", "swa:3"), "--page names group 'swa'; kvcanary-r1.sqlite has full"),
        (("--forwards", "a:b"), "--forwards is 'a:b'; expected FIRST:LAST"),
        (("--forwards", "60:40"), "--forwards is '60:40'; expected FIRST:LAST with FIRST at most LAST"),
        (("--seq", f"{1 << 63}:"), "and LAST at most 2**62"),
        (("--limit", "-1"), "--limit is -1; expected 0 or more"),
        (("--where", "INPUT_TOKN"), "--where is 'INPUT_TOKN': no event fits, and none is known by that kind or type;"),
        (("--where", "pages.fred"), "did you mean pages.freed?"),
        (("--where", "?"), "known are WRITE_FOREIGN, "),
    ],
)
def test_what_cannot_be_looked_for_is_an_error_with_an_example(
    run: Run, folder: Path, words: tuple[str, ...], message: str
) -> None:
    status, _, err = run("journal", folder, *words)
    assert status == 2
    assert message in err


@pytest.mark.parametrize("command", ["journal", "replay"])
def test_a_missing_empty_or_foreign_target_is_an_error_without_a_traceback(
    run: Run, tmp_path: Path, command: str
) -> None:
    (tmp_path / "text").write_text("no database" * 100)
    for target, message in (
        (tmp_path / "absent", "there is no"),
        (tmp_path, "holds no journal"),
        (tmp_path / "text", "no journal of kvcanary, or damaged"),
    ):
        status, _, err = run(command, target)
        assert status == 2
        assert message in err


@pytest.mark.parametrize("words", [("journal",), ("replay",), ("replay", "--check")])
def test_one_file_that_cannot_be_read_does_not_hide_the_others(
    run: Run, tmp_path: Path, words: tuple[str, ...]
) -> None:
    record(tmp_path, faulty())
    (tmp_path / "kvcanary-broken.sqlite").write_text("no database" * 100)
    status, out, err = run(words[0], tmp_path, *words[1:])
    assert status == 1
    assert "r1" in out or "run.started: test on here" in out
    assert "kvcanary-broken.sqlite cannot be read" in err


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (("journal",), "r1 "),
        (("journal", "--incidents"), "kvcanary-r1.sqlite lacks "),
        (("journal", "--request", "r5"), "requests.admitted"),
        (("journal", "--where", "forward.launched"), "32 rows, 32 tokens"),
        (("replay",), "run.started: test on here"),
        (("replay", "--check"), "but events are missing"),
    ],
)
def test_of_a_damaged_file_every_command_shows_what_can_be_read_and_says_that_it_is_damaged(
    run: Run, tmp_path: Path, words: tuple[str, ...], shown: str
) -> None:
    path = record(tmp_path, make_events(25_000))
    os.truncate(path, path.stat().st_size * 2 // 3)
    status, out, err = run(words[0], path, *words[1:])
    assert status == 1
    assert shown in out
    assert "kvcanary-r1.sqlite is damaged in the file (database disk image is malformed)" in err


def test_a_listing_says_how_much_a_damaged_file_lacks(run: Run, tmp_path: Path) -> None:
    path = record(tmp_path, make_events(20_000))
    with sqlite3.connect(path) as db:
        first, last = db.execute(
            "SELECT first_seq, last_seq FROM frames ORDER BY first_seq LIMIT 1 OFFSET 1"
        ).fetchone()
        db.execute("UPDATE frames SET events = zeroblob(40) WHERE first_seq = ?", (first,))
    db.close()
    status, out, err = run("journal", path, "--json")
    (row,) = lines(out)
    assert status == 1
    assert row["missing"] == last - first + 1
    assert row["missing_because"] == {"damaged in the file (checksum differs)": row["missing"]}
    assert "this is what could be read of it" in err


@pytest.mark.parametrize("command", ["journal", "replay"])
def test_help_shows_examples(run: Run, command: str) -> None:
    status, out, _ = run(command, "--help")
    assert status == 0
    assert f"kvcanary {command} run" in out


# --- replay -----------------------------------------------------------------------------------------------------


def test_a_replay_tells_what_happened(run: Run, folder: Path) -> None:
    status, out, _ = run("replay", folder / "kvcanary-r1.sqlite")
    assert status == 0
    told = [line.split(": ")[0].split()[-1] for line in out.splitlines()]
    assert told[0] == "run.started"
    assert told[-1] == "run.stopped"
    assert {"incident.opened", "incident.updated", "stats.reported"} <= set(told)


def test_a_check_says_what_it_compared(run: Run, folder: Path) -> None:
    status, out, _ = run("replay", folder / "kvcanary-r1.sqlite", "--check")
    assert status == 0
    assert "derived compared: no difference" in out


def test_ranks_are_replayed_together(run: Run, folder: Path) -> None:
    events = lines(run("replay", folder, "--json")[1])
    assert {event["from"] for event in events if "from" in event} == {"here:0", "here:0 tp1"}
    assert [event["type"] for event in events if event["run"] == "r2"] == [
        "run.started",
        "events.dropped",
        "run.stopped",
        "gap",
    ]


@pytest.mark.parametrize(
    ("words", "message"),
    [(("--from", "-1"), "--from is -1; expected 0 or more"), (("--where", "CONTNT"), "did you mean CONTENT?")],
)
def test_what_no_event_can_be_is_an_error(run: Run, folder: Path, words: tuple[str, ...], message: str) -> None:
    status, _, err = run("replay", folder, *words)
    assert status == 2
    assert message in err


def test_where_and_from_choose_events(run: Run, folder: Path) -> None:
    path = folder / "kvcanary-r1.sqlite"
    everything = lines(run("replay", path, "--where", "forward.retired", "--json")[1])
    later = lines(run("replay", path, "--where", "forward.retired", "--from", "100", "--json")[1])
    assert 0 < len(later) < len(everything)
    assert min(event["seq"] for event in later) >= 100
    kinds = lines(run("replay", path, "--where", "INPUT_TOKEN", "--json")[1])
    assert {event["type"] for event in kinds} == {"violation.detected", "incident.opened", "incident.updated"}


def test_observers_of_ones_own_get_the_events(run: Run, folder: Path) -> None:
    path = folder / "kvcanary-r1.sqlite"
    _, out, _ = run("replay", path, "--observer", f"{__name__}:on_incident")
    assert (out, len(SEEN)) == ("", 2)
    run("replay", path, "--observer", f"{__name__}:on_batch")
    assert SEEN[0] == "run.started"
    assert SEEN.count("incident.opened") == 2
    run("replay", path, "--observer", f"{__name__}:Opened")
    assert SEEN == ["open", "event", "close"]


def test_a_check_that_fails_shows_both_and_ends_with_one(
    run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvcanary.observers.violations import ViolationsFold

    monkeypatch.setattr(ViolationsFold, "emits", ())
    monkeypatch.setattr(ViolationsFold, "_update", lambda *_: IncidentOpened(incident="x", kind="y", headline="other"))
    status, out, _ = run("replay", folder / "kvcanary-r1.sqlite", "--check")
    assert status == 1
    assert "recorded: incident.updated" in out
    assert "derived now: incident.opened: other" in out


def test_a_gap_is_said(run: Run, tmp_path: Path) -> None:
    with recording(tmp_path, "incidents", bounds=Small, after_s=1) as made:
        for second, events in seconds_of(30, 200):
            made.publish(events)
            if second == 25:
                made.publish(at(25, [violation(1)]))
    out = run("replay", tmp_path)[1]
    assert "are missing: level incidents: nothing was found" in out
    _, checked, _ = run("replay", tmp_path, "--check")
    assert "not compared" in checked
    (verdict,) = lines(run("replay", tmp_path, "--check", "--json")[1])
    assert verdict["holds"]
    assert {gap["reason"] for gap in verdict["gaps"]} == {"level incidents: nothing was found"}
