"""Slots handed out and taken back. Their numbers lie on the device, and are told without a look at them.

What an allocator hands out is the head of its list of free pages, so its length, which the host knows, says which
part that is: no number is read and no kernel is launched for an allotment.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from kvcanary.canary import Canary
    from kvcanary.engines.base import Patches
    from kvcanary.engines.sglang.late import LateLedger

Method = Callable[..., Any]
_FORWARDS_KEPT = 4
"""SGLang has at most two forwards in flight; what an older one reads is read."""


class Ear:
    """Makes the canary's lifecycle calls, and keeps what they name alive until the device has read it.

    SGLang's lists are made on one stream and read by the facts on another; memory that nobody holds would be handed
    out on the first before the second is done.
    """

    def __init__(self, canary: Canary) -> None:
        self._canary = canary
        self._kept: deque[list[torch.Tensor]] = deque([[] for _ in range(_FORWARDS_KEPT)])

    def __call__(self, call: Callable[..., object], *args: Any, **kwargs: Any) -> None:
        """Make a call, unless the pool was left in the meantime."""
        if self._canary.bound:
            call(*args, **kwargs)

    def about(self, call: Callable[..., object], group: str, *args: Any) -> None:
        """Make a call about pages that only the device knows."""
        self._kept[0] += [item for item in args if isinstance(item, torch.Tensor)]
        self(call, group, *args, judged=True)

    def forward(self) -> None:
        """The next forward is about to be launched."""
        self._kept.rotate()
        self._kept[0].clear()


class AllocatorWatch:
    """One allocator over one slot space: SGLang's token or page allocator, whichever wraps it.

    Args:
        canary: bound.
        ear: what calls are made through.
        group: over the allocator's pages.
        allocator: SGLang's.
        ledger: also told, where there is one for the group.
    """

    def __init__(self, canary: Canary, ear: Ear, group: str, allocator: Any, ledger: LateLedger | None = None) -> None:
        self._canary = canary
        self._ledger = ledger
        self._ear = ear
        self._group = group
        self._allocator = allocator
        self._free: torch.Tensor = allocator.free_pages

    def wire(self, patches: Patches) -> None:
        """Listen."""
        by_token = self._allocator.page_size == 1
        patches.wrap(self._allocator, "merge_and_sort_free", self._sorted)
        for name in ("alloc",) if by_token else ("alloc", "alloc_extend", "alloc_decode"):
            patches.wrap(self._allocator, name, self._taken)
        if by_token:
            patches.wrap(self._allocator, "free", self._token_freed)
        else:
            patches.wrap(self._allocator, "_release_page_ids", self._pages_freed)

    def tell_free(self) -> None:
        """All that is free now, which nobody was told of: records have just been reset."""
        pages = self._allocator.get_all_free_pages()
        if pages.numel():
            self._ear.about(self._canary.free, self._group, pages)

    def _taken(self, original: Method) -> Method:
        def take(*args: Any, **kwargs: Any) -> Any:
            self._free = self._allocator.free_pages
            result = original(*args, **kwargs)
            count = self._free.shape[0] - self._allocator.free_pages.shape[0]
            if result is not None and count:
                self._ear.about(self._canary.alloc, self._group, "", self._free[:count])
                if self._ledger is not None:
                    self._ledger.tell("alloc", "", self._free[:count])
            return result

        return take

    def _sorted(self, original: Method) -> Method:
        def merge_and_sort_free() -> Any:
            result = original()
            self._free = self._allocator.free_pages
            return result

        return merge_and_sort_free

    def _token_freed(self, original: Method) -> Method:
        def free(free_index: torch.Tensor) -> Any:
            # Within a group frees are only noted; its end comes here again with all of them.
            if self._allocator.free_group is None and free_index.numel():
                # A copy: it may be a view of a table row that is about to change.
                self._freed(free_index.detach().flatten().clone())
            return original(free_index)

        return free

    def _pages_freed(self, original: Method) -> Method:
        def release_page_ids(*page_ids: torch.Tensor) -> Any:
            for ids in page_ids:
                if ids.numel():
                    self._freed(ids)
            return original(*page_ids)

        return release_page_ids

    def _freed(self, pages: torch.Tensor) -> None:
        self._ear.about(self._canary.free, self._group, pages)
        if self._ledger is not None:
            self._ledger.tell("free", "", pages)
