"""Where a scheduler is hooked, what it must not have, and how all of it is undone."""

# pyright: reportMissingImports=false

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import torch

from kvcanary.engines.base import Patches
from kvcanary.engines.sglang.allocator import AllocatorWatch, Ear, Method
from kvcanary.engines.sglang.batches import Batches
from kvcanary.engines.sglang.contract import check_allocator, check_drafts, check_scheduler, check_version
from kvcanary.engines.sglang.drafts import DraftWatch, find_draft
from kvcanary.engines.sglang.late import LateLedger
from kvcanary.engines.sglang.pools import Space, find_spaces, make_layout
from kvcanary.engines.sglang.prefixes import TreeWatch, unknown_tree
from kvcanary.engines.sglang.quarantine import Healer, check_quarantine
from kvcanary.engines.sglang.requests import Requests
from kvcanary.engines.sglang.sentinel import write_sentinels
from kvcanary.errors import ConfigError

if TYPE_CHECKING:
    from kvcanary.canary import Canary
    from kvcanary.layout import PoolLayout

_UNARMED = {
    "WINDOW_FREED_EARLY": "slot numbers stay on the device; a window slot that is freed early is found as WINDOW",
}
_TREE_CHECKS = ("FREED_WHILE_PUBLISHED", "PUBLISHED_UNOWNED", "PUBLISHED_UNWRITTEN", "STALE_EPOCH")
_NO_TREE = "the prefix tree is over slots that no group has"


def attach(scheduler: Any, canary: Canary, unarmed: dict[str, str]) -> Callable[[], None]:
    """Watch a scheduler; returns what undoes it.

    Raises:
        ConfigError: it cannot be watched; it is left as it was.
    """
    release = version("sglang")
    check_version(release)
    check_scheduler(scheduler, release)
    _check_features(scheduler)
    watch = _SchedulerWatch(scheduler, canary, release, {**unarmed, **_UNARMED})
    try:
        watch.begin()
    except BaseException:
        watch.end()
        raise
    return watch.end


def _check_features(scheduler: Any) -> None:
    """Raises ConfigError for what would be watched wrongly."""
    from sglang.srt.runtime_context import get_parallel

    parallel, runner = get_parallel(), scheduler.tp_worker.model_runner
    topk = getattr(scheduler.server_args, "speculative_eagle_topk", None) or 1
    trees = scheduler.draft_worker is not None and topk > 1
    found = {
        "the decode side of disaggregation (KV arrives from other hosts)": scheduler.disaggregation_mode.value
        == "decode",
        "hierarchical cache (--enable-hierarchical-cache: KV comes back from the host)": _on(
            scheduler, "enable_hierarchical_cache"
        ),
        "an external cache linker (KV comes back from elsewhere)": _on(
            scheduler, "enable_unified_cache_external_linker"
        ),
        "HiSparse (slots hold other tokens by turns)": _on(scheduler, "enable_hisparse"),
        "unified memory (slots move under the table)": _on(scheduler, "enable_unified_memory"),
        "prefill and decode on two streams (--enable-pdmux)": _on(scheduler, "enable_pdmux"),
        "a diffusion language model (tokens are rewritten in place)": scheduler.dllm_config is not None,
        "an encoder-decoder model": bool(runner.model_config.is_encoder_decoder),
        "pipeline parallelism": parallel.pp_size > 1,
        "context parallelism": parallel.attn_cp_size > 1 or parallel.attn_dcp_size > 1,
        "draft trees with pages of several tokens (accepted tokens move within pages)": trees
        and scheduler.token_to_kv_pool_allocator.page_size > 1,
    }
    refused = [name for name, present in found.items() if present]
    if refused:
        raise ConfigError(
            f"this SGLang server uses {'; '.join(refused)}, which kvcanary cannot watch without false alarms; switch "
            "it off, or run with KVCANARY_MODE=off"
        )


def _on(scheduler: Any, name: str) -> bool:
    return bool(getattr(scheduler, name, False))


