"""Quarantine that heals: tainted blocks leave the prefix index, and whoever held them is computed anew.

It runs in the scheduler, before the output of the step that brought the finding is taken: the token of that step is
dropped with everything else that is in flight, so no token that was computed from a bad block leaves the engine.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

from kvcanary.engines.vllm.wire import Healed, Told, Wanted, Withdrawn


def heal(scheduler: Any, wanted: Iterable[Wanted], now: float) -> list[Told]:
    """Take what is wanted out of service; returns what was done."""
    told: list[Told] = []
    for wish in wanted:
        manager = scheduler.kv_cache_manager
        names = _concerned(scheduler, wish)
        bad = set(wish.blocks).union(*(_tainted(manager.get_block_ids(name), wish) for name in names))
        manager.evict_blocks(bad)
        if wish.group >= 0:
            told.append(Withdrawn(wish.incident, wish.group, tuple(sorted(bad))))
        told += [_recompute(scheduler, name, wish, now) for name in names]
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
    """Blocks of a request from the bad one on; all of them when none that it holds is named."""
    if not wish.blocks:
        return {block for group in groups for block in group if block}
    if not 0 <= wish.group < len(groups):
        return set(wish.blocks)
    table = groups[wish.group]
    first = min((table.index(block) for block in wish.blocks if block in table), default=0)
    # Groups may count blocks of other sizes: what is computed after the bad one is not told apart there.
    others = chain(*(blocks for group, blocks in enumerate(groups) if group != wish.group))
    return {block for block in chain(table[first:], others) if block}


def _recompute(scheduler: Any, name: str, wish: Wanted, now: float) -> Told:
    request = scheduler.requests[name]
    left = request.num_output_tokens
    if request not in scheduler.running:
        # It waits, preempted or not yet begun: it holds no block, or gives its blocks back before it runs.
        held = any(scheduler.kv_cache_manager.get_block_ids(name))
        return Healed(wish.incident, name, left, "it holds blocks and does not run" if held else "")
    scheduler.running.remove(request)
    # It may resume in the very next step: as the engine does where it forces preemptions, the request must not count as
    # scheduled in the step before, or the earlier runner is not sent its tokens.
    scheduler.prev_step_scheduled_req_ids.discard(name)
    scheduler._preempt_request(request, now, drop_stale_output=True)  # noqa: SLF001 - the engine's own way to recompute
    return Healed(wish.incident, name, left)
