"""The demo on a terminal: a live view while it runs, a table at its end."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from kvcanary.cli.models import TITLES, ModelName
from kvcanary.cli.report import POSITIONS, FaultJudged, PhaseEnded, Results
from kvcanary.cli.scoreboard import Scoreboard, say
from kvcanary.events import Event, FaultInjected
from kvcanary.observers.base import Observer

PER_SECOND = 8


class LiveView:
    """Draws a few times a second, from a thread of its own; the engine and its clients never wait for it."""

    observers: tuple[Observer, ...] = ()

    def __init__(self, console: Console | None = None) -> None:
        self._console = Console() if console is None else console

    @contextmanager
    def showing(self, board: Scoreboard, model: ModelName) -> Generator[None]:
        """Follow one model's run; on leaving, the cursor is back and only finished lines remain."""
        with Live(
            get_renderable=lambda: _frame(board, model),
            console=self._console,
            refresh_per_second=PER_SECOND,
            transient=True,
        ):
            yield

    def told(self, report: PhaseEnded | FaultJudged) -> None:
        """One line above the view."""
        if isinstance(report, PhaseEnded):
            state = Text("silent", "green") if not report.alarms else Text(f"{len(report.alarms)} alarms", "bold red")
            told = (
                f"{report.requests:,} requests, {report.forwards:,} forwards, {report.positions:,} positions verified"
            )
            self._console.print(f"{report.model:>5}  {report.phase}:", state, told, *report.alarms[:3])
            return
        state = Text("named", "green") if report.passed else Text("missed", "bold red")
        style = "dim" if report.passed else "red"
        self._console.print(f"{report.model:>5}  {report.title}:", state, Text(report.headline, style))

    def closing(self, results: Results, seconds: float) -> None:
        """The table of faults, and the sum of it all."""
        if results.verdicts:
            self._console.print(_table(results))
        named = sum(verdict.passed for verdict in results.verdicts)
        silent = sum(not phase.alarms for phase in results.phases)
        self._console.print(
            f"{named} of {len(results.verdicts)} faults named; {silent} of {len(results.phases)} clean phases silent, "
            f"{results.positions:,} slot positions verified in them (promised: {POSITIONS:,}); {seconds:.0f} s"
        )
        for problem in results.problems:
            self._console.print(Text(problem, "red"))


def _frame(board: Scoreboard, model: ModelName) -> RenderableType:
    totals = board.totals
    numbers = Table.grid(padding=(0, 2))
    numbers.add_row("phase", Text(board.phase.phase, "bold"))
    numbers.add_row("forwards", f"{totals.forward:,}")
    numbers.add_row("requests", f"{totals.finished:,}")
    numbers.add_row("tokens", f"{totals.tokens:,}")
    numbers.add_row("positions verified", f"{totals.positions:,}")
    numbers.add_row("slots re-read", f"{totals.reread:,}")
    numbers.add_row("violations", Text(f"{totals.violations:,}", "red" if totals.violations else "green"))
    lines = [_line(event) for event in board.latest]
    return Panel(Group(numbers, Text(), *lines), title=f"kvcanary demo: {TITLES[model]}", title_align="left")


def _line(event: Event) -> Text:
    style = "yellow" if isinstance(event, FaultInjected) else "red"
    return Text(f"forward {event.forward:>5}  {say(event)}", style, no_wrap=True, overflow="ellipsis")


def _table(results: Results) -> Table:
    table = Table(title="Planted faults", title_justify="left")
    for column in ("model", "fault", "incident", "forwards", "request", "what was reported"):
        table.add_column(column, justify="right" if column == "forwards" else "left")
    for verdict in results.verdicts:
        table.add_row(
            verdict.model,
            verdict.title,
            verdict.kind or "-",
            "-" if verdict.after is None else f"+{verdict.after}",
            verdict.request or "-",
            Text(verdict.headline, "" if verdict.passed else "red"),
        )
    return table
