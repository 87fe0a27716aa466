"""SGLang's real prefix trees over its real allocators: what they take in and give up reaches the ledger, in order."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from kvcanary.canary import Canary
from kvcanary.config import CanaryConfig
from kvcanary.engines.base import Patches
from kvcanary.engines.sglang.allocator import AllocatorWatch, Ear
from kvcanary.engines.sglang.late import LateLedger
from kvcanary.engines.sglang.prefixes import TreeWatch, unknown_tree
from kvcanary.events import (
    Event,
    FactsLost,
    OwnershipViolated,
    PagesFact,
    PrefixEvicted,
    PrefixPublished,
    WeightsUpdated,
)
from kvcanary.layout import AttentionGroup, KVSource, PoolLayout
from kvcanary.testing import EventRecorder

pytestmark = [pytest.mark.usefixtures("on_cpu"), pytest.mark.filterwarnings("ignore")]
SLOTS = 64


class Bench:
    """A canary over bytes of its own that hears one allocator and the tree over its slots."""

    def __init__(self, page_size: int, room: int = 1024) -> None:
        pages = SLOTS // page_size + 1
        view = torch.zeros(pages, page_size, 1, 8)
        group = AttentionGroup("full", "full", pages * page_size, page_size, (KVSource.from_view("k", view),))
        self.recorder = EventRecorder()
        self.canary = Canary(CanaryConfig(mode="log"), observers=[self.recorder]).start()
        self.canary.bind(PoolLayout((group,)), max_tokens=8, max_batch_rows=2, max_rows=2)
        self.canary.arm()
        self.ledger = LateLedger(self.canary, "full", room, torch.device("cpu"))
        self.patches = Patches()
        self.page_size = page_size
        self.looks = 0
        self.allocator = self._allocator()
        AllocatorWatch(self.canary, Ear(self.canary), "full", self.allocator, self.ledger).wire(self.patches)

    def watch(self, tree: Any) -> Any:
        TreeWatch(self.ledger, tree).wire(self.patches)
        return tree

    def told(self, *kinds: type[Event]) -> list[Any]:
        """Events of these types, after all that was told so far."""
        self.ledger.settle()
        self.looks += 1
        self.canary.weights_updated(self.looks)
        with self.canary.step():
            pass
        self.canary.flush(10)
        self.recorder.wait_for(WeightsUpdated, lambda event: event.epoch == self.looks)
        return [event for event in self.recorder.events if isinstance(event, kinds)]

    def pages(self, kind: type[PagesFact]) -> list[int]:
        facts = self.told(kind)
        return sorted(page for fact in facts for run in fact.runs for page in range(run.first, run.first + run.count))

    def broken(self) -> list[str]:
        return [event.kind for event in self.told(OwnershipViolated)]

    def _allocator(self) -> Any:
        from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
        from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator

        if self.page_size == 1:
            return TokenToKVPoolAllocator(SLOTS, torch.bfloat16, "cpu", None, False)
        return PagedTokenToKVPoolAllocator(SLOTS, self.page_size, torch.bfloat16, "cpu", None, False)


def plain(bench: Bench) -> Any:
    from sglang.srt.mem_cache.radix_cache import RadixCache

    return bench.watch(RadixCache(params(bench)))


def unified(bench: Bench, core: str) -> Any:
    from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

    return bench.watch(UnifiedRadixCache(params(bench, tree_components=(ComponentType.FULL,), tree_core_backend=core)))


TREES: dict[str, Callable[[Bench], Any]] = {
    "plain": plain,
    "unified, python": lambda bench: unified(bench, "python"),
    "unified, rust": lambda bench: unified(bench, "rust"),
}


def params(bench: Bench, **more: Any) -> Any:
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams

    return CacheInitParams(
        disable=False,
        req_to_token_pool=None,
        token_to_kv_pool_allocator=bench.allocator,
        page_size=bench.page_size,
        **more,
    )


def insert(tree: Any, tokens: list[int], slots: torch.Tensor) -> Any:
    from sglang.srt.mem_cache.base_prefix_cache import InsertParams
    from sglang.srt.mem_cache.radix_cache import RadixKey

    return tree.insert(InsertParams(key=RadixKey(array("q", tokens), None), value=slots.clone()))


def evict(tree: Any, tokens: int) -> Any:
    from sglang.srt.mem_cache.base_prefix_cache import EvictParams

    return tree.evict(EvictParams(num_tokens=tokens))


@pytest.fixture
def benches() -> Iterator[Callable[..., Bench]]:
    made: list[Bench] = []

    def make(page_size: int = 1, **more: int) -> Bench:
        made.append(Bench(page_size, **more))
        return made[-1]

    yield make
    for bench in made:
        bench.patches.undo()
        bench.canary.stop(1)


@pytest.mark.parametrize("page_size", [1, 8])
@pytest.mark.parametrize("kind", TREES)
def test_what_a_tree_takes_in_and_gives_up_is_published_and_evicted(benches: Any, kind: str, page_size: int) -> None:
    bench = benches(page_size)
    tree = TREES[kind](bench)
    slots = bench.allocator.alloc(24)
    insert(tree, list(range(24)), slots)
    pages = sorted(set((slots // page_size).tolist()))
    assert bench.pages(PrefixPublished) == pages
    evict(tree, 24)
    assert bench.pages(PrefixEvicted) == pages
    assert bench.allocator.available_size() == SLOTS
    assert bench.broken() == []


@pytest.mark.parametrize("kind", TREES)
def test_only_what_is_new_to_a_tree_is_published(benches: Any, kind: str) -> None:
    bench = benches()
    tree = TREES[kind](bench)
    first, second = bench.allocator.alloc(8), bench.allocator.alloc(12)
    insert(tree, list(range(8)), first)
    insert(tree, [*range(8), 50, 51, 52, 53], second)
    assert bench.pages(PrefixPublished) == sorted(first.tolist() + second[8:].tolist())


@pytest.mark.parametrize("kind", TREES)
def test_a_page_freed_while_a_tree_holds_it_is_found(benches: Any, kind: str) -> None:
    bench = benches()
    tree = TREES[kind](bench)
    slots = bench.allocator.alloc(8)
    insert(tree, list(range(8)), slots)
    assert bench.broken() == []
    bench.allocator.free(slots[3:4])
    assert bench.broken() == ["FREED_WHILE_PUBLISHED"]


@pytest.mark.parametrize("kind", TREES)
def test_a_tree_that_takes_in_a_free_page_is_found(benches: Any, kind: str) -> None:
    bench = benches()
    tree = TREES[kind](bench)
    slots = bench.allocator.alloc(8)
    bench.allocator.free(slots[7:])
    insert(tree, list(range(8)), slots)
    assert bench.broken() == ["PUBLISHED_UNOWNED"]


def test_a_tree_of_another_kind_is_said_to_be_unknown() -> None:
    from sglang.srt.mem_cache.pure_swa_radix_cache import PureSWARadixCache

    tree = PureSWARadixCache.__new__(PureSWARadixCache)
    assert unknown_tree(tree) == (
        "the prefix tree PureSWARadixCache is none of those that kvcanary follows, UnifiedRadixCache and RadixCache"
    )


# --- late -------------------------------------------------------------------------------------------------


class Arrival:
    """A copy's event, as CUDA has them."""

    def __init__(self) -> None:
        self.done = False

    def query(self) -> bool:
        return self.done


