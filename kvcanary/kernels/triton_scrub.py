"""Scrub, on the device: what the sums over old bytes say about their seals. Device functions."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from kvcanary.kernels.descriptors import ROW, GroupWord, RegionWord, StateWord
from kvcanary.kernels.triton_bytes import COPIED_CURSORS, PART_SHIFT, SPACE_SHIFT, is_reserved_in
from kvcanary.kernels.triton_words import (
    NONE,
    code_of,
    count_unverified,
    count_verified,
    divide,
    flag,
    is_sealed,
    position_of,
    report,
    state_of,
    words_at,
)
from kvcanary.record import FLAG_SHIFT, Kind, SealFlag
from kvcanary.state import (
    GLOBAL_WORDS,
    GROUP_WORDS,
    OWNER_NULL,
    SCRUB_CURSOR,
    SCRUB_PASS_FORWARD,
    SCRUB_PASSES,
    SUSPECT_ROWS,
    Check,
    Reason,
    Role,
    Word,
)

_STATE_ROW = tl.constexpr(ROW)
_SUSPECTS = tl.constexpr(int(Word.SUSPECTS))
_SEAL_ROLE = tl.constexpr(int(Role.SEAL))
_GROUP_WORDS = tl.constexpr(GROUP_WORDS)
_CURSOR = tl.constexpr(GLOBAL_WORDS + SCRUB_CURSOR)
_PASSES = tl.constexpr(GLOBAL_WORDS + SCRUB_PASSES)
_PASS_FORWARD = tl.constexpr(GLOBAL_WORDS + SCRUB_PASS_FORWARD)
_COPIED_CURSORS = tl.constexpr(COPIED_CURSORS)
_SUSPECT_ROWS = tl.constexpr(SUSPECT_ROWS)
_QUEUE = tl.constexpr(int(StateWord.SUSPECTS))
_SPACE = tl.constexpr(int(RegionWord.SPACE))
_PART = tl.constexpr(int(RegionWord.PART))
_ITEMS = tl.constexpr(int(RegionWord.ITEMS))
_SUMS = tl.constexpr(int(RegionWord.SUMS))
_FLAGS = tl.constexpr(int(RegionWord.FLAGS))
_WRITERS = tl.constexpr(int(RegionWord.WRITERS))
_LINKS_AT = tl.constexpr(int(GroupWord.LINKS))
_SEALS_AT = tl.constexpr(int(GroupWord.SEALS))
_OWNER_AT = tl.constexpr(int(GroupWord.OWNER))
_NUM_SLOTS = tl.constexpr(int(GroupWord.NUM_SLOTS))
_GROUP_PAGE_SIZE = tl.constexpr(int(GroupWord.PAGE_SIZE))
_END = tl.constexpr(int(RegionWord.NUM_SLOTS))
_SEALS = tl.constexpr(int(RegionWord.SEALS))
_OWNER = tl.constexpr(int(RegionWord.OWNER))
_PAGE_SIZE = tl.constexpr(int(RegionWord.PAGE_SIZE))
_PAGE_SHIFT = tl.constexpr(int(RegionWord.PAGE_SHIFT))
_NULL_IS_ZERO = tl.constexpr(int(RegionWord.NULL_IS_ZERO))
_NULL = tl.constexpr(OWNER_NULL)
_CONTENT_CHECK = tl.constexpr(int(Check.CONTENT))
_UNSEALED = tl.constexpr(int(Reason.UNSEALED))
_CONTENT = tl.constexpr(int(Kind.CONTENT))
_NULL_DIRTY = tl.constexpr(int(Kind.NULL_DIRTY))
_CONTENT_FLAG = tl.constexpr(int(SealFlag.CONTENT) << FLAG_SHIFT)
_SUSPECT_FLAG = tl.constexpr(int(SealFlag.SUSPECT) << FLAG_SHIFT)
_SPACE_SHIFT = tl.constexpr(SPACE_SHIFT)
_PART_SHIFT = tl.constexpr(PART_SHIFT)
_SLOT_MASK = tl.constexpr((1 << SPACE_SHIFT) - 1)


@triton.jit
def read_sums(sums, flags, item, inside, NONFINITE: tl.constexpr):
    """The sum of each item, and its flag. To be cleared only when all else was read: no load passes a store."""
    found = tl.load(sums + item, mask=inside, other=0)
    flawed = item * 0
    if NONFINITE:
        flawed = tl.load(flags + item, mask=inside, other=0)
    return found, flawed


@triton.jit
def clear_sums(sums, flags, item, inside, found, flawed, NONFINITE: tl.constexpr):
    """Both become zero again for the next launch."""
    tl.store(sums + item, item * 0, mask=inside & (found != 0))
    if NONFINITE:
        tl.store(flags + item, item * 0, mask=inside & (flawed != 0))


@triton.jit
def count_lanes(mask):
    """How many lanes are set."""
    return tl.sum(mask.to(tl.int32), 0).to(tl.int64)


@triton.jit
def enqueue(counters, meta, word, mask):
    """Put entries at the end of the scrub's queue."""
    number = tl.atomic_add(counters + _SUSPECTS + word * 0, word * 0 + 1, mask=mask, sem="relaxed")
    tl.store(words_at(tl.load(meta + _QUEUE)) + number % _SUSPECT_ROWS, word, mask=mask)


