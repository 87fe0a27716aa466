"""A scheduler that puts its pages in order while requests run: moves, and one copy instead of two."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvcanary.engines.simulated.requests import Request

if TYPE_CHECKING:
    from kvcanary.engines.simulated.engine import SimulatedEngine


def defragment(engine: SimulatedEngine, request: Request) -> None:
    """Move a running request's pages elsewhere, for all who hold them; the index and the tables follow.

    Forwards that are launched still read the old ones. What is copied out meanwhile stays where it is.
    """
    for group, pages in request.pages.items():
        pool = engine.pools[group]
        sharers = {page: [r for r in engine.running if page in r.pages.get(group, ())] for page in pages if page}
        old = [page for page, who in sharers.items() if len(who) == pool.holders[page]][: len(pool.free)]
        fresh = pool.take(request.name, len(old))
        engine.copy_pages(request, group, old, fresh)
        for before, after in zip(old, fresh, strict=True):
            _repoint(engine, sharers[before], group, before, after, mover=request)


def _repoint(
    engine: SimulatedEngine, sharers: Sequence[Request], group: str, before: int, after: int, *, mover: Request
) -> None:
    pool = engine.pools[group]
    if before in pool.key_of:
        key = pool.key_of[before]
        pool.evict([before])
        pool.publish(mover.name, [key], [after], engine.epoch)
    for one in sharers:
        if one is not mover:
            pool.share(one.name, [after])
        if group == "full":
            engine.unmap(one, [before])
        one.pages[group][one.pages[group].index(before)] = after
        engine.mapped(one)
        pool.drop(one.name, [before])


def deduplicate(engine: SimulatedEngine, request: Request) -> None:
    """Have a running request use the pages that the index has for its text, and give up its own copies."""
    if not engine.style.cache or request.epoch != engine.epoch:
        return
    size = engine.style.page_size
    for group, pages in request.pages.items():
        pool = engine.pools[group]
        for block in range(min(request.computed, len(request.tokens)) // size):
            own, other = pages[block], pool.by_key.get(engine.block_key(request, block))
            if own and other not in (own, None) and own not in pool.key_of:
                pool.share(request.name, [other], engine.epoch)
                pages[block] = other
                pool.drop(request.name, [own])
                engine.oracle.replaced(group, request.name, range(block * size, (block + 1) * size))
