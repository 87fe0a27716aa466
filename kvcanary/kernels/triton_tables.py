"""From positions to slots, through the tables that attention reads: device functions."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from kvcanary.kernels.batch_descriptors import ItemFlag, ItemWord
from kvcanary.kernels.descriptors import MAX_INDEX, GroupWord
from kvcanary.kernels.triton_constants import (
    GROUP_NUM_PAGES,
    GROUP_PAGE_SHIFT,
    GROUP_PAGE_SIZE,
    GROUP_RESERVED,
    GROUP_RING,
    ITEM_FIRST,
    ITEM_FLAGS,
    ITEM_WIDE,
)
from kvcanary.kernels.triton_words import NONE, OUTSIDE, divide, index_at

_MAX_INDEX = tl.constexpr(MAX_INDEX)
_INDEX_STRIDE = tl.constexpr(int(GroupWord.INDEX_STRIDE))
_INDEX_SHIFT = tl.constexpr(int(GroupWord.INDEX_SHIFT))
_ENTRY_STRIDE = tl.constexpr(int(GroupWord.ENTRY_STRIDE))
_ENTRY_SHIFT = tl.constexpr(int(GroupWord.ENTRY_SHIFT))
_PAGE_LIMIT = tl.constexpr(int(GroupWord.PAGE_LIMIT))

_ENTRIES = tl.constexpr(int(ItemWord.ENTRIES))
_HEIGHT = tl.constexpr(int(ItemWord.HEIGHT))
_WIDTH = tl.constexpr(int(ItemWord.WIDTH))
_ROW_STRIDE = tl.constexpr(int(ItemWord.ROW_STRIDE))
_ROW_INDEX = tl.constexpr(int(ItemWord.ROW_INDEX))
_ROW_OFFSETS = tl.constexpr(int(ItemWord.ROW_OFFSETS))
_TRANSLATION = tl.constexpr(int(ItemWord.TRANSLATION))
_TRANSLATION_SIZE = tl.constexpr(int(ItemWord.TRANSLATION_SIZE))
_PAGES = tl.constexpr(int(ItemFlag.PAGES))


@triton.jit
def is_wide(wide, word: tl.constexpr):
    """1 when the tensor of ``word`` is int64."""
    return (wide >> word) & 1


@triton.jit
def open_pool(group):
    """What turns an index into a slot: a tuple for :func:`slot_of_index`."""
    return (
        tl.load(group + GROUP_NUM_PAGES),
        tl.load(group + GROUP_PAGE_SIZE),
        tl.load(group + GROUP_PAGE_SHIFT),
        tl.load(group + _INDEX_STRIDE),
        tl.load(group + _INDEX_SHIFT),
    )


@triton.jit
def open_map(item):
    """The translation of a batch item: a tuple for :func:`translate`."""
    wide = is_wide(tl.load(item + ITEM_WIDE), _TRANSLATION)
    return tl.load(item + _TRANSLATION), tl.load(item + _TRANSLATION_SIZE), wide


@triton.jit
def open_table(group, item, b, POW2: tl.constexpr):
    """One batch row's part of a table: a tuple for :func:`index_of_position`. A row that is not there has no width."""
    wide = tl.load(item + ITEM_WIDE)
    height = tl.load(item + _HEIGHT)
    width = tl.load(item + _WIDTH)
    page_size = tl.load(group + GROUP_PAGE_SIZE)
    pages = tl.load(item + ITEM_FLAGS) & _PAGES
    row_index = tl.load(item + _ROW_INDEX)
    offsets = tl.load(item + _ROW_OFFSETS)
    firsts = tl.load(item + ITEM_FIRST)
    ring = tl.where(height < 0, 0, tl.load(group + GROUP_RING))
    row = tl.where(row_index != 0, index_at(row_index, b, is_wide(wide, _ROW_INDEX), row_index != 0), b)
    begin = index_at(offsets, b, is_wide(wide, _ROW_OFFSETS), offsets != 0)
    end = index_at(offsets, b + 1, is_wide(wide, _ROW_OFFSETS), offsets != 0)
    flat_width = tl.where(begin < 0, 0, tl.minimum(end, width) - begin)
    known = (row >= 0) & (row < height)
    start = tl.where(height < 0, begin, tl.where(known, row * tl.load(item + _ROW_STRIDE), 0))
    width = tl.where(height < 0, flat_width, tl.where(known, width, 0))
    first = index_at(firsts, b, is_wide(wide, ITEM_FIRST), (firsts != 0) & (ring == 0))
    first_page = divide(first, page_size, tl.load(group + GROUP_PAGE_SHIFT), POW2)
    entry_wide = is_wide(wide, _ENTRIES)
    return (
        tl.load(item + _ENTRIES) + (start << (2 + entry_wide)),
        entry_wide,
        width,
        tl.where(pages != 0, first_page, first),
        pages,
        ring,
        tl.load(group + _ENTRY_STRIDE),
        tl.load(group + _ENTRY_SHIFT),
        tl.load(group + _PAGE_LIMIT),
    )


