"""Bytes, on the device: keyed sums over the bytes of many slots, in one launch.

The slots come in regions: new tokens of the scratch, the scrub's queue, the scrub's walk, or a plain list. A program
takes one item (or two) and some of the chunks that make up a token, and adds what it finds to the item's sum with one
atomic. The sums are zero before; who reads them stores zero back.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from kvcanary.kernels.descriptors import (
    BUNDLE,
    CHUNK_ROW,
    PART_ROW,
    ChunkWord,
    PartWord,
    RegionKind,
    RegionWord,
    StateWord,
)
from kvcanary.kernels.triton_clock import start_exit
from kvcanary.kernels.triton_constants import (
    GROUP_NUM_SLOTS,
    GROUP_PAGE_SHIFT,
    GROUP_PAGE_SIZE,
    GROUP_SEALS,
    GROUP_WORDS,
    KIND_OF_SUSPECTS,
    KIND_OF_TOKENS,
    MASK32,
    PART_SHIFT,
    REGION_FLAGS,
    REGION_ITEMS,
    REGION_KIND,
    REGION_NUM_SLOTS,
    REGION_PAGE_SHIFT,
    REGION_PAGE_SIZE,
    REGION_ROW,
    REGION_SEALS,
    REGION_SLOTS,
    REGION_SPACE,
    REGION_SUMS,
    REGION_WRITERS,
    SCRUB_CURSOR_AT,
    SLOT_MASK,
    SPACE_SHIFT,
    STATE_ROW,
    STATE_SUSPECTS,
    SUSPECT_ROWS,
    WORD_ARMED,
    WORD_SCRATCH_TOKENS,
    WORD_SUSPECTS,
    WORD_SUSPECTS_DONE,
)
from kvcanary.kernels.triton_launch import entry
from kvcanary.kernels.triton_words import NONE, divide, words_at
from kvcanary.record import WORD_MULTIPLIERS, WORD_STEP
from kvcanary.state import QUEUE_PER_LAUNCH

_DIRECTORY = tl.constexpr(int(StateWord.PARTS))
_MAX_PARTS = tl.constexpr(int(StateWord.MAX_PARTS))

_FIRST_PROGRAM = tl.constexpr(int(RegionWord.FIRST_PROGRAM))
_PROGRAMS = tl.constexpr(int(RegionWord.PROGRAMS))
_SPLITS = tl.constexpr(int(RegionWord.SPLITS))
_CHUNKS = tl.constexpr(int(RegionWord.CHUNKS))
_BUNDLES = tl.constexpr(int(RegionWord.BUNDLES))
_REGION_PAGE_STRIDE = tl.constexpr(int(RegionWord.PAGE_STRIDE))
_REGION_TOKEN_STRIDE = tl.constexpr(int(RegionWord.TOKEN_STRIDE))
_EXPONENTS = tl.constexpr(int(RegionWord.EXPONENT))
_RESERVED = tl.constexpr(int(RegionWord.RESERVED))
_RESERVED_END = tl.constexpr(int(RegionWord.RESERVED_END))
_RESERVED_2 = tl.constexpr(int(RegionWord.RESERVED_2))
_RESERVED_2_END = tl.constexpr(int(RegionWord.RESERVED_2_END))
_SCRUB_KIND = tl.constexpr(int(RegionKind.SCRUB))

_PART_ROW = tl.constexpr(PART_ROW)
_PART_CHUNKS = tl.constexpr(int(PartWord.CHUNKS))
_PART_BUNDLES = tl.constexpr(int(PartWord.BUNDLES))
_PART_PAGE_STRIDE = tl.constexpr(int(PartWord.PAGE_STRIDE))
_PART_TOKEN_STRIDE = tl.constexpr(int(PartWord.TOKEN_STRIDE))

_BUNDLE = tl.constexpr(BUNDLE)
_CHUNK_ROW = tl.constexpr(CHUNK_ROW)
_BASE = tl.constexpr(int(ChunkWord.BASE))
_PAGE_STRIDE = tl.constexpr(int(ChunkWord.PAGE_STRIDE))
_TOKEN_STRIDE = tl.constexpr(int(ChunkWord.TOKEN_STRIDE))
_NUM_BYTES = tl.constexpr(int(ChunkWord.NUM_BYTES))
_KEY = tl.constexpr(int(ChunkWord.KEY))
_EXPONENT = tl.constexpr(int(ChunkWord.EXPONENT))
_ACCESS = tl.constexpr(int(ChunkWord.ACCESS))

_STEP = tl.constexpr(WORD_STEP)
_MULTIPLIER_0 = tl.constexpr(WORD_MULTIPLIERS[0])
_MULTIPLIER_1 = tl.constexpr(WORD_MULTIPLIERS[1])

COPIED_CURSORS = 2 + QUEUE_PER_LAUNCH
"""Where a launch's copy of the scrub's cursors begins, behind the bounds and entries of the queue."""
_QUEUE_PER_LAUNCH = tl.constexpr(QUEUE_PER_LAUNCH)
_COPIED_CURSORS = tl.constexpr(COPIED_CURSORS)


@triton.jit
def _load_chunk(chunk, page, offset, valid, ACCESS: tl.constexpr, BLOCK: tl.constexpr):
    """The 32-bit words ``[items, BLOCK]`` of one chunk of each item; what lies beyond the chunk is zero."""
    word = tl.arange(0, BLOCK)[None, :]
    num_bytes = tl.load(chunk + _NUM_BYTES).to(tl.int32)
    base = tl.load(chunk + _BASE) + page * tl.load(chunk + _PAGE_STRIDE) + offset * tl.load(chunk + _TOKEN_STRIDE)
    if ACCESS == 1:
        start = base[:, None] + word.to(tl.int64) * 4
        data = tl.zeros([1, BLOCK], tl.uint32)
        for k in tl.static_range(4):
            inside = valid[:, None] & (word * 4 + k < num_bytes)
            byte = tl.load((start + k).to(tl.pointer_type(tl.uint8)), mask=inside, other=0)
            data = data | (byte.to(tl.uint32) << (8 * k))
    else:
        # The hints are what makes 128-bit loads of this; the host has checked what they say.
        words = tl.multiple_of(num_bytes // 4, ACCESS // 4)
        place = base.to(tl.pointer_type(tl.uint32))[:, None] + word
        place = tl.max_contiguous(tl.multiple_of(place, [4, ACCESS]), [1, BLOCK])
        data = tl.load(place, mask=valid[:, None] & (word < words), other=0)
    return data


@triton.jit
def _add_bundle(chunk, page, offset, valid, looks, total, bad, ACCESS: tl.constexpr, NONFINITE: tl.constexpr,
                BLOCK: tl.constexpr):  # fmt: skip
    """Four chunks, all loads before all sums; ``looks`` at their exponents only where somebody asks."""
    second = chunk + _CHUNK_ROW
    third = second + _CHUNK_ROW
    fourth = third + _CHUNK_ROW
    data0 = _load_chunk(chunk, page, offset, valid, ACCESS, BLOCK)
    data1 = _load_chunk(second, page, offset, valid, ACCESS, BLOCK)
    data2 = _load_chunk(third, page, offset, valid, ACCESS, BLOCK)
    data3 = _load_chunk(fourth, page, offset, valid, ACCESS, BLOCK)
    total = _add_block(tl.load(chunk + _KEY), data0, total, BLOCK)
    total = _add_block(tl.load(second + _KEY), data1, total, BLOCK)
    total = _add_block(tl.load(third + _KEY), data2, total, BLOCK)
    total = _add_block(tl.load(fourth + _KEY), data3, total, BLOCK)
    if NONFINITE:
        if looks:
            bad = _look(tl.load(chunk + _EXPONENT), data0, bad)
            bad = _look(tl.load(second + _EXPONENT), data1, bad)
            bad = _look(tl.load(third + _EXPONENT), data2, bad)
            bad = _look(tl.load(fourth + _EXPONENT), data3, bad)
    return total, bad


@triton.jit
def _open_bundle(chunk):
    """Addresses and keys of a bundle's four chunks."""
    return (
        tl.load(chunk + _BASE), tl.load(chunk + _KEY),
        tl.load(chunk + _CHUNK_ROW + _BASE), tl.load(chunk + _CHUNK_ROW + _KEY),
        tl.load(chunk + 2 * _CHUNK_ROW + _BASE), tl.load(chunk + 2 * _CHUNK_ROW + _KEY),
        tl.load(chunk + 3 * _CHUNK_ROW + _BASE), tl.load(chunk + 3 * _CHUNK_ROW + _KEY),
    )  # fmt: skip


