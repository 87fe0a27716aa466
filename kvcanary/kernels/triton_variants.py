"""The compiled forms of the kernels that one state needs."""

from __future__ import annotations

import itertools
from typing import Any

from kvcanary.kernels.descriptors import is_plain
from kvcanary.kernels.triton_bytes import sum_kernel
from kvcanary.kernels.triton_check import check_kernel
from kvcanary.kernels.triton_facts import facts_kernel
from kvcanary.kernels.triton_launch import Kernel
from kvcanary.kernels.triton_mark import mark_kernel
from kvcanary.kernels.triton_poison import fill_kernel, search_kernel
from kvcanary.kernels.triton_seal import abandon_kernel, commit_kernel
from kvcanary.kernels.triton_window import window_kernel
from kvcanary.kernels.triton_workspace import Workspace
from kvcanary.layout import PoolLayout
from kvcanary.state import PoisonMode

POISON_TILE = 32


class Variants:
    """Kernels by what varies between launches, made when they are first asked for.

    Attributes:
        facts, window, abandon, fill, search: these have one form.
    """

    def __init__(self, workspace: Workspace, layout: PoolLayout, header_words: int, poison: PoisonMode) -> None:
        self._workspace = workspace
        self._tuning = tuning = workspace.tuning
        self._layout = layout
        self._poison = poison
        self._header = 1 << (header_words - 1).bit_length()
        self._known: dict[tuple[Any, ...], Kernel] = {}
        self.facts = Kernel(facts_kernel, _warps(tuning.facts_tile), TILE=tuning.facts_tile)
        self.window = Kernel(window_kernel, _warps(tuning.window_tile), POW2=workspace.pow2, TILE=tuning.window_tile)
        self.abandon = Kernel(abandon_kernel, 4, HEADER=self._header)
        self.fill = Kernel(fill_kernel, 1, POW2=workspace.pow2, TILE=POISON_TILE)
        self.search = Kernel(search_kernel, 1, POW2=workspace.pow2, TILE=POISON_TILE)

    def mark(self, tile: int, *, first: bool, linked: bool, poison: bool) -> Kernel:
        """Mark with ``tile`` lanes."""
        key = (mark_kernel, tile, first, linked, poison)
        return self._known.get(key) or self._add(
            key,
            _warps(tile),
            self._tuning.mark_registers,
            FIRST=first,
            UNLINKED=not linked,
            POISON=poison,
            POW2=self._workspace.pow2,
            TILE=tile,
            SUM=min(self._tuning.sum_tile, 4 * tile),
        )

    def check(self, *, plain: bool) -> Kernel:
        """Check; ``plain`` when all groups of the launch are."""
        tile, registers = self._tuning.check_tile, self._tuning.check_registers
        key = (check_kernel, plain)
        return self._known.get(key) or self._add(
            key,
            min(self._tuning.check_warps, _warps(tile)),
            registers,
            PLAIN=plain,
            POW2=self._workspace.pow2,
            TILE=tile,
        )

    def sum(self, *, large: bool, nonfinite: bool) -> Kernel:
        """The byte kernel for few or many items."""
        key = (sum_kernel, large, nonfinite)
        if key in self._known:
            return self._known[key]
        workspace = self._workspace
        items, sub, warps, registers = self._tuning.large if large else self._tuning.small
        return self._add(
            key,
            max(warps, min(8, workspace.block // 256)),
            registers,
            ITEMS=items,
            SUB=sub,
            BLOCK=workspace.block,
            NONFINITE=nonfinite,
            WORDS=workspace.words,
            BYTES=workspace.bytes,
            ALIKE=workspace.alike,
            POW2=workspace.pow2,
        )

    def commit(self, *, last: bool, nonfinite: bool, poison: bool) -> Kernel:
        """Commit; ``last`` of the forward, with flags of values that are not finite, and a look for poison."""
        tile = self._tuning.commit_tile
        key = (commit_kernel, last, nonfinite, poison)
        return self._known.get(key) or self._add(
            key,
            _warps(tile),
            0,
            LAST=last,
            NONFINITE=nonfinite,
            POISON=poison,
            POW2=self._workspace.pow2,
            TILE=tile,
            HEADER=self._header,
        )

    def variants(self, *, rare: bool) -> list[Kernel]:
        """What serving needs; with ``rare`` every form that there is."""
        tiles = (self._tuning.mark_tile, self._tuning.decode_tile)
        plain = all(is_plain(group) for group in self._layout.groups)
        rings = any(group.ring is not None for group in self._layout.groups)
        both = (False, True)
        poisons = both if rare else (self._poison != "off",)
        firsts = both if rings or rare else (True,)
        return [
            self._workspace.describe,
            self.facts,
            self.abandon,
            *([self.window] if rare else []),
            *([self.fill, self.search] if rare or self._poison == "full" else []),
            # Any batch may come with a translation, or without rows.
            *(self.check(plain=value) for value in (both if rare or plain else (False,))),
            *(
                self.mark(tile, first=first, linked=linked, poison=poison)
                for tile, first, linked, poison in itertools.product(tiles, firsts, both if rare else (True,), poisons)
            ),
            *(
                self.sum(large=large, nonfinite=nonfinite)
                for large, nonfinite in itertools.product(both, both if rare else (True,))
            ),
            *(
                self.commit(last=last, nonfinite=nonfinite, poison=poison)
                for last, nonfinite, poison in itertools.product(
                    both if rare else (True,), both if rare else (True,), poisons
                )
            ),
        ]

    def _add(self, key: tuple[Any, ...], warps: int, registers: int, **constants: object) -> Kernel:
        kernel = self._known[key] = Kernel(key[0], warps, registers, **constants)
        return kernel


def _warps(tile: int) -> int:
    return max(1, min(8, tile // 32))