class _SchedulerWatch:
    """One scheduler: its pool, its requests, its forwards."""

    def __init__(self, scheduler: Any, canary: Canary, version: str, unarmed: dict[str, str]) -> None:
        self._scheduler = scheduler
        self._canary = canary
        self._version = version
        self._unarmed = unarmed
        self._patches = Patches()
        self._batch: Any = None
        self._epoch = 0
        self._allocators: list[AllocatorWatch] = []
        self._bound = False

    def begin(self) -> None:
        """Bind the canary to the pool and hook everything.

        Raises:
            ConfigError: the pool cannot be watched; call :meth:`end`.
        """
        from sglang.srt.runtime_context import get_parallel

        scheduler, canary = self._scheduler, self._canary
        runner, table = scheduler.tp_worker.model_runner, scheduler.req_to_token_pool
        self._patches.claim(scheduler)
        spaces, uncovered = find_spaces(runner, scheduler.token_to_kv_pool_allocator)
        for space in spaces:
            check_allocator(space.allocator, self._version)
        draft, gap = find_draft(scheduler, spaces[0])
        if draft is not None:
            check_drafts(scheduler.draft_worker, self._version)
            spaces[0] = replace(spaces[0], draft=draft)
        parallel = get_parallel()
        # Tensors of the canary are used inside and outside of inference mode.
        with torch.inference_mode(mode=False):
            layout = make_layout(spaces, uncovered + _beside(scheduler, gap), int(parallel.attn_tp_rank))
            if bool(scheduler.is_fully_idle()):
                with torch.no_grad():
                    write_sentinels(spaces, layout)
            batch_rows = int(table.size)
            max_tokens = _max_tokens(scheduler, runner, batch_rows, layout.groups[0].num_slots)
            max_rows = 2 * batch_rows + 64
            tree_gap = unknown_tree(scheduler.tree_cache) if spaces[0].translation is None else _NO_TREE
            self._make_parts(spaces, layout, max_tokens=max_tokens, max_rows=max_rows, follow_tree=not tree_gap)
            unarmed = self._unarmed | dict.fromkeys(_TREE_CHECKS if tree_gap else (), tree_gap)
            canary.bind(
                layout,
                max_tokens=max_tokens,
                max_batch_rows=batch_rows,
                max_rows=max_rows,
                engine="sglang",
                engine_version=self._version,
                unarmed=unarmed,
                quarantine=self._healer,
                ranks={
                    "tp_rank": int(parallel.tp_rank),
                    "pp_rank": int(parallel.pp_rank),
                    "dp_rank": int(parallel.dp_rank or 0),
                },
            )
            self._bound = True
            self._drafts = DraftWatch(canary) if draft is not None else None
            self._hook(spaces, runner)
            self._arm()

    def _make_parts(
        self, spaces: list[Space], layout: PoolLayout, *, max_tokens: int, max_rows: int, follow_tree: bool
    ) -> None:
        """What hears the scheduler and speaks of it.

        Raises:
            ConfigError: mode ``quarantine`` where several ranks would have to act as one.
        """
        from sglang.srt.runtime_context import get_parallel

        scheduler, canary = self._scheduler, self._canary
        table = scheduler.req_to_token_pool
        self._ear = Ear(canary)
        # Every page may change hands within a step.
        room = 4 * layout.groups[0].num_slots
        self._ledger = LateLedger(canary, spaces[0].name, room, layout.device) if follow_tree else None
        self._requests = Requests(canary, self._ear, table, spaces, max_rows, self._ledger)
        self._batches = Batches(
            self._requests, table, spaces, max_rows=int(table.size), max_tokens=max_tokens, device=layout.device
        )
        self._healer = None
        if canary.config.mode == "quarantine":
            check_quarantine(int(get_parallel().tp_size), int(scheduler.server_args.dp_size or 1))
            self._healer = Healer(scheduler, canary, self._requests)

    def end(self) -> None:
        """Take every hook out and leave the pool. Idempotent."""
        self._patches.undo()
        if self._bound:
            self._bound = False
            self._canary.unbind()

    def _hook(self, spaces: list[Space], runner: Any) -> None:
        patches, scheduler = self._patches, self._scheduler
        for space in spaces:
            ledger = self._ledger if space is spaces[0] else None
            allocator = AllocatorWatch(self._canary, self._ear, space.name, space.allocator, ledger)
            self._allocators.append(allocator)
            allocator.wire(patches)
            if space.allocator.page_size == 1:  # slots that move within pages take draft trees, refused above
                patches.wrap(space.pool, "move_kv_cache", self._move(space.name))
        patches.wrap(scheduler.token_to_kv_pool_allocator, "clear", self._clear)
        if self._ledger is not None:
            TreeWatch(self._ledger, scheduler.tree_cache).wire(patches)
        self._requests.wire(patches, scheduler)
        if self._healer is not None:
            self._healer.wire(patches)
        patches.wrap(scheduler, "record_weight_version_change", self._weights)
        patches.wrap(scheduler, "run_batch", self._run_batch)
        if self._drafts is not None:
            self._drafts.wire(patches, scheduler.draft_worker)
        patches.wrap(runner, "forward", self._forward)

    # --- the forward --------------------------------------------------------------------------------------

    def _run_batch(self, original: Method) -> Method:
        def run_batch(batch: Any, *args: Any, **kwargs: Any) -> Any:
            self._batch = batch
            try:
                return original(batch, *args, **kwargs)
            finally:
                self._batch = None

        return run_batch

    def _forward(self, original: Method) -> Method:
        def forward(forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
            batch, mode = self._batch, forward_batch.forward_mode
            if batch is None or mode.is_idle() or mode.is_prebuilt() or not forward_batch.batch_size:
                return original(forward_batch, *args, **kwargs)
            if not self._watchable(len(batch.reqs), forward_batch.batch_size):
                return original(forward_batch, *args, **kwargs)
            self._batches.fill(batch, forward_batch)
            ledger = self._ledger
            if ledger is not None:
                ledger.settle()
            result = self._checked(forward_batch, lambda: original(forward_batch, *args, **kwargs))
            self._ear.forward()
            if ledger is not None:
                ledger.settle()  # before what this forward finds is known
            return result

        return forward

    def _checked(self, forward_batch: Any, run: Callable[[], Any]) -> Any:
        canary, drafts = self._canary, self._drafts
        rest = None if drafts is None else drafts.rest
        if drafts is None or rest is None:
            with canary.step():
                canary.enter(self._batches.make(forward_batch))
                result = run()
                canary.leave()
            return result
        rest.enter_context(canary.step())
        canary.enter(self._batches.make(forward_batch))
        result = run()
        drafts.model_done(rest, forward_batch.input_ids.shape[0])
        return result

    def _watchable(self, requests: int, rows: int) -> bool:
        """Whether every row of the batch is a request's; otherwise checking pauses until that is so again.

        Members of a beam have rows of their own, which are copied onto each other: nothing says what they should hold.
        """
        plain = rows == requests
        if plain == self._canary.armed:
            return plain
        self._requests.forget()
        if plain:
            self._arm()
        else:
            self._canary.disarm("a beam search runs: its rows are copied onto each other")
        return plain

    def _move(self, group: str) -> Callable[[Method], Method]:
        """Accepted tokens of a draft tree move together; their records go along."""

        def make(original: Method) -> Method:
            def move_kv_cache(tgt_loc: torch.Tensor, src_loc: torch.Tensor) -> Any:
                if tgt_loc.numel():
                    self._ear.about(self._canary.move, group, src_loc.flatten(), tgt_loc.flatten())
                return original(tgt_loc, src_loc)

            return move_kv_cache

        return make

    # --- what starts anew ---------------------------------------------------------------------------------

    def _clear(self, original: Method) -> Method:
        def clear() -> Any:
            result = original()
            # Every slot is free and every request gone; nothing runs.
            self._requests.forget()
            if self._canary.bound:
                self._arm()
            return result

        return clear

    def _arm(self) -> None:
        if self._ledger is not None:
            self._ledger.drop()
        self._canary.arm()
        for allocator in self._allocators:
            allocator.tell_free()

    def _weights(self, original: Method) -> Method:
        def record_weight_version_change(*args: Any, **kwargs: Any) -> Any:
            # Called after each update, whatever brought the weights.
            self._epoch += 1
            tell = partial(self._ear, self._canary.weights_updated, self._epoch)
            tell() if self._ledger is None else self._ledger.later(tell)
            return original(*args, **kwargs)

        return record_weight_version_change


def _max_tokens(scheduler: Any, runner: Any, rows: int, slots: int) -> int:
    """Most tokens of one forward: a prefill within its budget but for its last request, and a decode of each row."""
    drafts = int(getattr(scheduler.server_args, "speculative_num_draft_tokens", None) or 1)
    chunk = int(getattr(scheduler, "chunked_prefill_size", None) or 0)
    prefill = max(int(scheduler.max_prefill_tokens), chunk) + int(runner.model_config.context_len)
    return min(prefill, slots) + rows * drafts


def _beside(scheduler: Any, gap: str) -> list[str]:
    """What this engine has and no source covers; ``gap``: of the draft model."""
    found = [gap] if gap else []
    if scheduler.disaggregation_mode.value == "prefill":
        found.append("KV on its way to decode instances")
    return found
