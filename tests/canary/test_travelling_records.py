"""Records that leave with their bytes: what takes them in, and what refuses them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch

from kvcanary.batch import ForwardBatch, GroupBatch, PageTable
from kvcanary.canary import Canary
from kvcanary.config import CanaryConfig
from kvcanary.errors import BatchError, LayoutError
from kvcanary.events import ViolationDetected
from kvcanary.layout import AttentionGroup, KVSource, PoolLayout
from kvcanary.testing import EventRecorder

PAGES, PAGE, HEADS, DIM = 8, 2, 2, 4


class Side:
    """One engine with one group; ``heads``: those that it holds, of all."""

    def __init__(self, heads: slice = slice(0, HEADS), key: int = 7, salts: list[int] | None = None) -> None:
        self.recorder = EventRecorder()
        self.canary = Canary(CanaryConfig(mode="log", key=key), observers=[self.recorder]).start()
        self.pool = torch.randn(PAGES, PAGE, len(range(HEADS)[heads]), DIM)
        source = KVSource.from_view("kv", self.pool, first_head=heads.start)
        group = AttentionGroup("full", "full", PAGES * PAGE, PAGE, (source,))
        self.canary.bind(PoolLayout((group,)), max_tokens=16, max_batch_rows=4, max_rows=4)
        self.canary.arm()
        self.salts = salts

    def forward(self, request: str, context: int, new: int) -> None:
        """New tokens of a request whose pages are 0, 1 and so on."""
        salts = None if self.salts is None else torch.tensor(self.salts[context : context + new])
        batch = ForwardBatch(
            input_ids=torch.arange(context, context + new),
            query_start_loc=torch.tensor([0, new]),
            context_lens=torch.tensor([context]),
            request_rows=torch.tensor([self.canary.row_of(request)]),
            token_salts=salts,
            groups=(GroupBatch(table=PageTable(entries=torch.arange(PAGES)[None])),),
        )
        with self.canary.step(), self.canary.forward(batch):
            slots = torch.arange(context, context + new)
            self.pool[slots // PAGE, slots % PAGE] = torch.randn(new, *self.pool.shape[2:])

    def kinds(self) -> list[str]:
        assert self.canary.flush(5)
        assert self.canary.bus.flush(float("inf"))
        return [event.kind for event in self.recorder.of(ViolationDetected)]


@pytest.fixture
def sides() -> Iterator[Any]:
    with ExitStack() as cleanup:

        def make(**how: Any) -> Side:
            side = Side(**how)
            cleanup.callback(side.canary.stop, 5)
            return side

        yield make


def filled(side: Side) -> Any:
    """Records of two pages that were written."""
    side.canary.admit("a")
    side.canary.alloc("full", "a", [0, 1])
    side.forward("a", 0, 4)
    records = side.canary.export_records("full", [0, 1])
    with side.canary.step():
        pass
    return records


def taken(side: Side, records: Any, **how: Any) -> None:
    """Take records in for a request that has four tokens, and read them twice."""
    side.canary.admit("other")
    side.canary.admit("b", tokens=range(4), start=4)
    side.canary.alloc("full", "b", [0, 1, 2])
    side.canary.import_records("full", [0, 1], records, "b", **how)
    side.forward("b", 4, 1)
    side.forward("b", 5, 1)


def test_records_and_bytes_that_belong_together_are_taken_in_silence(sides: Any) -> None:
    prefill, decode = sides(), sides()
    records = filled(prefill)
    decode.pool.copy_(prefill.pool)
    taken(decode, records)
    assert decode.kinds() == []


def test_records_whose_bytes_stayed_behind_are_found(sides: Any) -> None:
    prefill, decode = sides(), sides()
    taken(decode, filled(prefill))
    assert set(decode.kinds()) == {"CONTENT"}


def test_a_record_of_another_engine_is_laid_to_whoever_took_it_in(sides: Any) -> None:
    decode = sides()
    taken(decode, filled(sides()))
    assert decode.kinds()
    named = {event.writer_request for event in decode.recorder.of(ViolationDetected)}
    assert named == {"b"}


def test_records_of_another_layout_are_refused(sides: Any) -> None:
    records = filled(sides())
    other = sides(heads=slice(1, 2))
    with pytest.raises(LayoutError, match="cannot enter group 'full' of layout"):
        other.canary.import_records("full", [0, 1], records)


def test_records_made_with_another_key_are_refused_without_showing_the_key(sides: Any) -> None:
    records = filled(sides(key=7))
    with pytest.raises(LayoutError, match="made with another key"):
        sides(key=8).canary.import_records("full", [0, 1], records)
    assert records.key != "7"
    assert len(records.key) == 16


def test_bytes_laid_out_anew_keep_their_records_where_the_content_is_the_same(sides: Any) -> None:
    """Head-major memory is another layout, and the same content."""
    prefill, decode = sides(), sides()
    major = torch.zeros(PAGES, HEADS, PAGE, DIM)
    source = KVSource.from_view("kv", major.transpose(1, 2))
    group = AttentionGroup("full", "full", PAGES * PAGE, PAGE, (source,))
    decode.canary.bind(PoolLayout((group,)), max_tokens=16, max_batch_rows=4, max_rows=4)
    decode.canary.arm()
    records = filled(prefill)
    major.copy_(prefill.pool.transpose(1, 2))
    decode.pool = major.transpose(1, 2)
    with pytest.raises(LayoutError, match="relaid=True"):
        decode.canary.import_records("full", [0, 1], records)
    taken(decode, records, relaid=True)
    assert decode.kinds() == []


def test_other_heads_are_other_content_however_they_are_laid_out(sides: Any) -> None:
    records = filled(sides(heads=slice(0, 1)))
    with pytest.raises(LayoutError, match="are of other layers, components, dtypes or heads"):
        sides(heads=slice(1, 2)).canary.import_records("full", [0, 1], records, relaid=True)


def test_salts_count_in_what_a_request_should_have(sides: Any) -> None:
    salts = [5, 6, 0, 0, 0, 0]
    side = sides(salts=salts)
    filled(side)
    side.canary.admit("b", tokens=range(4), start=4, salts=salts)
    side.canary.reuse("full", "b", [0, 1])
    side.canary.alloc("full", "b", [2])
    side.forward("b", 4, 1)
    side.canary.finish("b", tokens=range(5), length=5)
    side.canary.admit("c", tokens=range(4), start=4, salts=[5, 7])  # another picture
    side.canary.reuse("full", "c", [0, 1])
    side.canary.own("full", "c", [2])
    assert side.kinds() == []
    side.forward("c", 4, 1)
    assert "REQUEST_DIGEST" in side.kinds()
    assert "FINAL_DIGEST" not in side.kinds()


@pytest.mark.parametrize("salts", [["x"], [1 << 64], 3])
def test_salts_that_are_no_64_bit_numbers_are_refused(sides: Any, salts: Any) -> None:
    with pytest.raises(BatchError, match="request 'a': salts must be whole numbers"):
        sides().canary.admit("a", salts=salts)


def test_bytes_that_are_not_finite_are_found_written_or_not(sides: Any) -> None:
    side = sides()
    filled(side)
    assert side.canary.nonfinite("full", [0, 1, 5]) == ()
    side.pool[5, 1, 1, 2] = float("inf")
    side.pool[0, 0, 0, 0] = float("nan")
    assert side.canary.nonfinite("full", [0, 1, 5]) == (0, 11)
    assert side.canary.nonfinite("full", [1]) == ()
