"""A canary and ``torch.compile``: around a compiled model, and inside of one graph with it."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch

from kvcanary.batch import ForwardBatch
from kvcanary.canary import Canary
from kvcanary.compiled import CompiledForward, flatten, unflatten
from kvcanary.errors import BatchError, ConfigError
from tests.canary.conftest import Bench
from tests.canary.hand import LAYERS, PAGE, HandEngine
from tests.kernels.cases import World, state_tensors
from tests.kernels.pools import GroupSpec

BACKENDS = ["eager", "aot_eager"]
KEY = 11
Kernel = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, list[torch.Tensor]], torch.Tensor]


def write(pool: torch.Tensor, values: torch.Tensor, slots: torch.Tensor) -> None:
    """What a model does to the cache."""
    pages, offsets = slots // PAGE, slots % PAGE
    for layer in range(LAYERS):
        pool[layer, :, pages, offsets] = values[layer]


class Compiled(HandEngine):
    """A hand engine whose model is compiled, with the canary inside of it or around."""

    backend = "eager"
    inside = False
    nodes: list[str]

    def step(self, names: list[str] | None = None, **_: Any) -> None:
        names = list(self.tokens) if names is None else names
        for name in names:
            if self.cached[name] == len(self.tokens[name]):
                self.tokens[name] += self.new_tokens(1)
            self._grow(name)
        with self.canary.step():
            self.batch = self._batch(names)
            self._forward(self.batch)
        for name in names:
            self.cached[name] = len(self.tokens[name])

    def _forward(self, batch: ForwardBatch) -> None:
        item = batch.groups[0]
        assert item is not None
        slots = item.slot_mapping
        assert slots is not None
        values = self._values(LAYERS, 2, len(slots), *self.pool.shape[-2:], dtype=self.pool.dtype)
        torch._dynamo.reset()
        if not self.inside:
            with self.canary.forward(batch):
                torch.compile(write, backend=self.backend, fullgraph=True)(self.pool, values, slots)
            return
        inside = self.canary.compiled(batch)

        def forward(pool: torch.Tensor, values: torch.Tensor, tensors: list[torch.Tensor], slots: torch.Tensor) -> None:
            inside.enter(tensors)
            write(pool, values, slots)
            inside.leave()

        compiled = torch.compile(forward, backend=self.backend, fullgraph=True)
        compiled(self.pool, values, inside.tensors(batch), slots)


def run(make: Callable[..., Bench], engine: type[HandEngine], **settings: Any) -> Bench:
    bench = make(key=KEY, **settings)
    bench.engine = engine(bench.canary)
    bench.engine.admit("a", 9)
    bench.engine.admit("b", 5)
    for _ in range(3):
        bench.engine.step()
    return bench


def same(one: Canary, two: Canary) -> bool:
    others = state_tensors(two.state)
    return all(torch.equal(tensor, others[name]) for name, tensor in state_tensors(one.state).items())


@pytest.mark.timeout(300)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("inside", [False, True], ids=["around", "inside"])
def test_a_compiled_model_leaves_the_state_of_an_eager_one(
    inside: bool, backend: str, make_bench: Callable[..., Bench]
) -> None:
    eager = run(make_bench, HandEngine)
    engine = type("Here", (Compiled,), {"backend": backend, "inside": inside})
    compiled = run(make_bench, engine)
    # The engine writes layer by layer, but the same numbers.
    assert torch.equal(eager.engine.pool, compiled.engine.pool)
    assert same(eager.canary, compiled.canary)
    assert compiled.violations() == []
    assert compiled.of("SnapshotTaken")[-1].verified["sealed"]["full"] == 9 + 5 + 2 * 2


@pytest.mark.timeout(300)
@pytest.mark.parametrize("backend", BACKENDS)
def test_writes_inside_of_a_graph_overwrite_the_poison_of_its_entry(
    backend: str, make_bench: Callable[..., Bench]
) -> None:
    engine = type("Here", (Compiled,), {"backend": backend, "inside": True})
    bench = run(make_bench, engine, poison="sample")
    assert bench.violations() == []
    assert bench.of("SnapshotTaken")[-1].verified["written"]["full"] == 9 + 5 + 2 * 2


@pytest.mark.timeout(300)
def test_the_exit_stays_behind_the_writes_in_the_traced_graph(bench: Bench) -> None:
    from torch._dynamo.backends.common import aot_autograd

    seen: list[list[str]] = []

    def keep(graph: Any, _example: Any) -> Any:
        seen.append([str(node.args[0] if "auto_functionalized" in str(node.target) else node.target)
                     for node in graph.graph.nodes if node.op == "call_function"])  # fmt: skip
        return graph.forward

    engine = type("Here", (Compiled,), {"backend": staticmethod(aot_autograd(fw_compiler=keep)), "inside": True})
    bench.engine = engine(bench.canary)
    bench.engine.admit("a", 6)
    bench.engine.step()
    (names,) = seen
    places = {word: [i for i, name in enumerate(names) if word in name] for word in ("enter", "index_put", "leave")}
    assert len(places["enter"]) == len(places["leave"]) == 1
    assert len(places["index_put"]) == LAYERS
    assert places["enter"][0] < min(places["index_put"])
    assert max(places["index_put"]) < places["leave"][0]


# --- forms --------------------------------------------------------------------------------------------------


def batch_of(bench: Bench) -> ForwardBatch:
    bench.engine.admit("a", 6)
    bench.engine._grow("a")
    return bench.engine._batch(["a"])


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


def test_tensors_that_do_not_fit_the_form_are_refused() -> None:
    form, tensors = flatten(World(5, (GroupSpec(),)).next_step().batch)
    with pytest.raises(BatchError, match=rf"{len(tensors) - 1} tensors do not fit a batch of {len(tensors)}"):
        unflatten(form, tensors[1:])


def test_a_batch_of_another_form_is_refused(bench: Bench) -> None:
    from dataclasses import replace

    batch = batch_of(bench)
    inside = bench.canary.compiled(batch)
    assert inside.tensors(batch)[0] is batch.input_ids
    with pytest.raises(BatchError, match=r"does not fit compiled code made for .*make another canary\.compiled\(\)"):
        inside.tensors(replace(batch, last_ids=None))


def test_code_that_outlives_what_it_was_made_with_says_so(bench: Bench) -> None:
    inside = bench.canary.compiled(batch_of(bench))
    caches, number = inside.caches, inside.number
    del inside
    gc.collect()
    with pytest.raises(ConfigError, match="a canary or pool that is gone"):
        torch.ops.kvcanary.leave(caches, number)


def test_code_that_outlives_its_pool_says_so(bench: Bench) -> None:
    inside: CompiledForward = bench.canary.compiled(batch_of(bench))
    HandEngine(bench.canary)
    with pytest.raises(ConfigError, match="make another one for a new pool"):
        inside.leave()
