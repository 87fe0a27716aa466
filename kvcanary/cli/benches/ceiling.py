"""How fast this device can read at all, and how near the fingerprint comes to it."""

from __future__ import annotations

from functools import partial

import torch

from kvcanary.cli.benches.pool import make_pool, slots_of
from kvcanary.cli.benches.reading import read_all
from kvcanary.cli.benches.rows import GIB, POOL_GIB, BenchError, Measured
from kvcanary.cli.benches.running import Setting
from kvcanary.cli.benches.timing import make_timer
from kvcanary.cli.benches.workload import Shape, make_workload
from kvcanary.layout import DEFAULT_PART

TOKENS = 16_384
BLOCKS = ((4096, 4), (8192, 8), (16384, 8), (16384, 16))
"""(words a program, warps); the best of them is the ceiling"""


def measure(setting: Setting, name: str) -> Measured:
    """One of the two rows; the ceiling is measured once a run."""
    if name == "read_ceiling_gb_s":
        return read_ceiling(setting)
    return _fingerprint(setting, name, read_ceiling(setting))


def read_ceiling(setting: Setting) -> Measured:
    """Gigabytes a second that a kernel reads which does nothing else."""
    return setting.keep("read_ceiling", lambda: _read_ceiling(setting))


def _read_ceiling(setting: Setting) -> Measured:
    num_bytes = setting.size(4 * GIB, 1 << 20)
    timer = make_timer(setting)
    buffer = torch.randint(-(1 << 31), (1 << 31) - 1, (num_bytes // 4,), dtype=torch.int32, device=setting.device)
    found: dict[str, float] = {}
    for block, warps in BLOCKS:
        microseconds = timer.cold(partial(read_all, buffer, block=block, warps=warps))
        found[f"{block} words, {warps} warps"] = round(num_bytes / microseconds / 1000, 1)
    return Measured(
        name="read_ceiling_gb_s",
        value=max(found.values()),
        method=(
            f"{timer.method}; Triton, 16-byte loads, {num_bytes / GIB:.3g} GiB of random words, best of {len(BLOCKS)} "
            "shapes"
        ),
        details={"gb_per_s": found},
    )


def _fingerprint(setting: Setting, name: str, ceiling: Measured) -> Measured:
    count = setting.size(TOKENS, 64)
    pool = make_pool(POOL_GIB, setting)
    timer = make_timer(setting)
    workload = make_workload(
        pool, Shape(1, 0, new=count), slots=slots_of(POOL_GIB, setting), chunk=setting.size(16_384, 128)
    )
    state, kernels = workload.state, workload.kernels
    workload.enter()
    workload.leave()
    slots = torch.randperm(state.layout.groups[0].num_slots, device=pool.device)[:count]
    wrong = int((kernels.fingerprint(state, 0, DEFAULT_PART, slots) != state.groups[0].seals[0, slots, 0]).sum())
    if wrong:
        raise BenchError(f"{wrong} of {count} fingerprints differ from what the seal wrote")
    microseconds = timer.cold(lambda: kernels.fingerprint(state, 0, DEFAULT_PART, slots))
    speed = count * pool.token_bytes / microseconds / 1000
    return Measured(
        name=name,
        value=100 * speed / ceiling.value,
        method=(
            f"{timer.method}; {count} random slots of a {POOL_GIB} GiB pool, {pool.token_bytes} bytes each, against "
            "the read ceiling of this run"
        ),
        details={"us": round(microseconds, 2), "gb_per_s": round(speed, 1), "read_ceiling_gb_s": ceiling.value},
    )
