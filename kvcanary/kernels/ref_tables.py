"""From positions to slots, through the tables and maps that the engine's own kernels use."""

from __future__ import annotations

from typing import NamedTuple

import torch

from kvcanary.batch import ForwardBatch, GroupBatch, PageTable
from kvcanary.kernels.ref_words import divide, modulo
from kvcanary.layout import AttentionGroup

NONE = -1
"""Nothing is mapped."""
OUTSIDE = -2
"""The index lies outside the pool, or outside the translation table."""


class Places(NamedTuple):
    """Where positions lie.

    ``engine_index`` is the engine's index after translation (before it, where the translation table has no such entry);
    ``slot`` is NONE or OUTSIDE where it is none; ``clean`` says that every slot is valid.
    """

    engine_index: torch.Tensor
    slot: torch.Tensor
    clean: bool


class SlotMap:
    """One group's addressing in one forward. Without a table :meth:`at` finds nothing anywhere."""

    def __init__(self, group: AttentionGroup, item: GroupBatch, batch: ForwardBatch) -> None:
        self.group = group
        self.table = item.table
        self.translation = item.translation
        self.stride = group.index_stride or group.page_size
        self._lines = None if item.table is None else _Lines(group, item.table, batch.num_rows)

    def mapped(self, indices: torch.Tensor) -> Places:
        """Places of a slot mapping's entries."""
        return self._places(indices.to(torch.int64))

    def at(self, rows: torch.Tensor, positions: torch.Tensor) -> Places:
        """Places of int64 ``positions`` of the batch rows ``rows``, both ``[n]``, through the table."""
        lines, group = self._lines, self.group
        if lines is None:
            nothing = torch.full_like(positions, NONE)
            return Places(nothing, nothing, clean=False)
        place = positions if lines.ring is None else modulo(positions, lines.ring)
        entry = lines.entries(rows, divide(place, group.page_size) if lines.of_pages else place)
        if lines.ring is not None:
            # A negative position has a remainder too, but nothing lies there.
            entry = torch.where(positions < 0, NONE, entry)
        if not lines.of_pages:
            return self._places(entry)
        page = divide(entry, group.page_entry_stride)
        # A negative page gives a negative index, whatever the offset is.
        return self._places(page * self.stride + modulo(place, group.page_size))

    def offset_of(self, positions: torch.Tensor) -> torch.Tensor:
        """The offset in its page at which a position belongs."""
        place = positions if self.group.ring is None else modulo(positions, self.group.ring)
        return modulo(place, self.group.page_size)

    def _places(self, index: torch.Tensor) -> Places:
        outside: torch.Tensor | None = None
        if index.numel() == 0:
            return Places(index, index, clean=True)
        if self.translation is not None:
            index, outside = _translate(self.translation, index)
        group = self.group
        bounds = index.aminmax()
        low, high = int(bounds.min), int(bounds.max)
        if self.stride == group.page_size:
            slot, inside = index, high < group.num_slots
            beyond = None if inside else slot >= group.num_slots
        else:
            page, offset = divide(index, self.stride), modulo(index, self.stride)
            slot = page * group.page_size + offset
            inside = high < group.num_pages * self.stride and int(offset.max()) < group.page_size
            beyond = None if inside else (page >= group.num_pages) | (offset >= group.page_size)
        if low >= 0 and inside and outside is None:
            return Places(index, slot, clean=True)
        if beyond is not None:
            slot = torch.where(beyond, OUTSIDE, slot)
        slot = torch.where(index < 0, NONE, slot)
        if outside is not None:
            slot = torch.where(outside, OUTSIDE, slot)
        return Places(index, slot, clean=False)


def _translate(translation: torch.Tensor, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Translated indices, and which ones the table lacks (None: it has all)."""
    size = translation.shape[0]
    outside = index >= size
    if size == 0:
        return index, outside
    value = translation[index.clamp(0, size - 1)].to(torch.int64)
    value = torch.where((value <= 0) | (index < 0), NONE, value)
    if not bool(outside.any()):
        return value, None
    return torch.where(outside, index, value), outside


class _Lines:
    """A table of either form as one flat tensor, with the place where each batch row's entries begin.

    Attributes:
        of_pages: entries name pages.
        ring: columns wrap at this many places; a ring begins at its own first place, wherever the row's window does.
    """

    def __init__(self, group: AttentionGroup, table: PageTable, num_rows: int) -> None:
        self.of_pages = table.unit == "page"
        self.ring = group.ring if table.row_offsets is None else None
        self._width: torch.Tensor | int
        if table.row_offsets is None:
            self._open_grid(table, num_rows)
        else:
            offsets = table.row_offsets.to(torch.int64)
            self._flat = table.entries
            self._step = table.entries.stride(0)
            self._begin = offsets[:-1]
            ends = offsets[1:].clamp(max=table.entries.shape[0])
            self._width = torch.where(self._begin < 0, 0, ends - self._begin)
        self._first: torch.Tensor | None = None
        if table.first_position is not None and self.ring is None:
            first = table.first_position.to(torch.int64)
            self._first = divide(first, group.page_size) if self.of_pages else first

    def entries(self, rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
        """Entries as int64; NONE where there is none."""
        if self._flat.numel() == 0 or columns.numel() == 0:
            return torch.full_like(columns, NONE)
        if self._first is not None:
            columns = columns - self._first.index_select(0, rows)
        inside: torch.Tensor | None = None
        if isinstance(self._width, torch.Tensor):
            inside = (columns >= 0).logical_and_(columns < self._width.index_select(0, rows))
        else:
            low, high = columns.aminmax()
            if int(low) < 0 or int(high) >= self._width:
                inside = (columns >= 0).logical_and_(columns < self._width)
        if inside is not None:
            columns = torch.where(inside, columns, 0)
        places = self._begin.index_select(0, rows).add_(columns, alpha=self._step)
        if inside is not None:
            # Rows without entries may begin at the very end.
            places.clamp_(0, self._flat.shape[0] - 1)
        found = self._flat.index_select(0, places).to(torch.int64)
        return found if inside is None else torch.where(inside, found, NONE)

    def _open_grid(self, table: PageTable, num_rows: int) -> None:
        entries = table.entries
        height, self._width = entries.shape
        line, self._step = entries.stride()
        span = max(0, (height - 1) * line + (self._width - 1) * self._step + 1) if entries.numel() else 0
        self._flat = entries.as_strided((span,), (1,))
        if table.row_index is None:
            row = torch.arange(num_rows, device=entries.device)
            known = None if num_rows <= height else row < height
        else:
            row = table.row_index.to(torch.int64)
            known = (row >= 0).logical_and_(row < height)
            known = None if bool(known.all()) else known
        if known is not None:
            row = torch.where(known, row, 0)
            self._width = torch.where(known, self._width, 0)
        self._begin = row * line
