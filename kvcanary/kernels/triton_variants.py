"""The compiled forms of the kernels that one state needs."""

from __future__ import annotations

import itertools
from typing import Any

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
        """Mark with ``tile`` lanes; only the first of a forward asks whether its tokens are linked."""
        unlinked = first and not linked
        key = (mark_kernel, tile, first, unlinked, poison)
        return self._known.get(key) or self._add(
            key,
            _warps(tile),
            self._tuning.mark_registers,
            FIRST=first,
            UNLINKED=unlinked,
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

    def all(self) -> list[Kernel]:
        """Every form that any configuration or batch of such a layout can ask for.

        What this leaves out compiles in the first forward that needs it, perhaps one that a graph captures.
        """
        tiles = (self._tuning.mark_tile, self._tuning.decode_tile)
        both = (False, True)
        poisons = (False,) if self._poison == "off" else both
        return [
            self._workspace.describe,
            self.facts,
            self.abandon,
            *([] if self._layout.window_pair is None else [self.window]),
            *([self.fill, self.search] if self._poison == "full" else []),
            # Any batch may come with a translation, without rows, or for some of the groups only.
            *(self.check(plain=plain) for plain in both),
            *(
                self.mark(tile, first=True, linked=linked, poison=poison)
                for tile, linked, poison in itertools.product(tiles, both, poisons)
            ),
            *(
                self.mark(tile, first=False, linked=True, poison=poison)
                for tile, poison in itertools.product(tiles, poisons)
                if len({group.ring is None for group in self._layout.groups}) > 1  # rings are marked apart
            ),
            # Without flags: for fingerprints, and for a scrub by hand, which ends no forward either.
            *(self.sum(large=large, nonfinite=nonfinite) for large, nonfinite in itertools.product(both, both)),
            *(
                self.commit(last=last, nonfinite=nonfinite, poison=poison)
                for last, nonfinite, poison in itertools.product(both, both, poisons)
            ),
        ]

    def _add(self, key: tuple[Any, ...], warps: int, registers: int, **constants: object) -> Kernel:
        kernel = self._known[key] = Kernel(key[0], warps, registers, **constants)
        return kernel


def _warps(tile: int) -> int:
    return max(1, min(8, tile // 32))
