"""The reference against the plain-Python model, over random layouts, traffic and faults."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from kvcanary.kernels import Kernels
from kvcanary.kernels.reference import ReferenceKernels
from kvcanary.state import DeviceState, Word
from tests.kernels.cases import LIMITS, Step, World, entry, leave
from tests.kernels.model_exit import Model


class Driven(Model):
    """A model with the call signatures of kernels, so that one driver serves both."""

    def bind(self, state: DeviceState) -> tuple[Kernels, DeviceState]:
        return _Adapter(self), state  # type: ignore[return-value]


class _Adapter:
    name = "model"

    def __init__(self, model: Model) -> None:
        self._model = model

    def __getattr__(self, name: str):
        operation = getattr(self._model, name)
        return lambda state, *args, **named: operation(*args, **named)


def run_both(world: World, step: Step, reference: tuple[Kernels, DeviceState], model: Driven, scrub_bytes: int) -> None:
    """One forward on both, compared after each half."""
    kernels, state = reference
    other, _ = model.bind(state)
    for k in (other, kernels):
        if step.facts:
            k.facts(state, step.facts)
    assert model.differences(state) == []
    for k in (other, kernels):
        entry(k, state, step.batch)
    assert model.differences(state) == []
    world.write(step)
    for k in (other, kernels):
        leave(k, state, scrub_bytes)
    assert model.differences(state) == []


@pytest.mark.parametrize("seed", range(16))
def test_clean_traffic_agrees_with_the_model_and_raises_no_alarm(seed: int) -> None:
    world = World(seed, limits=replace(LIMITS, head_entries=LIMITS.head_entries if seed % 2 else 320))
    state = world.new_state()
    model = Driven(state)
    for _ in range(6):
        run_both(world, world.next_step(rows=4), (ReferenceKernels(), state), model, scrub_bytes=3000)
    assert int(state.counters[Word.STORED]) == 0


@pytest.mark.parametrize("seed", range(48))
def test_broken_traffic_agrees_with_the_model(seed: int) -> None:
    world, rng = World(seed + 1000, limits=replace(LIMITS, head_entries=320)), random.Random(seed)
    state, kernels = world.new_state(), ReferenceKernels()
    for _ in range(5):
        world.run(world.next_step(rows=4), (kernels, state), scrub_bytes=0)
    model = Driven(state)
    for _ in range(4):
        step = world.next_step(rows=4)
        for _ in range(rng.randint(1, 4)):
            world.disturb(step, [state], rng)
        model.load(state)
        run_both(world, step, (kernels, state), model, scrub_bytes=rng.choice((1, 3000, 60_000)))
