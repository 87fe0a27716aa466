"""How the cost grows: with what is touched, and with nothing else."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from kvcanary.cli.benches.decode import Case, case_workload
from kvcanary.cli.benches.pool import make_pool
from kvcanary.cli.benches.rows import LARGE_POOL_GIB, Measured
from kvcanary.cli.benches.running import Setting
from kvcanary.cli.benches.timing import make_timer
from kvcanary.cli.benches.workload import Shape

MIB = 1 << 20
ENTRIES = (8192, 16_384, 32_768, 65_536, 131_072, 262_144, 524_288, 1_048_576)
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16_384)
BUDGETS_MIB = (0, 1, 2, 4, 8, 16, 32, 64, 128)
POOLS_GIB = (1, 2, 4, 8, 16, 32, 60, 100)
TYPICAL = Shape(64, 64)
"""the batch whose cost is watched while the pool grows: it fits the smallest pool"""


def measure(setting: Setting, name: str) -> Measured:
    """One series; the value is its worst step, or for pools the last point over the first."""
    axis = name.partition(".")[2]
    points = list(_series(axis, setting))
    costs = [cost for _, cost in points]
    if axis.startswith("pool"):
        value, judged = costs[-1] / costs[0], "the largest pool over the smallest"
    else:
        value, judged = _worst_doubling(points), "the largest ratio between neighbours, which are a factor of 2 apart"
    return Measured(
        name=name,
        value=value,
        method=f"{make_timer(setting).method}; whole decode or prefill step, {_WORDS[axis]}; the value is {judged}",
        series=[{"x": x, "us": round(cost, 2), "unit": _UNITS[axis]} for x, cost in points],
    )


def _series(axis: str, setting: Setting) -> Iterator[tuple[int, float]]:
    # The largest pool serves every point, so that it is made once.
    make_pool(LARGE_POOL_GIB, setting)
    cases = _cases(axis)
    for x, case in itertools.islice(cases, 2) if setting.rehearse else cases:
        yield x, _cost(setting, case)


def _cases(axis: str) -> Iterator[tuple[int, Case]]:
    match axis:
        case "live_entries":
            yield from ((n, Case(Shape(128, n // 128, page_size=16), gib=LARGE_POOL_GIB)) for n in ENTRIES)
        case "new_tokens":
            yield from ((n, Case(Shape(1, 0, new=n), scrub_bytes=0)) for n in TOKENS)
        case "scrub_budget":
            yield from ((n, Case(Shape(1, 512), scrub_bytes=n * MIB)) for n in BUDGETS_MIB)
        case _:
            yield from ((n, Case(TYPICAL, gib=n)) for n in POOLS_GIB)


def _cost(setting: Setting, case: Case) -> float:
    workload = case_workload(setting, case)
    before = workload.counts()
    cost = make_timer(setting).cold(workload.enter, workload.leave)
    workload.judge(before)
    return cost


def _worst_doubling(points: Sequence[tuple[int, float]]) -> float:
    ratios = [later / earlier for (x, earlier), (_, later) in itertools.pairwise(points) if x > 0]
    return max(ratios, default=1.0)


_WORDS = {
    "live_entries": "128 rows in pages of 16, 32 MiB scrubbed, 100 GiB pool",
    "new_tokens": "one request with an empty cache, no scrub, 60 GiB pool",
    "scrub_budget": "one row of 512, 60 GiB pool",
    "pool_1_to_100_gib": f"{TYPICAL.rows} rows of {TYPICAL.context}, 32 MiB scrubbed",
}
_UNITS = {"live_entries": "entries", "new_tokens": "tokens", "scrub_budget": "MiB", "pool_1_to_100_gib": "GiB"}
