"""Fingerprints, through every kind of view on a buffer, and in every mode of the caller."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from kvcanary.errors import ConfigError, LayoutError
from kvcanary.kernels import Kernels, load_kernels
from kvcanary.kernels.reference import ReferenceKernels
from kvcanary.layout import AttentionGroup, KVSource, PoolLayout, Run
from kvcanary.record import fingerprint_bytes, make_keys, signed, source_seed
from kvcanary.state import DeviceState
from tests.kernels.cases import LIMITS, World
from tests.kernels.model_exit import Model
from tests.kernels.pools import SHAPES, GroupSpec, make_sources
from tests.kernels.rig import PLAIN, Rig

KEYS = make_keys(11)


def state_of(*sources: KVSource) -> DeviceState:
    first = sources[0]
    group = AttentionGroup("g", "full", first.num_pages * first.page_size, first.page_size, sources)
    return DeviceState(PoolLayout((group,)), KEYS, LIMITS)


def fingerprint(state: DeviceState, *slots: int, part: str = "target") -> list[int]:
    return ReferenceKernels().fingerprint(state, 0, part, torch.tensor(slots)).tolist()


@pytest.mark.parametrize("page_size", [1, 3, 16])
@pytest.mark.parametrize("shape", SHAPES)
def test_fingerprints_are_those_of_the_definition(shape: str, page_size: int) -> None:
    world = World(3, (GroupSpec(page_size=page_size, pages=7, shape=shape),))
    state = world.new_state()
    slots = list(range(7 * page_size))
    model = Model(state)
    assert fingerprint(state, *slots) == [model.fingerprint(0, "target", slot) for slot in slots]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_one_value_at_one_logical_place_counts_the_same_in_every_layout(dtype: torch.dtype) -> None:
    values = torch.randn(6, 4, 3, 8).to(dtype)
    by_head = values.view(torch.uint8).permute(0, 2, 1, 3).contiguous().view(dtype).permute(0, 2, 1, 3)
    plain, strided = (state_of(KVSource.from_view("k", view)) for view in (values, by_head))
    assert strided.layout.groups[0].sources[0].page_stride == plain.layout.groups[0].sources[0].page_stride
    assert len(strided.layout.groups[0].sources[0].runs) == 3
    assert fingerprint(plain, *range(24)) == fingerprint(strided, *range(24))


def test_the_fingerprints_of_ranks_add_up_to_the_whole() -> None:
    whole = torch.randn(5, 4, 2, 8)

    def heads(first: int, end: int) -> torch.Tensor:
        return whole[:, first:end].clone().permute(0, 2, 1, 3)

    parts = [state_of(KVSource.from_view("k", heads(first, first + 2), first_head=first)) for first in (0, 2)]
    sums = [signed(a + b) for a, b in zip(*(fingerprint(part, *range(10)) for part in parts), strict=True)]
    assert sums == fingerprint(state_of(KVSource.from_view("k", heads(0, 4))), *range(10))


def test_every_bit_of_a_token_counts() -> None:
    raw = torch.zeros(2, 1, 9, dtype=torch.uint8)
    state = state_of(KVSource.from_view("k", raw))
    seen = {fingerprint(state, 1)[0]}
    for byte in range(9):
        for bit in range(8):
            raw.zero_()
            raw[1, 0, byte] = 1 << bit
            seen.add(fingerprint(state, 1)[0])
    assert len(seen) == 1 + 9 * 8


@pytest.mark.parametrize("offset", [0, 1, 2, 4])
def test_runs_at_any_alignment_read_the_same_bytes(offset: int) -> None:
    raw = torch.randint(0, 256, (4 * 24 + 8,), dtype=torch.uint8)
    source = KVSource("k", raw[offset:], 4, 1, 24, 24, (Run(0, 8, 0), Run(12, 8, 5)))
    data = bytes(raw[offset + 24 : offset + 48].tolist())
    seed = source_seed(KEYS, 0, "k")
    expected = fingerprint_bytes(seed, data[:8], 0) + fingerprint_bytes(seed, data[12:20], 5)
    assert fingerprint(state_of(source), 1) == [signed(expected)]


@pytest.mark.parametrize("token_bytes", [2, 584])
def test_addresses_above_two_gigabytes_do_not_wrap(token_bytes: int) -> None:
    # Never touched but at its end, so the pages of the buffer are not even mapped.
    pages, page_size = 5, 1 << 20
    stride = (page_size * token_bytes + 4095) // 4096 * 4096 + (1 << 29)
    raw = torch.empty(pages * stride, dtype=torch.uint8)
    source = KVSource("k", raw, pages, page_size, stride, token_bytes, (Run(0, token_bytes, 0),))
    slot = pages * page_size - 1
    at = (pages - 1) * stride + (page_size - 1) * token_bytes
    assert at > 1 << 31
    data = torch.arange(token_bytes).to(torch.uint8)
    raw[at : at + token_bytes] = data
    expected = fingerprint_bytes(source_seed(KEYS, 0, "k"), bytes(data.tolist()))
    reader = ReferenceKernels().fingerprint(state_of(source), 0, "target", torch.tensor([slot]))
    assert reader.tolist() == [signed(expected)]


def test_many_slots_are_read_in_pieces_with_the_same_result() -> None:
    source = KVSource.from_view("k", torch.randint(0, 256, (3000, 1, 1024), dtype=torch.uint8))
    state = state_of(source)
    together = fingerprint(state, *range(3000))
    some = (0, 1023, 1024, 2999)
    assert [fingerprint(state, slot)[0] for slot in some] == [together[slot] for slot in some]


def test_no_slots_have_no_fingerprints() -> None:
    assert fingerprint(state_of(KVSource.from_view("k", torch.zeros(3, 1, 4)))) == []


def test_a_part_that_the_group_lacks_is_named() -> None:
    with pytest.raises(LayoutError, match=r"no part 'draft', it has \['target'\]"):
        fingerprint(state_of(KVSource.from_view("k", torch.zeros(3, 1, 4))), 1, part="draft")


def test_a_run_that_cuts_a_float_is_refused() -> None:
    raw = torch.zeros(64, dtype=torch.uint8)
    source = KVSource("k", raw, 4, 1, 8, 8, (Run(0, 3, 0),), dtype=torch.float16)
    with pytest.raises(LayoutError, match=r"a run of 3 bytes is no whole number of torch\.float16"):
        fingerprint(state_of(source), 1)


def test_what_cannot_be_read_is_refused_before_the_first_forward() -> None:
    source = KVSource("k", torch.zeros(64, dtype=torch.uint8), 4, 1, 8, 8, (Run(0, 3, 0),), dtype=torch.float16)
    with pytest.raises(LayoutError, match="a run of 3 bytes is no whole number"):
        ReferenceKernels().prepare(state_of(source))


def test_buffers_of_another_float_type_side_by_side_are_each_tested_as_their_own() -> None:
    rig = Rig(replace(PLAIN, shape="latent", draft="nhd"))
    request = rig.request(4)
    gate = next(s for s in rig.world.layout.groups[0].sources if s.component == "gate")
    step = rig.plan((request, 4, 1))
    rig.enter(step.batch)
    rig.world.write(step)
    gate.tensor[rig.page(request, 4), 0, 0] = float("inf")
    assert [(v.name, v.part) for v in rig.leave()] == [("NONFINITE", 0)]


def inference_sources() -> tuple[KVSource, ...]:
    with torch.inference_mode():
        return make_sources(GroupSpec(page_size=4, pages=6), "nhd", "cpu", "target")


@pytest.mark.parametrize("inside", [True, False])
def test_caches_that_are_inference_tensors_are_read_in_either_mode(inside: bool) -> None:
    sources = inference_sources()
    assert sources[0].tensor.is_inference()
    state = state_of(*sources)
    with torch.inference_mode(inside):
        found = fingerprint(state, *range(24))
    assert found == [Model(state).fingerprint(0, "target", slot) for slot in range(24)]


def test_a_reader_made_in_one_mode_serves_the_other_and_its_results_are_plain_tensors() -> None:
    state, kernels = state_of(*inference_sources()), ReferenceKernels()
    slots = torch.arange(24)
    with torch.inference_mode():
        first = kernels.fingerprint(state, 0, "target", slots).tolist()
    second = kernels.fingerprint(state, 0, "target", slots)
    assert second.tolist() == first
    assert not second.is_inference()
    second += 1


OPERATIONS: dict[str, Callable[[Kernels, Rig], object]] = {
    "facts": lambda k, rig: k.facts(rig.state, []),
    "mark": lambda k, rig: k.mark(rig.state, rig.plan().batch, [0], first=True),
    "check": lambda k, rig: k.check(rig.state, rig.plan().batch, [0]),
    "seal": lambda k, rig: k.seal(rig.state, "target", 0, last=True, nonfinite=True),
    "abandon": lambda k, rig: k.abandon(rig.state),
    "window": lambda k, rig: k.window(rig.state, rig.plan().batch, 0, 0, every=1),
    "fingerprint": lambda k, rig: k.fingerprint(rig.state, 0, "target", torch.tensor([1])),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_graph_capture_is_refused_by_every_operation(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig()
    OPERATIONS[name](rig.kernels, rig)
    monkeypatch.setattr(rig.state, "device", torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(ConfigError, match="cannot be captured in a CUDA graph"):
        OPERATIONS[name](rig.kernels, rig)


def test_the_registry_loads_the_reference_for_a_cpu() -> None:
    assert load_kernels("auto", "cpu").name == load_kernels("reference", "cpu").name == "reference"
