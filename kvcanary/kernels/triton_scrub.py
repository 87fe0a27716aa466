"""Scrub, on the device: what the sums over old bytes say about their seals. Device functions."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from kvcanary.kernels.descriptors import RegionWord
from kvcanary.kernels.triton_bytes import COPIED_CURSORS, is_reserved_in
from kvcanary.kernels.triton_constants import (
    GROUP_LINKS,
    GROUP_NUM_SLOTS,
    GROUP_OWNER,
    GROUP_PAGE_SIZE,
    GROUP_SEALS,
    GROUP_WORDS,
    OWNER_NULL,
    PART_SHIFT,
    REGION_FLAGS,
    REGION_ITEMS,
    REGION_NUM_SLOTS,
    REGION_PAGE_SHIFT,
    REGION_PAGE_SIZE,
    REGION_PART,
    REGION_SEALS,
    REGION_SPACE,
    REGION_SUMS,
    REGION_WRITERS,
    ROLE_SEAL,
    SCRUB_CURSOR_AT,
    SLOT_MASK,
    SPACE_SHIFT,
    STATE_ROW,
    STATE_SUSPECTS,
    SUSPECT_ROWS,
    WORD_SUSPECTS,
)
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
from kvcanary.state import GLOBAL_WORDS, SCRUB_PASS_FORWARD, SCRUB_PASSES, Check, Reason

_PASSES = tl.constexpr(GLOBAL_WORDS + SCRUB_PASSES)
_PASS_FORWARD = tl.constexpr(GLOBAL_WORDS + SCRUB_PASS_FORWARD)
_COPIED_CURSORS = tl.constexpr(COPIED_CURSORS)
_OWNER = tl.constexpr(int(RegionWord.OWNER))
_NULL_IS_ZERO = tl.constexpr(int(RegionWord.NULL_IS_ZERO))
_CONTENT_CHECK = tl.constexpr(int(Check.CONTENT))
_UNSEALED = tl.constexpr(int(Reason.UNSEALED))
_CONTENT = tl.constexpr(int(Kind.CONTENT))
_NULL_DIRTY = tl.constexpr(int(Kind.NULL_DIRTY))
_CONTENT_FLAG = tl.constexpr(int(SealFlag.CONTENT) << FLAG_SHIFT)
_SUSPECT_FLAG = tl.constexpr(int(SealFlag.SUSPECT) << FLAG_SHIFT)


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
def queue_entry(space, part, slot):
    """The word that stands for a slot's part in the queue."""
    return slot | (space << SPACE_SHIFT) | (part << PART_SHIFT)


@triton.jit
def enqueue(counters, meta, word, mask):
    """Put entries at the end of the scrub's queue."""
    number = tl.atomic_add(counters + WORD_SUSPECTS + word * 0, word * 0 + 1, mask=mask, sem="relaxed")
    tl.store(words_at(tl.load(meta + STATE_SUSPECTS)) + number % SUSPECT_ROWS, word, mask=mask)


@triton.jit
def look_again(counters, rows, meta, region, item, copy, count, NONFINITE: tl.constexpr):
    """Entries of the queue: the second look at a suspect, or the first at what was queued."""
    inside = item < count
    sums, flags = words_at(tl.load(region + REGION_SUMS)), words_at(tl.load(region + REGION_FLAGS))
    found, flawed = read_sums(sums, flags, item, inside, NONFINITE)
    entry = tl.load(copy + 2 + item, mask=inside, other=0)
    slot = entry & SLOT_MASK
    space = (entry >> SPACE_SHIFT) & 0xFF
    part = (entry >> PART_SHIFT) & 0xFF
    group = meta + (space + 1) * STATE_ROW
    seal = words_at(tl.load(group + GROUP_SEALS, mask=inside, other=0)) + slot * 2
    seal += part * tl.load(group + GROUP_NUM_SLOTS, mask=inside, other=0) * 2
    wanted = tl.load(seal, mask=inside, other=0)
    writer = tl.load(seal + 1, mask=inside, other=0)
    # As it was before this launch: the walk, in other programs, may come upon the same slot now.
    before = tl.load(words_at(tl.load(region + REGION_WRITERS)) + item, mask=inside, other=0)
    sealed = inside & is_sealed(before)
    clear_sums(sums, flags, item, inside, found, flawed, NONFINITE)
    one = item * 0 + 1
    count_unverified(counters, space, _UNSEALED, tl.where(inside & (sealed == 0), one, 0))
    count_verified(counters, space, _CONTENT_CHECK, tl.where(sealed, one, 0))
    suspect = (before & _SUSPECT_FLAG) != 0
    wrong = sealed & (found != wanted)
    tl.atomic_and(seal + 1, one * 0 + ~_SUSPECT_FLAG, mask=sealed & (wrong == 0) & suspect, sem="relaxed")
    once = wrong & (suspect == 0)
    old = tl.atomic_or(seal + 1, one * 0 + _SUSPECT_FLAG, mask=once, sem="relaxed")
    enqueue(counters, meta, entry, once & ((old & _SUSPECT_FLAG) == 0))
    twice = wrong & suspect
    if tl.max(twice.to(tl.int32), 0) > 0:
        link = words_at(tl.load(group + GROUP_LINKS, mask=twice, other=0)) + slot * 2
        word = tl.load(link, mask=twice, other=0)
        digest = tl.load(link + 1, mask=twice, other=0)
        unknown = (word | digest) == 0
        page = slot // tl.load(group + GROUP_PAGE_SIZE, mask=twice, other=1)
        owner = tl.load(words_at(tl.load(group + GROUP_OWNER, mask=twice, other=0)) + page, mask=twice, other=0)
        kind = item * 0 + _CONTENT
        report(
            counters, rows, meta, twice, kind, ROLE_SEAL, space, (seal + 1).to(tl.int64), one * 0 + _CONTENT_FLAG,
            NONE, slot, page, NONE, tl.where(unknown, NONE, position_of(word)), NONE,
            tl.where(unknown, NONE, code_of(word)), 0, digest, wanted, found, writer, owner, part, kind < 0,
        )  # fmt: skip


