"""``kvcanary simulate``: play scenario files, and see whether what they say is reported, and nothing else."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from kvcanary.cli.interpreter import interpret_triton
from kvcanary.errors import ConfigError

if TYPE_CHECKING:
    from kvcanary.events import Event
    from kvcanary.faults.scenario.pool import Backend
    from kvcanary.faults.scenario.verdict import Verdict

MARKS = {"caught": "[green]caught[/]", "silent": "[green]silent[/]", "unseen": "[yellow]unseen[/]"}


def simulate(
    *paths: Path,
    json: bool = False,
    verbose: bool = False,
    backend: Literal["reference", "triton"] = "reference",
) -> int:
    """Play scenario files: is each fault reported as the file says, and nothing else?

    A scenario file describes a tiny pool, a list of events, and what must be reported at which of them. Its events
    happen on real tensors under a real canary. The reference of scenarios explains the notation. Such a file is the
    best attachment to a bug report.

    The exit status is 1 if a file does not hold, and 2 if one cannot be read or there is none.

    Examples:
      kvcanary simulate tests/scenarios              all files of a folder
      kvcanary simulate case.toml --verbose          what the canary told at each event
      kvcanary simulate a.toml b.toml --json         one JSON object
      kvcanary simulate case.toml --backend triton   the kernels of a GPU; interpreted where there is none

    Args:
        paths: files, or folders that are searched for *.toml.
        json: one JSON object instead of the table.
        verbose: show all events that the canary told, by the event of the scenario at which they came.
        backend: the kernels that check.

    Returns:
        The exit status.
    """
    import torch

    from kvcanary.kernels import load_kernels

    torch.set_num_threads(1)
    device = "cuda" if backend == "triton" and torch.cuda.is_available() else "cpu"
    if backend == "triton" and device == "cpu":
        interpret_triton()
    load_kernels(backend, device)  # a backend that does not work here is no file's fault
    results = [_absent(path) if not path.exists() else _result(path, backend) for path in files_in(paths)]
    if json:
        print(msgspec.json.format(msgspec.json.encode(as_json(results, trace=verbose)), indent=2).decode())
    else:
        _print(results, verbose=verbose)
    if any(result.error for result in results):
        return 2
    return 0 if all(result.holds for result in results) else 1


@dataclass(frozen=True, slots=True)
class Result:
    """What became of one file: verdicts, or why it has none."""

    path: Path
    verdicts: tuple[Verdict, ...] = ()
    error: str = ""

    @property
    def holds(self) -> bool:
        """Whether everything came as the file says."""
        return not self.error and all(verdict.holds for verdict in self.verdicts)


def files_in(paths: Sequence[Path]) -> list[Path]:
    """The files that are meant, each once; a path that does not exist is among them.

    Raises:
        ConfigError: there is none.
    """
    found: dict[Path, None] = {}
    for path in paths:
        for file in sorted(path.rglob("*.toml")) if path.is_dir() else [path]:
            found[file] = None
    if not found:
        searched = ", ".join(map(str, paths)) or "nothing; name files or folders"
        raise ConfigError(f"no scenario files (*.toml) found in {searched}")
    return list(found)


def _absent(path: Path) -> Result:
    return Result(path, error=f"{path}: there is no such file or folder")


def _result(path: Path, backend: Backend) -> Result:
    from kvcanary.faults.scenario.parse import ScenarioError, load
    from kvcanary.faults.scenario.verdict import judge

    try:
        return Result(path, tuple(judge(load(path), backend=backend)))
    except ScenarioError as error:
        return Result(path, error=str(error))


# --- as JSON ------------------------------------------------------------------------------------------------


def as_json(results: Sequence[Result], *, trace: bool = False) -> dict[str, Any]:
    """The results as plain values; ``trace``: with all events that the canary told."""
    return {
        "passed": all(result.holds for result in results),
        "files": len(results),
        "scenarios": [row for result in results for row in _rows(result, trace=trace)],
    }


def _rows(result: Result, *, trace: bool) -> Iterator[dict[str, Any]]:
    if result.error:
        yield {"file": str(result.path), "twin": False, "outcome": "error", "problems": [result.error]}
    for verdict in result.verdicts:
        document = verdict.scenario.document
        wants = () if verdict.is_twin else verdict.scenario.wants
        row: dict[str, Any] = {
            "file": str(result.path),
            "twin": verdict.is_twin,
            "case": document.case,
            "kind": document.kind,
            "summary": document.summary,
            "outcome": verdict.outcome,
            "expected": [msgspec.to_builtins(want.expected) for want in wants],
            "found": [_found(verdict, number) for number in range(len(verdict.report.findings))],
            "problems": list(verdict.problems),
        }
        if document.why and not verdict.is_twin:
            row["why"] = document.why
        if trace:
            row["trace"] = [
                {"event": event.text, "told": [msgspec.to_builtins(one) for one in told]}
                for event, told in zip(verdict.play.events, verdict.report.trace, strict=True)
            ]
        yield row


def _found(verdict: Verdict, number: int) -> dict[str, Any]:
    finding = verdict.report.findings[number]
    at = verdict.play.events[finding.event].text
    return {**msgspec.to_builtins(finding), "line": verdict.play.lines[finding.event], "at": at}


# --- for people ---------------------------------------------------------------------------------------------


def _print(results: Sequence[Result], *, verbose: bool) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console(highlight=False)
    for result in results if verbose else ():
        for line in _traces(result):
            console.print(line, markup=False)
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("file", no_wrap=True)
    for column in ("expected", "found", "verdict"):
        table.add_column(column, overflow="fold")
    for result in results:
        *words, marks = _line(result)
        table.add_row(*map(escape, words), marks)
    console.print(table)
    for line in [line for result in results for line in _complaints(result)]:
        console.print(line, markup=False)
    console.print(_sum(results), markup=False)


def _line(result: Result) -> tuple[str, str, str, str]:
    """The row of a file in the table."""
    if result.error:
        return result.path.name, "", "", "[red]no scenario[/]"
    marks = [("twin " if verdict.is_twin else "") + _mark(verdict) for verdict in result.verdicts]
    first = result.verdicts[0]
    return result.path.name, _expected(first), _kinds(first), ", ".join(marks)


def _mark(verdict: Verdict) -> str:
    return MARKS.get(verdict.outcome, "[red]FAILED[/]")


def _expected(verdict: Verdict) -> str:
    if not verdict.scenario.wants:
        return "nothing"
    return ", ".join(dict.fromkeys(want.expected.kind for want in verdict.scenario.wants))


def _kinds(verdict: Verdict) -> str:
    counts: dict[str, int] = {}
    for finding in verdict.report.findings:
        counts[finding.kind] = counts.get(finding.kind, 0) + 1
    return ", ".join(kind if count == 1 else f"{kind} x{count}" for kind, count in counts.items()) or "nothing"


def _complaints(result: Result) -> Iterator[str]:
    from kvcanary.faults.scenario.verdict import described

    if result.error:
        yield f"\n{result.error}"
    for verdict in result.verdicts:
        if verdict.holds:
            continue
        yield f"\n{result.path}{' (twin)' if verdict.is_twin else ''}: {verdict.scenario.document.case}"
        yield from (f"  {problem}" for problem in verdict.problems)
        yield "  what came:" if verdict.report.findings else "  nothing came"
        for finding in verdict.report.findings:
            yield f"    at {verdict.play.events[finding.event].text!r}: {described(finding)}"


def _traces(result: Result) -> Iterator[str]:
    for verdict in result.verdicts:
        yield f"{result.path}{' (twin)' if verdict.is_twin else ''}: {verdict.scenario.document.summary}"
        for event, told in zip(verdict.play.events, verdict.report.trace, strict=True):
            yield f"  {event.text}"
            yield from (f"      {_told(one)}" for one in told)
        yield ""


def _told(event: Event) -> str:
    """An event in one line, without what every event has and what does not apply."""
    from kvcanary.events import event_name

    plain: dict[str, Any] = msgspec.to_builtins(event)
    left_out = {"type", "seq", "time_ns", "monotonic_ns", "cause", "by", "due", "launches", "config", "origin", "first"}
    fields = [
        f"{name}={value}"
        for name, value in plain.items()
        if name not in left_out and value not in (-1, 0, "", None, [], {}, False) and not isinstance(value, dict)
    ]
    return f"{event_name(type(event))} {' '.join(fields)}"


def _sum(results: Sequence[Result]) -> str:
    outcomes = [verdict.outcome for result in results for verdict in result.verdicts]
    errors = sum(bool(result.error) for result in results)
    parts = [f"{outcomes.count('caught')} caught", f"{outcomes.count('silent')} silent"]
    parts += [f"{outcomes.count('unseen')} unseen, as the files say"] if "unseen" in outcomes else []
    parts += [f"{outcomes.count('failed')} FAILED"] if "failed" in outcomes else []
    parts += [f"{errors} not readable"] if errors else []
    return f"\n{len(results)} {'file' if len(results) == 1 else 'files'}: {', '.join(parts)}"
