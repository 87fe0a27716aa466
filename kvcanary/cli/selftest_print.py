"""What ``kvcanary selftest`` prints for people."""

from __future__ import annotations

from itertools import groupby
from typing import Any

from rich.console import Console
from rich.table import Table

SHOWN = 10


def print_report(report: dict[str, Any]) -> None:
    """Tables, what fails, and one word at the end."""
    console = Console(highlight=False)
    if "operations" in report:
        _print_kernels(console, report)
    if "matrix" in report:
        _print_matrix(console, report["matrix"])
    console.print("passed" if report["passed"] else "FAILED: do not trust this backend on this machine")


def _print_kernels(console: Console, report: dict[str, Any]) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("operation")
    table.add_column("compared", justify="right")
    table.add_column("differing", justify="right")
    for row in report["operations"]:
        table.add_row(row["operation"], f"{row['compared']:,}", f"{row['differing']:,}")
    console.print(table)
    machine = report["machine"]
    gpu = machine.get("gpu", {}).get("name")
    place = gpu or (f"{machine['processor']}, interpreted" if report["interpreted"] else machine["processor"])
    versions = machine["versions"]
    console.print(
        f"\n{report['cases']} cases, {report['forwards']} forwards, {report['backend']} against reference on {place}, "
        f"torch {versions.get('torch', '?')}, triton {versions.get('triton', 'none')}, {report['seconds']} s",
        markup=False,
    )
    broken = sum(report["reported_on_purpose"].values())
    console.print(
        f"clean: {report['clean_forwards']} forwards, {report['false_alarms']} false alarms; broken on purpose: "
        f"{broken} reports of {len(report['reported_on_purpose'])} kinds, alike on both sides\n",
        markup=False,
    )
    for line in report["differences"][:SHOWN]:
        console.print(f"  {line}", markup=False)


def _print_matrix(console: Console, matrix: dict[str, Any]) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("fault", "named by"):
        table.add_column(name)
    for name in ("forwards later", "styles"):
        table.add_column(name, justify="right")
    for fault, group in groupby(matrix["cells"], key=lambda cell: cell["fault"]):
        cells = list(group)
        kinds = ", ".join(sorted({cell["detected_by"] for cell in cells if cell["detected_by"]})) or "nobody"
        latest = max(cell["after_forwards"] for cell in cells)
        table.add_row(fault, kinds, str(latest), f"{sum(cell['holds'] for cell in cells)} of {len(cells)}")
    console.print(table)
    cells = matrix["cells"]
    console.print(
        f"\n{len(cells)} cells on the simulated engine, {matrix['backend']} kernels, {matrix['seconds']} s; "
        f"{sum(cell['clean_twin_silent'] for cell in cells)} clean twins silent",
        markup=False,
    )
    for cell in cells:
        if not cell["holds"]:
            console.print(f"  {cell['fault']} in {cell['style']}: {cell['problem']}", markup=False, soft_wrap=True)
