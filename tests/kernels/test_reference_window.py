"""Counting what a sliding window leaves out, and where its slots differ from the full group's."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kvcanary.kernels import DeviceFact, FactOp
from kvcanary.kernels.reference import ReferenceKernels
from kvcanary.state import Check, Role, Word
from tests.kernels.cases import World, table_of, with_group
from tests.kernels.model_exit import Model
from tests.kernels.pools import GroupSpec
from tests.kernels.rig import Rig

FULL = GroupSpec(page_size=1, pages=200, unit="slot")
SWA = replace(FULL, window=8, kind="swa")


def counts(rig: Rig) -> tuple[int, int]:
    return rig.word(Word.SWA_OUT_OF_WINDOW), rig.word(Word.SWA_DIVERGENCE)


def test_positions_without_a_window_slot_and_diverging_ones_are_counted() -> None:
    rig = Rig(FULL, SWA)
    request = rig.request(20)
    step = rig.plan((request, 20, 1))
    gone = sum(page is None for page in request.pages[1][:20])
    same = sum(rig.slot(request, p, 0) == rig.slot(request, p, 1) for p in range(gone, 20))
    rig.kernels.window(rig.state, step.batch, 0, 1, every=1)
    assert gone > 0
    assert counts(rig) == (gone, 20 - gone - same)
    assert rig.word(Word.SWA_FORWARD) == rig.word(Word.FORWARD)
    assert rig.word(Word.SWA_FULL) == rig.verified(Check.LINKS, 0)
    assert rig.word(Word.SWA_WINDOW) == rig.verified(Check.LINKS, 1)


def test_null_pages_and_positions_before_the_table_are_out_of_the_window() -> None:
    rig = Rig(FULL, replace(SWA, null=True))
    request = rig.request(6)
    step = rig.plan((request, 6, 1))
    table = table_of(step.batch, 1)
    table.entries[0, 3] = 1
    shifted = replace(table, entries=table.entries[:, 2:], first_position=torch.tensor([2]))
    rig.kernels.window(rig.state, with_group(step.batch, 1, table=shifted), 0, 1, every=1)
    assert counts(rig)[0] == 3


def test_only_every_nth_forward_counts_and_launches() -> None:
    rig = Rig(FULL, SWA)
    request = rig.request(5)
    seen = []
    for _ in range(6):
        step = rig.plan((request, request.length, 1))
        rig.kernels.window(rig.state, step.batch, 0, 1, every=3)
        seen.append(rig.word(Word.SWA_FORWARD))
        rig.run(step)
    assert seen == [0, 3, 3, 3, 6, 6]
    assert rig.launches(Role.WINDOW) == 2


def test_a_group_that_takes_no_part_leaves_the_counters_as_they_were() -> None:
    rig = Rig(FULL, SWA)
    request = rig.request(5)
    step = rig.plan((request, 5, 1))
    rig.kernels.window(rig.state, replace(step.batch, groups=(step.batch.groups[0], None)), 0, 1, every=1)
    assert (counts(rig), rig.word(Word.SWA_FORWARD), rig.launches(Role.WINDOW)) == ((0, 0), 0, 1)


@pytest.mark.parametrize("seed", range(6))
def test_window_counters_agree_with_the_model(seed: int) -> None:
    specs = (GroupSpec(page_size=4, pages=300), GroupSpec(page_size=2, pages=600, window=20, offset=True, kind="swa"))
    world, kernels = World(seed, specs), ReferenceKernels()
    state = world.new_state()
    model = Model(state)
    for _ in range(5):
        step = world.next_step(rows=4)
        kernels.facts(state, [*step.facts, *([] if state.counters[Word.FORWARD] < 3 else [free(world)])])
        model.load(state)
        for operation in (model.window, lambda *a, **n: kernels.window(state, *a, **n)):
            operation(step.batch, 0, 1, every=2)
        assert model.differences(state) == []
        step.facts.clear()
        world.run(step, (kernels, state))


def free(world: World) -> DeviceFact:
    return DeviceFact(FactOp.FREE, group=1, pages=[world.rng.randrange(600)])
