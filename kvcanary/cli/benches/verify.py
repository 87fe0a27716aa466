"""The check of old positions alone, two million of them: records only, so the pool's bytes do not matter."""

from __future__ import annotations

from kvcanary.cli.benches.pool import thin_pool
from kvcanary.cli.benches.rows import Measured
from kvcanary.cli.benches.running import Setting
from kvcanary.cli.benches.timing import make_timer
from kvcanary.cli.benches.workload import Shape, make_workload

ROWS, CONTEXT = 256, 8192
SPARE = 65_536


def measure(setting: Setting, name: str) -> Measured:
    """One launch of the check over every live position."""
    page_size = 16 if name.endswith("page16") else 1
    shape = Shape(setting.size(ROWS, 3), setting.size(CONTEXT, 40), page_size=page_size)
    slots = setting.size(ROWS * (CONTEXT + 16) + SPARE, 512)
    timer = make_timer(setting)
    workload = make_workload(
        thin_pool(slots, setting), shape, slots=slots, scrub_bytes=0, chunk=setting.size(1 << 17, 128)
    )
    workload.enter()
    workload.leave()
    checks = 0
    before = workload.counts()

    def check() -> None:
        nonlocal checks
        checks += 1
        workload.check()

    microseconds = timer.cold(check)
    # Python counts the calls that were captured; a graph's replays are at least as many.
    workload.judge(before, checks=checks)
    entries = shape.rows * shape.context
    return Measured(
        name=name,
        value=microseconds,
        method=(
            f"{timer.method}; check alone, {shape.rows} x {shape.context} entries, page size {page_size}, "
            f"{'random slots' if page_size == 1 else 'random pages'}; 0 violations asserted after the timing"
        ),
        details={"entries": entries, "gb_per_s_of_links": round(entries * 16 / microseconds / 1000, 1)},
    )
