"""Descriptor rows that the host writes on the device, by launches, so that a captured graph writes them too."""

from __future__ import annotations

import torch
import triton.language as tl

from kvcanary.kernels.triton_capture import Written
from kvcanary.kernels.triton_launch import Kernel, entry
from kvcanary.kernels.triton_words import words_at

ROWS_AT_ONCE = 256
"""Descriptor rows allocated together."""


@entry
def describe_kernel(  # type: ignore[no-untyped-def]
    row: tl.int64, count: tl.int64, w0: tl.int64, w1: tl.int64, w2: tl.int64, w3: tl.int64, w4: tl.int64, w5: tl.int64,
    w6: tl.int64, w7: tl.int64, w8: tl.int64, w9: tl.int64, w10: tl.int64, w11: tl.int64, w12: tl.int64, w13: tl.int64,
):  # fmt: skip
    """Write up to 14 words of a descriptor row. They travel as arguments, so a captured graph keeps them."""
    out = words_at(row)
    tl.store(out, w0, mask=count > 0)
    tl.store(out + 1, w1, mask=count > 1)
    tl.store(out + 2, w2, mask=count > 2)
    tl.store(out + 3, w3, mask=count > 3)
    tl.store(out + 4, w4, mask=count > 4)
    tl.store(out + 5, w5, mask=count > 5)
    tl.store(out + 6, w6, mask=count > 6)
    tl.store(out + 7, w7, mask=count > 7)
    tl.store(out + 8, w8, mask=count > 8)
    tl.store(out + 9, w9, mask=count > 9)
    tl.store(out + 10, w10, mask=count > 10)
    tl.store(out + 11, w11, mask=count > 11)
    tl.store(out + 12, w12, mask=count > 12)
    tl.store(out + 13, w13, mask=count > 13)


DESCRIBED = 14
"""Words of a row that one launch writes at most."""


class RowSets:
    """Descriptor rows on the device, remembered by what they say.

    Sets that were used while a stream was captured stay for ever, since the graph reads them at every replay; of the
    others the oldest is written anew when all are taken.
    """

    def __init__(self, rows: int, words: int, device: torch.device, describe: Kernel) -> None:
        self._rows = max(1, rows)
        self._row_words = words
        self._device = device
        self._describe = describe
        self._known: dict[tuple[object, ...], int] = {}
        self._kept: set[tuple[object, ...]] = set()
        self._written = Written[tuple[object, ...]](device)
        self._chunks: list[torch.Tensor] = []
        self._free: list[int] = []

    def find(self, rows: tuple[tuple[int, ...], ...], *, keep: bool) -> int:
        """The address of a set of rows."""
        address = self._known.get(rows)
        if address is None:
            address = self._known[rows] = self._take()
        if self._written.is_due(rows):
            for i, words in enumerate(rows):
                for at in range(0, len(words), DESCRIBED):
                    some = words[at : at + DESCRIBED]
                    place = address + (i * self._row_words + at) * 8
                    self._describe((1, 1, 1), place, len(some), *some, *[0] * (DESCRIBED - len(some)))
        if keep:
            self._kept.add(rows)
        return address

    def _take(self) -> int:
        if not self._free and len(self._known) - len(self._kept) >= ROWS_AT_ONCE // 2:
            oldest = next(rows for rows in self._known if rows not in self._kept)
            self._written.forget(oldest)
            return self._known.pop(oldest)
        if not self._free:
            words = self._rows * self._row_words
            # Not zeroed: a fill that was captured in a graph would wipe the rows at every replay.
            chunk = torch.empty(ROWS_AT_ONCE, words, dtype=torch.int64, device=self._device)
            self._chunks.append(chunk)
            self._free = [chunk.data_ptr() + i * words * 8 for i in reversed(range(ROWS_AT_ONCE))]
        return self._free.pop()
