"""What the prefix index of one attention group holds: who wrote each page when, and which page it follows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from kvcanary.canary import Canary
    from kvcanary.engines.base import Patches


class _Origin(NamedTuple):
    request: str
    forward: int
    """the next one when the page was published"""
    parent: int
    """the page before it in its writer's table, or -1"""


class PrefixIndex:
    """Pages of one allocator of 5.18 or later. Belongs to the engine's thread."""

    def __init__(self, allocator: Any) -> None:
        self._allocator = allocator
        self._ledger = allocator.ledger
        self._origins: dict[int, _Origin] = {}
        self._since: dict[int, int] = {}
        self._marking = ""

    def wire(self, patches: Patches, canary: Canary) -> None:
        """Listen to who gets pages and who publishes them."""

        def get_free_blocks(original: Callable[..., Any]) -> Callable[..., Any]:
            def wrapped(index: int, num_blocks: int) -> Any:
                blocks = original(index, num_blocks)
                if index == self._allocator.index:
                    self._since.update(dict.fromkeys(blocks, canary.next_forward))
                return blocks

            return wrapped

        def mark_complete_blocks(original: Callable[..., Any]) -> Callable[..., Any]:
            def wrapped(request_id: str, *args: Any, **kwargs: Any) -> Any:
                self._marking = request_id
                try:
                    return original(request_id, *args, **kwargs)
                finally:
                    self._marking = ""

            return wrapped

        def register_new_hash(original: Callable[..., Any]) -> Callable[..., Any]:
            def wrapped(block_id: int, block_hash: int) -> Any:
                identical = original(block_id, block_hash)
                if identical is None:
                    parent = _before(block_id, self._allocator.block_table.get(self._marking, ()))
                    self._origins[block_id] = _Origin(self._marking, canary.next_forward, parent)
                return identical

            return wrapped

        patches.wrap(self._allocator.pool, "get_free_blocks", get_free_blocks)
        patches.wrap(self._allocator, "mark_complete_blocks", mark_complete_blocks)
        patches.wrap(self._ledger, "register_new_hash", register_new_hash)

    def since(self, page: int) -> int:
        """The forward from which the page's present contents are written; 0: before the watch began."""
        return self._since.get(page, 0)

    def holders(self, pages: set[int]) -> list[str]:
        """Requests whose tables hold one of the pages."""
        if not pages:
            return []
        return [name for name, table in self._allocator.block_table.items() if not pages.isdisjoint(table)]

    def written(self, requests: Iterable[str], forward: int) -> set[int]:
        """Published pages that the requests may have written from ``forward`` on."""
        names = set(requests)
        return {page for page, origin in self._published() if origin.request in names and origin.forward > forward}

    def with_descendants(self, pages: set[int]) -> set[int]:
        """The pages, and all published ones that were computed from them.

        What was published before the watch began may have been computed from any other such page.
        """
        unknown = self._ledger.block_to_hash.keys() - self._origins.keys()
        if not pages.isdisjoint(unknown):
            pages = pages | unknown
        children: dict[int, list[int]] = {}
        if pages:
            for page, origin in self._published():
                children.setdefault(origin.parent, []).append(page)
        found, waiting = set(pages), list(pages)
        while waiting:
            new = [child for child in children.get(waiting.pop(), ()) if child not in found]
            found.update(new)
            waiting += new
        return found

    def drop(self, pages: set[int]) -> tuple[int, ...]:
        """Take pages out of the index, and free those that nobody holds. Returns the ones that were in it.

        Whoever holds one of the others lets go of it as of a page that was never published.
        """
        ledger = self._ledger
        dropped = tuple(sorted(page for page in pages if page in ledger.block_to_hash))
        for page in dropped:
            ledger.hash_to_block.pop(ledger.block_to_hash.pop(page), None)
            self._origins.pop(page, None)
        idle = [page for page in dropped if page in ledger.cached_blocks]
        for page in idle:
            del ledger.cached_blocks[page]
        if idle:
            self._allocator.pool.free_blocks(self._allocator.index, idle)
        return dropped

    def _published(self) -> list[tuple[int, _Origin]]:
        indexed = self._ledger.block_to_hash
        return [(page, origin) for page, origin in self._origins.items() if page in indexed]


def _before(page: int, table: Sequence[int]) -> int:
    # From the end: pages are published as they fill up.
    for place in range(len(table) - 1, 0, -1):
        if table[place] == page:
            return table[place - 1]
    return -1
