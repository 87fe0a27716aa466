"""SGLang's real allocators: what they hand out and take back reaches the owner table, once, and unread."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from kvcanary.canary import Canary
from kvcanary.config import CanaryConfig
from kvcanary.engines.base import Patches
from kvcanary.engines.sglang.allocator import AllocatorWatch, Ear
from kvcanary.layout import AttentionGroup, KVSource, PoolLayout
from kvcanary.record import OWNER_FREED, OWNER_HELD, parse_owner
from kvcanary.state import KIND_COUNTS, group_base

pytestmark = [pytest.mark.usefixtures("on_cpu"), pytest.mark.filterwarnings("ignore")]
SLOTS = 64


class Bench:
    """A canary over bytes of its own, listening to one allocator."""

    def __init__(self, allocator: Any) -> None:
        self.allocator = allocator
        page = int(allocator.page_size)
        tensor = torch.zeros((SLOTS + page) // page, page, 1, 8)
        group = AttentionGroup("full", "full", SLOTS + page, page, (KVSource.from_view("k", tensor),), trash_pages=(0,))
        self.canary = Canary(CanaryConfig(mode="log"))
        self.canary.bind(PoolLayout((group,)), max_tokens=8, max_batch_rows=2, max_rows=2)
        self.canary.arm()
        self.patches = Patches()
        self.watch = AllocatorWatch(self.canary, Ear(self.canary), "full", allocator)
        self.watch.wire(self.patches)

    def states(self) -> dict[int, int]:
        """Pages that somebody was told about, after the facts so far; reports included."""
        with self.canary.step():
            pass
        owners = self.canary.state.groups[0].owner.tolist()
        return {page: state for page, word in enumerate(owners) if page and (state := parse_owner(word).state)}

    def held(self) -> list[int]:
        return [page for page, state in self.states().items() if state == OWNER_HELD]

    def freed(self) -> list[int]:
        return [page for page, state in self.states().items() if state == OWNER_FREED]

    def findings(self) -> int:
        self.states()
        base = group_base(0) + KIND_COUNTS
        return int(self.canary.state.counters[base : base + 20].sum())


@pytest.fixture
def listen() -> Iterator[Callable[[int, bool], Bench]]:
    made: list[Bench] = []

    def make(page_size: int, need_sort: bool) -> Bench:
        from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
        from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator

        if page_size == 1:
            allocator = TokenToKVPoolAllocator(SLOTS, torch.bfloat16, "cpu", None, need_sort)
        else:
            allocator = PagedTokenToKVPoolAllocator(SLOTS, page_size, torch.bfloat16, "cpu", None, need_sort)
        made.append(Bench(allocator))
        return made[-1]

    yield make
    for bench in made:
        bench.patches.undo()
        bench.canary.stop(1)


@pytest.mark.parametrize("need_sort", [False, True])
def test_what_a_token_allocator_hands_out_is_held_until_it_comes_back(listen: Any, need_sort: bool) -> None:
    bench = listen(1, need_sort)
    taken = bench.allocator.alloc(5)
    assert bench.held() == taken.tolist()
    bench.allocator.free(taken[1:3])
    assert bench.freed() == taken[1:3].tolist()
    assert bench.findings() == 0


@pytest.mark.parametrize("need_sort", [False, True])
def test_everything_can_be_handed_out_and_taken_back_again_and_again(listen: Any, need_sort: bool) -> None:
    for page_size in (1, 8):
        bench = listen(page_size, need_sort)
        for _ in range(3):
            taken = bench.allocator.alloc(SLOTS)
            assert len(bench.held()) == SLOTS // page_size
            bench.allocator.free(taken[torch.randperm(SLOTS)])
            assert bench.held() == []
        assert bench.findings() == 0


def test_an_allotment_that_fails_is_none(listen: Any) -> None:
    bench = listen(1, False)
    bench.allocator.alloc(60)
    assert bench.allocator.alloc(10) is None
    assert len(bench.held()) == 60


def test_pages_are_held_from_their_first_slot_on(listen: Any) -> None:
    bench = listen(8, False)
    lengths = [torch.tensor([0, 0]), torch.tensor([10, 3])]
    taken = bench.allocator.alloc_extend(lengths[0], lengths[0], lengths[1], lengths[1], torch.tensor([-1, -1]), 13)
    pages = sorted(set((taken // 8).tolist()))
    assert len(pages) == 3
    assert bench.held() == pages
    one = bench.allocator.alloc_decode(torch.tensor([11]), torch.tensor([11]), taken[9:10])
    assert bench.held() == sorted({*pages, int(one[0]) // 8}) == pages, "the last page had room"


def test_frees_of_a_group_are_told_once_when_it_ends(listen: Any) -> None:
    for page_size in (1, 8):
        bench = listen(page_size, False)
        taken = bench.allocator.alloc(16)
        bench.allocator.free_group_begin()
        bench.allocator.free(taken[:8])
        bench.allocator.free_segment(taken[8:], start_pos=8)
        assert bench.freed() == []
        bench.allocator.free_group_end()
        assert bench.freed() == sorted(set((taken // page_size).tolist()))
        assert bench.findings() == 0


def test_a_view_that_changes_after_its_free_is_told_as_it_was(listen: Any) -> None:
    bench = listen(1, False)
    row = bench.allocator.alloc(4).clone()
    bench.allocator.free(row[:2])
    freed = row[:2].tolist()
    row.fill_(0)
    assert bench.freed() == freed


@pytest.mark.parametrize("need_sort", [False, True])
def test_what_is_free_when_records_are_reset_is_known_to_be_free(listen: Any, need_sort: bool) -> None:
    for page_size in (1, 8):
        bench = listen(page_size, need_sort)
        taken = bench.allocator.alloc(16)
        bench.allocator.free(taken[:8])
        bench.canary.arm()
        bench.watch.tell_free()
        assert sorted({*bench.freed(), *(taken[8:] // page_size).tolist()}) == list(range(1, SLOTS // page_size + 1))
        assert bench.findings() == 0
        bench.allocator.free(taken[:1])
        assert bench.findings() == 1


def test_a_second_free_is_found(listen: Any) -> None:
    for page_size in (1, 8):
        bench = listen(page_size, False)
        taken = bench.allocator.alloc(8)
        bench.allocator.free(taken)
        assert bench.findings() == 0
        bench.allocator.free(taken[:1])
        assert bench.findings() == 1


def test_both_sides_of_a_window_allocator_are_heard_through_its_own_calls() -> None:
    from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator
    from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

    pool = SWAKVPool(
        size=SLOTS, size_swa=SLOTS, page_size=1, dtype=torch.bfloat16, head_num=1, head_dim=8,
        swa_attention_layer_ids=[0], full_attention_layer_ids=[1], device="cpu",
    )  # fmt: skip
    whole = SWATokenToKVPoolAllocator(SLOTS, SLOTS, 1, torch.bfloat16, "cpu", pool, need_sort=False)
    full, swa = Bench(whole.full_attn_allocator), Bench(whole.swa_attn_allocator)
    taken = whole.alloc(6)
    assert full.held() == taken.tolist()
    assert len(swa.held()) == 6
    whole.free_swa(taken[:2])
    assert (len(full.held()), len(swa.held())) == (6, 4)
    whole.free_group_begin()
    whole.free_full(taken[:2])
    whole.free_segment(taken[2:], start_pos=2)
    whole.free_group_end()
    assert (full.held(), swa.held()) == ([], [])
    assert full.findings() == swa.findings() == 0
    for bench in (full, swa):
        bench.canary.stop(1)


def test_nothing_is_heard_once_the_pool_was_left(listen: Any) -> None:
    bench = listen(1, False)
    bench.canary.unbind()
    assert bench.allocator.alloc(3).tolist() == [1, 2, 3]
    bench.patches.undo()
    assert set(vars(bench.allocator)).isdisjoint({"alloc", "free", "merge_and_sort_free"})
