"""``kvcanary selftest``: this machine's kernels against the reference, and the fault matrix on them.

The first finds a wrong compiler before that cries wolf; the second shows that what it must find is found.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from kvcanary.cli.benches.running import Setting, describe_machine
from kvcanary.cli.interpreter import interpret_triton
from kvcanary.config import Backend
from kvcanary.errors import ConfigError

if TYPE_CHECKING:
    from kvcanary.cli.selftest_compare import Tally
    from kvcanary.faults.matrix import Cell
    from kvcanary.kernels import Kernels

FULL, TINY = 60, 3
"""cases on a GPU, and under the interpreter, which is some thousand times slower"""
CLEAN_EVERY = 3
"""every third case is clean, and must stay silent"""


def selftest(
    *,
    device: Literal["auto", "cpu", "cuda"] = "auto",
    backend: Backend = "auto",
    cases: int | None = None,
    forwards: int = 8,
    seed: int = 0,
    only: Literal["all", "kernels", "faults"] = "all",
    faults: str = "all",
    json: bool = False,
) -> int:
    """Compare the kernels with the reference on this machine, bit for bit, and plant every fault of the field.

    Each case is a small random pool with random traffic, run on the CPU by the reference and on the device by the
    backend; after every operation all records, rows, counters and queues are compared. In two of three cases things
    are broken on purpose; in the third nothing may be reported.

    The fault matrix serves random requests on a simulated engine in eight styles of paging, and plants each fault in
    each style that can have it. An oracle inside the engine knows what went wrong. A cell holds if the right check
    named it, in time, with a request that was hit, if nothing else was missed or reported, and if the same program
    without the fault is silent. The exit status is 1 if kernels differ or a cell fails.

    Without a GPU the Triton kernels run under their interpreter, a few cases only, and the matrix runs on the
    reference.

    Examples:
      kvcanary selftest                            the backend that this machine would use
      kvcanary selftest --device cuda --json       one JSON object
      kvcanary selftest --cases 500 --seed 7       longer, with other cases
      kvcanary selftest --only faults              the fault matrix alone
      kvcanary selftest --faults late-table        one fault, in all styles

    Args:
        device: where the backend runs; auto takes CUDA if there is any.
        backend: what is compared with the reference.
        cases: how many; default 60 on a GPU, 3 under the interpreter.
        forwards: forwards of each case.
        seed: of the first case, and of the first program that is tried for a fault; the others follow.
        only: the comparison of kernels, the fault matrix, or both.
        faults: names separated by commas, or all; a wrong name lists the right ones. Names leave out the kernels.
        json: one JSON object instead of the table.

    Returns:
        The exit status.
    """
    import torch

    where = _device(device)
    count = (FULL if where == "cuda" else TINY) if cases is None else cases
    if count < 1 or forwards < 1:
        raise ConfigError(f"--cases is {count} and --forwards is {forwards}; both must be at least 1")
    if only == "kernels" and faults != "all":
        raise ConfigError(f"--only kernels compares kernels alone, and --faults names {faults}; give one of the two")
    torch.set_num_threads(1)
    report: dict[str, Any] = {"machine": describe_machine(Setting(where)), "passed": True}
    names = () if faults == "all" else tuple(faults.split(","))
    if only != "faults" and not names:
        report |= _kernels(backend, where, count, forwards, seed)
    if only != "kernels":
        matrix = fault_matrix(backend, where, names, seed)
        report |= {"matrix": matrix, "passed": report["passed"] and matrix["passed"]}
    if json:
        print(msgspec.json.format(msgspec.json.encode(report), indent=2).decode())
    else:
        from kvcanary.cli.selftest_print import print_report

        print_report(report)
    return 0 if report["passed"] else 1


def _kernels(backend: str, where: str, count: int, forwards: int, seed: int) -> dict[str, Any]:
    candidate = _candidate(backend, where)
    began = time.perf_counter()
    tally = compare(candidate, where, cases=count, forwards=forwards, seed=seed)
    return {
        "backend": candidate.name,
        "interpreted": where == "cpu" and candidate.name == "triton",
        "cases": count,
        "seed": seed,
        "seconds": round(time.perf_counter() - began, 1),
        **as_json(tally),
    }


def fault_matrix(backend: Backend, device: str, faults: Sequence[str], seed: int) -> dict[str, Any]:
    """The fault matrix as plain values. On a CPU it runs on the reference: the interpreter takes hours."""
    from kvcanary.faults.matrix import matrix

    backend = ("triton" if device == "cuda" else "reference") if backend == "auto" or device == "cpu" else backend
    began = time.perf_counter()
    cells = matrix(backend=backend, device=device, faults=faults, seed=seed)
    return {
        "passed": all(cell.holds for cell in cells),
        "backend": backend,
        "seconds": round(time.perf_counter() - began, 1),
        "cells": [_cell_as_json(cell) for cell in cells],
    }


def _cell_as_json(cell: Cell) -> dict[str, Any]:
    return {
        "fault": cell.fault,
        "style": cell.style,
        "holds": cell.holds,
        "detected_by": cell.detected_by,
        "after_forwards": cell.after,
        "request_named": cell.named,
        "clean_twin_silent": cell.clean,
        "seed": cell.seed,
        "problem": cell.problem,
    }


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
