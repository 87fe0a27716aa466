"""The pool of 5.17: blocks of one size in shared tensors, drawn by many groups of equally many layers."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch

from kvcanary.engines.transformers.rows import GroupView, ring_of
from kvcanary.layout import AttentionGroup, KVSource, PoolLayout

if TYPE_CHECKING:
    from kvcanary.canary import Canary
    from kvcanary.engines.base import Patches
    from kvcanary.engines.transformers.requests import Facts, Requests


_SPACE = 0
"""Blocks are facts of the first group: the others share its slots."""


class BlockPool:
    """Layout, tables and life cycle of one ``PagedAttentionCache`` with a ``_block_manager``.

    All groups draw blocks of the same numbers over the same bytes: the first one has the sources, the others
    share its slots.
    """

    def __init__(self, cache: Any) -> None:
        self._cache = cache
        self._managers: list[Any] = list(cache.group_cache_managers)
        self._names = [f"{_kind(manager)}.{i}" for i, manager in enumerate(self._managers)]

    @property
    def views(self) -> tuple[GroupView, ...]:
        """Where a forward's keywords have each group."""
        return tuple(GroupView(i, _kind(manager), ring_of(manager)) for i, manager in enumerate(self._managers))

    @property
    def inference(self) -> bool:
        """Whether the pool was made in inference mode, and takes writes in that mode only."""
        return bool(self._cache.key_cache[0].is_inference())

    @property
    def num_blocks(self) -> int:
        """Blocks of the pool, as many requests at most hold one of their own."""
        return int(self._cache.num_blocks)

    def layout(self, tp_rank: int) -> PoolLayout:
        """The layout; sources are views of the key and value tensors."""
        blocks, page = self._cache.num_blocks + 2, self._cache.block_size
        sources = tuple(
            KVSource.from_view(
                f"place{place}.{component}",
                tensor.view(blocks, page, *tensor.shape[1:]),
                layer=place,
                component=component,
                first_head=tp_rank,
            )
            for component, tensors in (("k", self._cache.key_cache), ("v", self._cache.value_cache))
            for place, tensor in enumerate(tensors)
        )
        groups: list[AttentionGroup] = []
        for name, manager in zip(self._names, self._managers, strict=True):
            ring = ring_of(manager)
            groups.append(
                AttentionGroup(
                    name=name,
                    kind="full" if ring is None else "swa",
                    num_slots=blocks * page,
                    page_size=page,
                    sources=() if groups else sources,
                    shares=groups[0].name if groups else None,
                    window=ring,
                    ring=ring,
                    max_rewind=1,
                    null_pages=(blocks - 2,),
                    null_is_zero=True,
                    trash_pages=(blocks - 1,),
                    offset_follows_position=True,
                )
            )
        return PoolLayout(tuple(groups))

    def trash(self, group: int) -> tuple[int, int]:
        """The index that padding writes to, and the slot it should be."""
        del group  # one pool for all
        return int(self._cache.write_trash_index), (self._cache.num_blocks + 1) * self._cache.block_size

    def layers(self, group: int) -> Sequence[int]:
        """Layers of a group, by their place in the shared tensors."""
        where = self._cache.layer_index_to_group_indices
        return sorted(
            (layer for layer, (index, _) in where.items() if index == group), key=lambda layer: where[layer][1]
        )

    def place(self, layer: int) -> int:
        """The layer number of the sources of a layer: its place in the shared tensors."""
        return int(self._cache.layer_index_to_group_indices[layer][1])

    def update(
        self, key: torch.Tensor, value: torch.Tensor, layer: int, indices: list[torch.Tensor], by_dict: bool
    ) -> None:
        """Write one token through the engine's own path, reading nothing."""
        del by_dict  # 5.17 knows the index lists only
        self._cache.update(key, value, layer, [index[:0] for index in indices], indices)

    def space(self, group: int) -> int:
        """The group whose slots a group uses."""
        del group  # one pool for all
        return _SPACE

    def table(self, group: int, request: str) -> Sequence[int]:
        """Blocks of a request in a group."""
        blocks: Sequence[int] = self._managers[group].block_table.get(request, ())
        return blocks

    def offloaded_tables(self, state: Any, arguments: Sequence[Any]) -> list[Sequence[int]]:
        """Blocks are copied out before they are freed, so the tables still hold them."""
        del arguments  # 5.17 hands none along
        return [list(self.table(group, state.request_id)) for group in range(len(self._managers))]

    # --- life cycle ---------------------------------------------------------------------------------------

    def wire(self, patches: Patches, canary: Canary, facts: Facts, requests: Requests) -> None:
        """Listen to the cache and its block manager."""
        wires = _Wires(self._cache, canary, facts, requests)
        patches.wrap(self._cache, "allocate_blocks", wires.allocate_blocks)
        patches.wrap(self._cache, "search_prefix_match", wires.search_prefix_match)
        patches.wrap(self._cache, "mark_shareable_blocks_as_complete", wires.mark_shareable_blocks_as_complete)
        patches.wrap(self._cache, "copy_cache", wires.copy_cache)
        for group, manager in enumerate(self._managers):
            patches.wrap(manager, "fork_blocks", wires.fork_blocks(group))
        blocks = self._cache._block_manager  # noqa: SLF001 - the pool has no public name
        patches.wrap(blocks, "mark_shareable_blocks_as_complete", wires.publish)
        # Last: from here on blocks are told, so whoever asks for them must be known already.
        patches.wrap(blocks, "free_blocks", wires.free_blocks)
        patches.wrap(blocks, "uninitialize_unshared_block", wires.uninitialize_unshared_block)
        patches.wrap(blocks, "has_enough_free_blocks", wires.has_enough_free_blocks)
        patches.wrap(blocks, "get_free_blocks", wires.get_free_blocks)


