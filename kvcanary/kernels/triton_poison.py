"""Poison, on the device: put into new slots by the mark, into whole slots by a fact, and looked for by the seal.

Where a forward's poison goes is computed from the forward's number, read on the device, so a captured graph chooses
anew at every replay.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from kvcanary.kernels.descriptors import GroupWord, StateWord
from kvcanary.kernels.triton_constants import (
    GROUP_LINKS,
    GROUP_NUM_SLOTS,
    GROUP_OWNER,
    MASK32,
    OWNER_HELD,
    ROLE_SEAL,
    STATE_ROW,
    WORD_ARMED,
    WORD_SCRATCH_TOKENS,
)
from kvcanary.kernels.triton_launch import entry
from kvcanary.kernels.triton_scrub import count_lanes
from kvcanary.kernels.triton_spots import POISON_ROW, SPOT_ROW, PoisonWord, SpotWord
from kvcanary.kernels.triton_tables import open_pool, page_of
from kvcanary.kernels.triton_words import (
    NONE,
    code_of,
    count_verified,
    finalise,
    flag,
    position_of,
    report,
    state_of,
    tag_of,
    words_at,
)
from kvcanary.record import (
    FLAG_SHIFT,
    GOLDEN,
    MASK64,
    POISON_BYTES,
    POISON_CLEAR,
    POISON_SET,
    Kind,
    SealFlag,
    signed,
)
from kvcanary.state import Check, PoisonBit

_SCRATCH_POISON = tl.constexpr(int(StateWord.SCRATCH_POISON))
_SCRATCH_SLOTS = tl.constexpr(int(StateWord.SCRATCH_SLOTS))
_MAX_TOKENS = tl.constexpr(int(StateWord.MAX_TOKENS))
_SPACE = tl.constexpr(int(GroupWord.SPACE))
_POISON_ROW = tl.constexpr(POISON_ROW)
_SPOTS = tl.constexpr(int(PoisonWord.SPOTS))
_COUNT = tl.constexpr(int(PoisonWord.COUNT))
_KEY = tl.constexpr(int(PoisonWord.KEY))
_FILLED = tl.constexpr(int(PoisonWord.FILLED))
_SPOT_ROW = tl.constexpr(SPOT_ROW)
_ADDRESS = tl.constexpr(int(SpotWord.ADDRESS))
_PAGE_STRIDE = tl.constexpr(int(SpotWord.PAGE_STRIDE))
_TOKEN_STRIDE = tl.constexpr(int(SpotWord.TOKEN_STRIDE))
_NUM_BYTES = tl.constexpr(int(SpotWord.NUM_BYTES))
_BYTES = tl.constexpr(POISON_BYTES)
_CLEAR = tl.constexpr(signed(POISON_CLEAR))
_SET = tl.constexpr(POISON_SET)
_STEP_1 = tl.constexpr(GOLDEN)
_STEP_2 = tl.constexpr(2 * GOLDEN & MASK64)
_STEP_3 = tl.constexpr(3 * GOLDEN & MASK64)
_PLACED = tl.constexpr(int(PoisonBit.PLACED))
_FOUND = tl.constexpr(int(PoisonBit.FOUND))
_WRITTEN = tl.constexpr(int(Check.WRITTEN))
_KIND = tl.constexpr(int(Kind.WRITE_MISSING))
_FLAG = tl.constexpr(int(SealFlag.WRITE_MISSING) << FLAG_SHIFT)


@triton.jit
def _poison_words(key, forward, group):
    """What to put and where: (choice, low, high) as :func:`kvcanary.record.poison` defines them."""
    where = ((forward & MASK32) | (group << 32)).to(tl.uint64, bitcast=True)
    base = key.to(tl.uint64, bitcast=True) ^ finalise(where)
    choice = finalise(base + _STEP_1).to(tl.int64, bitcast=True)
    low = finalise(base + _STEP_2).to(tl.int64, bitcast=True)
    high = finalise(base + _STEP_3).to(tl.int64, bitcast=True)
    return choice, (low & _CLEAR) | _SET, (high & _CLEAR) | _SET


@triton.jit
def _choose(row, choice):
    """The run that a forward chose: (its row, first byte, how many)."""
    spot = words_at(tl.load(row + _SPOTS)) + ((choice & MASK32) % tl.load(row + _COUNT)) * _SPOT_ROW
    size = tl.load(spot + _NUM_BYTES)
    block = ((choice >> 32) & MASK32) % ((size + _BYTES - 1) // _BYTES)
    start = tl.minimum(block * _BYTES, tl.maximum(size - _BYTES, 0))
    return spot, start, tl.minimum(size, _BYTES)


@triton.jit
def _bytes_at(spot, pool, slot, start, POW2: tl.constexpr):
    """Addresses of a run's byte ``start`` in ``slot`` (not negative)."""
    page = page_of(pool, slot, POW2)
    _, page_size, _, _, _ = pool
    offset = slot - page * page_size
    base = tl.load(spot + _ADDRESS) + start
    return base + page * tl.load(spot + _PAGE_STRIDE) + offset * tl.load(spot + _TOKEN_STRIDE)


