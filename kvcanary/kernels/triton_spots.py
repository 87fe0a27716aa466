"""Tables of what takes poison, made once for a state and read by its kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import IntEnum

from kvcanary.kernels.descriptors import fill_row
from kvcanary.kernels.poison import fill_runs, poison_runs
from kvcanary.layout import KVSource, PoolLayout, Run
from kvcanary.record import Keys


class PoisonWord(IntEnum):
    """Words of a group's row in the table of what takes poison in one part."""

    SPOTS = 0
    """address of its runs, see :class:`SpotWord`"""
    COUNT = 1
    """runs; 0: the group takes none"""
    KEY = 2
    FILLED = 3
    """1: pages are filled when they are handed out"""


POISON_ROW = 4


class SpotWord(IntEnum):
    """Words of a run that may take poison."""

    ADDRESS = 0
    PAGE_STRIDE = 1
    TOKEN_STRIDE = 2
    NUM_BYTES = 3


SPOT_ROW = 4


Upload = Callable[[list[list[int]]], int]
"""Puts rows on the device for good; gives their address."""


class PoisonTables:
    """One table ``[groups, POISON_ROW]`` a part, and one of what is filled when pages are handed out.

    Attributes:
        filled: address of the latter; its rows are the spaces'.
    """

    def __init__(self, layout: PoolLayout, keys: Keys, upload: Upload) -> None:
        self._layout = layout
        self._key = keys.fingerprint
        self._upload = upload
        self._filled = [fill_runs(layout, g) if layout.spaces[g] == g else [] for g in range(len(layout.groups))]
        self._parts: dict[str, tuple[int, int]] = {}
        for part in dict.fromkeys(part for group in layout.groups for part in group.parts):
            runs = [poison_runs(layout, g, part) for g in range(len(layout.groups))]
            self._parts[part] = self._table(runs), max(map(len, runs))
        self.filled = self._table(self._filled)

    def part(self, name: str) -> int:
        """Address of the table of a part; 0 when no group has it."""
        return self._parts.get(name, (0, 0))[0]

    def most_runs(self, name: str) -> int:
        """Runs of the group that has most of them in a part."""
        return self._parts.get(name, (0, 0))[1]

    def fill_runs(self, space: int) -> int:
        """Runs of a space that are filled."""
        return len(self._filled[space])

    def _table(self, runs: Sequence[Sequence[tuple[KVSource, Run]]]) -> int:
        rows: list[list[int]] = []
        for group, pairs in enumerate(runs):
            words = {PoisonWord.KEY: self._key, PoisonWord.COUNT: len(pairs)}
            if pairs:
                words[PoisonWord.SPOTS] = self._upload([_spot(source, run) for source, run in pairs])
                words[PoisonWord.FILLED] = int(bool(self._filled[self._layout.spaces[group]]))
            rows.append(fill_row(words, POISON_ROW))
        return self._upload(rows)


def _spot(source: KVSource, run: Run) -> list[int]:
    words = {
        SpotWord.ADDRESS: source.address + run.offset,
        SpotWord.PAGE_STRIDE: source.page_stride,
        SpotWord.TOKEN_STRIDE: source.token_stride,
        SpotWord.NUM_BYTES: run.num_bytes,
    }
    return fill_row(words, SPOT_ROW)