@triton.jit
def index_of_position(table, pool, p, mask, POW2: tl.constexpr):
    """The entry of position ``p`` (int32 or int64, at least 0 where ``mask``) as an index; NONE where there is none.

    In 32 bits, what does not fit becomes the largest index, which lies outside every pool.
    """
    entries, wide, width, first, pages, ring, entry_stride, entry_shift, limit = table
    _, page_size, page_shift, index_stride, _ = pool
    wrapped = p
    if ring > 0:
        wrapped = p % ring.to(p.dtype)
    page = divide(wrapped, page_size.to(p.dtype), page_shift.to(p.dtype), POW2)
    offset = wrapped - page * page_size.to(p.dtype)
    column = tl.where(pages != 0, page, wrapped) - first.to(p.dtype)
    inside = mask & (column >= 0) & (column < width.to(p.dtype))
    entry = tl.where(inside, index_at(entries, column, wide, inside), NONE)
    if p.dtype == tl.int32:
        entry = tl.minimum(tl.maximum(entry, NONE), _MAX_INDEX).to(tl.int32)
    named = divide(tl.maximum(entry, 0), entry_stride.to(p.dtype), entry_shift.to(p.dtype), POW2)
    index = named * index_stride.to(p.dtype) + offset
    if p.dtype == tl.int32:
        index = tl.where(named > limit.to(tl.int32), _MAX_INDEX, index)
    return tl.where(entry < 0, NONE, tl.where(pages != 0, index, entry))


@triton.jit
def translate(mapping, index, mask):
    """Through the batch item's translation, if it has one. NONE stays.

    An index ``i`` that the translation lacks becomes ``OUTSIDE - i``: still negative, still to be named.
    """
    address, size, wide = mapping
    index = tl.maximum(index, NONE)
    if size >= 0:
        inside = mask & (index >= 0) & (index < size.to(index.dtype))
        value = index_at(address, index, wide, inside)
        if index.dtype == tl.int32:
            value = tl.minimum(value, _MAX_INDEX).to(tl.int32)
        outside = (index >= 0) & (index >= size.to(index.dtype))
        index = tl.where(inside & (value > 0), value, tl.where(outside, OUTSIDE - index, NONE)).to(index.dtype)
    return index


@triton.jit
def slot_of_index(pool, index, POW2: tl.constexpr):
    """Slots of indices: NONE where there is none, OUTSIDE where it lies outside the pool or the translation."""
    num_pages, page_size, _, index_stride, index_shift = pool
    inside = tl.maximum(index, 0)
    page = divide(inside, index_stride.to(index.dtype), index_shift.to(index.dtype), POW2)
    offset = inside - page * index_stride.to(index.dtype)
    there = (page < num_pages.to(index.dtype)) & (offset < page_size.to(index.dtype))
    slot = page * page_size.to(index.dtype) + offset
    return tl.where(index < 0, tl.maximum(index, OUTSIDE), tl.where(there, slot, OUTSIDE)).to(index.dtype)


@triton.jit
def engine_index(index):
    """The index as the engine gave it."""
    return tl.where(index <= OUTSIDE, OUTSIDE - index, index)


@triton.jit
def is_reserved(group, page):
    """Whether a page may be a trash or null page: whether it lies in one of the two ranges that hold them all."""
    low0 = tl.load(group + GROUP_RESERVED).to(page.dtype)
    end0 = tl.load(group + GROUP_RESERVED + 1).to(page.dtype)
    low1 = tl.load(group + GROUP_RESERVED + 2).to(page.dtype)
    end1 = tl.load(group + GROUP_RESERVED + 3).to(page.dtype)
    return ((page >= low0) & (page < end0)) | ((page >= low1) & (page < end1))


@triton.jit
def page_of(pool, slot, POW2: tl.constexpr):
    """Pages of slots that are not negative."""
    _, page_size, page_shift, _, _ = pool
    return divide(slot, page_size.to(slot.dtype), page_shift.to(slot.dtype), POW2)
