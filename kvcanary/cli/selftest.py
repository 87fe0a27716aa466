"""``kvcanary selftest``: this machine's kernels against the reference.

It finds a wrong compiler before that cries wolf.
"""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from kvcanary.cli.benches.running import Setting, describe_machine
from kvcanary.cli.interpreter import interpret_triton
from kvcanary.errors import ConfigError

if TYPE_CHECKING:
    from kvcanary.cli.selftest_compare import Tally
    from kvcanary.kernels import Kernels

FULL, TINY = 60, 3
"""cases on a GPU, and under the interpreter, which is some thousand times slower"""
CLEAN_EVERY = 3
"""every third case is clean, and must stay silent"""
SHOWN = 10


def selftest(
    *,
    device: Literal["auto", "cpu", "cuda"] = "auto",
    backend: Literal["auto", "triton", "reference"] = "auto",
    cases: int | None = None,
    forwards: int = 8,
    seed: int = 0,
    json: bool = False,
) -> int:
    """Compare the kernels with the reference on this machine, bit for bit.

    Each case is a small random pool with random traffic, run on the CPU by the reference and on the device by the
    backend; after every operation all records, rows, counters and queues are compared. In two of three cases things
    are broken on purpose; in the third nothing may be reported. The exit status is 1 if anything differs.

    Without a GPU the Triton kernels run under their interpreter, a few cases only.

    Examples:
      kvcanary selftest                         the backend that this machine would use
      kvcanary selftest --device cuda --json    one JSON object
      kvcanary selftest --cases 500 --seed 7    longer, with other cases

    Args:
        device: where the backend runs; auto takes CUDA if there is any.
        backend: what is compared with the reference.
        cases: how many; default 60 on a GPU, 3 under the interpreter.
        forwards: forwards of each case.
        seed: of the first case; the others follow.
        json: one JSON object instead of the table.

    Returns:
        The exit status.
    """
    import torch

    where = _device(device)
    count = (FULL if where == "cuda" else TINY) if cases is None else cases
    if count < 1 or forwards < 1:
        raise ConfigError(f"--cases is {count} and --forwards is {forwards}; both must be at least 1")
    torch.set_num_threads(1)
    candidate = _candidate(backend, where)
    began = time.perf_counter()
    tally = compare(candidate, where, cases=count, forwards=forwards, seed=seed)
    report = {
        "machine": describe_machine(Setting(where)),
        "backend": candidate.name,
        "interpreted": where == "cpu" and candidate.name == "triton",
        "cases": count,
        "seed": seed,
        "seconds": round(time.perf_counter() - began, 1),
        **as_json(tally),
    }
    if json:
        print(msgspec.json.format(msgspec.json.encode(report), indent=2).decode())
    else:
        _print(report)
    return 0 if tally.passed else 1


def compare(candidate: Kernels, device: str, *, cases: int, forwards: int, seed: int) -> Tally:
    """Run random cases on the reference and on ``candidate``."""
    from kvcanary.cli.selftest_cases import Case
    from kvcanary.cli.selftest_compare import Comparison, Tally
    from kvcanary.kernels import load_kernels

    tally = Tally()
    reference = load_kernels("reference", "cpu")
    for number in range(seed, seed + cases):
        case = Case(number, reference, candidate, device)
        Comparison(case, tally, f"case {number}", dirty=number % CLEAN_EVERY != 0).run(forwards)
    return tally


def as_json(tally: Tally) -> dict[str, Any]:
    """The tally as plain values."""
    return {
        "passed": tally.passed,
        "forwards": tally.forwards,
        "operations": [
            {"operation": name, "compared": tally.compared[name], "differing": tally.differing[name]}
            for name in sorted(tally.compared)
        ],
        "clean_forwards": tally.clean_forwards,
        "false_alarms": tally.false_alarms,
        "reported_on_purpose": dict(sorted(tally.reported.items())),
        "differences": tally.differences,
    }


def _device(wanted: str) -> str:
    import torch

    if wanted == "cpu":
        return wanted
    if torch.cuda.is_available():
        return "cuda"
    if wanted == "cuda":
        raise ConfigError(f"--device cuda: torch {torch.__version__} finds no CUDA device; use --device cpu")
    return "cpu"


def _candidate(backend: str, device: str) -> Kernels:
    from kvcanary.kernels import load_kernels

    if backend == "auto":
        backend = "triton"
    if backend == "triton" and device == "cpu":
        interpret_triton()
    return load_kernels(backend, device)


def _print(report: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
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
        f"{broken} reports of {len(report['reported_on_purpose'])} kinds, alike on both sides",
        markup=False,
    )
    for line in report["differences"][:SHOWN]:
        console.print(f"  {line}", markup=False)
    console.print("passed" if report["passed"] else "FAILED: do not trust this backend on this machine")


if __name__ == "__main__":
    from kvcanary.cli import main

    sys.exit(main(["selftest", *sys.argv[1:]]))
