"""Pages of one group: a free list, how many hold each page, and the index by which prefixes are found."""

from __future__ import annotations

import random
from collections.abc import Sequence

from kvcanary.engines.simulated.oracle import Oracle


class Pool:
    """Pages are handed out, shared and given back. A page that nobody holds stays while the index names it.

    Attributes:
        free: pages to be handed out, in order.
        holders: how many requests hold each page.
        by_key, key_of: the prefix index: pages by the hash of everything up to their end, and back.
    """

    def __init__(self, group: str, pages: int, rng: random.Random, oracle: Oracle) -> None:
        self.group = group
        self._oracle = oracle
        self.free = list(range(1, pages))
        rng.shuffle(self.free)
        self.holders = [0] * pages
        self.by_key: dict[int, int] = {}
        self.key_of: dict[int, int] = {}
        self._idle: dict[int, None] = {}

    @property
    def room(self) -> int:
        """Pages that can be handed out now."""
        return len(self.free) + len(self._idle)

    def take(self, request: str, count: int) -> list[int]:
        """Hand out ``count`` pages; there must be :attr:`room`."""
        short = count - len(self.free)
        if short > 0:
            idle = list(self._idle)[:short]
            self.forget(idle)
        pages, self.free = self.free[:count], self.free[count:]
        for page in pages:
            self.holders[page] += 1
        self._oracle.took(self.group, request, pages)
        return pages

    def share(self, request: str, pages: Sequence[int], epoch: int | None = None) -> None:
        """One more request holds pages that exist already; ``epoch``: found by their prefix, under these weights."""
        for page in pages:
            self.holders[page] += 1
            self._idle.pop(page, None)
        self._oracle.shared(self.group, request, pages, epoch)

    def drop(self, request: str, pages: Sequence[int]) -> None:
        """A request holds pages no more; what nobody holds and nobody can find is given back."""
        self._oracle.left(self.group, request, pages)
        freed: list[int] = []
        for page in pages:
            self.holders[page] -= 1
            if self.holders[page] == 0:
                if page in self.key_of:
                    self._idle[page] = None
                else:
                    freed.append(page)
        if freed:
            self.give_back(freed)

    def give_back(self, pages: Sequence[int]) -> None:
        """Pages are free."""
        self._oracle.freed(self.group, pages)
        self.free += pages

    def publish(self, request: str, keys: Sequence[int], pages: Sequence[int], epoch: int) -> None:
        """Let pages be found by their keys."""
        for key, page in zip(keys, pages, strict=True):
            self.by_key[key] = page
            self.key_of[page] = key
            self._oracle.published(self.group, page, epoch)

    def evict(self, pages: Sequence[int]) -> None:
        """Let pages be found no more."""
        for page in pages:
            self.by_key.pop(self.key_of.pop(page), None)
            self._oracle.evicted(self.group, page)

    def forget(self, pages: Sequence[int]) -> None:
        """Evict pages that nobody holds, and give them back."""
        if pages:
            for page in pages:
                del self._idle[page]
            self.evict(pages)
            self.give_back(pages)

    def forget_all(self) -> None:
        """Empty the index; pages in use stay in use."""
        self.forget(list(self._idle))
        if self.key_of:
            self.evict(list(self.key_of))
