"""Tables of a prepared forward, flat and as blocks; the block form is what flash attention uses on a GPU."""

from __future__ import annotations

import dataclasses
import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvcanary.faults.transformers_batch import Batch, read_batch
from kvcanary.faults.transformers_ops import OPERATIONS
from kvcanary.layout import AttentionGroup, KVSource, PoolLayout

PAGE, LAYERS = 4, 2
STRIDE = 2 * LAYERS * PAGE
"""Engine indices step over the keys and values of all layers."""


def make_canary() -> Any:
    pool = torch.zeros(16, PAGE, 8)
    group = AttentionGroup(
        name="full_attention",
        kind="full",
        num_slots=16 * PAGE,
        page_size=PAGE,
        sources=(KVSource.from_view("layer0.v", pool, component="v"),),
        index_stride=STRIDE,
        page_entry_stride=2 * LAYERS,
        trash_pages=(0,),
    )
    return SimpleNamespace(layout=PoolLayout((group,)), pool=pool)


def requests(*lengths: tuple[int, int]) -> Any:
    """Buffers of a forward with rows of (old, new) tokens; positions are advanced already, as the engine does."""
    rows = [
        SimpleNamespace(
            state=SimpleNamespace(
                request_id=f"r{i}",
                position_offset=old + new,
                max_new_tokens=50,
                generated_len=lambda: 10,
                initial_tokens=[i] * old,
                generated_tokens=[50] * new,
            ),
            query_length=new,
        )
        for i, (old, new) in enumerate(lengths)
    ]
    return SimpleNamespace(requests_in_batch=rows, config=SimpleNamespace(vocab_size=100))


def inputs(*lengths: tuple[int, int], **more: Any) -> dict[str, Any]:
    new = torch.tensor([0, *(length[1] for length in lengths)]).cumsum(0)
    keys = torch.tensor([0, *(sum(length) for length in lengths)]).cumsum(0)
    tokens = int(new[-1])
    return {
        "input_ids": torch.arange(tokens).unsqueeze(0),
        "position_ids": torch.zeros(1, tokens, dtype=torch.int32),
        "cu_seq_lens_q": new,
        "cu_seq_lens_k": {"full_attention": keys},
        "block_table": None,
    } | more


@pytest.fixture
def blocks() -> tuple[Batch, torch.Tensor]:
    """Two decoding rows, of 6 and 9 old tokens, in the pages 3, 5 and 7, 9, 11."""
    table = torch.tensor([[[3, 5, -1], [7, 9, 11]]], dtype=torch.int32) * (2 * LAYERS)
    stale = [torch.full((2,), 99)]
    data = inputs((6, 1), (9, 1), block_table=table, write_index=stale, read_index=stale)
    return read_batch(data, requests((6, 1), (9, 1)), make_canary()), table


@pytest.fixture
def flat() -> tuple[Batch, dict[str, Any]]:
    """The same rows with index lists; a third row prefills."""
    read = torch.tensor(
        [3 * STRIDE + i for i in range(4)]
        + [5 * STRIDE + i for i in range(3)]
        + [7 * STRIDE + i for i in range(4)]
        + [9 * STRIDE + i for i in range(4)]
        + [11 * STRIDE + i for i in range(2)]
        + [13 * STRIDE, 13 * STRIDE + 1]
    )
    write = torch.tensor([5 * STRIDE + 2, 11 * STRIDE + 1, 13 * STRIDE, 13 * STRIDE + 1])
    lengths = (6, 1), (9, 1), (0, 2)
    data = inputs(*lengths, write_index=[write], read_index=[read])
    return read_batch(data, requests(*lengths), make_canary()), data


def test_old_lengths_are_those_before_the_forward(flat: tuple[Batch, dict[str, Any]]) -> None:
    assert [(row.request, row.old, row.new, row.first, row.decodes) for row in flat[0].rows] == [
        ("r0", 6, 1, 0, True),
        ("r1", 9, 1, 1, True),
        ("r2", 0, 2, 2, False),
    ]


def test_a_flat_table_is_the_part_of_the_read_list_with_old_tokens(flat: tuple[Batch, dict[str, Any]]) -> None:
    batch, data = flat
    (view,) = batch.groups
    entries = view.entries(batch.rows[1])
    assert entries is not None
    assert entries.tolist() == data["read_index"][0][7:16].tolist()
    assert (view.last_index(batch.rows[1]), view.slot(11 * STRIDE)) == (11 * STRIDE, 44)