@triton.jit
def look_again(counters, rows, meta, region, item, copy, count, NONFINITE: tl.constexpr):
    """Entries of the queue: the second look at a suspect, or the first at what was queued."""
    inside = item < count
    sums, flags = words_at(tl.load(region + _SUMS)), words_at(tl.load(region + _FLAGS))
    found, flawed = read_sums(sums, flags, item, inside, NONFINITE)
    entry = tl.load(copy + 2 + item, mask=inside, other=0)
    slot = entry & _SLOT_MASK
    space = (entry >> _SPACE_SHIFT) & 0xFF
    part = (entry >> _PART_SHIFT) & 0xFF
    group = meta + (space + 1) * _STATE_ROW
    seal = words_at(tl.load(group + _SEALS_AT, mask=inside, other=0)) + slot * 2
    seal += part * tl.load(group + _NUM_SLOTS, mask=inside, other=0) * 2
    wanted = tl.load(seal, mask=inside, other=0)
    writer = tl.load(seal + 1, mask=inside, other=0)
    sealed = inside & is_sealed(tl.load(words_at(tl.load(region + _WRITERS)) + item, mask=inside, other=0))
    clear_sums(sums, flags, item, inside, found, flawed, NONFINITE)
    one = item * 0 + 1
    count_unverified(counters, space, _UNSEALED, tl.where(inside & (sealed == 0), one, 0))
    count_verified(counters, space, _CONTENT_CHECK, tl.where(sealed, one, 0))
    suspect = (writer & _SUSPECT_FLAG) != 0
    wrong = sealed & (found != wanted)
    tl.atomic_and(seal + 1, one * 0 + ~_SUSPECT_FLAG, mask=sealed & (wrong == 0) & suspect, sem="relaxed")
    once = wrong & (suspect == 0)
    tl.atomic_or(seal + 1, one * 0 + _SUSPECT_FLAG, mask=once, sem="relaxed")
    enqueue(counters, meta, entry, once)
    twice = wrong & suspect
    if tl.max(twice.to(tl.int32), 0) > 0:
        link = words_at(tl.load(group + _LINKS_AT, mask=twice, other=0)) + slot * 2
        word = tl.load(link, mask=twice, other=0)
        digest = tl.load(link + 1, mask=twice, other=0)
        unknown = (word | digest) == 0
        page = slot // tl.load(group + _GROUP_PAGE_SIZE, mask=twice, other=1)
        owner = tl.load(words_at(tl.load(group + _OWNER_AT, mask=twice, other=0)) + page, mask=twice, other=0)
        kind = item * 0 + _CONTENT
        report(
            counters, rows, meta, twice, kind, _SEAL_ROLE, space, (seal + 1).to(tl.int64), one * 0 + _CONTENT_FLAG,
            NONE, slot, page, NONE, tl.where(unknown, NONE, position_of(word)), NONE,
            tl.where(unknown, NONE, code_of(word)), 0, digest, wanted, found, writer, owner, part, kind < 0,
        )  # fmt: skip