def test_numbers_are_told_in_order_and_not_before_they_have_arrived(
    benches: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = benches()
    events = [Arrival(), Arrival()]
    monkeypatch.setattr(bench.ledger, "_mark", iter(events).__next__)
    bench.ledger.tell("alloc", "", torch.tensor([3]))
    bench.ledger.tell("publish", "", torch.tensor([3]))
    events[1].done = True
    assert bench.told(PagesFact) == []
    events[0].done = True
    assert [type(fact).__name__ for fact in bench.told(PagesFact)] == ["PagesAllocated", "PrefixPublished"]


def test_a_ring_is_used_again_and_again_without_a_number_being_lost(benches: Any) -> None:
    bench = benches(room=7)
    for round_ in range(20):
        bench.ledger.tell("alloc", "", torch.arange(1 + round_ % 5) + 1)
        bench.ledger.tell("free", "", torch.arange(1 + round_ % 2) + 1)
        bench.ledger.settle()
    assert bench.told(FactsLost) == []
    assert len(bench.told(PagesFact)) >= 2


def test_numbers_that_find_no_room_are_told_as_lost(benches: Any) -> None:
    bench = benches(room=4)
    bench.ledger.tell("alloc", "", torch.tensor([1, 2, 3]))
    bench.ledger.tell("free", "", torch.tensor([1, 2]))
    assert [event.count for event in bench.told(FactsLost)] == [1]
    assert bench.broken() == []


def test_calls_keep_their_place_among_the_pages(benches: Any) -> None:
    bench = benches()
    order: list[str] = []
    bench.ledger.tell("alloc", "", torch.tensor([1]))
    bench.ledger.later(lambda: order.append("called"))
    assert order == []
    bench.ledger.settle()
    assert order == ["called"]


def test_what_is_on_its_way_is_dropped_when_all_starts_anew(benches: Any) -> None:
    bench = benches()
    bench.ledger.tell("alloc", "", torch.tensor([1]))
    bench.ledger.drop()
    assert bench.told(PagesFact) == []


def test_nothing_is_copied_for_a_run_without_a_ledger(benches: Any) -> None:
    bench = benches()
    ledger = LateLedger(bench.canary, "full", 0, torch.device("cpu"))
    ledger._wanted = False
    ledger.tell("alloc", "", torch.tensor([1]))
    assert bench.told(FactsLost) == []
