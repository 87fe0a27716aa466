"""The pool of 5.18 and later: one byte arena cut into sectors, which attention types trade with each other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from kvcanary.engines.transformers.rows import GroupView, ring_of
from kvcanary.layout import Arena, AttentionGroup, KVSource, PoolLayout

if TYPE_CHECKING:
    from kvcanary.canary import Canary
    from kvcanary.engines.base import Patches
    from kvcanary.engines.transformers.requests import Facts, Requests

_RESERVED_SECTORS = 2
"""Sector 0 is read by padding and stays zero; sector 1 takes padding's writes."""


class SectorPool:
    """Layout, tables and life cycle of one ``PagedAttentionCache`` with ``cache_allocators``."""

    def __init__(self, cache: Any) -> None:
        self._cache = cache
        # By number, which is the order of a forward's index lists. The name of an attention type is the key:
        # 5.18 has no attribute for it.
        items = sorted(cache.cache_allocators.items(), key=lambda item: item[1].index)
        self._names = [name for name, _ in items]
        self._allocators = [allocator for _, allocator in items]

    @property
    def views(self) -> tuple[GroupView, ...]:
        """Where a forward's keywords have each group."""
        return tuple(
            GroupView(allocator.index, name, ring_of(allocator))
            for name, allocator in zip(self._names, self._allocators, strict=True)
        )

    @property
    def inference(self) -> bool:
        """Whether the pool was made in inference mode, and takes writes in that mode only."""
        return bool(self._cache.cache_tensor.is_inference())

    @property
    def num_blocks(self) -> int:
        """Blocks of all groups, as many requests at most hold one of their own."""
        return sum(int(allocator.num_blocks) for allocator in self._allocators)

    def layout(self, tp_rank: int) -> PoolLayout:
        """The layout; sources are views of the arena."""
        return PoolLayout(
            tuple(
                self._group(name, allocator, tp_rank)
                for name, allocator in zip(self._names, self._allocators, strict=True)
            )
        )

    def _group(self, name: str, allocator: Any, tp_rank: int) -> AttentionGroup:
        arena = self._cache.cache_tensor
        blocks = arena.view(-1, allocator.bytes_per_block)
        page, per_sector = allocator.tokens_per_page, allocator.blocks_per_sector
        half = allocator.bytes_per_page // 2
        shape = (page, allocator.num_key_value_heads, allocator.head_dim)
        sources: list[KVSource] = []
        for place, layer in enumerate(allocator.layer_indices):
            for number, component in enumerate(("k", "v")):
                piece = blocks.narrow(1, (2 * place + number) * half, half)
                view = piece.view(allocator.cache_dtype).unflatten(1, shape)
                # One run holds all heads of a rank, so the rank number places its words among those of the others.
                sources.append(
                    KVSource.from_view(
                        f"layer{layer}.{component}", view, layer=layer, component=component, first_head=tp_rank
                    )
                )
        ring = ring_of(allocator)
        return AttentionGroup(
            name=name,
            kind="full" if ring is None else "swa",
            num_slots=blocks.shape[0] * page,
            page_size=page,
            sources=tuple(sources),
            window=ring,
            ring=ring,
            max_rewind=1,
            index_stride=allocator.block_physical_stride,
            page_entry_stride=allocator.block_physical_stride // page,
            null_pages=tuple(range(per_sector)),
            null_is_zero=True,
            trash_pages=tuple(range(per_sector, _RESERVED_SECTORS * per_sector)),
            arena=Arena("sectors", per_sector),
            offset_follows_position=True,
        )

    def trash(self, group: int) -> tuple[int, int]:
        """The index that padding writes to, and the slot it should be."""
        allocator = self._allocators[group]
        return int(allocator.write_trash_index), allocator.blocks_per_sector * allocator.tokens_per_page

    def layers(self, group: int) -> Sequence[int]:
        """Layers of a group, in the order of its sources."""
        layers: Sequence[int] = self._allocators[group].layer_indices
        return layers

    def place(self, layer: int) -> int:
        """The layer number of the sources of a layer."""
        return layer

    def update(
        self, key: torch.Tensor, value: torch.Tensor, layer: int, indices: list[torch.Tensor], by_dict: bool
    ) -> None:
        """Write one token through the engine's own path, reading nothing."""
        nothing = [index[:0] for index in indices]
        if not by_dict:
            self._cache.update(key, value, layer, nothing, indices)
            return
        lengths = {name: torch.zeros(2, dtype=torch.int32, device=key.device) for name in self._names}
        keywords = {
            "read_index": nothing,
            "write_index": indices,
            "block_table": None,
            "cu_seq_lens_k": lengths,
            "max_length_k": dict.fromkeys(self._names, 1),
        }
        self._cache.update(key, value, layer, kwargs=keywords)

    def space(self, group: int) -> int:
        """The group whose slots a group uses: each has its own."""
        return group

    def table(self, group: int, request: str) -> Sequence[int]:
        """Blocks of a request in a group."""
        blocks: Sequence[int] = self._allocators[group].block_table.get(request, ())
        return blocks

    def offloaded_tables(self, state: Any, arguments: Sequence[Any]) -> list[Sequence[int]]:
        """The engine frees a victim's blocks before it copies them out, so it hands their tables along."""
        tables = arguments[0][state.request_id]
        return [list(tables.get(name, ())) for name in self._names]

    # --- life cycle ---------------------------------------------------------------------------------------

    def wire(self, patches: Patches, canary: Canary, facts: Facts, requests: Requests) -> None:
        """Listen to the cache, its pool and its ledgers."""
        wires = _Wires(self._cache, self._allocators, canary, facts, requests)
        patches.wrap(self._cache, "can_store_request_tokens", wires.can_store_request_tokens)
        patches.wrap(self._cache, "search_prefix_match", wires.search_prefix_match)
        patches.wrap(self._cache, "mark_complete_blocks", wires.mark_complete_blocks)
        patches.wrap(self._cache, "prepare_fork_request", wires.prepare_fork_request)
        for group, allocator in enumerate(self._allocators):
            patches.wrap(allocator, "fork_blocks", wires.fork_blocks(group))
            patches.wrap(allocator, "copy_blocks", wires.copy_blocks(group))
            patches.wrap(allocator.ledger, "register_new_hash", wires.register_new_hash(group))
        # Last: from here on blocks are told, so whoever asks for them must be known already.
        patches.wrap(self._cache.pool, "free_blocks", wires.free_blocks)
        patches.wrap(self._cache.pool, "get_free_blocks", wires.get_free_blocks)