@triton.jit
def _load_block(base, at, BLOCK: tl.constexpr):
    """All words ``[items, BLOCK]`` of a chunk that fills its block."""
    word = tl.arange(0, BLOCK)[None, :]
    place = (base + at).to(tl.pointer_type(tl.uint32))[:, None] + word
    return tl.load(tl.max_contiguous(tl.multiple_of(place, [4, 16]), [1, BLOCK]))


@triton.jit
def _add_block(key, data, total, BLOCK: tl.constexpr):
    """Add ``key * word`` for every word of a chunk, the keys made of the words' logical places."""
    key = key.to(tl.uint32) + tl.arange(0, BLOCK)[None, :].to(tl.uint32) * _STEP
    key = (key ^ (key >> 16)) * _MULTIPLIER_0
    key = (key ^ (key >> 15)) * _MULTIPLIER_1
    key = (key ^ (key >> 16)) | 1
    return total + key.to(tl.uint64) * data.to(tl.uint64)


@triton.jit
def _look(exponent, data, bad):
    """Set a bit of ``bad`` where a value's exponent bits are all set: it then has no carry into its top bit."""
    mask = exponent.to(tl.uint32)
    top = (exponent >> 32).to(tl.uint32)
    spare = (mask & (data ^ MASK32)) + (top ^ MASK32)
    return bad | (top & (spare ^ MASK32))


