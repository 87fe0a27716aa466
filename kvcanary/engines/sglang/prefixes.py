"""The prefix tree: which pages it takes in, and which it gives up.

Two trees are known, SGLang's ``UnifiedRadixCache`` over either of its cores, and the older ``RadixCache``. A tree frees
what it gives up, so that is told before.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from kvcanary.engines.base import Patches
    from kvcanary.engines.sglang.allocator import Method
    from kvcanary.engines.sglang.late import LateLedger

_UNIFIED, _PLAIN = "UnifiedRadixCache", "RadixCache"


def unknown_tree(tree: Any) -> str:
    """Why nothing can be told of a tree; "": it can."""
    kind = type(tree).__name__
    if kind in {_UNIFIED, _PLAIN}:
        return ""
    return f"the prefix tree {kind} is none of those that kvcanary follows, {_UNIFIED} and {_PLAIN}"


class TreeWatch:
    """One tree over the slots of one allocator."""

    def __init__(self, ledger: LateLedger, tree: Any) -> None:
        self._ledger = ledger
        self._tree = tree
        self._page_size = int(tree.page_size)
        self._evicting = False

    def wire(self, patches: Patches) -> None:
        """Listen."""
        tree = self._tree
        patches.after(tree, "insert", self._inserted)
        if type(tree).__name__ == _PLAIN:
            patches.wrap(tree, "evict", self._evict)
            patches.wrap(tree.token_to_kv_pool_allocator, "free_segment", self._free_segment)
        else:
            patches.wrap(tree, "_apply_eviction_result", self._apply_eviction_result)
            patches.wrap(tree, "_apply_cache_action", self._apply_cache_action)

    def _inserted(self, result: Any, params: Any) -> None:
        """All but what was there before is new in the tree: whole pages of it."""
        if self._tree.disable or getattr(result, "rotation_tail_declined", False):
            return
        end = len(params.key) // self._page_size * self._page_size
        if result.prefix_len < end:
            self._tell("publish", [params.value[result.prefix_len : end]])

    # --- RadixCache -----------------------------------------------------------------------------------------

    def _evict(self, original: Method) -> Method:
        def evict(params: Any) -> Any:
            self._evicting = True
            try:
                return original(params)
            finally:
                self._evicting = False

        return evict

    def _free_segment(self, original: Method) -> Method:
        def free_segment(free_index: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if self._evicting:
                self._tell("evict", [free_index])
            return original(free_index, *args, **kwargs)

        return free_segment

    # --- UnifiedRadixCache ----------------------------------------------------------------------------------

    def _apply_eviction_result(self, original: Method) -> Method:
        def apply_eviction_result(result: Any) -> Any:
            for component, values in result.device_frees.items():
                if component.is_full:
                    self._tell("evict", values)
            self._evicting = True
            try:
                return original(result)
            finally:
                self._evicting = False

        return apply_eviction_result

    def _apply_cache_action(self, original: Method) -> Method:
        def apply_cache_action(action: Any) -> Any:
            # While pages are taken in, a plain free is of what the tree has already; the other one is of a node whose
            # window had gone, and whose slots the new ones replace.
            kind = type(action).__name__
            if kind == "FreeDeviceKVFullOnly" or (kind == "FreeDeviceKV" and self._evicting):
                self._tell("evict", action.indices)
            return original(action)

        return apply_cache_action

    def _tell(self, kind: str, values: Iterable[torch.Tensor]) -> None:
        size = self._page_size
        for slots in values:
            self._ledger.tell(kind, "", slots if size == 1 else slots[::size] // size)