class _Wires:
    """One wrapper a method. What a call is about (whose blocks) is known to its caller, so callers leave a note."""

    def __init__(self, cache: Any, allocators: Sequence[Any], canary: Canary, facts: Facts, requests: Requests) -> None:
        self._cache = cache
        self._allocators = allocators
        self._canary = canary
        self._facts = facts
        self._requests = requests
        self._storing: Any = None
        """state of the request that blocks are being found for"""
        self._forking: Any = None
        """state of the request whose children are being made"""
        self._child = ""
        self._marking = ""
        """request whose complete blocks are being published"""
        self._published: list[set[int]] = [set() for _ in allocators]

    def can_store_request_tokens(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def can_store_request_tokens(state: Any, *args: Any, **kwargs: Any) -> Any:
            self._storing = state
            try:
                return original(state, *args, **kwargs)
            finally:
                self._storing = None

        return can_store_request_tokens

    def get_free_blocks(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def get_free_blocks(index: int, num_blocks: int) -> Any:
            blocks = original(index, num_blocks)
            if blocks and self._facts.enabled:
                request = self._child
                if self._storing is not None:
                    self._requests.admitted(self._storing)
                    request = self._storing.request_id
                self._facts(self._canary.alloc, index, request, list(blocks))
            return blocks

        return get_free_blocks

    def free_blocks(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def free_blocks(index: int, block_ids: Sequence[int]) -> Any:
            result = original(index, block_ids)
            if block_ids and self._facts.enabled:
                indexed = self._allocators[index].ledger.block_to_hash
                published = self._published[index]
                evicted = [block for block in block_ids if block in published and block not in indexed]
                if evicted:
                    published.difference_update(evicted)
                    self._facts(self._canary.evict, index, evicted)
                self._facts(self._canary.free, index, list(block_ids))
            return result

        return free_blocks

    def search_prefix_match(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def search_prefix_match(request_id: str, prompt_ids: Sequence[int]) -> Any:
            matched = original(request_id, prompt_ids)
            if matched:
                for group, allocator in enumerate(self._allocators):
                    blocks = allocator.block_table.get(request_id, ())[: matched // allocator.tokens_per_page]
                    self._requests.matched(request_id, group, blocks)
            return matched

        return search_prefix_match

    def mark_complete_blocks(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def mark_complete_blocks(state: Any, complete_blocks: Any) -> Any:
            self._marking = state.request_id
            try:
                return original(state, complete_blocks)
            finally:
                self._marking = ""

        return mark_complete_blocks

    def register_new_hash(self, group: int) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        def make(original: Callable[..., Any]) -> Callable[..., Any]:
            def register_new_hash(block_id: int, block_hash: int) -> Any:
                identical = original(block_id, block_hash)
                if not self._facts.enabled:
                    return identical
                if identical is None:
                    self._published[group].add(block_id)
                    self._facts(self._canary.publish, group, [block_id], request=self._marking)
                else:
                    # The request goes on with the block that was there before; its own is freed next.
                    self._facts(self._canary.reuse, group, self._marking, [identical])
                return identical

            return register_new_hash

        return make

    def prepare_fork_request(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def prepare_fork_request(src_state: Any, *args: Any, **kwargs: Any) -> Any:
            self._forking = src_state
            try:
                return original(src_state, *args, **kwargs)
            finally:
                self._forking = None

        return prepare_fork_request

    def fork_blocks(self, group: int) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        def make(original: Callable[..., Any]) -> Callable[..., Any]:
            def fork_blocks(source_request_id: str, dest_request_id: str, past_length: int) -> Any:
                if self._forking is not None:
                    self._requests.forked(dest_request_id, self._forking, past_length)
                self._child = dest_request_id
                try:
                    sources, targets = original(source_request_id, dest_request_id, past_length)
                finally:
                    self._child = ""
                table = self._allocators[group].block_table[dest_request_id]
                shared = list(table[: len(table) - len(targets)])
                if shared:
                    self._facts(self._canary.reuse, group, dest_request_id, shared)
                return sources, targets

            return fork_blocks

        return make

    def copy_blocks(self, group: int) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        def make(original: Callable[..., Any]) -> Callable[..., Any]:
            def copy_blocks(source_block_ids: Sequence[int], dest_block_ids: Sequence[int]) -> Any:
                result = original(source_block_ids, dest_block_ids)
                self._facts(self._canary.move, group, list(source_block_ids), list(dest_block_ids))
                return result

            return copy_blocks

        return make
