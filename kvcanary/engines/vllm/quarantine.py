"""Quarantine that heals: tainted blocks leave the prefix index, and whoever held them is computed anew.

It runs in the scheduler, before the output of the step that brought the finding is taken: the token of that step is
dropped with everything else that is in flight, so no token that was computed from a bad block leaves the engine.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

from kvcanary.engines.vllm.wire import Healed, Told, Wanted


def heal(scheduler: Any, wanted: Iterable[Wanted], now: float) -> list[Told]:
    """Take what is wanted out of service; returns what was done."""
    told: list[Told] = []
    for wish in wanted:
        told += [_recompute(scheduler, name, wish, now) for name in _concerned(scheduler, wish)]
        _evict(scheduler, wish.blocks)
    return told


def _concerned(scheduler: Any, wish: Wanted) -> list[str]:
    """The requests named, and all others that hold a block named or share one of theirs."""
    manager = scheduler.kv_cache_manager
    tables = {name: manager.get_block_ids(name) for name in scheduler.requests}
    bad = set(wish.blocks)
    for name in wish.requests:
        bad.update(_tainted(tables.get(name, ()), wish))
    names = [name for name in wish.requests if name in tables]
    names += [name for name, groups in tables.items() if name not in names and not bad.isdisjoint(chain(*groups))]
    return names


def _tainted(groups: Sequence[Sequence[int]], wish: Wanted) -> set[int]:
    """Blocks of a request from the bad one on; all of them when none is named."""
    if not wish.blocks:
        return {block for group in groups for block in group if block}
    if not 0 <= wish.group < len(groups):
        return set(wish.blocks)
    table = groups[wish.group]
    first = min((table.index(block) for block in wish.blocks if block in table), default=len(table))
    # Groups may count blocks of other sizes: what is computed after the bad one is not told apart there.
    others = chain(*(blocks for group, blocks in enumerate(groups) if group != wish.group))
    return {block for block in chain(table[first:], others) if block}


def _recompute(scheduler: Any, name: str, wish: Wanted, now: float) -> Told:
    request = scheduler.requests[name]
    left = request.num_output_tokens
    _evict(scheduler, _tainted(scheduler.kv_cache_manager.get_block_ids(name), wish))
    if request not in scheduler.running:
        # It waits, preempted or not yet begun: it holds no block, or gives its blocks back before it runs.
        return Healed(name, left, "" if not any(scheduler.kv_cache_manager.get_block_ids(name)) else "not running")
    scheduler.running.remove(request)
    scheduler._preempt_request(request, now, drop_stale_output=True)  # noqa: SLF001 - the engine's own way to recompute
    return Healed(name, left)


def _evict(scheduler: Any, blocks: Iterable[int]) -> None:
    scheduler.kv_cache_manager.evict_blocks(set(blocks))