@triton.jit
def scrub_slots(counters, rows, meta, region, item, copy, NONFINITE: tl.constexpr, POW2: tl.constexpr):
    """The walk over slot space: a mismatch makes a suspect, and only the second look a finding."""
    space = tl.load(region + REGION_SPACE)
    part = tl.load(region + REGION_PART)
    end = tl.load(region + REGION_NUM_SLOTS)
    zero = flag(tl.load(region + _NULL_IS_ZERO) != 0)
    owners = words_at(tl.load(region + _OWNER))
    seals = words_at(tl.load(region + REGION_SEALS))
    sums, flags = words_at(tl.load(region + REGION_SUMS)), words_at(tl.load(region + REGION_FLAGS))
    inside = item < tl.load(region + REGION_ITEMS)
    slot = tl.load(copy + _COPIED_CURSORS + space) + item
    found, flawed = read_sums(sums, flags, item, inside, NONFINITE)
    before = tl.load(words_at(tl.load(region + REGION_WRITERS)) + item, mask=inside, other=0)
    slot = tl.where(inside, tl.where(slot >= end, slot - end, slot), 0)
    seal = seals + slot * 2
    wanted = tl.load(seal, mask=inside, other=0)
    writer = tl.load(seal + 1, mask=inside, other=0)
    page = divide(slot, tl.load(region + REGION_PAGE_SIZE), tl.load(region + REGION_PAGE_SHIFT), POW2)
    reserved = inside & is_reserved_in(region, page)
    owner = tl.load(owners + page, mask=reserved, other=0)
    clear_sums(sums, flags, item, inside, found, flawed, NONFINITE)
    due = inside & is_sealed(before) & ((before & (_SUSPECT_FLAG | _CONTENT_FLAG)) == 0)
    count_verified(counters, space, _CONTENT_CHECK, count_lanes(due))
    wrong = due & (found != wanted)
    old = tl.atomic_or(seal + 1, item * 0 + _SUSPECT_FLAG, mask=wrong, sem="relaxed")
    # An entry of the queue may name the same slot; then one of the two queues it.
    entry = queue_entry(space, part, slot)
    enqueue(counters, meta, entry, wrong & ((old & _SUSPECT_FLAG) == 0))
    dirty = reserved & (state_of(owner) == OWNER_NULL) & ((zero & (found != 0)) | (~zero & (flawed != 0)))
    if tl.max(dirty.to(tl.int32), 0) > 0:
        kind = item * 0 + _NULL_DIRTY
        report(
            counters, rows, meta, dirty, kind, ROLE_SEAL, space, (seal + 1).to(tl.int64), item * 0 + _CONTENT_FLAG,
            NONE, slot, page, NONE, NONE, NONE, NONE, 0, 0, 0, 0, writer, owner, part, kind < 0,
        )  # fmt: skip


@triton.jit
def advance_cursor(counters, region, copy, forward):
    """The walk goes on behind what this launch has read. The launch's other programs look at the copy."""
    space = tl.load(region + REGION_SPACE)
    end = tl.load(region + REGION_NUM_SLOTS)
    cursor = tl.load(copy + _COPIED_CURSORS + space) + tl.load(region + REGION_ITEMS)
    words = counters + space * GROUP_WORDS
    passed = cursor >= end
    passes = tl.load(words + _PASSES)
    tl.store(words + _PASSES, passes + 1, mask=passed)
    tl.store(words + _PASS_FORWARD, forward, mask=passed)
    tl.store(words + SCRUB_CURSOR_AT, tl.where(passed, cursor - end, cursor))