@triton.jit
def scrub_slots(counters, rows, meta, region, item, copy, NONFINITE: tl.constexpr, POW2: tl.constexpr):
    """The walk over slot space: a mismatch makes a suspect, and only the second look a finding."""
    space = tl.load(region + _SPACE)
    part = tl.load(region + _PART)
    end = tl.load(region + _END)
    zero = flag(tl.load(region + _NULL_IS_ZERO) != 0)
    owners = words_at(tl.load(region + _OWNER))
    seals = words_at(tl.load(region + _SEALS))
    sums, flags = words_at(tl.load(region + _SUMS)), words_at(tl.load(region + _FLAGS))
    inside = item < tl.load(region + _ITEMS)
    slot = tl.load(copy + _COPIED_CURSORS + space) + item
    found, flawed = read_sums(sums, flags, item, inside, NONFINITE)
    before = tl.load(words_at(tl.load(region + _WRITERS)) + item, mask=inside, other=0)
    slot = tl.where(inside, tl.where(slot >= end, slot - end, slot), 0)
    seal = seals + slot * 2
    wanted = tl.load(seal, mask=inside, other=0)
    writer = tl.load(seal + 1, mask=inside, other=0)
    page = divide(slot, tl.load(region + _PAGE_SIZE), tl.load(region + _PAGE_SHIFT), POW2)
    reserved = inside & is_reserved_in(region, page)
    owner = tl.load(owners + page, mask=reserved, other=0)
    clear_sums(sums, flags, item, inside, found, flawed, NONFINITE)
    due = inside & is_sealed(before) & ((writer & (_SUSPECT_FLAG | _CONTENT_FLAG)) == 0)
    count_verified(counters, space, _CONTENT_CHECK, count_lanes(due))
    wrong = due & (found != wanted)
    old = tl.atomic_or(seal + 1, item * 0 + _SUSPECT_FLAG, mask=wrong, sem="relaxed")
    # An entry of the queue may name the same slot; then one of the two queues it.
    entry = slot | (space << _SPACE_SHIFT) | (part << _PART_SHIFT)
    enqueue(counters, meta, entry, wrong & ((old & _SUSPECT_FLAG) == 0))
    dirty = reserved & (state_of(owner) == _NULL) & ((zero & (found != 0)) | (~zero & (flawed != 0)))
    if tl.max(dirty.to(tl.int32), 0) > 0:
        kind = item * 0 + _NULL_DIRTY
        report(
            counters, rows, meta, dirty, kind, _SEAL_ROLE, space, (seal + 1).to(tl.int64), item * 0 + _CONTENT_FLAG,
            NONE, slot, page, NONE, NONE, NONE, NONE, 0, 0, 0, 0, writer, owner, part, kind < 0,
        )  # fmt: skip


@triton.jit
def advance_cursor(counters, region, copy, forward):
    """The walk goes on behind what this launch has read. The launch's other programs look at the copy."""
    space = tl.load(region + _SPACE)
    end = tl.load(region + _END)
    cursor = tl.load(copy + _COPIED_CURSORS + space) + tl.load(region + _ITEMS)
    words = counters + space * _GROUP_WORDS
    passed = cursor >= end
    passes = tl.load(words + _PASSES)
    tl.store(words + _PASSES, passes + 1, mask=passed)
    tl.store(words + _PASS_FORWARD, forward, mask=passed)
    tl.store(words + _CURSOR, tl.where(passed, cursor - end, cursor))
