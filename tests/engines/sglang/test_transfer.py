"""Records that travel with KV: SGLang's own pools and lists of transfers, and a copy in place of the network."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from kvcanary.batch import ForwardBatch, GroupBatch, PageTable
from kvcanary.canary import Canary
from kvcanary.config import CanaryConfig
from kvcanary.engines.sglang.pools import Space, make_layout
from kvcanary.engines.sglang.transfer import RecordBuffer
from kvcanary.errors import ConfigError, LayoutError
from kvcanary.events import SnapshotTaken, ViolationDetected
from kvcanary.testing import EventRecorder
from tests.engines.sglang.test_pools import allocator, mha, mla, parallel, write_mha, write_mla

__all__ = ["parallel"]
pytestmark = [pytest.mark.usefixtures("parallel"), pytest.mark.filterwarnings("ignore")]
PAGE, PROMPT = 16, 40
Write = Callable[[Any, torch.Tensor], None]
POOLS: dict[str, tuple[Callable[[], Any], Write]] = {"mha": (mha, write_mha), "mla": (mla, write_mla)}


class Instance:
    """One side: a real pool, its allocator, a canary over it, and the list of what is transferred."""

    def __init__(self, make: Callable[[], Any], write: Write, key: int) -> None:
        self.pool, self._write = make(), write
        self.recorder = EventRecorder()
        self.canary = Canary(CanaryConfig(mode="log", key=key), observers=[self.recorder]).start()
        self.allocator = allocator(self.pool)
        self.canary.bind(
            make_layout([Space("full", self.allocator, None, self.pool)], [], 0),
            max_tokens=64, max_batch_rows=1, max_rows=2,
        )  # fmt: skip
        self.canary.arm()
        self.records = RecordBuffer(self.canary)
        self.kv_args = self._kv_args()

    def _kv_args(self) -> Any:
        from sglang.srt.disaggregation.base.conn import KVArgs
        from sglang.srt.disaggregation.utils import setup_state_kv_args

        args = KVArgs()
        args.kv_data_ptrs, args.kv_data_lens, args.kv_item_lens = self.pool.get_contiguous_buf_infos()
        args.page_size = self.pool.page_size
        setup_state_kv_args(args, self.pool)
        self.records.join(args)
        return args

    def allot(self, request: str, tokens: int, taken: int = 0) -> torch.Tensor:
        """Slots of a request; ``taken``: pages that others have before."""
        if taken:
            self.allocator.alloc(taken * PAGE)
        slots: torch.Tensor = self.allocator.alloc(-(-tokens // PAGE) * PAGE)
        self.canary.alloc("full", request, sorted(set((slots // PAGE).tolist())))
        return slots

    def forward(self, request: str, slots: torch.Tensor, context: int, new: int) -> None:
        """New tokens after ``context`` old ones, in a request whose row is ``slots``."""
        batch = ForwardBatch(
            input_ids=torch.arange(100 + context, 100 + context + new),
            query_start_loc=torch.tensor([0, new]),
            context_lens=torch.tensor([context]),
            request_rows=torch.tensor([self.canary.row_of(request)]),
            groups=(
                GroupBatch(
                    slot_mapping=slots[context : context + new], table=PageTable(entries=slots[None], unit="slot")
                ),
            ),
        )
        with self.canary.step(), self.canary.forward(batch):
            self._write(self.pool, slots[context : context + new])

    def found(self) -> set[tuple[str, str]]:
        assert self.canary.flush(10)
        assert self.canary.bus.flush(float("inf"))
        return {(event.kind, event.request) for event in self.recorder.of(ViolationDetected)}

    def verified(self, name: str) -> int:
        """How much, up to now."""
        self.found()
        return sum(self.recorder.of(SnapshotTaken)[-1].verified[name].values())


def send(source: Instance, target: Instance, pages: list[int], into: list[int], *, state: bool = True) -> None:
    """What a transfer engine does with the two lists: each item of each buffer, page by page."""
    ours, theirs = source.kv_args, target.kv_args
    lists = [(ours.kv_data_ptrs, theirs.kv_data_ptrs, ours.kv_item_lens, theirs.kv_item_lens)]
    if state:
        columns = (ours.state_data_ptrs, theirs.state_data_ptrs, ours.state_item_lens, theirs.state_item_lens)
        lists += list(zip(*columns, strict=True))
    for from_, to, length, their_length in lists:
        assert length == their_length
        for src, dst, size in zip(from_, to, length, strict=True):
            for page, other in zip(pages, into, strict=True):
                ctypes.memmove(dst + other * size, src + page * size, size)


class Pair:
    """A prefill instance that computed a prompt, and a decode instance with room for it."""

    def __init__(self, pool: str, key: int = 7) -> None:
        make, write = POOLS[pool]
        self.prefill, self.decode = Instance(make, write, 7), Instance(make, write, key)
        self.prefill.canary.admit("p", tokens=range(100, 100 + PROMPT))
        slots = self.prefill.allot("p", PROMPT)
        self.prefill.forward("p", slots, 0, PROMPT)
        self.pages = list(dict.fromkeys((slots // PAGE).tolist()))
        self.decode.canary.admit("d", tokens=range(100, 200), start=PROMPT)
        self.slots = self.decode.allot("d", PROMPT + 4, taken=2)
        self.into = list(dict.fromkeys((self.slots // PAGE).tolist()))
        with self.decode.canary.step():
            pass

    def go_on(self) -> None:
        """The decode instance reads what has landed."""
        for i in range(3):
            self.decode.forward("d", self.slots, PROMPT + i, 1)


@pytest.fixture
def pairs() -> Iterator[Callable[..., Pair]]:
    made: list[Pair] = []

    def make(pool: str = "mha", **more: int) -> Pair:
        made.append(Pair(pool, **more))
        return made[-1]

    yield make
    for pair in made:
        pair.prefill.canary.stop(1)
        pair.decode.canary.stop(1)


@pytest.mark.parametrize("pool", POOLS)
def test_kv_that_arrives_with_its_records_is_verified_on_arrival_and_in_use(pairs: Any, pool: str) -> None:
    pair = pairs(pool)
    pair.prefill.records.pack(pair.pages)
    send(pair.prefill, pair.decode, pair.pages, pair.into)
    assert pair.decode.records.unpack(pair.into, "d")
    pair.go_on()
    assert pair.prefill.found() == pair.decode.found() == set()
    assert pair.decode.verified("links") == 3 * PROMPT + 3
    assert pair.decode.verified("content") >= PROMPT


@pytest.mark.parametrize("pool", POOLS)
def test_a_bit_that_was_lost_on_the_way_is_found_on_arrival(pairs: Any, pool: str) -> None:
    pair = pairs(pool)
    pair.prefill.records.pack(pair.pages)
    send(pair.prefill, pair.decode, pair.pages, pair.into)
    buffers = pair.decode.pool.v_buffer if pool == "mha" else pair.decode.pool.kv_buffer
    buffers[1][pair.slots[20]].view(torch.uint8)[0, 9] ^= 4
    pair.decode.records.unpack(pair.into, "d")
    pair.go_on()
    assert pair.decode.found() == {("CONTENT", "d")}


def test_a_page_that_did_not_arrive_is_found(pairs: Any) -> None:
    pair = pairs()
    pair.prefill.records.pack(pair.pages)
    send(pair.prefill, pair.decode, pair.pages, pair.into)
    for buffer in pair.decode.pool.k_buffer:
        buffer[pair.into[1] * PAGE : (pair.into[1] + 1) * PAGE] = 0
    pair.decode.records.unpack(pair.into, "d")
    pair.go_on()
    assert pair.decode.found() == {("CONTENT", "d")}


def test_pages_that_land_in_each_others_place_are_found_in_use(pairs: Any) -> None:
    pair = pairs()
    pair.prefill.records.pack(pair.pages)
    send(pair.prefill, pair.decode, pair.pages, [pair.into[1], pair.into[0], pair.into[2]])
    pair.decode.records.unpack(pair.into, "d")
    pair.go_on()
    assert ("POSITION", "d") in pair.decode.found()


def test_kv_that_arrives_without_records_is_not_taken_for_verified(pairs: Any) -> None:
    pair = pairs()
    send(pair.prefill, pair.decode, pair.pages, pair.into, state=False)
    assert not pair.decode.records.unpack(pair.into, "d")
    pair.go_on()
    assert pair.decode.found() == {("UNWRITTEN", "d")}


def test_records_are_taken_once(pairs: Any) -> None:
    pair = pairs()
    pair.prefill.records.pack(pair.pages)
    send(pair.prefill, pair.decode, pair.pages, pair.into)
    assert pair.decode.records.unpack(pair.into, "d")
    assert not pair.decode.records.unpack(pair.into, "d")


def test_records_of_another_key_are_refused(pairs: Any) -> None:
    pair = pairs(key=8)
    pair.prefill.records.pack(pair.pages)
    send(pair.prefill, pair.decode, pair.pages, pair.into)
    with pytest.raises(LayoutError, match="another layout or key"):
        pair.decode.records.unpack(pair.into, "d")


def test_the_list_of_another_pool_is_refused(pairs: Any) -> None:
    pair = pairs()
    pair.prefill.kv_args.page_size = 64
    with pytest.raises(ConfigError, match="pages of 64 tokens"):
        pair.prefill.records.join(pair.prefill.kv_args)