@triton.jit
def _add_blocks(bundle, at, exponent, looks, total, bad, NONFINITE: tl.constexpr, BLOCK: tl.constexpr):
    """A bundle of blocks, all loads before all sums."""
    base0, key0, base1, key1, base2, key2, base3, key3 = bundle
    data0 = _load_block(base0, at, BLOCK)
    data1 = _load_block(base1, at, BLOCK)
    data2 = _load_block(base2, at, BLOCK)
    data3 = _load_block(base3, at, BLOCK)
    total = _add_block(key0, data0, total, BLOCK)
    total = _add_block(key1, data1, total, BLOCK)
    total = _add_block(key2, data2, total, BLOCK)
    total = _add_block(key3, data3, total, BLOCK)
    if NONFINITE:
        if looks:
            bad = _look(exponent, data0, bad)
            bad = _look(exponent, data1, bad)
            bad = _look(exponent, data2, bad)
            bad = _look(exponent, data3, bad)
    return total, bad


@triton.jit
def queue_bounds(counters):
    """First and end number of the queue entries that a launch takes; what overtook the ring is passed over."""
    end = tl.load(counters + WORD_SUSPECTS)
    start = tl.maximum(tl.load(counters + WORD_SUSPECTS_DONE), end - SUSPECT_ROWS)
    return start, tl.minimum(end, start + _QUEUE_PER_LAUNCH)


