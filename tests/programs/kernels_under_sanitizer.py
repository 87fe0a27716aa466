"""Every Triton kernel over small awkward pools, for NVIDIA's compute-sanitizer.

Compile first, so that the sanitizer sees no compiler, then run under it::

    python -m tests.programs.kernels_under_sanitizer
    compute-sanitizer --tool memcheck --error-exitcode 9 python -m tests.programs.kernels_under_sanitizer --seconds 60
    compute-sanitizer --tool racecheck --error-exitcode 9 python -m tests.programs.kernels_under_sanitizer --seconds 60

Traffic is broken on purpose: tables with wild entries, slots outside of the pool, two tokens for one slot. It ends with
1 if a kernel never ran, and after ``--seconds`` at the latest, between two forwards.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from kvcanary.kernels import DeviceFact, FactOp
from kvcanary.kernels.triton_backend import TritonKernels
from kvcanary.record import Kind
from kvcanary.state import DeviceState, PoisonMode, Role, ViolationWord, Word
from tests.kernels.cases import LIMITS, World, entry, leave
from tests.kernels.pools import GroupSpec, write_tokens

SPECS: tuple[tuple[PoisonMode, tuple[GroupSpec, ...]], ...] = (
    ("off", (GroupSpec(page_size=16, pages=60, trash=True, null=True),)),
    (
        "sample",
        (
            GroupSpec(page_size=4, pages=200, draft="tiny", offset=True, window=20, kind="swa", max_rewind=4),
            GroupSpec(page_size=4, pages=40, ring=32, window=24, kind="swa", max_rewind=4, mapping=False),
        ),
    ),
    (
        "full",
        (
            GroupSpec(page_size=3, pages=240, shape="odd", stride_gap=2, translated=True, arena=2),
            GroupSpec(page_size=2, pages=360, shape="latent", unit="slot", flat=True, arena=3, trash=True),
        ),
    ),
)
FORWARDS = 6


def run(
    mode: PoisonMode, specs: tuple[GroupSpec, ...], seed: int, deadline: float, device: str
) -> tuple[DeviceState, int]:
    """Some forwards over one pool, as many as there is time for."""
    rng = random.Random(seed)
    limits = replace(LIMITS, poison=mode, gpu_time_every=2, head_entries=300)
    world, kernels = World(seed, specs, device=device, limits=limits), TritonKernels()
    state = world.new_state()
    kernels.prepare(state)
    done = 0
    while done < FORWARDS and (done == 0 or time.monotonic() < deadline):
        step = world.next_step(max_new=rng.choice((3, 40, 90)), linked=True)
        if done > 1:
            world.disturb(step, (state,), rng)
        facts = [*step.facts, *more_facts(world, state, rng)]
        kernels.facts(state, facts)
        entry(kernels, state, step.batch)
        if len(specs) > 1:
            kernels.window(state, step.batch, 1, 0, every=1)
        for group, slots in zip(world.layout.groups, step.writes, strict=True):
            write_tokens(group.sources, slots[:20], world.generator)
        if done == FORWARDS - 2:
            kernels.abandon(state)
        else:
            leave(kernels, state, scrub_bytes=4096)
        done += 1
    kernels.fingerprint(state, 0, world.layout.groups[0].parts[0], torch.arange(30, device=device))
    if device == "cuda":
        torch.cuda.synchronize()
    return state, done


def more_facts(world: World, state: DeviceState, rng: random.Random) -> Iterator[DeviceFact]:
    """Facts beside those of the traffic, with pages on the device, some of which do not exist."""
    group = rng.randrange(len(world.specs))
    count = world.layout.groups[group].num_pages
    pages = rng.sample(range(count), 4)
    numbers = pages[:2] if world.device == "cpu" else [*pages[:2], -1, count, 1 << 40]
    device = torch.tensor(numbers, device=world.device)
    op = rng.choice((FactOp.QUEUE, FactOp.RESTAMP, FactOp.WIPE))
    yield DeviceFact(op, group=group, pages=pages[:2])
    yield DeviceFact(rng.choice((FactOp.QUEUE, FactOp.OWN, FactOp.WIPE)), group=group, pages=device, tag=3)
    yield DeviceFact(FactOp.COPY, group=group, pages=pages[:2], targets=pages[2:])
    width = 2 + 2 * state.groups[group].seals.shape[0]
    slots = 2 * world.specs[group].page_size
    records = torch.zeros(slots, width, dtype=torch.int64, device=world.device)
    yield DeviceFact(FactOp.EXPORT, group=group, pages=pages[:2], records=records)
    yield DeviceFact(FactOp.IMPORT, group=group, pages=pages[2:], records=records, tag=4)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all pools, print what was seen."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=600.0, help="begin no forward after so many seconds")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", default="cuda", help="cpu: under Triton's interpreter, to see that it runs")
    options = parser.parse_args(arguments)
    deadline = time.monotonic() + options.seconds
    launches: Counter[str] = Counter()
    for number, (mode, specs) in enumerate(SPECS):
        began = time.monotonic()
        state, done = run(mode, specs, options.seed + number, deadline, options.device)
        words = state.counters.tolist()
        launches.update({role.name: words[Word.LAUNCHES + role] for role in Role})
        rows = state.violations[: words[Word.STORED]].tolist()
        kinds = Counter(Kind(row[ViolationWord.KIND]).name for row in rows if row[0])
        seconds = time.monotonic() - began
        print(f"pool {number} (poison {mode}): {done} forwards in {seconds:.1f} s, found {dict(kinds)}", flush=True)
    print("launches", dict(launches))
    missing = [role.name for role in Role if not launches[role.name]]
    if missing:
        print(f"never ran: {missing}", file=sys.stderr)
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
