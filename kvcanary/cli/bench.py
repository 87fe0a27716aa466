"""``kvcanary bench``: what the canary costs on this machine, row by row, against what it must reach.

``python -m kvcanary bench ...`` is the same command from a checkout that is not installed.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from kvcanary.cli.benches.rows import Row, choose
from kvcanary.cli.benches.running import Outcome, Setting, describe_machine, run
from kvcanary.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

Device = Literal["auto", "cpu", "cuda"]


def bench(
    *,
    only: tuple[str, ...] = (),
    device: Device = "auto",
    quick: bool = False,
    rehearse: bool = False,
    list: bool = False,  # noqa: A002 - named as it is written on the command line
    json: bool = False,
    out: Path | None = None,
    plot: Path | None = None,
) -> int:
    """Measure what the canary costs on this machine.

    Every row has a name, a unit, a target and a method; rows that cannot run here are listed with the reason and never
    count as reached. Figures of other projects beside a row were measured elsewhere. The exit status is 1 if a row
    that ran misses its target, or failed.

    Examples:
      kvcanary bench                              all that this machine can show
      kvcanary bench --only decode --only host    some rows, by their names
      kvcanary bench --json --out h200.json       one JSON object, with methods
      kvcanary bench --only growth --plot g.png   the growth series as a picture
      kvcanary bench --list                       names, targets and needs

    Args:
        only: names of rows, or their beginnings, or patterns with *; may be repeated.
        device: where to run; auto takes CUDA if there is any.
        quick: fewer repetitions; sizes stay.
        rehearse: run every row with tiny sizes, on any device: tries the bench itself and judges nothing.
        list: list the rows and measure nothing.
        json: one JSON object instead of the table.
        out: write the JSON object to this file too.
        plot: write the growth series as a picture to this file; needs matplotlib.

    Returns:
        The exit status.
    """
    rows = choose(only)
    if list:
        _print_list(rows, json=json)
        return 0
    _check_file(out, "--out")
    _check_file(plot, "--plot")
    setting = Setting(_device(device), quick=quick, rehearse=rehearse)
    began = time.perf_counter()
    outcomes = _measure(rows, setting, quiet=json)
    report: dict[str, Any] = {
        "machine": describe_machine(setting),
        "rows": [outcome.as_json() for outcome in outcomes],
        "seconds": round(time.perf_counter() - began, 1),
        "quick": quick,
    }
    text = msgspec.json.format(msgspec.json.encode(report), indent=2)
    if out is not None:
        out.write_bytes(text + b"\n")
    if plot is not None:
        from kvcanary.cli.benches.plot import plot_growth

        plot_growth(report["rows"], plot)
    if json:
        print(text.decode())
    else:
        _print_table(outcomes, report["machine"])
    return exit_status(outcomes)


def exit_status(outcomes: Sequence[Outcome]) -> int:
    """1 if a row that ran misses its target or failed; rows that cannot run here do not count."""
    missed = [o for o in outcomes if o.measured is not None and o.holds is False and not o.rehearsal]
    return int(bool(missed) or any(outcome.failed for outcome in outcomes))


def _device(wanted: Device) -> str:
    if wanted == "cpu":
        return wanted
    try:
        import torch
    except ModuleNotFoundError:
        if wanted == "cuda":
            raise
        return "cpu"  # rows about the host need no torch
    if torch.cuda.is_available():
        return "cuda"
    if wanted == "cuda":
        raise ConfigError(f"--device cuda: torch {torch.__version__} finds no CUDA device; use --device cpu")
    return "cpu"


def _check_file(path: Path | None, option: str) -> None:
    """Before minutes of measuring, not after them."""
    if path is not None and not path.absolute().parent.is_dir():
        raise ConfigError(f"{option} is {str(path)!r}, but there is no directory {str(path.parent)!r}; make it first")


def _measure(rows: Sequence[Row], setting: Setting, *, quiet: bool) -> list[Outcome]:
    outcomes: list[Outcome] = []
    for outcome in run(rows, setting):
        outcomes.append(outcome)
        if quiet:
            print(f"{outcome.row.name}: {_value(outcome)}", file=sys.stderr)
        else:
            print(f"{outcome.row.name:<48} {_value(outcome)}")
    return outcomes


# --- for people ---------------------------------------------------------------------------------------------


def _print_list(rows: Sequence[Row], *, json: bool) -> None:
    if json:
        print(msgspec.json.format(msgspec.json.encode([_listed(row) for row in rows]), indent=2).decode())
        return
    for row in rows:
        print(f"{row.name:<48} {_target(row):>22}  {row.needs:<4}  {row.title}")


def _listed(row: Row) -> dict[str, Any]:
    return {
        "name": row.name,
        "unit": row.unit,
        "target": row.target,
        "better": row.better,
        "needs": row.needs,
        "title": row.title,
    }


def _print_table(outcomes: Sequence[Outcome], machine: dict[str, Any]) -> None:
    from rich.console import Console

    console = Console(highlight=False, width=None if sys.stdout.isatty() else 160)
    console.print()
    _print_figures(console, [outcome for outcome in outcomes if outcome.measured is not None])
    left = [outcome for outcome in outcomes if outcome.measured is None]
    if left:
        console.print("\nnot run here:")
        for outcome in left:
            console.print(f"  {outcome.row.name}: {outcome.reason}", markup=False)
    gpu = machine.get("gpu")
    versions = ", ".join(f"{name} {number}" for name, number in machine["versions"].items())
    console.print(
        f"\n{gpu['name'] + ', ' if gpu else ''}{machine['processor']}, {machine['cores']} cores", markup=False
    )
    console.print(f"Python {machine['python']}, {versions}", markup=False)
    console.print("Methods and details: --json. Figures of other projects were measured elsewhere, in other runs.")


def _print_figures(console: Console, outcomes: Sequence[Outcome]) -> None:
    from rich.table import Table

    if not outcomes:
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for header, justify in (("row", "left"), ("value", "right"), ("target", "right"), ("holds", "left")):
        table.add_column(header, justify="right" if justify == "right" else "left", no_wrap=True)
    table.add_column("what")
    table.add_column("elsewhere", style="dim")
    for outcome in outcomes:
        row = outcome.row
        table.add_row(row.name, _value(outcome), _target(row), _verdict(outcome), row.title, row.prior)
    console.print(table)


def _verdict(outcome: Outcome) -> str:
    if outcome.rehearsal:
        return "rehearsal"
    return {True: "yes", False: "NO", None: ""}[outcome.holds]


def _value(outcome: Outcome) -> str:
    if outcome.measured is None:
        return f"{'FAILED' if outcome.failed else 'not run'}: {outcome.reason}"
    return f"{_number(outcome.measured.value)} {outcome.row.unit}"


def _target(row: Row) -> str:
    if row.target is None:
        return ""
    return f"{'<=' if row.better == 'lower' else '>='} {_number(row.target)} {row.unit}"


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 or float(value).is_integer() else f"{value:.3g}"
