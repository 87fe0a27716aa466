"""Triton's kernels leave every tensor of a state as the reference does. More seeds: KVCANARY_SEEDS=100."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.kernels.triton_rig import CUDA, DEVICES, SEEDS, assert_same, kinds, make_kernels

# Above: before triton can be loaded.
# isort: split
from kvcanary.kernels.reference import ReferenceKernels
from kvcanary.kernels.triton_tuning import Tuning
from kvcanary.kernels.triton_workspace import Workspace
from kvcanary.record import fingerprint_bytes, signed, source_seed
from kvcanary.state import DeviceState, Word
from tests.kernels.cases import LIMITS, Step, World, clone_state, leave, state_tensors
from tests.kernels.pools import SHAPES, GroupSpec, run_addresses, storage_bytes

TINY: dict[str, Any] = {
    "mark_tile": 16,
    "decode_tile": 16,
    "sum_tile": 16,
    "check_tile": 16,
    "commit_tile": 16,
    "window_tile": 16,
    "facts_tile": 16,
    "programs": 9,
    "row_programs": 2,
    "small": (1, 1, 1, 0),
    "large": (2, 2, 1, 0),
    "large_items": 24,
    "suspect_programs": 3,
}
"""Sizes that make every loop go round."""


class Pair:
    """One world, and two states that should stay equal: the reference's and Triton's."""

    def __init__(self, world: World, *, armed: bool = True, **tuning: object) -> None:
        self.world = world
        self.reference, self.triton = ReferenceKernels(), make_kernels(**tuning)
        self.wanted = world.new_state(armed=armed)
        self.found = world.new_state(armed=armed)

    def run(self, step: Step, scrub_bytes: int = 0, *, nonfinite: bool = True) -> None:
        contestants = (self.reference, self.wanted), (self.triton, self.found)
        self.world.run(step, *contestants, scrub_bytes=scrub_bytes, nonfinite=nonfinite)

    def disturb(self, step: Step, rng: random.Random) -> str:
        what = self.world.disturb(step, (self.wanted,), rng)
        copy_state(self.wanted, self.found)
        return what

    @property
    def raced(self) -> bool:
        """Two tokens went to one slot: on a GPU nobody knows which one stayed, so the states may part."""
        return "WRITE_CONFLICT" in kinds(self.wanted)

    def compare(self) -> None:
        assert_same(self.found, self.wanted, exact=not CUDA and not self.raced)


def copy_state(source: DeviceState, target: DeviceState) -> None:
    targets = state_tensors(target)
    for name, tensor in state_tensors(source).items():
        targets[name].copy_(tensor)


def scrub_bytes(world: World, slots: int) -> int:
    return slots * sum(group.token_bytes for group in world.layout.groups)


def drive(pair: Pair, rng: random.Random, steps: int, *, faults: float = 0.0) -> None:
    for n in range(steps):
        step = pair.world.next_step(max_new=rng.choice((3, 40, 90)))
        if n and rng.random() < faults:
            pair.disturb(step, rng)
        pair.run(step, scrub_bytes(pair.world, rng.choice((0, 20, 90))))
        if CUDA and pair.raced:
            return
        pair.compare()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("seed", range(3 + SEEDS))
def test_clean_traffic_leaves_equal_states_and_no_report(seed: int, device: str) -> None:
    pair = Pair(World(seed, device=device))
    drive(pair, random.Random(seed), 4)
    assert not kinds(pair.found)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("seed", range(100, 108 + SEEDS))
def test_faulty_traffic_leaves_equal_states_and_reports(seed: int, device: str) -> None:
    drive(Pair(World(seed, device=device)), random.Random(seed), 4, faults=0.8)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("seed", range(200, 202 + SEEDS // 4))
def test_sizes_of_tiles_change_no_result(seed: int, device: str) -> None:
    drive(Pair(World(seed, device=device), **TINY), random.Random(seed), 3, faults=0.5)


@pytest.mark.parametrize("device", DEVICES)
def test_rows_over_capacity_are_read_in_turn_alike(device: str) -> None:
    limits = replace(LIMITS, head_entries=70)
    specs = (GroupSpec(page_size=4, pages=400),)
    pair = Pair(World(5, specs, device=device, limits=limits, plain=True), check_tile=32)
    request, facts = pair.world.admit()
    pair.run(pair.world.plan([(request, 0, 300)], facts))
    for _ in range(3):
        pair.run(pair.world.plan([(request, request.length, 1)]))
        pair.compare()


@pytest.mark.parametrize("device", DEVICES)
def test_a_quota_drops_the_same_number_of_reports(device: str) -> None:
    limits = replace(LIMITS, ring_quota=2, ring_capacity=3)
    pair = Pair(World(6, (GroupSpec(page_size=4, pages=200),), device=device, limits=limits, plain=True))
    request, facts = pair.world.admit()
    pair.run(pair.world.plan([(request, 0, 60)], facts))
    for state in (pair.wanted, pair.found):
        state.groups[0].links[:, 0] ^= 1 << 33
        state.groups[0].links[pair.world.slot(request, 0, 3)] = 0
    pair.run(pair.world.plan([(request, request.length, 1)]))
    assert torch.equal(pair.found.counters.cpu(), pair.wanted.counters.cpu())


@pytest.mark.parametrize("device", DEVICES)
def test_an_unarmed_canary_counts_launches_and_forwards_only(device: str) -> None:
    pair = Pair(World(7, device=device), armed=False)
    for _ in range(2):
        pair.run(pair.world.next_step(), scrub_bytes(pair.world, 5))
        pair.compare()
    assert int(pair.found.counters[Word.FORWARD]) == 3


@pytest.mark.parametrize("device", DEVICES)
def test_a_flipped_byte_is_found_at_the_second_look(device: str) -> None:
    pair = Pair(World(8, (GroupSpec(page_size=4, pages=40, shape="packed"),), device=device, plain=True))
    request, facts = pair.world.admit()
    pair.run(pair.world.plan([(request, 0, 30)], facts))
    source = pair.world.layout.groups[0].sources[1]
    place, _ = run_addresses(source, pair.world.slot(request, 0, 17))[0]
    storage_bytes(source)[place] ^= 4
    for looks in range(1, 4):
        for kernels, state in ((pair.reference, pair.wanted), (pair.triton, pair.found)):
            leave(kernels, state, scrub_bytes(pair.world, 160))
        pair.compare()
        assert kinds(pair.found) == (set() if looks == 1 else {"CONTENT"})


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("index", [(1 << 31) - 1, 1 << 31, (1 << 32) + 5, 1 << 40, (1 << 62) // 4096])
def test_an_index_that_does_not_fit_32_bits_is_out_of_range_and_never_followed(index: int, device: str) -> None:
    pair = Pair(World(4, (GroupSpec(page_size=4, pages=40),), device=device, plain=True))
    request, facts = pair.world.admit()
    pair.run(pair.world.plan([(request, 0, 10)], facts))
    for spoil in ("table", "mapping"):
        step = pair.world.plan([(request, request.length, 1)])
        (item,) = step.batch.groups
        assert item is not None
        assert item.table is not None
        assert item.slot_mapping is not None
        if spoil == "table":
            item.table.entries[0, 1] = index
        else:
            item.slot_mapping[0] = index
        pair.run(step)
    assert "SLOT_RANGE" in kinds(pair.found)
    assert kinds(pair.found) == kinds(pair.wanted)
    assert torch.equal(pair.found.counters.cpu(), pair.wanted.counters.cpu())
    assert torch.equal(pair.found.groups[0].links, pair.wanted.groups[0].links)


@pytest.mark.parametrize("device", DEVICES)
def test_padding_without_any_row_comes_to_an_end(device: str) -> None:
    pair = Pair(World(9, (GroupSpec(page_size=4, pages=40),), device=device, plain=True))
    step = pair.world.plan([])
    padding = torch.zeros(3, dtype=torch.int64, device=device)
    (item,) = step.batch.groups
    assert item is not None
    step.batch = replace(step.batch, input_ids=padding, groups=(replace(item, slot_mapping=padding - 1),))
    pair.run(step)
    pair.compare()


@pytest.mark.parametrize("device", DEVICES)
def test_an_abandoned_forward_leaves_equal_states(device: str) -> None:
    pair = Pair(World(9, device=device))
    pair.run(pair.world.next_step())
    step = pair.world.next_step()
    for kernels, state in ((pair.reference, pair.wanted), (pair.triton, pair.found)):
        kernels.facts(state, step.facts)
        kernels.mark(state, step.batch, range(len(pair.world.specs)), first=True)
        kernels.abandon(state)
    pair.compare()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", SHAPES)
def test_fingerprints_are_what_the_record_defines(shape: str, device: str) -> None:
    world = World(10, (GroupSpec(page_size=4, pages=6, shape=shape),), device=device)
    slots = [0, 3, 4, 23, 11]
    found = make_kernels().fingerprint(world.new_state(), 0, "target", torch.tensor(slots, device=device))
    assert found.tolist() == [_fingerprint(world, slot) for slot in slots]


def test_sources_that_fill_whole_blocks_take_the_short_way() -> None:
    world = World(10, (GroupSpec(page_size=4, pages=6, shape="blocks"), GroupSpec(shape="blocks", draft="blocks")))
    assert Workspace(world.new_state(), Tuning()).alike
    assert not Workspace(World(10, (GroupSpec(shape="nhd"),)).new_state(), Tuning()).alike


def _fingerprint(world: World, slot: int) -> int:
    total = 0
    for source in world.layout.groups[0].sources:
        seed, raw = source_seed(world.keys, source.layer, source.component), storage_bytes(source)
        for run, (start, size) in zip(source.runs, run_addresses(source, slot), strict=True):
            total += fingerprint_bytes(seed, bytes(raw[start : start + size].tolist()), run.first_word)
    return signed(total)


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="needs a CUDA device")
def test_a_captured_forward_replays_as_it_runs() -> None:
    pair = Pair(World(11, (GroupSpec(page_size=16, pages=60),), device="cuda", plain=True))
    request, facts = pair.world.admit()
    pair.run(pair.world.plan([(request, 0, 40)], facts))
    step = pair.world.plan([(request, request.length, 1)])
    pair.run(step, scrub_bytes(pair.world, 20))
    batch, kernels = step.batch, make_kernels()
    eager, replayed = clone_state(pair.found), clone_state(pair.found)
    kernels.prepare(replayed)
    graph = torch.cuda.CUDAGraph()
    budget = scrub_bytes(pair.world, 20)
    with torch.cuda.graph(graph):
        kernels.mark(replayed, batch, [0], first=True)
        kernels.check(replayed, batch, [0])
        kernels.seal(replayed, "target", budget, last=True, nonfinite=True)
    for _ in range(3):
        pair.triton.mark(eager, batch, [0], first=True)
        pair.triton.check(eager, batch, [0])
        pair.triton.seal(eager, "target", budget, last=True, nonfinite=True)
        graph.replay()
    torch.cuda.synchronize()
    assert_same(replayed, eager, exact=False)
