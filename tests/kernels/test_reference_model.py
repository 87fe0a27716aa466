"""The reference against the plain-Python model, over random layouts, traffic and faults."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import pytest
import torch

from kvcanary.kernels import DeviceFact, FactOp, Kernels
from kvcanary.kernels.reference import ReferenceKernels
from kvcanary.state import DeviceState, PoisonMode, Word
from tests.kernels.cases import LIMITS, Step, World, entry, leave
from tests.kernels.model_exit import Model
from tests.kernels.pools import GroupSpec

MODES: tuple[PoisonMode, ...] = ("sample", "full", "off")


class ModelKernels:
    """A model with the call signatures of kernels, so that one driver serves both."""

    name = "model"

    def __init__(self, state: DeviceState) -> None:
        self.model = Model(state)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        operation = getattr(self.model, name)
        return lambda _state, *args, **named: operation(*args, **named)


def run_both(world: World, step: Step, state: DeviceState, slow: ModelKernels, scrub_bytes: int) -> None:
    """One forward on both, compared after each half."""
    model, both = slow.model, (cast("Kernels", slow), cast("Kernels", ReferenceKernels()))
    for k in both:
        if step.facts:
            k.facts(state, step.facts)
    assert model.differences(state) == []
    for k in both:
        entry(k, state, step.batch)
    assert model.differences(state) == []
    world.write(step)
    for k in both:
        leave(k, state, scrub_bytes)
    assert model.differences(state) == []


@pytest.mark.parametrize("seed", range(16))
def test_clean_traffic_agrees_with_the_model_and_raises_no_alarm(seed: int) -> None:
    world = World(
        seed, limits=replace(LIMITS, head_entries=LIMITS.head_entries if seed % 2 else 320, poison=MODES[seed % 3])
    )
    state = world.new_state()
    slow = ModelKernels(state)
    for _ in range(6):
        run_both(world, world.next_step(max_new=24, rows=4), state, slow, scrub_bytes=3000)
    assert int(state.counters[Word.STORED]) == 0


@pytest.mark.parametrize("seed", range(40))
def test_broken_traffic_agrees_with_the_model(seed: int) -> None:
    limits = replace(LIMITS, head_entries=320, poison=MODES[seed % 3])
    world, rng = World(seed + 1000, limits=limits), random.Random(seed)
    state, kernels = world.new_state(), ReferenceKernels()
    for _ in range(5):
        world.run(world.next_step(max_new=24, rows=4), (kernels, state), scrub_bytes=0)
    slow = ModelKernels(state)
    for _ in range(4):
        step = world.next_step(max_new=24, rows=4)
        for _ in range(rng.randint(1, 4)):
            world.disturb(step, [state], rng)
        slow.model.load(state)
        run_both(world, step, state, slow, scrub_bytes=rng.choice((1, 3000, 40_000)))


ARENAS = (
    GroupSpec(page_size=4, pages=120, arena=3, shape="tiny", draft="odd"),
    GroupSpec(page_size=2, pages=300, arena=5, null=True, trash=True),
    GroupSpec(page_size=4, pages=120, shares=0),
)


def random_fact(world: World, rng: random.Random, records: list[tuple[int, torch.Tensor]]) -> DeviceFact:
    group = rng.randrange(3)
    spec = world.specs[world.layout.spaces[group]]
    pages = rng.sample(range(spec.pages), 8)
    op = rng.choice(list(FactOp))
    row, tag, position = rng.randrange(5), rng.randrange(1, 8), rng.choice((0, 3, 9, 70))
    fact = DeviceFact(op, group=group, pages=pages[:4], targets=pages[4:], row=row, tag=tag, position=position)
    fact.digest, fact.seed, fact.armed = rng.choice((0, 5)), rng.choice((0, 5)), rng.random() < 0.5
    if op is FactOp.EXPORT:
        width = 2 + 2 * len(world.layout.groups[world.layout.spaces[group]].parts)
        fact.records = torch.zeros(4 * spec.page_size, width, dtype=torch.int64)
        records.append((world.layout.spaces[group], fact.records))
    if op is FactOp.IMPORT:
        known = [kept for space, kept in records if space == world.layout.spaces[group]]
        if not known:
            return DeviceFact(FactOp.QUEUE, group=group, pages=pages)
        fact.records = rng.choice(known)
    return fact


@pytest.mark.parametrize("seed", range(10))
def test_random_facts_agree_with_the_model(seed: int) -> None:
    world, rng, kernels = World(seed, ARENAS), random.Random(seed), ReferenceKernels()
    state = world.new_state()
    slow = ModelKernels(state)
    records: list[tuple[int, torch.Tensor]] = []
    for _ in range(5):
        world.run(world.next_step(rows=3), (kernels, state), scrub_bytes=4000)
        facts = [random_fact(world, rng, records) for _ in range(12)]
        slow.model.load(state)
        slow.model.facts(facts)
        exported = [fact.records for fact in facts if fact.op is FactOp.EXPORT and fact.records is not None]
        expected = [kept.clone() for kept in exported]
        kernels.facts(state, facts)
        assert slow.model.differences(state) == []
        assert all(torch.equal(one, two) for one, two in zip(expected, exported, strict=True))