@triton.jit
def _pattern(low, high, at):
    """Bytes of the pattern at places ``at`` (0 to 15)."""
    return ((tl.where(at < 8, low, high) >> ((at & 7) * 8)) & 0xFF).to(tl.uint8)


@triton.jit
def _holds(address, low, high, start, size, mask):
    """Whether the ``size`` (at most 16) bytes at each address are the pattern's from place ``start`` on."""
    holds = mask
    # Byte by byte: runs may lie at any address, and a tile of bytes would take the registers of what surrounds it.
    for k in tl.static_range(_BYTES):
        inside = mask & flag(size > k)
        found = tl.load((address + k).to(tl.pointer_type(tl.uint8)), mask=inside, other=0)
        holds = holds & ((inside == 0) | (found == _pattern(low, high, (start + k) & (_BYTES - 1))))
    return holds


@triton.jit
def place_poison(meta, poison_at, g, pool, forward, t, slot, written, owner, tag, changed, POW2: tl.constexpr):
    """Put the forward's poison into the new slots of a tile that are the row's own and get a new record."""
    row = words_at(poison_at) + g * _POISON_ROW
    if tl.load(row + _COUNT) > 0:
        mine = written & changed & (state_of(owner) == OWNER_HELD) & (tag_of(owner) == tag) & flag(tag != 0)
        choice, low, high = _poison_words(tl.load(row + _KEY), forward, g)
        spot, start, size = _choose(row, choice)
        address = _bytes_at(spot, pool, tl.maximum(slot, 0), start, POW2)
        for k in tl.static_range(_BYTES):
            value = _pattern(low, high, t * 0 + k)
            tl.store((address + k).to(tl.pointer_type(tl.uint8)), value, mask=mine & flag(size > k))
        bits = words_at(tl.load(meta + _SCRATCH_POISON)) + g * tl.load(meta + _MAX_TOKENS) + t
        tl.store(bits, tl.where(mine, _PLACED, t * 0), mask=written)


@triton.jit
def look_for_poison(counters, rows, meta, poison_at, g, group, part, first_part, t, mine, slot, row, word, forward,
                    POW2: tl.constexpr):  # fmt: skip
    """Report the sealed tokens of a tile (``mine``) whose bytes still hold what was put there."""
    spots = words_at(poison_at) + g * _POISON_ROW
    if tl.load(spots + _COUNT) > 0:
        bits = words_at(tl.load(meta + _SCRATCH_POISON)) + g * tl.load(meta + _MAX_TOKENS) + t
        bits = tl.load(bits, mask=mine, other=0)
        placed = (bits & _PLACED) != 0
        choice, low, high = _poison_words(tl.load(spots + _KEY), forward, g)
        spot, start, size = _choose(spots, choice)
        address = _bytes_at(spot, open_pool(group), slot, start, POW2)
        missing = mine & (_holds(address, low, high, start * 0, size, placed) | ((bits & _FOUND) != 0))
        count_verified(counters, g, _WRITTEN, count_lanes(placed & (missing == 0)))
        if tl.max(missing.to(tl.int32), 0) > 0:
            # The flag goes into a word that was just stored, perhaps by another thread.
            tl.debug_barrier()
            page = page_of(open_pool(group), slot, POW2)
            owner = tl.load(words_at(tl.load(group + GROUP_OWNER)) + page, mask=missing, other=0)
            old = tl.load(first_part + 1, mask=missing, other=0, volatile=True)
            kind = t * 0 + _KIND
            report(
                counters, rows, meta, missing, kind, ROLE_SEAL, g, (first_part + 1).to(tl.int64), t * 0 + _FLAG, row,
                slot, page, position_of(word), NONE, code_of(word), NONE, 0, 0, 0, 0, old, owner, part, kind < 0,
            )  # fmt: skip


