"""The host half of the Triton kernels: descriptor rows, staging, plans, errors."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace

import pytest
import torch

from tests.kernels.triton_rig import CUDA, make_kernels  # before triton can be loaded

# isort: split
from kvcanary.errors import BatchError, ConfigError, LayoutError
from kvcanary.kernels import DeviceFact, FactOp
from kvcanary.kernels.descriptors import CHUNK_ROW, ChunkWord, GroupWord, group_row
from kvcanary.kernels.triton_capture import Written
from kvcanary.kernels.triton_regions import Planner, round_up
from kvcanary.kernels.triton_rowsets import ROWS_AT_ONCE, RowSets
from kvcanary.kernels.triton_sources import block_words, chunk_rows
from kvcanary.kernels.triton_staging import Staging
from kvcanary.kernels.triton_tuning import INTERPRETED
from kvcanary.kernels.triton_workspace import Workspace
from kvcanary.layout import AttentionGroup, KVSource, PoolLayout, Run
from kvcanary.record import make_keys
from tests.kernels.cases import World
from tests.kernels.pools import GroupSpec

pytestmark = pytest.mark.skipif(CUDA, reason="these worlds live on the CPU")
CPU = torch.device("cpu")


class Writes:
    """Stands for the kernel that writes descriptor rows."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, ...]] = []

    def __call__(self, grid: tuple[int, int, int], *arguments: int) -> None:
        self.rows.append(arguments)


def source(dtype: torch.dtype, runs: tuple[Run, ...] = (Run(0, 64, 0),)) -> KVSource:
    return KVSource("k", torch.zeros(4, 64, dtype=torch.uint8), 4, 1, 64, 64, runs, dtype=dtype)


# --- descriptor rows ----------------------------------------------------------------------------------------


def test_a_described_row_is_written_once() -> None:
    writes = Writes()
    sets = RowSets(1, 16, CPU, writes)  # type: ignore[arg-type]
    first = sets.find(((1, 2),), keep=False)
    assert sets.find(((1, 2),), keep=False) == first
    assert sets.find(((1, 3),), keep=False) != first
    assert [row[:4] for row in writes.rows] == [(first, 2, 1, 2), (sets.find(((1, 3),), keep=False), 2, 1, 3)]


def test_the_row_of_a_group_that_takes_no_part_holds_no_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "empty", lambda *size, **how: torch.full(size, -1, **how))  # memory as it is found
    world = World(1, (GroupSpec(page_size=4, pages=40),), plain=True)
    request, facts = world.admit()
    workspace = Workspace(world.new_state(), INTERPRETED)
    workspace.item_rows(replace(world.plan([(request, 0, 4)], facts).batch, groups=(None,)))
    (rows,) = workspace.items._chunks
    assert (rows == 0).all(1).sum() == 1


def test_a_long_row_is_written_in_pieces_that_stay_within_it() -> None:
    writes = Writes()
    sets = RowSets(1, 32, CPU, writes)  # type: ignore[arg-type]
    first = sets.find((tuple(range(32)),), keep=False)
    assert [(row[0] - first, row[1]) for row in writes.rows] == [(0, 14), (14 * 8, 14), (28 * 8, 4)]


def test_rows_of_a_captured_graph_are_never_written_anew() -> None:
    sets = RowSets(1, 16, CPU, Writes())  # type: ignore[arg-type]
    kept = sets.find(((7,),), keep=True)
    others = {sets.find(((i, 0),), keep=False) for i in range(3 * ROWS_AT_ONCE)}
    assert kept not in others
    assert sets.find(((7,),), keep=False) == kept


def test_rows_that_no_graph_holds_are_used_again() -> None:
    sets = RowSets(1, 16, CPU, Writes())  # type: ignore[arg-type]
    assert len({sets.find(((i,),), keep=False) for i in range(5 * ROWS_AT_ONCE)}) <= ROWS_AT_ONCE


