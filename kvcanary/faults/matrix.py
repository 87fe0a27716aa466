"""The fault matrix: every fault of the field in every style of engine that can have it, and a clean twin of each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from kvcanary.config import Backend, CanaryConfig
from kvcanary.engines.simulated import STYLES, Style, Wrong
from kvcanary.errors import ConfigError
from kvcanary.faults.agreement import concerns, deadline, disagreements, names_of
from kvcanary.faults.programs import Finding, Outcome, Program, random_program, run
from kvcanary.faults.simulated_faults import SIMULATED

TRIES = 120
"""Programs that are tried until a fault does harm."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One fault in one style.

    Attributes:
        style, fault: names.
        expects: kinds that may name it.
        seed: of the program that was run; -1: in none of those that were tried did the fault do harm.
        detected_by: the first finding of such a kind; "": none.
        after: forwards from the first harm to that finding; negative: before any harm was done.
        named: the finding names a request that the fault hit.
        clean: the same program without the fault is silent, and nothing in it is wrong.
        problem: why the cell fails; "": it holds.
    """

    style: str
    fault: str
    expects: tuple[str, ...]
    seed: int = -1
    detected_by: str = ""
    after: int = 0
    named: bool = False
    clean: bool = False
    problem: str = ""

    @property
    def holds(self) -> bool:
        """Seen by the right check, in time, the right request named, and no alarm without it."""
        return not self.problem


def matrix(
    *,
    backend: Backend = "auto",
    device: str = "cpu",
    faults: Sequence[str] = (),
    styles: Sequence[str] = (),
    seed: int = 0,
    told: Callable[[Cell], object] = lambda _: None,
) -> list[Cell]:
    """Run all cells, or those of some ``faults`` and ``styles``.

    Args:
        backend: of the canary's kernels.
        device: where the engine's cache lies.
        faults: names; (): all.
        styles: names; (): all.
        seed: of the first program that is tried for a cell.
        told: hears of each cell.

    Raises:
        ConfigError: no such fault or style, or none that go together.
    """
    for name in faults:
        if name not in SIMULATED:
            raise ConfigError(f"no fault {name!r}; known are {', '.join(SIMULATED)}")
    for name in styles:
        if name not in STYLES:
            raise ConfigError(f"no style {name!r}; styles are {', '.join(STYLES)}")
    config = CanaryConfig(mode="log", key=7, stats_every=0, health_every=0, backend=backend)
    cells: list[Cell] = []
    for fault in faults or SIMULATED:
        for style in styles or STYLES:
            if SIMULATED[fault].fits(STYLES[style]):
                cells.append(
                    _cell(fault, STYLES[style], lambda program: run(program, config=config, device=device), seed)
                )
                told(cells[-1])
    if not cells:
        raise ConfigError("none of these faults can happen in any of these styles")
    return cells


def _cell(fault: str, style: Style, execute: Callable[[Program], Outcome], seed: int) -> Cell:
    cell = Cell(style=style.name, fault=fault, expects=SIMULATED[fault].fault.expects)
    for program in _programs(fault, style, seed):
        outcome = execute(program)
        harm = [wrong for wrong in outcome.truth if deadline(wrong, outcome) is not None]
        if harm:
            cell = _judged(replace(cell, seed=program.seed), outcome, harm)
            return _compared(cell, execute(replace(program, fault="")))
    return replace(cell, problem=f"did no harm in {TRIES} programs, so nothing was shown")


def _programs(fault: str, style: Style, seed: int) -> Iterator[Program]:
    for number in range(seed, seed + TRIES):
        yield random_program(number, faults=[fault], styles=[style])


def _judged(cell: Cell, outcome: Outcome, harm: list[Wrong]) -> Cell:
    finding = _first(cell.expects, harm, outcome.findings)
    if finding is None:
        others = ", ".join(sorted({one.kind for one in outcome.findings})) or "nothing"
        return replace(cell, problem=f"not seen by {' or '.join(cell.expects)}; found was {others}")
    hit = {name for wrong in outcome.truth for name in (wrong.request, wrong.author)}
    hit |= set(outcome.injection.requests) if outcome.injection is not None else set()
    named = bool(hit & names_of(finding))
    cell = replace(cell, detected_by=finding.kind, after=finding.forward - harm[0].forward, named=named)
    return replace(cell, problem="; ".join(_problems(cell, outcome)))


def _compared(cell: Cell, clean: Outcome) -> Cell:
    """With its clean twin."""
    silent = not clean.findings and not clean.truth and clean.reads > 0
    problem = cell.problem if silent else f"without the fault, the same program is not silent; {cell.problem}"
    return replace(cell, clean=silent, problem=problem)


def _first(expects: tuple[str, ...], harm: list[Wrong], findings: list[Finding]) -> Finding | None:
    fitting = [one for one in findings if one.kind in expects and any(concerns(wrong, one) for wrong in harm)]
    return min(fitting, key=lambda one: one.forward, default=None)


def _problems(cell: Cell, outcome: Outcome) -> Iterator[str]:
    fault = SIMULATED[cell.fault].fault
    if fault.within is not None and cell.after > fault.within:
        yield f"seen {cell.after} forwards after the first harm, {fault.within} are allowed"
    if fault.names_request and not cell.named:
        yield "names no request that was hit"
    yield from disagreements(outcome)[:2]