@entry
def fill_kernel(
    slots_at: tl.int64, count: tl.int64, meta_at: tl.int64, poison_at: tl.int64, space: tl.int64,
    POW2: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Grid ``[tiles, runs]``: fill the runs of ``space`` in a list of slots."""
    # The interpreter makes small arguments 32 bits wide, whatever their annotation says.
    own = space.to(tl.int64)
    zero = own * 0
    row = words_at(poison_at) + own * _POISON_ROW
    group = words_at(meta_at) + (own + 1) * STATE_ROW
    spot = words_at(tl.load(row + _SPOTS)) + tl.program_id(1).to(tl.int64) * _SPOT_ROW
    _, low, high = _poison_words(tl.load(row + _KEY), zero, own)
    i = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE).to(tl.int64)
    slot = tl.load(words_at(slots_at) + i, mask=i < count, other=NONE)
    inside = (slot >= 0) & (slot < tl.load(group + GROUP_NUM_SLOTS))
    address = _bytes_at(spot, open_pool(group), tl.where(inside, slot, 0), zero, POW2)
    size = tl.load(spot + _NUM_BYTES)
    lane = tl.arange(0, _BYTES).to(tl.int64)[None, :]
    at = zero
    while at < size:
        place = address[:, None] + at + lane
        mask = inside[:, None] & (at + lane < size)
        tl.store(place.to(tl.pointer_type(tl.uint8)), _pattern(low, high, lane + place * 0), mask=mask)
        at += _BYTES


@entry
def search_kernel(
    counters_at: tl.int64, meta_at: tl.int64, scratch_links_at: tl.int64, poison_at: tl.int64,
    POW2: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Grid ``[tiles, runs, groups]``: mark the new tokens that hold what their slots were filled with."""
    counters = words_at(counters_at)
    meta = words_at(meta_at)
    g = tl.program_id(2).to(tl.int64)
    number = tl.program_id(1).to(tl.int64)
    group = meta + (g + 1) * STATE_ROW
    row = words_at(poison_at) + g * _POISON_ROW
    tokens = tl.load(counters + WORD_SCRATCH_TOKENS)
    due = (tl.load(counters + WORD_ARMED) != 0) & (number < tl.load(row + _COUNT)) & (tl.load(row + _FILLED) != 0)
    scratch = g * tl.load(meta + _MAX_TOKENS)
    _, low, high = _poison_words(tl.load(row + _KEY), tokens * 0, tl.load(group + _SPACE))
    spot = words_at(tl.load(row + _SPOTS)) + number * _SPOT_ROW
    begin = tl.program_id(0).to(tl.int64) * TILE
    while due & (begin < tokens):
        t = begin + tl.arange(0, TILE).to(tl.int64)
        slot = tl.load(words_at(tl.load(meta + _SCRATCH_SLOTS)) + scratch + t, mask=t < tokens, other=NONE)
        mine = slot >= 0
        slot = tl.maximum(slot, 0)
        link = words_at(tl.load(group + GROUP_LINKS)) + slot * 2
        wanted = words_at(scratch_links_at) + t * 2
        mine = mine & (tl.load(link, mask=mine, other=0) == tl.load(wanted, mask=mine, other=1))
        mine = mine & (tl.load(link + 1, mask=mine, other=0) == tl.load(wanted + 1, mask=mine, other=1))
        address = _bytes_at(spot, open_pool(group), slot, tokens * 0, POW2)
        size = tl.load(spot + _NUM_BYTES)
        piece = tl.minimum(size, _BYTES)
        left = t < 0
        at = tokens * 0
        while at < size:
            start = tl.minimum(at, size - piece)
            left = left | _holds(address + start, low, high, start, piece, mine)
            at += _BYTES
        bits = words_at(tl.load(meta + _SCRATCH_POISON)) + scratch + t
        tl.atomic_or(bits, t * 0 + _FOUND, mask=left, sem="relaxed")
        begin += tl.num_programs(0).to(tl.int64) * TILE