def test_what_a_graph_alone_has_written_is_written_again(monkeypatch: pytest.MonkeyPatch) -> None:
    capturing = iter((True, True, False, True))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: next(capturing))
    written = Written[str](torch.device("cuda"))
    found = [written.is_due("row") for _ in range(5)]
    written.forget("row")
    assert [*found, written.is_due("row")] == [True, True, True, False, False, True]


def test_a_seal_of_no_tokens_has_a_plan() -> None:
    world = World(1, (GroupSpec(page_size=4, pages=40),), plain=True)
    state = world.new_state()
    plan = Planner(state, Workspace(state, INTERPRETED)).plan("target", 0, 0)
    assert [launch.programs for launch in plan.launches] == [1]


# --- staging ------------------------------------------------------------------------------------------------


def test_words_that_the_device_has_not_read_are_not_overwritten() -> None:
    staging = Staging(CPU, words=8)
    places = [staging.put([i, i]) for i in range(6)]
    spans = [range(address, address + 16) for address, _, _ in places]
    assert not any(set(one) & set(two) for i, one in enumerate(spans) for two in spans[:i])


def test_words_that_were_read_make_room() -> None:
    staging = Staging(CPU, words=8)
    addresses = set()
    for i in range(20):
        address, _, generation = staging.put([i, i, i])
        addresses.add(address)
        staging.progress[0] = generation
    assert len(addresses) <= 3


def test_more_words_than_the_ring_has_make_it_grow() -> None:
    staging = Staging(CPU, words=4)
    _, before, _ = staging.put([1])
    address, target, generation = staging.put(list(range(100)))
    assert generation == 2
    assert target != before
    assert torch.frombuffer(_bytes_at(address, 800), dtype=torch.int64).tolist() == list(range(100))


def _bytes_at(address: int, size: int) -> bytearray:
    import ctypes

    return bytearray(ctypes.string_at(address, size))


# --- sources ------------------------------------------------------------------------------------------------


def test_chunks_of_a_bundle_are_read_alike() -> None:
    runs = (Run(0, 16, 0), Run(16, 3, 4), Run(20, 12, 5), Run(32, 16, 8))
    rows = chunk_rows([source(torch.uint8, runs)], make_keys(1), 32)
    access = [row[ChunkWord.ACCESS] for row in rows]
    assert access == [16] * 4 + [4] * 4 + [1] * 4
    assert all(len(row) == CHUNK_ROW for row in rows)
    assert sum(row[ChunkWord.NUM_BYTES] for row in rows) == 47


def test_a_long_run_becomes_chunks_with_keys_that_go_on() -> None:
    rows = chunk_rows([source(torch.uint8)], make_keys(1), 8)
    assert [row[ChunkWord.NUM_BYTES] for row in rows] == [32, 32, 0, 0]
    whole = chunk_rows([source(torch.uint8, (Run(32, 32, 8),))], make_keys(1), 8)
    assert rows[1][ChunkWord.KEY] == whole[0][ChunkWord.KEY]
    assert rows[1][ChunkWord.BASE] == rows[0][ChunkWord.BASE] + 32


def test_the_block_fits_the_runs() -> None:
    assert block_words([source(torch.uint8, (Run(0, 64, 0),))]) == 32
    wide = KVSource("k", torch.zeros(4, 1024, dtype=torch.uint8), 4, 1, 1024, 1024, (Run(0, 1024, 0),))
    assert block_words([wide]) == 256


def test_a_dtype_whose_finite_values_cannot_be_told_is_refused() -> None:
    with pytest.raises(LayoutError, match=r"cannot tell which values of torch\.float64"):
        chunk_rows([source(torch.float64)], make_keys(1), 32)


def test_a_run_that_cuts_a_float_is_refused() -> None:
    with pytest.raises(LayoutError, match=r"a run of 6 bytes is no whole number of torch\.float32"):
        chunk_rows([source(torch.float32, (Run(0, 6, 0),))], make_keys(1), 32)


# --- groups -------------------------------------------------------------------------------------------------