def test_with_a_block_table_the_stale_index_lists_are_not_looked_at(blocks: tuple[Batch, torch.Tensor]) -> None:
    batch, _ = blocks
    (view,) = batch.groups
    entries = view.entries(batch.rows[0])
    assert entries is not None
    assert entries.tolist() == [12, 20]
    assert view.last_index(batch.rows[0]) == 5 * STRIDE + 1
    assert view.write_index is None


def test_pages_are_swapped_in_a_block_table(blocks: tuple[Batch, torch.Tensor]) -> None:
    batch, table = blocks
    hit = OPERATIONS["swapped-pages"](batch, random.Random(0), None)
    assert hit is not None
    assert (table[0] // (2 * LAYERS)).tolist() == [[7, 5, -1], [3, 9, 11]]


def test_a_foreign_table_is_read_through_in_a_block_table(blocks: tuple[Batch, torch.Tensor]) -> None:
    batch, table = blocks
    hit = OPERATIONS["foreign-table"](batch, random.Random(0), None)
    assert hit is not None
    assert hit.requests == ("r0",)
    assert (table[0, 0] // (2 * LAYERS)).tolist() == [7, 9, -1]


@pytest.mark.parametrize("name", ["stale-slot", "foreign-write", "dropped-write"])
def test_writes_that_only_an_index_list_directs_wait_for_one(name: str, blocks: tuple[Batch, torch.Tensor]) -> None:
    batch, table = blocks
    before = table.clone()
    assert OPERATIONS[name](batch, random.Random(0), None) is None
    assert torch.equal(table, before)


def test_pages_are_swapped_in_a_flat_table(flat: tuple[Batch, dict[str, Any]]) -> None:
    batch, data = flat
    assert OPERATIONS["swapped-pages"](batch, random.Random(0), None) is not None
    assert (data["read_index"][0] // STRIDE).tolist() == [7] * 4 + [5] * 3 + [3] * 4 + [9] * 4 + [11] * 2 + [13] * 2


def test_copies_of_a_common_prefix_are_not_swapped(flat: tuple[Batch, dict[str, Any]]) -> None:
    batch, data = flat
    before = data["read_index"][0].clone()
    alike = dataclasses.replace(batch, rows=tuple(dataclasses.replace(row, tokens=(1,) * 20) for row in batch.rows))
    assert OPERATIONS["swapped-pages"](alike, random.Random(0), None) is None
    assert OPERATIONS["foreign-table"](alike, random.Random(0), None) is None
    assert torch.equal(data["read_index"][0], before)


def test_a_stale_slot_is_that_of_the_step_before(flat: tuple[Batch, dict[str, Any]]) -> None:
    batch, data = flat
    hit = OPERATIONS["stale-slot"](batch, random.Random(0), None)
    assert hit is not None
    row = int(hit.requests[0][1])
    assert int(data["write_index"][0][row]) == [5 * STRIDE + 1, 11 * STRIDE][row]


def test_a_foreign_write_goes_over_an_old_token_of_the_other_row(flat: tuple[Batch, dict[str, Any]]) -> None:
    batch, data = flat
    hit = OPERATIONS["foreign-write"](batch, random.Random(0), None)
    assert hit is not None
    # r0's own offset, 2, is beyond r1's last old token; r1's, 1, is not beyond r0's.
    assert hit.requests == ("r1", "r0")
    assert data["write_index"][0][:2].tolist() == [5 * STRIDE + 2, 5 * STRIDE + 1]


def test_one_bit_of_a_live_token_flips_and_no_other(flat: tuple[Batch, dict[str, Any]]) -> None:
    batch, _ = flat
    hit = OPERATIONS["flipped-bit"](batch, random.Random(0), None)
    assert hit is not None
    assert hit.slot in (21, 44)
    bytes_ = batch.canary.pool.view(torch.uint8).flatten()  # type: ignore[attr-defined]
    assert sum(int(byte).bit_count() for byte in bytes_) == 1
    assert int(bytes_.nonzero()) // 32 == hit.slot


@pytest.mark.parametrize("name", sorted(set(OPERATIONS) - {"stalled-kernel"}))
def test_nothing_is_broken_while_nobody_decodes(name: str) -> None:
    data = inputs(
        (0, 3), write_index=[torch.zeros(3, dtype=torch.int64)], read_index=[torch.zeros(0, dtype=torch.int64)]
    )
    batch = read_batch(data, requests((0, 3)), make_canary())
    assert OPERATIONS[name](batch, random.Random(0), None) is None
