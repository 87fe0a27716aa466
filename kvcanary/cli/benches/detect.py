"""Never a false alarm, never a miss: random clean traffic, and random single-word changes of sealed bytes."""

from __future__ import annotations

import random
import time

import torch

from kvcanary.cli.benches.pool import Pool, make_pool
from kvcanary.cli.benches.rows import POOL_GIB, BenchError, Measured
from kvcanary.cli.benches.running import Setting
from kvcanary.cli.benches.traffic import Addressing, Traffic
from kvcanary.cli.benches.workload import Shape, Workload, make_workload, read_counts
from kvcanary.kernels import load_kernels
from kvcanary.layout import DEFAULT_PART
from kvcanary.record import FLAG_SHIFT, Kind, make_keys
from kvcanary.state import KIND_COUNTS, DeviceState, Limits, Word, group_base

ENTRIES = 10_000_000
CHANGES = 100_000
BATCH = 1000
"""changed slots at a time: one launch of the scrub takes a second look at 1,024 of them"""
TRAFFIC_ROWS, LONGEST, TRAFFIC_CHUNK = 64, 4096, 1024
CHANGED_SLOTS = 16_384
SCRUB_BYTES = 32 << 20


def measure(setting: Setting, name: str) -> Measured:
    """One of the three rows; the value is what went wrong, so 0 is the target."""
    if name.startswith("false_alarms"):
        return _clean(setting, name)
    return _changed(setting, name, scrub=name.startswith("missed_changes.scrub"))


# --- clean traffic ------------------------------------------------------------------------------------------


def _clean(setting: Setting, name: str) -> Measured:
    page_size = 16
    rows, longest = setting.size(TRAFFIC_ROWS, 4), setting.size(LONGEST, 100)
    chunk = setting.size(TRAFFIC_CHUNK, 32)
    pages = (rows + 1) * (longest + chunk) // page_size + 2
    pool = make_pool(POOL_GIB, setting)
    layout = pool.layout(pages * page_size, page_size)
    limits = Limits(max_tokens=rows * chunk + 2, max_batch_rows=rows + 2, max_rows=rows)
    state = DeviceState(layout, make_keys(), limits)
    state.counters[Word.ARMED] = 1
    kernels = load_kernels("auto", layout.device.type)
    traffic = Traffic(
        (Addressing(page_size=page_size, pages=pages),),
        state.keys,
        random.Random(7),
        rows=rows,
        longest=longest,
        chunk=chunk,
        device=setting.device,
    )
    wanted = setting.size(ENTRIES, 2000)
    began, planned, forwards = time.perf_counter(), 0, 0
    while planned < wanted:
        forward = traffic.next()
        if forward.facts:
            kernels.facts(state, forward.facts)
        kernels.mark(state, forward.batch, (0,), first=True)
        kernels.check(state, forward.batch, (0,))
        _write(pool, forward.writes[0])
        kernels.seal(state, DEFAULT_PART, setting.size(SCRUB_BYTES, 4096), last=True, nonfinite=True)
        planned += forward.old_positions
        forwards += 1
    counts = read_counts(state)
    if counts.links < planned:
        raise BenchError(f"{counts.links} entries were verified of {planned} that were there; the rest was passed over")
    return Measured(
        name=name,
        value=counts.reported,
        method=(
            f"random traffic of {rows} rows up to {longest} tokens: chunked prefill, decode, shared prefixes, rewinds, "
            "padding, pages freed and handed on; random bytes written by every forward, 32 MiB scrubbed; the value "
            "counts reports of any kind"
        ),
        details={
            "entries_verified": counts.links,
            "tokens_sealed": counts.sealed,
            "slots_scrubbed": counts.content,
            "row_ends_verified": counts.row_ends,
            "forwards": forwards,
            "seconds": round(time.perf_counter() - began, 2),
            "reported": counts.kinds,
        },
    )


def _write(pool: Pool, slots: list[int]) -> None:
    """The model's part: new bytes in the slots of the new tokens."""
    if not slots:
        return
    where = torch.tensor(slots, device=pool.device)
    for buffer in pool.buffers:
        buffer[where] = torch.randn(len(slots), buffer.shape[1], dtype=buffer.dtype, device=pool.device)


# --- changed words ------------------------------------------------------------------------------------------


def _changed(setting: Setting, name: str, *, scrub: bool) -> Measured:
    slots = setting.size(CHANGED_SLOTS, 256)
    batch = setting.size(BATCH, 50)
    total = setting.size(CHANGES, 100)
    pool = make_pool(POOL_GIB, setting)
    workload = make_workload(pool, Shape(1, 0), slots=slots, chunk=slots)
    workload.enter()
    workload.leave()
    look = _by_scrub if scrub else _by_fingerprint
    false_alarms = look(workload, torch.randperm(slots, device=pool.device)[:batch])
    if false_alarms:
        raise BenchError(f"{false_alarms} slots were called changed before anything was changed")
    found = done = 0
    while done < total:
        where = torch.randperm(slots, device=pool.device)[: min(batch, total - done)]
        change = _Change(pool, where)
        change.apply()
        found += look(workload, where)
        change.apply()  # an exclusive or: the second time undoes it
        _forget(workload.state, where)
        done += len(where)
    return Measured(
        name=name,
        value=done - found,
        method=(
            f"{done} changes, each of one random 32-bit word of one random layer and component of a slot, to a random "
            f"other value, {batch} slots at a time among {slots}; found by "
            + ("two passes of the scrub over the pool (CONTENT reports)" if scrub else "recomputing their fingerprints")
        ),
        details={"changes": done, "detected": found},
    )


class _Change:
    """Random non-zero differences in one word of each of ``slots``."""

    def __init__(self, pool: Pool, slots: torch.Tensor) -> None:
        count, device = len(slots), pool.device
        words = pool.buffers[0].view(torch.int32).shape[1]
        self._slots = slots
        self._words = torch.randint(words, (count,), device=device)
        self._differences = torch.randint(1, 1 << 32, (count,), dtype=torch.int64, device=device).to(torch.int32)
        where = torch.randint(len(pool.buffers), (count,), device=device)
        self._buffers = [(b.view(torch.int32), (where == i).nonzero().flatten()) for i, b in enumerate(pool.buffers)]

    def apply(self) -> None:
        """Change the words, or change them back."""
        for buffer, mine in self._buffers:
            buffer[self._slots[mine], self._words[mine]] ^= self._differences[mine]


def _by_fingerprint(workload: Workload, slots: torch.Tensor) -> int:
    state = workload.state
    found = workload.kernels.fingerprint(state, 0, DEFAULT_PART, slots)
    return int((found != state.groups[0].seals[0, slots, 0]).sum())


def _by_scrub(workload: Workload, slots: torch.Tensor) -> int:
    """CONTENT reports of two passes: the first suspects, the second looks at the suspects again."""
    del slots  # it looks at all of them
    state = workload.state
    everything = state.layout.groups[0].num_slots * state.layout.groups[0].token_bytes
    word = group_base(0) + KIND_COUNTS + Kind.CONTENT
    before = int(state.counters[word])
    for _ in range(2):
        workload.kernels.seal(state, "", everything, last=False, nonfinite=False)
    return int(state.counters[word]) - before


def _forget(state: DeviceState, slots: torch.Tensor) -> None:
    """Slots that were reported once would never be reported again."""
    state.groups[0].seals[0, slots, 1] &= (1 << FLAG_SHIFT) - 1
