"""The operations inside compiled code, on a CPU with the reference kernels."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch

from kvcanary.errors import BatchError, ConfigError
from kvcanary.kernels.reference import ReferenceKernels
from kvcanary.kernels.torch_ops import CompiledOps, flatten, unflatten
from kvcanary.state import DeviceState
from tests.kernels.cases import Step, World, clone_state, entry, leave, state_tensors
from tests.kernels.pools import GroupSpec

SPEC = GroupSpec(page_size=4, pages=40, shape="packed", dtype=torch.float32)
Forward = Callable[[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor], torch.Tensor], None]


class Prepared:
    """A world with some tokens in its cache, the next step, and the new bytes that the model will write."""

    def __init__(self) -> None:
        self.world = World(3, (SPEC,), plain=True)
        self.kernels = ReferenceKernels()
        self.state = self.world.new_state()
        request, facts = self.world.admit()
        self.run(self.world.plan([(request, 0, 9)], facts))
        self.step = self.world.plan([(request, request.length, 3)])
        self.kernels.facts(self.state, self.step.facts)
        self.caches = [source.tensor for source in self.world.layout.groups[0].sources]
        self.slots = torch.tensor(self.step.writes[0])
        shapes = [cache.shape[2:] for cache in self.caches]
        self.values = [torch.randn(len(self.slots), *shape) for shape in shapes]

    def run(self, step: Step) -> None:
        self.world.run(step, (self.kernels, self.state))

    def write(self) -> None:
        for cache, value in zip(self.caches, self.values, strict=True):
            cache[self.slots // 4, self.slots % 4] = value

    def forward(self, ops: CompiledOps, form: int) -> Forward:
        """A model's forward with the operations in it."""

        def forward(
            caches: list[torch.Tensor], values: list[torch.Tensor], tensors: list[torch.Tensor], slots: torch.Tensor
        ) -> None:
            ops.mark(form, tensors, [0], first=True)
            ops.check(form, tensors, [0])
            for cache, value in zip(caches, values, strict=True):
                cache[slots // 4, slots % 4] = value
            ops.seal("target", 0, last=True, nonfinite=True)

        return forward


def same(one: DeviceState, two: DeviceState) -> bool:
    others = state_tensors(two)
    return all(torch.equal(tensor, others[name]) for name, tensor in state_tensors(one).items())


@pytest.mark.timeout(300)
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_forward_leaves_the_state_of_an_eager_one(backend: str) -> None:
    case = Prepared()
    wanted = clone_state(case.state)
    ops = CompiledOps(case.kernels, case.state)
    form, tensors = ops.remember(case.step.batch)
    compiled = torch.compile(case.forward(ops, form), fullgraph=True, backend=backend)
    compiled(case.caches, case.values, tensors, case.slots)

    entry(case.kernels, wanted, case.step.batch)
    case.write()
    leave(case.kernels, wanted)
    assert same(case.state, wanted)


@pytest.mark.timeout(300)
def test_the_seal_stays_behind_the_writes() -> None:
    case = Prepared()
    ops = CompiledOps(case.kernels, case.state)
    form, tensors = ops.remember(case.step.batch)
    before = case.kernels.fingerprint(case.state, 0, "target", case.slots)
    torch.compile(case.forward(ops, form), fullgraph=True, backend="aot_eager")(
        case.caches, case.values, tensors, case.slots
    )
    after = case.kernels.fingerprint(case.state, 0, "target", case.slots)
    sealed = case.state.groups[0].seals[0, case.slots, 0]
    assert torch.equal(sealed, after)
    assert not bool((sealed == before).any())


def test_a_batch_survives_being_taken_apart() -> None:
    specs = (
        GroupSpec(flat=True, translated=True),
        GroupSpec(ring=32, row_index=True, mapping=False),
        GroupSpec(unit=None),
    )
    batch = World(5, specs).next_step().batch
    form, tensors = flatten(batch)
    again, same_tensors = flatten(unflatten(form, tensors))
    assert again == form
    assert all(one is two for one, two in zip(tensors, same_tensors, strict=True))


def test_batches_of_one_form_share_a_number() -> None:
    case = Prepared()
    ops = CompiledOps(case.kernels, case.state)
    assert ops.remember(case.step.batch)[0] == ops.remember(case.step.batch)[0]


def test_tensors_that_do_not_fit_the_form_are_refused() -> None:
    form, tensors = flatten(Prepared().step.batch)
    with pytest.raises(BatchError, match=rf"{len(tensors) - 1} tensors do not fit a batch of {len(tensors)}"):
        unflatten(form, tensors[1:])


def test_code_that_outlives_its_canary_says_so() -> None:
    case = Prepared()
    ops = CompiledOps(case.kernels, case.state)
    caches, number = ops.caches, ops.number
    del ops
    gc.collect()
    with pytest.raises(ConfigError, match="a canary that is gone"):
        torch.ops.kvcanary.seal(caches, number, "target", 0, True, True)