@entry
def sum_kernel(
    counters_at: tl.int64, meta_at: tl.int64, regions_at: tl.int64, queue_copy_at: tl.int64, always: tl.int64,
    first1: tl.int64, first2: tl.int64, first3: tl.int64, first4: tl.int64, first5: tl.int64, first6: tl.int64,
    first7: tl.int64,
    ITEMS: tl.constexpr, SUB: tl.constexpr, BLOCK: tl.constexpr, NONFINITE: tl.constexpr, WORDS: tl.constexpr,
    BYTES: tl.constexpr, ALIKE: tl.constexpr, POW2: tl.constexpr,
):  # fmt: skip
    """One-dimensional grid; program ``p`` works in the last region whose first program is at most ``p``.

    ``ITEMS``: items a program; ``SUB``: bundles of chunks it adds up; ``WORDS``, ``BYTES``: some chunks must be read by
    words or by bytes; ``ALIKE``: all chunks are whole blocks that differ only in their addresses and keys.

    A program's time is its chain of loads that need each other, so all that can be asked for at once is: first the
    counters and the region, then slots and chunks, then bytes.
    """
    program = tl.program_id(0).to(tl.int64)
    counters = words_at(counters_at)
    meta = words_at(meta_at)
    number = (program >= first1).to(tl.int64) + (program >= first2).to(tl.int64) + (program >= first3).to(tl.int64)
    number += (program >= first4).to(tl.int64) + (program >= first5).to(tl.int64) + (program >= first6).to(tl.int64)
    number += (program >= first7).to(tl.int64)
    region = words_at(regions_at) + number * REGION_ROW
    start, stop = queue_bounds(counters)
    armed = (tl.load(counters + WORD_ARMED) | always) != 0
    tokens = tl.load(counters + WORD_SCRATCH_TOKENS)
    kind = tl.load(region + REGION_KIND)
    space = tl.load(region + REGION_SPACE)
    splits = tl.load(region + _SPLITS).to(tl.int32)
    programs = tl.load(region + _PROGRAMS).to(tl.int32)
    first_program = tl.load(region + _FIRST_PROGRAM)
    slots = words_at(tl.load(region + REGION_SLOTS))
    sums = words_at(tl.load(region + REGION_SUMS))
    flags = words_at(tl.load(region + REGION_FLAGS))
    writers = words_at(tl.load(region + REGION_WRITERS))
    chunks = words_at(tl.load(region + _CHUNKS))
    bundles = tl.load(region + _BUNDLES).to(tl.int32)
    items = tl.load(region + REGION_ITEMS)
    seals = words_at(tl.load(region + REGION_SEALS))
    num_slots = tl.load(region + REGION_NUM_SLOTS)
    page_size = tl.load(region + REGION_PAGE_SIZE)
    page_shift = tl.load(region + REGION_PAGE_SHIFT)
    page_stride = tl.load(region + _REGION_PAGE_STRIDE)
    token_stride = tl.load(region + _REGION_TOKEN_STRIDE)
    exponent = tl.load(region + _EXPONENTS)
    cursor = tl.load(counters + SCRUB_CURSOR_AT + space * GROUP_WORDS)
    copy = words_at(queue_copy_at)
    if (program == 0) & (always == 0):
        # Entries are queued while the next launch judges these sums: it must see the bounds of now.
        tl.store(copy, start)
        tl.store(copy + 1, stop)
    start_exit(counters, (program == 0) & (always == 0))
    items = tl.where(kind == KIND_OF_TOKENS, tokens, items)
    items = tl.where(kind == KIND_OF_SUSPECTS, stop - start, items).to(tl.int32)
    lane = tl.arange(0, ITEMS)
    # Entries of the queue differ in their sources, so that a program takes them one by one.
    each = tl.where(kind == KIND_OF_SUSPECTS, 1, ITEMS)
    units = tl.where(armed, ((items + each - 1) // each) * splits, 0)
    unit = (program - first_program).to(tl.int32)
    while unit < units:
        tile = unit // splits
        split = unit - tile * splits
        item = tile * each + lane
        valid = (lane < each) & (item < items)
        slot = (lane * 0).to(tl.int64)
        if kind == KIND_OF_SUSPECTS:
            place = (start + tile) % SUSPECT_ROWS
            entry = tl.load(words_at(tl.load(meta + STATE_SUSPECTS)) + place)
            if split == 0:
                tl.store(copy + 2 + tile, entry)
            here = (entry >> SPACE_SHIFT) & 0xFF
            part = (entry >> PART_SHIFT) & 0xFF
            row = words_at(tl.load(meta + _DIRECTORY)) + (here * tl.load(meta + _MAX_PARTS) + part) * _PART_ROW
            chunks = words_at(tl.load(row + _PART_CHUNKS))
            bundles = tl.load(row + _PART_BUNDLES).to(tl.int32)
            page_stride = tl.load(row + _PART_PAGE_STRIDE)
            token_stride = tl.load(row + _PART_TOKEN_STRIDE)
            group = meta + (here + 1) * STATE_ROW
            num_slots = tl.load(group + GROUP_NUM_SLOTS)
            page_size = tl.load(group + GROUP_PAGE_SIZE)
            page_shift = tl.load(group + GROUP_PAGE_SHIFT)
            seals = words_at(tl.load(group + GROUP_SEALS)) + part * num_slots * 2
            slot += entry & SLOT_MASK
        bundle = split * SUB
        last = tl.minimum(bundle + SUB, bundles)
        chunk = chunks + bundle * _BUNDLE * _CHUNK_ROW
        if ALIKE:
            # A program beyond the last bundle of a queued slot reads the chunks of the last one, and adds nothing.
            blocks = _open_bundle(chunks + tl.minimum(bundle, bundles - 1) * _BUNDLE * _CHUNK_ROW)
        if kind == _SCRUB_KIND:
            slot = cursor + item
            slot = tl.where(slot >= num_slots, slot - num_slots, slot)
        elif kind != KIND_OF_SUSPECTS:
            slot = tl.load(slots + item, mask=valid, other=NONE)
        valid = valid & (slot >= 0) & (slot < num_slots)
        slot = tl.where(valid, slot, 0)
        page = divide(slot, page_size, page_shift, POW2)
        offset = slot - page * page_size
        total = tl.zeros([ITEMS, BLOCK], tl.uint64)
        bad = tl.zeros([ITEMS, BLOCK], tl.uint32)
        looks = kind == KIND_OF_TOKENS
        if NONFINITE:
            looks = looks | (tl.max(is_reserved_in(region, page).to(tl.int32), 0) != 0)
        if ALIKE:
            at = page * page_stride + offset * token_stride
            while bundle < last:
                # Those after the last one are never used.
                ahead = _open_bundle(chunks + tl.minimum(bundle + 1, last - 1) * _BUNDLE * _CHUNK_ROW)
                total, bad = _add_blocks(blocks, at, exponent, looks, total, bad, NONFINITE, BLOCK)
                blocks = ahead
                bundle += 1
        else:
            while bundle < last:
                access = tl.load(chunk + _ACCESS)
                if access == 16:
                    total, bad = _add_bundle(chunk, page, offset, valid, looks, total, bad, 16, NONFINITE, BLOCK)
                if WORDS:
                    if access == 4:
                        total, bad = _add_bundle(chunk, page, offset, valid, looks, total, bad, 4, NONFINITE, BLOCK)
                if BYTES:
                    if access == 1:
                        total, bad = _add_bundle(chunk, page, offset, valid, looks, total, bad, 1, NONFINITE, BLOCK)
                chunk += _BUNDLE * _CHUNK_ROW
                bundle += 1
        if (unit == 0) & (kind == _SCRUB_KIND):
            tl.store(copy + _COPIED_CURSORS + space, cursor)
        if (split == 0) & ((kind == _SCRUB_KIND) | (kind == KIND_OF_SUSPECTS)):
            # The next launch seals tokens while it judges these: what has no seal now is none of the scrub's.
            tl.store(writers + item, tl.load(seals + slot * 2 + 1, mask=valid, other=0), mask=valid)
        found = tl.sum(total.to(tl.int64, bitcast=True), 1)
        tl.atomic_add(sums + item, found, mask=valid & (found != 0), sem="relaxed")
        if NONFINITE:
            flawed = tl.max((bad != 0).to(tl.int32), 1) != 0
            tl.store(flags + item, (lane * 0 + 1).to(tl.int64), mask=valid & flawed)
        unit += programs


@triton.jit
def is_reserved_in(region, page):
    """As for a group: whether a page may be a trash or null page."""
    low = (page >= tl.load(region + _RESERVED)) & (page < tl.load(region + _RESERVED_END))
    return low | ((page >= tl.load(region + _RESERVED_2)) & (page < tl.load(region + _RESERVED_2_END)))
