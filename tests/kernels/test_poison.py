"""Poison: where it goes, what finds it, and that it is the same whichever kernels put it there."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.kernels.triton_rig import CUDA, DEVICES, SEEDS, assert_same, kinds, make_kernels

# Above: before triton can be loaded.
# isort: split
from kvcanary.kernels import FactOp, Kernels
from kvcanary.kernels.poison import fill_runs, poison_runs
from kvcanary.kernels.reference import ReferenceKernels
from kvcanary.record import POISON_LEAST, SealFlag, make_keys, owner_word, poison
from kvcanary.state import Check, PoisonBit, PoisonMode
from tests.kernels.cases import LIMITS, World, entry, leave
from tests.kernels.pools import GroupSpec, random_specs, run_addresses, storage_bytes
from tests.kernels.rig import PLAIN, Rig, names

FLOATS = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
)
SAMPLE, FULL = replace(LIMITS, poison="sample"), replace(LIMITS, poison="full")
TILES: dict[str, Any] = {"mark_tile": 16, "decode_tile": 16, "commit_tile": 16, "programs": 9, "row_programs": 2}


@pytest.fixture(params=["reference", pytest.param("triton", marks=pytest.mark.skipif(CUDA, reason="CPU worlds"))])
def kernels(request: pytest.FixtureRequest) -> Kernels:
    return ReferenceKernels() if request.param == "reference" else make_kernels()


def written(rig: Rig) -> int:
    return rig.verified(Check.WRITTEN)


def bytes_of(rig: Rig | World, slot: int, group: int = 0) -> list[bytes]:
    world = rig.world if isinstance(rig, Rig) else rig
    return [
        bytes(storage_bytes(source)[start : start + size].tolist())
        for source in world.layout.groups[world.layout.spaces[group]].sources
        for start, size in run_addresses(source, slot)
    ]


# --- the pattern --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_poison_is_finite_in_every_type_at_every_alignment(dtype: torch.dtype) -> None:
    keys = make_keys(3)
    patterns = [poison(keys, forward, group).pattern for forward in range(300) for group in (0, 5)]
    for shift in range(8):
        raw = torch.tensor([list((pattern * 2)[shift : shift + 16]) for pattern in patterns], dtype=torch.uint8)
        assert bool(raw.view(dtype).to(torch.float32).isfinite().all())


def test_poison_differs_by_forward_group_and_key() -> None:
    choices = [(make_keys(key), forward, group) for key in (1, 2) for forward in range(1, 40) for group in range(3)]
    found = {(poison(*choice).choice, poison(*choice).pattern) for choice in choices}
    assert len(found) == len(choices)


@pytest.mark.parametrize("size", [8, 15, 16, 17, 33, 48, 1000])
def test_poison_stays_in_its_run_and_reaches_every_byte(size: int) -> None:
    starts = {poison(make_keys(1), forward, 0).start(size) for forward in range(2000)}
    length = min(size, 16)
    assert min(starts) == 0
    assert max(starts) + length == size
    assert {start + i for start in starts for i in range(length)} == set(range(size))


# --- found --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["sample", "full"])
@pytest.mark.parametrize("dtype", [*FLOATS[:5], torch.int8, torch.uint8], ids=str)
def test_a_write_that_never_came_is_reported_in_its_forward(
    dtype: torch.dtype, mode: PoisonMode, kernels: Kernels
) -> None:
    rig = Rig(replace(PLAIN, dtype=dtype), limits=replace(LIMITS, poison=mode), kernels=kernels)
    request = rig.request(9)
    assert written(rig) == 9
    step = rig.plan((request, 9, 3))
    lost = step.writes[0].pop(1)
    (violation,) = rig.run(step)
    assert (violation.name, violation.slot, violation.row) == ("WRITE_MISSING", lost, request.row)
    assert (violation.position_expected, violation.code_expected) == (10, request.tokens[10])
    assert (violation.forward, violation.part) == (2, 0)
    assert rig.seal(lost)[1] >> 56 == SealFlag.WRITE_MISSING
    assert written(rig) == 11


@pytest.mark.parametrize("mode", ["sample", "full"])
def test_clean_traffic_overwrites_all_poison(mode: PoisonMode, kernels: Kernels) -> None:
    rig = Rig(limits=replace(LIMITS, poison=mode), kernels=kernels)
    first, second = rig.request(21), rig.request(5)
    for _ in range(3):
        assert rig.step((first, first.length, 1), (second, second.length, 2)) == []
    assert written(rig) == 21 + 5 + 9


def test_each_forward_chooses_anew(kernels: Kernels) -> None:
    rig = Rig(limits=SAMPLE, kernels=kernels)
    request, places = rig.request(4), set()
    for _ in range(12):
        step = rig.plan((request, request.length, 1))
        before = bytes_of(rig, step.writes[0][0])
        rig.enter(step.batch)
        after = bytes_of(rig, step.writes[0][0])
        places.add(tuple(i for i, (old, new) in enumerate(zip(before, after, strict=True)) if old != new))
        rig.world.write(step)
        assert rig.leave() == []
    assert all(len(place) == 1 for place in places)
    assert len(places) > 1


def test_a_layer_that_skips_its_write_is_found_by_full_poison(kernels: Kernels) -> None:
    rig = Rig(limits=FULL, kernels=kernels)
    request = rig.request(4)
    step = rig.plan((request, 4, 1))
    slot = step.writes[0][0]
    source = rig.world.layout.groups[0].sources[2]
    (start, size), raw = run_addresses(source, slot)[0], storage_bytes(source)
    rig.enter(step.batch)
    kept = raw[start : start + size].clone()
    rig.world.write(step)
    raw[start : start + size] = kept
    assert names(rig.leave()) == ["WRITE_MISSING"]


def test_the_last_bytes_of_an_odd_run_are_watched_as_well(kernels: Kernels) -> None:
    rig = Rig(GroupSpec(page_size=4, pages=40, shape="latent"), limits=FULL, kernels=kernels)
    request = rig.request(3)
    step = rig.plan((request, 3, 1))
    source = rig.world.layout.groups[0].sources[0]
    (start, size), raw = run_addresses(source, step.writes[0][0])[0], storage_bytes(source)
    rig.enter(step.batch)
    kept = raw[start + size - 16 : start + size].clone()
    rig.world.write(step)
    raw[start + size - 16 : start + size] = kept
    assert names(rig.leave()) == ["WRITE_MISSING"]


# --- not placed ---------------------------------------------------------------------------------------------


def entered(rig: Rig, slot: int, **batch: object) -> tuple[list[bytes], list[bytes]]:
    """Bytes of a slot before and after the entry of a forward that writes one token there."""
    step = rig.plan((rig.world.requests[0], rig.world.requests[0].length, 1))
    step.batch = replace(step.batch, **batch)  # type: ignore[arg-type]
    before = bytes_of(rig, slot)
    rig.enter(step.batch)
    return before, bytes_of(rig, slot)


@pytest.mark.parametrize("state", [0, 2, 4], ids=["unknown", "freed", "null"])
def test_pages_that_are_not_the_row_s_own_stay_as_they_are(state: int, kernels: Kernels) -> None:
    rig = Rig(limits=SAMPLE, kernels=kernels)
    request = rig.request(6)
    slot = rig.slot(request, 5) + 1
    rig.state.groups[0].owner[slot // 4] = owner_word(1, request.tag, state)
    before, after = entered(rig, slot)
    assert after == before


def test_another_request_s_page_stays_as_it_is(kernels: Kernels) -> None:
    rig = Rig(limits=SAMPLE, kernels=kernels)
    request = rig.request(6)
    slot = rig.slot(request, 5) + 1
    rig.fact(FactOp.OWN, pages=[slot // 4], tag=request.tag + 1)
    before, after = entered(rig, slot)
    assert after == before
    assert names(rig.leave()) == []


def test_a_legal_rewrite_keeps_its_bytes(kernels: Kernels) -> None:
    rig = Rig(limits=SAMPLE, kernels=kernels)
    request = rig.request(6)
    token, salt = request.tokens[5], request.salts[5]
    step = rig.plan((request, 5, 1))
    again = replace(step.batch, input_ids=torch.tensor([token]), token_salts=torch.tensor([salt]))
    before = bytes_of(rig, step.writes[0][0])
    assert rig.enter(again) == []
    assert bytes_of(rig, step.writes[0][0]) == before
    assert rig.leave() == []
    assert written(rig) == 6


def test_an_unarmed_canary_places_none(kernels: Kernels) -> None:
    rig = Rig(limits=SAMPLE, kernels=kernels, armed=False)
    request, facts = rig.world.admit()
    rig.facts(*facts)
    step = rig.plan((request, 0, 3))
    before = bytes_of(rig, step.writes[0][0])
    rig.enter(step.batch)
    assert bytes_of(rig, step.writes[0][0]) == before


@pytest.mark.parametrize(
    "changes",
    [
        {"window": 24, "ring": 32, "kind": "swa"},
        {"ring": 1, "page_size": 1, "kind": "state", "max_rewind": 0},
        {"shape": "tiny"},
    ],
    ids=["ring", "state", "two bytes a token"],
)
def test_groups_that_cannot_take_poison_take_none(changes: dict[str, Any], kernels: Kernels) -> None:
    rig = Rig(replace(PLAIN, **changes), limits=FULL, kernels=kernels)
    request = rig.request(1)
    step = rig.plan((request, 1, 1))
    step.writes[0].clear()
    before = bytes_of(rig, rig.slot(request, 1))
    rig.fact(FactOp.POISON, pages=[rig.page(request, 1)])
    rig.enter(step.batch)
    assert bytes_of(rig, rig.slot(request, 1)) == before
    assert rig.leave() == []
    assert written(rig) == 0


def test_a_group_that_is_cleared_at_allotment_takes_none() -> None:
    layout = World(1, (PLAIN,)).layout
    cleared = replace(layout, groups=(replace(layout.groups[0], zero_on_allot=True),))
    assert poison_runs(layout, 0, "target")
    assert fill_runs(layout, 0)
    assert not poison_runs(cleared, 0, "target")
    assert not fill_runs(cleared, 0)


def test_pages_that_a_ring_shares_are_not_filled() -> None:
    shared = GroupSpec(page_size=4, pages=40, shares=0, window=24, ring=32, kind="swa")
    layout = World(1, (PLAIN, shared)).layout
    assert poison_runs(layout, 0, "target")
    assert not poison_runs(layout, 1, "target")
    assert not fill_runs(layout, 0)


def test_only_whole_patterns_are_placed_where_there_is_room_for_them() -> None:
    layout = World(1, (GroupSpec(page_size=4, pages=40, shape="latent"),)).layout
    assert {run.num_bytes for _, run in poison_runs(layout, 0, "target")} == {576}
    short = World(1, (GroupSpec(page_size=4, pages=40, shape="packed", dtype=torch.float8_e5m2),)).layout
    assert {run.num_bytes for _, run in poison_runs(short, 0, "target")} == {POISON_LEAST}


def test_poison_goes_into_the_part_that_is_written(kernels: Kernels) -> None:
    rig = Rig(replace(PLAIN, draft="nhd"), limits=SAMPLE, kernels=kernels)
    request = rig.request(4)
    step = rig.plan((request, 4, 1))
    slot = step.writes[0][0]
    before = bytes_of(rig, slot)
    rig.kernels.mark(rig.state, step.batch, [0], first=True, poison="draft")
    changed = [i for i, (old, new) in enumerate(zip(before, bytes_of(rig, slot), strict=True)) if old != new]
    assert len(changed) == 1
    assert changed[0] >= len(rig.world.layout.groups[0].part_sources("target"))
    rig.kernels.seal(rig.state, "target", 0, last=False, nonfinite=True)
    rig.kernels.seal(rig.state, "draft", 0, last=True, nonfinite=True, poison="sample")
    (violation,) = rig.new_violations()
    assert (violation.name, violation.part, violation.slot) == ("WRITE_MISSING", 1, slot)


# --- the two kernels ----------------------------------------------------------------------------------------


class Twins:
    """Two worlds of one seed: the reference works on one, Triton on the other; bytes and states stay equal."""

    def __init__(self, seed: int, device: str, mode: PoisonMode, **tuning: Any) -> None:
        limits, specs = replace(LIMITS, poison=mode), random_specs(random.Random(seed))
        self.worlds = [World(seed, specs, device=device, limits=limits) for _ in range(2)]
        self.kernels = [ReferenceKernels(), make_kernels(**tuning)]
        self.states = [world.new_state() for world in self.worlds]
        self.token_bytes = sum(group.token_bytes for group in self.worlds[0].layout.groups)

    def forward(self, seed: int, faults: float) -> bool:
        """One forward on both; whether it can be compared to the end."""
        rng = random.Random(seed)
        max_new, scrub = rng.choice((3, 40)), rng.choice((0, 20 * self.token_bytes))
        broken = rng.random() < faults
        for world, kernels, state in zip(self.worlds, self.kernels, self.states, strict=True):
            step = world.next_step(max_new=max_new)
            if broken:
                world.disturb(step, (state,), random.Random(seed))
            if step.facts:
                kernels.facts(state, step.facts)
            entry(kernels, state, step.batch)
            world.write(step)
            leave(kernels, state, scrub)
        if "WRITE_CONFLICT" in kinds(self.states[0]) and CUDA:
            return False
        self.compare()
        return True

    def compare(self) -> None:
        assert_same(self.states[1], self.states[0], exact=not CUDA)
        for one, two in zip(self.worlds[0].layout.groups, self.worlds[1].layout.groups, strict=True):
            for ours, theirs in zip(one.sources, two.sources, strict=True):
                assert torch.equal(storage_bytes(ours), storage_bytes(theirs)), ours.name


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("mode", ["sample", "full"])
@pytest.mark.parametrize("seed", range(500, 502 + SEEDS))
def test_both_kernels_place_and_find_the_same(seed: int, mode: PoisonMode, device: str) -> None:
    twins = Twins(seed, device, mode, **(TILES if seed % 2 else {}))
    for n in range(3):
        if not twins.forward(seed * 10 + n, faults=0.5 if n else 0.0):
            return


@pytest.mark.parametrize("device", DEVICES)
def test_bits_of_the_scratch_say_who_took_poison(device: str) -> None:
    world = World(5, (PLAIN,), device=device, limits=SAMPLE, plain=True)
    state, kernels = world.new_state(), make_kernels()
    request, facts = world.admit()
    step = world.plan([(request, 0, 6)], facts)
    kernels.facts(state, step.facts)
    entry(kernels, state, step.batch)
    assert state.scratch_poison[0, :6].tolist() == [PoisonBit.PLACED] * 6