def test_reserved_pages_at_both_ends_leave_the_middle_ordinary() -> None:
    world = World(1, (GroupSpec(page_size=4, pages=40),))
    group = replace(world.layout.groups[0], trash_pages=(0, 39), null_pages=(1,))
    state = World(1, (GroupSpec(page_size=4, pages=40),)).new_state()
    state.layout = PoolLayout((group,))
    row = group_row(state, 0)
    assert row[GroupWord.RESERVED : GroupWord.RESERVED + 4] == [0, 2, 39, 40]


def test_indices_beyond_32_bits_are_refused() -> None:
    state = World(1, (GroupSpec(page_size=4, pages=40),)).new_state()
    state.layout = PoolLayout((replace(state.layout.groups[0], index_stride=1 << 27),))
    with pytest.raises(ConfigError, match="indices reach 5368709120"):
        group_row(state, 0)


# --- plans --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("tokens", "size"), [(0, 0), (1, 1), (3, 4), (256, 256), (257, 512), (5000, 6144)])
def test_plans_are_made_for_rounded_sizes(tokens: int, size: int) -> None:
    assert round_up(tokens) == size


def test_a_pool_of_many_spaces_takes_several_launches() -> None:
    specs = tuple(GroupSpec(page_size=4, pages=8, draft="tiny") for _ in range(4))
    state = World(1, specs).new_state()
    plan = Planner(state, Workspace(state, INTERPRETED)).plan("target", 4, 1 << 12)
    assert [launch.count for launch in plan.launches] == [8, 5]


def test_kernels_do_not_keep_a_state_alive() -> None:
    kernels = make_kernels()
    state = World(1, (GroupSpec(page_size=4, pages=8),)).new_state()
    kernels.abandon(state)
    ghost = weakref.ref(state)
    del state
    gc.collect()
    assert ghost() is None


# --- errors -------------------------------------------------------------------------------------------------


def test_strided_index_tensors_are_refused_by_name() -> None:
    world = World(1, (GroupSpec(page_size=4, pages=40),), plain=True)
    request, facts = world.admit()
    step = world.plan([(request, 0, 4)], facts)
    batch = replace(step.batch, input_ids=torch.zeros(8, dtype=torch.int64)[::2])
    with pytest.raises(BatchError, match="input_ids has stride 2"):
        make_kernels().mark(world.new_state(), batch, [0], first=True)


def test_a_part_that_a_group_lacks_is_refused() -> None:
    state = World(1, (GroupSpec(page_size=4, pages=8),)).new_state()
    with pytest.raises(LayoutError, match="has no part 'draft'"):
        make_kernels().fingerprint(state, 0, "draft", torch.zeros(1, dtype=torch.int64))


def test_a_wrong_fact_applies_nothing() -> None:
    state = World(1, (GroupSpec(page_size=4, pages=8),)).new_state()
    facts = [DeviceFact(FactOp.OWN, pages=[2], tag=1), DeviceFact(FactOp.FREE, pages=[8])]
    with pytest.raises(BatchError, match=r"pages 8\.\.8 reach out of 0\.\.7"):
        make_kernels().facts(state, facts)
    assert int(state.groups[0].owner.sum()) == 0


def test_a_first_operation_in_a_capture_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    state = World(1, (GroupSpec(page_size=4, pages=8),)).new_state()
    monkeypatch.setattr(state, "device", torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(ConfigError, match=r"run one forward, or TritonKernels\.prepare\(state\), before the capture"):
        make_kernels().abandon(state)


def test_too_many_groups_are_refused() -> None:
    group = World(1, (GroupSpec(page_size=4, pages=8),)).layout.groups[0]
    shared = [AttentionGroup(f"s{i}", "full", group.num_slots, group.page_size, shares=group.name) for i in range(63)]
    state = World(1, (GroupSpec(page_size=4, pages=8),)).new_state()
    state.layout = PoolLayout((group, *shared))
    with pytest.raises(ConfigError, match="has 64 groups, the triton backend takes 63"):
        make_kernels().abandon(state)
