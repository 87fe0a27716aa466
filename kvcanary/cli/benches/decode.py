"""What a canary adds to one forward: everything on entry, everything on exit, the scrub at its default budget."""

from __future__ import annotations

from typing import NamedTuple

from kvcanary.cli.benches.pool import make_pool, slots_of
from kvcanary.cli.benches.rows import LARGE_POOL_GIB, POOL_GIB, Measured
from kvcanary.cli.benches.running import Setting
from kvcanary.cli.benches.timing import make_timer
from kvcanary.cli.benches.workload import SCRUB_BYTES, Shape, Workload, make_workload


class Case(NamedTuple):
    """One row: its batch, the pool it needs, and the scrub's budget."""

    shape: Shape
    gib: int = POOL_GIB
    scrub_bytes: int = SCRUB_BYTES


CASES = {
    "decode_added_us.bs128_ctx1024": Case(Shape(128, 1024)),
    "decode_added_us.bs1_ctx512": Case(Shape(1, 512)),
    "decode_added_us.bs1_ctx512_noscrub": Case(Shape(1, 512), scrub_bytes=0),
    "decode_added_us.bs256_ctx4096": Case(Shape(256, 4096), gib=LARGE_POOL_GIB),
    "decode_added_us.bs1_ctx131072_page16": Case(Shape(1, 131_072, page_size=16)),
    "decode_added_us.bs8_ctx131072_page16": Case(Shape(8, 131_072, page_size=16), gib=LARGE_POOL_GIB),
    "prefill_added_us.tokens16384": Case(Shape(1, 0, new=16_384)),
}


def measure(setting: Setting, name: str) -> Measured:
    """Entry and exit of one case, the cache flushed before each."""
    case = CASES[name]
    timer = make_timer(setting)
    workload = case_workload(setting, case)
    before = workload.counts()
    microseconds = timer.cold(workload.enter, workload.leave)
    after = workload.judge(before)
    shape = workload.shape
    return Measured(
        name=name,
        value=microseconds,
        method=(
            f"{timer.method}; the flush comes before the entry (mark, check) and again before the exit (seal, scrub, "
            f"commit); {_words(shape, case.gib)}; {case.scrub_bytes >> 20} MiB of other slots scrubbed; all slots of "
            "the pool sealed, random bytes; 0 violations and full counts asserted after the timing"
        ),
        details={
            "live_entries": shape.rows * shape.context,
            "new_tokens": shape.rows * shape.new,
            "pool_gib": case.gib,
            "forwards": after.forward - before.forward,
            "slots_scrubbed_per_forward": round((after.content - before.content) / (after.forward - before.forward), 1),
        },
    )


def case_workload(setting: Setting, case: Case) -> Workload:
    """The batch and records of a case; a rehearsal shrinks them."""
    shape = case.shape
    small = Shape(
        rows=setting.size(shape.rows, 3),
        context=setting.size(shape.context, 40),
        new=setting.size(shape.new, 64),
        page_size=shape.page_size,
    )
    pool = make_pool(case.gib, setting)
    return make_workload(
        pool,
        small,
        slots=slots_of(case.gib, setting),
        scrub_bytes=setting.size(case.scrub_bytes, 4096),
        chunk=setting.size(16_384, 128),
    )


def _words(shape: Shape, gib: int) -> str:
    where = "random slots" if shape.page_size == 1 else f"random pages of {shape.page_size}"
    return f"{shape.rows} x {shape.context} old and {shape.new} new tokens at {where} of a {gib} GiB pool"
