"""The scheduler's half: what its block pool and its requests do, told to the worker beside each step.

It needs no canary and no device: it lives where the scheduler lives, which may be another process.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Iterable, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from kvcanary.engines.base import Patches
from kvcanary.engines.vllm.contract import check_scheduler
from kvcanary.engines.vllm.media import Span, is_salted, spans_of
from kvcanary.engines.vllm.quarantine import heal
from kvcanary.engines.vllm.wire import (
    ATTRIBUTE,
    NO_GROUP,
    Admitted,
    Blocks,
    Copied,
    Finished,
    KnownIds,
    Preempted,
    Told,
    pack,
    starts_of,
    take_wanted,
)
from kvcanary.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Generator

_NOBODY = ""


class SchedulerWatch:
    """One scheduler with its block pool. All calls come from the scheduler's own thread."""

    def __init__(self, scheduler: Any, version: str) -> None:
        self.scheduler = scheduler
        self._version = version
        self._patches = Patches()
        self._told: list[Told] = []
        self._groups: dict[int, int] = {}
        """group that got each block last"""
        self._asking = (-1, _NOBODY)
        """group and request that the pool works for at the moment"""

    @property
    def _drafts_ahead(self) -> bool:
        """The scheduler counts on drafts that the device may have rejected: only the device knows how far rows are."""
        return bool(self.scheduler.num_spec_tokens) and bool(self.scheduler.scheduler_config.async_scheduling)

    def begin(self) -> None:
        """Listen.

        Raises:
            ConfigError: the scheduler cannot be watched; call :meth:`end`.
        """
        check_scheduler(self.scheduler, self._version)
        _refuse_connectors(self.scheduler)
        patches, manager = self._patches, self.scheduler.kv_cache_manager
        patches.claim(self.scheduler)
        pool = manager.block_pool
        for one in manager.coordinator.single_type_managers:
            for name in ("allocate_new_blocks", "allocate_external_computed_blocks", "add_local_computed_blocks"):
                patches.wrap(one, name, self._asks(one.kv_cache_group_id))
        patches.wrap(pool, "get_new_blocks", self._get_new_blocks)
        patches.wrap(pool, "free_blocks", self._free_blocks)
        patches.wrap(pool, "touch", self._touch)
        patches.wrap(pool, "cache_full_blocks", self._cache_full_blocks)
        patches.wrap(pool, "_maybe_evict_cached_block", self._evict)
        patches.wrap(pool, "reset_prefix_cache", self._reset_prefix_cache)
        patches.wrap(pool, "move_block_hashes", self._move_block_hashes)
        patches.wrap(manager, "take_kv_cache_block_copies", self._take_copies)
        patches.wrap(self.scheduler, "_preempt_request", self._preempt_request)
        patches.wrap(self.scheduler, "_free_request", self._free_request)
        patches.wrap(self.scheduler, "update_from_output", self._update_from_output)
        patches.wrap(self.scheduler, "schedule", self._schedule)
        free = [block for block in pool.blocks if block.ref_cnt == 0 and block.block_hash is None]
        self._told.append(Blocks("free", NO_GROUP, _NOBODY, tuple(_ids(free))))

    def end(self) -> None:
        """Take every hook out. Idempotent."""
        self._patches.undo()
        self._told.clear()

    # --- a step -------------------------------------------------------------------------------------------

    def _schedule(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def schedule(*args: Any, **kwargs: Any) -> Any:
            before, self._told = self._told, []
            output = original(*args, **kwargs)
            # Blocks go to requests while these are scheduled, and a block's owner must be known by name first.
            starts = starts_of(output)
            told = [*before, *self._admitted(output, starts), *self._told, *self._known(output, starts)]
            setattr(output, ATTRIBUTE, pack(told))
            self._told = []
            return output

        return schedule

    def _admitted(self, output: Any, starts: dict[str, int]) -> list[Told]:
        cached = output.scheduled_cached_reqs
        names = [new.req_id for new in output.scheduled_new_reqs]
        names += [name for name in cached.req_ids if name in cached.resumed_req_ids]
        found = [(name, self.scheduler.requests[name]) for name in names]
        return [Admitted(name, starts[name], _identity(request), self._media(request)) for name, request in found]

    def _known(self, output: Any, starts: dict[str, int]) -> list[Told]:
        if self._drafts_ahead:
            return []
        requests = self.scheduler.requests
        ids = (self._id_before(requests[name], starts[name]) for name in output.num_scheduled_tokens)
        return [KnownIds(array("i", ids).tobytes())]

    def _id_before(self, request: Any, start: int) -> int:
        tokens = request.all_token_ids
        # With asynchronous scheduling the newest tokens are not here yet.
        if not 0 < start <= len(tokens) or request.prompt_embeds is not None:
            return -1
        if request.mm_features and is_salted(self._media(request), start - 1):
            return -1
        return int(tokens[start - 1])

    def _media(self, request: Any) -> tuple[Span, ...]:
        # An encoder's inputs are no part of the decoder's prompt.
        return spans_of(request) if request.mm_features and not self.scheduler.is_encoder_decoder else ()

    def _update_from_output(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def update_from_output(scheduler_output: Any, model_runner_output: Any) -> Any:
            wanted = take_wanted(model_runner_output)
            if wanted:
                self._told += heal(self.scheduler, wanted, time.monotonic())
            return original(scheduler_output, model_runner_output)

        return update_from_output

    # --- requests -----------------------------------------------------------------------------------------

    def _preempt_request(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def preempt_request(request: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(request, *args, **kwargs)
            self._told.append(Preempted(request.request_id))
            return result

        return preempt_request

    def _free_request(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def free_request(request: Any, *args: Any, **kwargs: Any) -> Any:
            tokens = tuple(request.all_token_ids) if _came_to_its_end(request) else None
            result = original(request, *args, **kwargs)
            self._told.append(Finished(request.request_id, tokens))
            return result

        return free_request

    # --- blocks -------------------------------------------------------------------------------------------

    @contextmanager
    def _for(self, group: int, request: str) -> Generator[None]:
        before, self._asking = self._asking, (group, request)
        try:
            yield
        finally:
            self._asking = before

    def _asks(self, group: int) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        def make(original: Callable[..., Any]) -> Callable[..., Any]:
            def asks(*args: Any, **kwargs: Any) -> Any:
                request: str = args[0] if args else kwargs["request_id"]
                with self._for(group, request):
                    return original(*args, **kwargs)

            return asks

        return make

    def _get_new_blocks(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def get_new_blocks(num_blocks: int) -> Any:
            blocks = original(num_blocks)
            group, request = self._asking
            ids = _ids(blocks)
            self._groups.update(dict.fromkeys(ids, group))
            self._tell("alloc", request, ids)
            return blocks

        return get_new_blocks

    def _free_blocks(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def free_blocks(ordered_blocks: Iterable[Any]) -> Any:
            blocks = list(ordered_blocks)
            result = original(blocks)
            # A hashed block stays readable in the prefix index: it is free when it is evicted. A count below zero
            # is a free too many, which the ledger is to see.
            own = [block for block in blocks if block.pool in (None, self.scheduler.kv_cache_manager.block_pool)]
            gone = [block for block in own if block.ref_cnt < 0 or (block.ref_cnt == 0 and block.block_hash is None)]
            self._tell("free", _NOBODY, _ids(gone))
            return result

        return free_blocks

    def _touch(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def touch(blocks: Sequence[Any]) -> Any:
            result = original(blocks)
            self._tell("reuse", self._asking[1], _ids(blocks))
            return result

        return touch

    def _cache_full_blocks(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def cache_full_blocks(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            call = dict(zip(_CACHE_ARGUMENTS, args, strict=False)) | kwargs
            first, last = call["num_cached_blocks"], call["num_full_blocks"]
            mask = call.get("block_mask")
            blocks = call["blocks"][first:last]
            kept = blocks if mask is None else [block for block, keep in zip(blocks, mask, strict=True) if keep]
            self._tell("publish", call["request"].request_id, _ids(kept))
            return result

        return cache_full_blocks

    def _evict(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def maybe_evict_cached_block(block: Any) -> Any:
            evicted = original(block)
            if evicted:
                self._evicted([block])
            return evicted

        return maybe_evict_cached_block

    def _reset_prefix_cache(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def reset_prefix_cache() -> Any:
            cached = [block for block in self.scheduler.kv_cache_manager.block_pool.blocks if block.block_hash]
            done = original()
            if done:
                self._evicted(cached)
            return done

        return reset_prefix_cache

    def _evicted(self, blocks: Sequence[Any]) -> None:
        self._tell("evict", _NOBODY, _ids(blocks))
        self._tell("free", _NOBODY, [block.block_id for block in blocks if block.ref_cnt == 0])

    def _move_block_hashes(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def move_block_hashes(src_block: Any, dst_block: Any) -> Any:
            result = original(src_block, dst_block)
            self._tell("evict", _NOBODY, [src_block.block_id])
            self._tell("publish", _NOBODY, [dst_block.block_id])
            return result

        return move_block_hashes

    def _take_copies(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def take_kv_cache_block_copies() -> Any:
            copies, retained = original()
            for copy in copies:
                group = self._groups.get(copy.dst_block_id, -1)
                self._told.append(Copied(group, (copy.src_block_id,), (copy.dst_block_id,)))
            return copies, retained

        return take_kv_cache_block_copies

    def _tell(self, kind: str, request: str, blocks: Sequence[int]) -> None:
        """Blocks of one call belong to one group, but frees of a whole request may come in one call."""
        groups: dict[int, list[int]] = {}
        for block in blocks:
            groups.setdefault(self._groups.get(block, -1), []).append(block)
        self._told += [Blocks(kind, group, request, tuple(ids)) for group, ids in groups.items() if group >= 0]


_CACHE_ARGUMENTS = (
    "request",
    "blocks",
    "num_cached_blocks",
    "num_full_blocks",
    "block_size",
    "kv_cache_group_id",
    "block_mask",
)


def _ids(blocks: Iterable[Any]) -> list[int]:
    return [block.block_id for block in blocks if not block.is_null]


def _identity(request: Any) -> bytes:
    """What vLLM's block hashes separate equal tokens by, as far as it holds for the whole request."""
    lora, salt = request.lora_request, request.cache_salt or ""
    adapter = f"{lora.lora_name}\0{lora.lora_path}" if lora is not None else ""
    return f"{adapter}\0{salt}".encode() if adapter or salt else b""


def _came_to_its_end(request: Any) -> bool:
    return request.status.name in ("FINISHED_STOPPED", "FINISHED_LENGTH_CAPPED")


def _refuse_connectors(scheduler: Any) -> None:
    if scheduler.connector is not None:
        raise ConfigError(
            f"a KV connector ({type(scheduler.connector).__name__}) loads blocks by itself, and this adapter does not "
            "follow such loads yet: it would report every loaded block as unwritten. Run without kv_transfer_config"
        )
