from __future__ import annotations

import io

import pytest
from rich.console import Console

from kvcanary.cli.live import LiveView
from kvcanary.cli.report import FaultJudged, PhaseEnded, Results
from kvcanary.cli.scoreboard import PhaseChanged, Scoreboard
from kvcanary.events import Event, FaultInjected, IncidentOpened, SnapshotTaken

CLEAN = PhaseEnded(model="full", phase="clean before", forwards=99, requests=40, positions=120_000, reread=7)
NAMED = FaultJudged(
    model="full",
    fault="flipped-bit",
    title="flipped bit in one V",
    passed=True,
    kind="CONTENT",
    headline="CONTENT: slot 3",
    after=1,
    request="full-17",
)
MISSED = FaultJudged(model="full", fault="stale-slot", title="stale slot mapping", headline="nothing was reported")
EVENTS: list[Event] = [
    PhaseChanged(number=1, model="full", phase="flipped-bit"),
    SnapshotTaken(forward=1234, new_tokens=5678, verified={"links": {"a": 40_000, "b": 2_000}}),
    FaultInjected(fault="flipped-bit", description="bit 3 flipped", forward=1233),
    IncidentOpened(incident="1", kind="CONTENT", headline="CONTENT: slot 3", forward=1234),
]

pytestmark = pytest.mark.anyio


def screen() -> tuple[Console, io.StringIO]:
    drawn = io.StringIO()
    return Console(file=drawn, force_terminal=True, width=160, height=50, color_system=None), drawn


async def test_the_view_shows_the_phase_the_numbers_and_the_latest_findings() -> None:
    console, drawn = screen()
    board = Scoreboard()
    await board.handle_batch(EVENTS)
    with LiveView(console).showing(board, "full"):
        pass
    text = drawn.getvalue()
    for words in ("flipped-bit", "1,234", "5,678", "42,000", "planted flipped-bit: bit 3 flipped", "CONTENT: slot 3"):
        assert words in text


def test_the_closing_table_names_fault_incident_distance_and_request() -> None:
    console, drawn = screen()
    LiveView(console).closing(Results([CLEAN], [NAMED, MISSED]), 12.3)
    row = next(line for line in drawn.getvalue().splitlines() if "flipped bit in one V" in line)
    assert [cell.strip() for cell in row.strip("│ ").split("│")] == [
        "full", "flipped bit in one V", "CONTENT", "+1", "full-17", "CONTENT: slot 3",
    ]  # fmt: skip
    assert "1 of 2 faults named; 1 of 1 clean phases silent, 120,000 slot positions verified" in drawn.getvalue()
    assert "full, stale-slot: nothing was reported" in drawn.getvalue()


@pytest.mark.parametrize(
    ("report", "words"),
    [
        (CLEAN, "full  clean before: silent 40 requests, 99 forwards, 120,000 positions verified"),
        (NAMED, "full  flipped bit in one V: named CONTENT: slot 3"),
        (MISSED, "full  stale slot mapping: missed nothing was reported"),
    ],
)
def test_what_was_judged_is_one_line(report: PhaseEnded | FaultJudged, words: str) -> None:
    console, drawn = screen()
    LiveView(console).told(report)
    assert drawn.getvalue().strip() == words