def _kind(manager: Any) -> str:
    return "full_attention" if ring_of(manager) is None else "sliding_attention"


class _Wires:
    """One wrapper a method. What a call is about (whose blocks) is known to its caller, so callers leave a note."""

    def __init__(self, cache: Any, canary: Canary, facts: Facts, requests: Requests) -> None:
        self._cache = cache
        self._blocks = cache._block_manager  # noqa: SLF001 - the pool has no public name
        self._canary = canary
        self._facts = facts
        self._requests = requests
        self._storing = ""
        """request that blocks are being found for"""
        self._children: deque[str] = deque()
        """children that get blocks next, one call each"""
        self._marking = ""
        """request whose complete blocks are being published"""

    def allocate_blocks(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def allocate_blocks(n_blocks: int, request_id: str, allocated_blocks: int) -> Any:
            self._storing = request_id
            try:
                return original(n_blocks, request_id, allocated_blocks)
            finally:
                self._storing = ""

        return allocate_blocks

    def get_free_blocks(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def get_free_blocks(n_blocks: int, last_block_id: int | None, shareable: bool, group_id: int) -> Any:
            blocks = original(n_blocks, last_block_id, shareable, group_id)
            request = self._children.popleft() if self._children else self._storing
            if blocks and self._facts.enabled:
                state = self._requests.state_of(self._storing)
                if state is not None:
                    self._requests.admitted(state)
                self._facts(self._canary.alloc, _SPACE, request, list(blocks))
            return blocks

        return get_free_blocks

    def has_enough_free_blocks(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def has_enough_free_blocks(n_blocks: int) -> Any:
            blocks = self._blocks
            missing = n_blocks - len(blocks._uninit_block_ids)  # noqa: SLF001 - here and below, the pool has no other names
            cached = list(islice(reversed(blocks._init_block_ids), missing)) if missing > 0 else []  # noqa: SLF001
            enough = original(n_blocks)
            gone = [block for block in cached if block not in blocks._init_block_ids]  # noqa: SLF001
            if gone:
                self._facts(self._canary.evict, _SPACE, gone)
                self._facts(self._canary.free, _SPACE, gone)
            return enough

        return has_enough_free_blocks

    def free_blocks(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def free_blocks(blocks: Sequence[int], shareable: bool) -> Any:
            freed = [block for block in blocks if not shareable or self._ends(block)]
            result = original(blocks, shareable)
            if freed:
                self._facts(self._canary.free, _SPACE, freed)
            return result

        return free_blocks

    def _ends(self, block: int) -> bool:
        """Whether dropping one reference frees the block; complete ones are kept cached instead."""
        item = self._blocks._id_to_block[block]  # noqa: SLF001
        return item.ref_count == 1 and not item.is_complete

    def uninitialize_unshared_block(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def uninitialize_unshared_block(block_id: int) -> Any:
            result = original(block_id)
            self._facts(self._canary.free, _SPACE, [block_id])
            return result

        return uninitialize_unshared_block

    def search_prefix_match(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def search_prefix_match(request_id: str, prompt_ids: Sequence[int]) -> Any:
            matched = original(request_id, prompt_ids)
            if matched:
                table = self._cache.group_cache_managers[0].block_table.get(request_id, ())
                self._requests.matched(request_id, _SPACE, table[: matched // self._cache.block_size])
            return matched

        return search_prefix_match

    def mark_shareable_blocks_as_complete(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def mark_shareable_blocks_as_complete(state: Any, num_complete_blocks: int) -> Any:
            self._marking = state.request_id
            try:
                return original(state, num_complete_blocks)
            finally:
                self._marking = ""

        return mark_shareable_blocks_as_complete

    def publish(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def mark_shareable_blocks_as_complete(
            num_complete_blocks: int, allocated_blocks: list[int], prompt_ids: Sequence[int]
        ) -> Any:
            known = self._blocks._id_to_block  # noqa: SLF001
            first = len(allocated_blocks)
            while first and not known[allocated_blocks[first - 1]].is_complete:
                first -= 1
            before = allocated_blocks[first:]
            result = original(num_complete_blocks, allocated_blocks, prompt_ids)
            after = allocated_blocks[first:]
            published = [new for old, new in zip(before, after, strict=True) if old == new and known[new].is_complete]
            # The request goes on with blocks that were there before; its own ones were freed.
            adopted = [new for old, new in zip(before, after, strict=True) if old != new]
            if published:
                self._facts(self._canary.publish, _SPACE, published, request=self._marking)
            if adopted:
                self._facts(self._canary.reuse, _SPACE, self._marking, adopted)
            return result

        return mark_shareable_blocks_as_complete

    def fork_blocks(self, group: int) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        def make(original: Callable[..., Any]) -> Callable[..., Any]:
            def fork_blocks(parent_request_id: str, children_request_ids: Sequence[str], block_manager: Any) -> Any:
                parent = self._requests.state_of(parent_request_id)
                if parent is not None:
                    for child in children_request_ids:
                        self._requests.forked(child, parent, parent.position_offset)
                self._children.extend(children_request_ids)
                try:
                    sources, targets = original(parent_request_id, children_request_ids, block_manager)
                finally:
                    self._children.clear()
                for child in children_request_ids:
                    table = self._cache.group_cache_managers[group].block_table[child]
                    own = len(targets) // len(children_request_ids)
                    if len(table) > own:
                        self._facts(self._canary.reuse, _SPACE, child, list(table[: len(table) - own]))
                return sources, targets

            return fork_blocks

        return make

    def copy_cache(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def copy_cache(list_source_blocks: Sequence[int], list_forked_blocks: Sequence[int]) -> Any:
            result = original(list_source_blocks, list_forked_blocks)
            self._facts(self._canary.move, _SPACE, list(list_source_blocks), list(list_forked_blocks))
            return result

        return copy_cache
