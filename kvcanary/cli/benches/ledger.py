"""What the ledger costs a step of overlapped decode traffic: pages freed and handed on while forwards still run."""

from __future__ import annotations

import random
import statistics
import time
from typing import Any

from kvcanary.cli.benches.rows import BenchError, Measured
from kvcanary.cli.benches.running import Setting
from kvcanary.events import (
    Event,
    GroupInfo,
    Origin,
    OwnershipViolated,
    PageRun,
    PagesAllocated,
    PagesFreed,
    RequestsAdmitted,
    RequestsFinished,
    RunStarted,
)
from kvcanary.observers.ownership import OwnershipFold

REQUESTS, PAGE, LENGTH = 1000, 16, 1024
STEPS, REPEATS = 400, 5


def measure(setting: Setting, name: str) -> Measured:
    """Median cost of one step's facts."""
    requests = setting.size(REQUESTS, 20)
    steps = setting.size(STEPS // 4 if setting.quick else STEPS, 20)
    runs: list[float] = []
    for number in range(setting.size(REPEATS, 1)):
        traffic = make_steps(requests, steps, seed=number)
        fold = OwnershipFold()
        for event in traffic[0]:
            fold.handle(event)
        took: list[float] = []
        for facts in traffic[1:]:
            began = time.perf_counter_ns()
            found = [event for fact in facts for event in fold.handle(fact)]
            took.append((time.perf_counter_ns() - began) / 1000)
            if any(isinstance(event, OwnershipViolated) for event in found):
                raise BenchError(f"the ledger reported clean traffic: {found[0]}")
        runs.append(statistics.median(took))
    return Measured(
        name=name,
        value=statistics.median(runs),
        method=(
            f"{requests} requests of about {LENGTH} tokens in pages of {PAGE}; in each step a sixteenth of them get a "
            f"page and one in {LENGTH} ends, whose pages are handed on at once, one forward ahead of the device; the "
            f"time that the fold takes for a step's facts; median of {steps} steps, then of {len(runs)} runs"
        ),
        details={"runs": [round(run, 2) for run in runs]},
    )


def make_steps(requests: int, steps: int, *, seed: int = 0) -> list[list[Event]]:
    """The facts of each step; those that fill the pool first."""
    rng = random.Random(seed)
    held = -(-LENGTH // PAGE)
    group = GroupInfo(
        name="full", kind="full", num_slots=requests * held * 2 * PAGE, page_size=PAGE, token_bytes=1, sources=1
    )
    pages = {f"r{n}": list(range(n * held, (n + 1) * held)) for n in range(requests)}
    free = list(range(requests * held, requests * held * 2))
    names = tuple(pages)
    runs = tuple(PageRun(n, n * held, held) for n in range(requests))
    first = list[Event]()
    first += [
        RunStarted(run="r", origin=Origin(), groups=(group,)),
        RequestsAdmitted(
            **_at(1), requests=names, rows=tuple(range(requests)), tags=(1,) * requests, starts=(0,) * requests
        ),
        PagesAllocated(**_at(1), group="full", requests=names, runs=runs),
    ]
    made = [first]
    for step in range(2, steps + 2):
        facts: list[Event] = []
        for _ in range(max(1, requests // LENGTH)):
            name, new = rng.choice(list(pages)), f"s{step}-{len(facts)}"
            given = pages.pop(name)
            ended = tuple(PageRun(0, page, 1) for page in given)
            facts += [
                RequestsFinished(**_at(step), requests=(name,), tags=(1,), lengths=(LENGTH,), digests=("",)),
                PagesFreed(**_at(step), group="full", requests=("",), runs=ended),
                RequestsAdmitted(**_at(step), requests=(new,), rows=(0,), tags=(1,), starts=(0,)),
                PagesAllocated(**_at(step), group="full", requests=(new,), runs=ended),
            ]
            pages[new] = given
        grown = rng.sample(list(pages), max(1, requests // PAGE))
        if len(free) < len(grown):
            break
        taken = [free.pop() for _ in grown]
        for name, page in zip(grown, taken, strict=True):
            pages[name].append(page)
        runs = tuple(PageRun(n, page, 1) for n, page in enumerate(taken))
        made.append([*facts, PagesAllocated(**_at(step), group="full", requests=tuple(grown), runs=runs)])
    return made


def _at(forward: int) -> dict[str, Any]:
    """Facts of a step hold from ``forward``; the one before it is launched, and not done."""
    fields = dict.fromkeys(("time_ns", "monotonic_ns"), 1)
    return fields | {"forward": forward, "retired": max(0, forward - 2)}
