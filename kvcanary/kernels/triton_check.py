"""Check, on the device: read the records of every row's old positions through the tables that attention will use.

One program takes every ``programs``-th tile of old positions of one batch row in one group. Most tables are plain
(no ring, no translation, sizes that are powers of two), and most records are right: for them a short loop asks of
each record and the next only whether all is well. Whatever it cannot vouch for is read again by a longer one, which
judges, counts and reports.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from kvcanary.kernels.descriptors import ITEM_ROW, ROW, GroupWord, ItemFlag, ItemWord, StateWord
from kvcanary.kernels.triton_launch import entry
from kvcanary.kernels.triton_mark import batch_row
from kvcanary.kernels.triton_tables import (
    index_of_position,
    is_reserved,
    is_wide,
    open_map,
    open_pool,
    open_table,
    page_of,
    slot_of_index,
    translate,
)
from kvcanary.kernels.triton_words import (
    NONE,
    OUTSIDE,
    code_of,
    count_unverified,
    count_verified,
    flag,
    index_at,
    lowest_fault,
    mix,
    position_of,
    report,
    row_flag,
    state_of,
    words_at,
)
from kvcanary.record import FLAG_SHIFT, OWNER_FREED, OWNER_HELD, Kind, SealFlag
from kvcanary.state import (
    HISTORY,
    OWNER_TRASH,
    ROW_WORDS,
    Check,
    Reason,
    Role,
    RowFlag,
    RowWord,
    Word,
)

_STATE_ROW = tl.constexpr(ROW)
_ITEM_ROW = tl.constexpr(ITEM_ROW)
_FORWARD = tl.constexpr(int(Word.FORWARD))
_ARMED = tl.constexpr(int(Word.ARMED))
_SCRATCH_TOKENS = tl.constexpr(int(Word.SCRATCH_TOKENS))
_LAUNCHES = tl.constexpr(int(Word.LAUNCHES) + int(Role.CHECK))
_ROLE = tl.constexpr(int(Role.CHECK))

_ROW_WORDS = tl.constexpr(ROW_WORDS)
_SEED = tl.constexpr(int(RowWord.SEED))
_LOW = tl.constexpr(int(RowWord.LOW))
_HIGH = tl.constexpr(int(RowWord.HIGH))
_FLAGS = tl.constexpr(int(RowWord.FLAGS))
_ROW_ARMED = tl.constexpr(int(RowFlag.ARMED))
_HISTORY = tl.constexpr(HISTORY)

_HEAD_ENTRIES = tl.constexpr(int(StateWord.HEAD_ENTRIES))
_LINKS_AT = tl.constexpr(int(GroupWord.LINKS))
_SEALS_AT = tl.constexpr(int(GroupWord.SEALS))
_OWNER_AT = tl.constexpr(int(GroupWord.OWNER))
_RING = tl.constexpr(int(GroupWord.RING))
_WINDOW = tl.constexpr(int(GroupWord.WINDOW))
_RESERVED = tl.constexpr(int(GroupWord.RESERVED))
_NUM_PAGES = tl.constexpr(int(GroupWord.NUM_PAGES))
_PAGE_SHIFT = tl.constexpr(int(GroupWord.PAGE_SHIFT))
_FIRST = tl.constexpr(int(ItemWord.FIRST))
_REQUIRED = tl.constexpr(int(ItemWord.REQUIRED))
_WIDE = tl.constexpr(int(ItemWord.WIDE))
_ITEM_FLAGS = tl.constexpr(int(ItemWord.FLAGS))
_TABLE = tl.constexpr(int(ItemFlag.TABLE))

_HELD = tl.constexpr(OWNER_HELD)
_FREED = tl.constexpr(OWNER_FREED)
_TRASH = tl.constexpr(OWNER_TRASH)

_LINKS = tl.constexpr(int(Check.LINKS))
_ROW_ENDS = tl.constexpr(int(Check.ROW_ENDS))
_UNKNOWN_RECORD = tl.constexpr(int(Reason.UNKNOWN_RECORD))
_UNARMED_ROW = tl.constexpr(int(Reason.UNARMED_ROW))
_UNLINKED = tl.constexpr(int(Reason.UNLINKED))
_NO_TABLE = tl.constexpr(int(Reason.NO_TABLE))
_OVER_CAPACITY = tl.constexpr(int(Reason.OVER_CAPACITY))
_OUT_OF_WINDOW = tl.constexpr(int(Reason.OUT_OF_WINDOW))

_WINDOW_KIND = tl.constexpr(int(Kind.WINDOW))
_SLOT_RANGE = tl.constexpr(int(Kind.SLOT_RANGE))
_UNWRITTEN = tl.constexpr(int(Kind.UNWRITTEN))
_POSITION = tl.constexpr(int(Kind.POSITION))
_DIGEST = tl.constexpr(int(Kind.DIGEST))
_REQUEST_DIGEST = tl.constexpr(int(Kind.REQUEST_DIGEST))
_WRITE_CONFLICT = tl.constexpr(int(Kind.WRITE_CONFLICT))
_UNWRITTEN_FLAG = tl.constexpr(int(SealFlag.UNWRITTEN) << FLAG_SHIFT)
_POSITION_FLAG = tl.constexpr(int(SealFlag.POSITION) << FLAG_SHIFT)
_DIGEST_FLAG = tl.constexpr(int(SealFlag.DIGEST) << FLAG_SHIFT)

# Bits of a lane's faults, lowest reported first; MISSING comes last and once a row.
_OUT = tl.constexpr(1)
_EMPTY = tl.constexpr(2)
_SHIFTED = tl.constexpr(4)
_BROKEN = tl.constexpr(8)
_END = tl.constexpr(16)
_MISSING = tl.constexpr(32)
# Bits of what was counted.
_KNOWN = tl.constexpr(1)
_CLAIMS_NOTHING = tl.constexpr(2)
_NO_PREFIX = tl.constexpr(4)
_END_VERIFIED = tl.constexpr(8)
_END_UNARMED = tl.constexpr(16)

MIN_ENTRIES_PER_ROW = 64


@triton.jit
def _read(group, table, pool, mapping, p, mask, POW2: tl.constexpr):
    """The record of position ``p``: (index, slot, page, word 0, digest, owner).

    The owner is read only where it can matter: in reserved pages, and for slots without a record.
    """
    index = translate(mapping, index_of_position(table, pool, p, mask, POW2), mask)
    slot = slot_of_index(pool, index, POW2)
    there = mask & (slot >= 0)
    inside = tl.maximum(slot, 0)
    page = page_of(pool, inside, POW2)
    link = words_at(tl.load(group + _LINKS_AT)) + inside.to(tl.int64) * 2
    word = tl.load(link, mask=there, other=0)
    digest = tl.load(link + 1, mask=there, other=0)
    matters = there & (is_reserved(group, page) | ((word | digest) == 0))
    owner = tl.load(words_at(tl.load(group + _OWNER_AT)) + page, mask=matters, other=0)
    return index, slot, page, word, digest, owner


@triton.jit
def _judge(group, table, pool, mapping, row, span, i, inside, mix_in, mix_out, POW2: tl.constexpr):
    """Entries ``i`` of a row: their positions and records, what was found to be wrong, and what was counted."""
    low, context, turn, first_count, half = span
    seed, held, wanted, armed = row
    p = tl.where(i < first_count, turn + i, context - half + (i - first_count)).to(tl.int32)
    index, slot, page, word, digest, owner = _read(group, table, pool, mapping, p, inside, POW2)
    led = inside & (p > low)
    _, last_slot, _, last_word, last_digest, last_owner = _read(group, table, pool, mapping, p - 1, led, POW2)
    last_known = led & (last_slot >= 0) & (state_of(last_owner) < _TRASH) & (position_of(last_word) == p - 1)
    last_known = last_known & (last_digest != 0)
    from_seed = inside & (p == 0) & flag(seed != 0)
    expected = tl.where(from_seed, seed, last_digest + mix(last_word, mix_in, mix_out))

    state = state_of(owner)
    usable = inside & (slot >= 0) & (state < _TRASH)
    known = usable & ((word | digest) != 0)
    right = known & (position_of(word) == p)
    linked = right & (digest != 0)
    claimed = (state == _HELD) | (state == _FREED)
    after = digest + mix(word, mix_in, mix_out)
    end = linked & (p == context - 1)
    faults = tl.where(inside & (slot == OUTSIDE), _OUT, 0)
    faults |= tl.where(usable & (known == 0) & claimed, _EMPTY, 0)
    faults |= tl.where(known & (right == 0), _SHIFTED, 0)
    faults |= tl.where(linked & (last_known | from_seed) & (digest != expected), _BROKEN, 0)
    faults |= tl.where(end & held & (after != wanted), _END, 0)
    faults |= tl.where(inside & (slot != OUTSIDE) & (usable == 0), _MISSING, 0)
    counts = tl.where(known, _KNOWN, 0)
    counts |= tl.where(usable & (known == 0) & (claimed == 0), _CLAIMS_NOTHING, 0)
    counts |= tl.where(right & (digest == 0), _NO_PREFIX, 0)
    counts |= tl.where(end & held & armed & (after == wanted), _END_VERIFIED, 0)
    counts |= tl.where(end & (~held | (~armed & (after == wanted))), _END_UNARMED, 0)
    return p, index, slot, page, word, digest, expected, after, faults, counts


@triton.jit
def _report_entries(counters, rows, meta, g, group, row, p, index, slot, page, word, digest, expected, after, wanted,
                    faults):  # fmt: skip
    """Report all but missing positions of a tile."""
    faults = faults & (_MISSING - 1)
    inside = tl.maximum(slot, 0).to(tl.int64)
    seal = words_at(tl.load(group + _SEALS_AT)) + inside * 2 + 1
    writer = tl.load(seal, mask=(faults != 0) & (slot >= 0), other=0)
    owner = tl.load(words_at(tl.load(group + _OWNER_AT)) + page, mask=(faults != 0) & (slot >= 0), other=0)
    unknown = (word | digest) == 0
    while tl.max(faults) > 0:
        fault = lowest_fault(faults)
        faults = faults & ~fault
        out = fault == _OUT
        by_row = out | (fault == _END)
        kind = tl.where(out, _SLOT_RANGE, tl.where(fault == _EMPTY, _UNWRITTEN, _REQUEST_DIGEST))
        kind = tl.where(fault == _SHIFTED, _POSITION, tl.where(fault == _BROKEN, _DIGEST, kind)).to(tl.int64)
        slot_bit = tl.where(fault == _EMPTY, _UNWRITTEN_FLAG, tl.where(fault == _SHIFTED, _POSITION_FLAG, _DIGEST_FLAG))
        reported = tl.where(by_row, row_flag(rows, row, kind * 0), seal.to(tl.int64))
        wanted_digest = tl.where(fault == _END, wanted, tl.where(fault == _BROKEN, expected, 0))
        report(
            counters, rows, meta, fault != 0, kind, _ROLE, g, reported, tl.where(by_row, (kind * 0 + 1) << kind, slot_bit),
            row, tl.where(out, index, slot).to(tl.int64), tl.where(out, NONE, page).to(tl.int64), p.to(tl.int64),
            tl.where(out | unknown, NONE, position_of(word)), NONE, tl.where(out | unknown, NONE, code_of(word)),
            wanted_digest, tl.where(out, 0, tl.where(fault == _END, after, digest)), 0, 0,
            tl.where(out, 0, writer), tl.where(out, 0, owner), NONE, fault == _END,
        )  # fmt: skip


@triton.jit
def report_conflicts(counters, rows, meta, g, group, role, t, count, scratch_slots, scratch_links, scratch_rows,
                     POW2: tl.constexpr):  # fmt: skip
    """Report tokens ``t`` of the scratch whose slot holds another token's record by now."""
    inside = t < count
    slot = tl.load(scratch_slots + t, mask=inside, other=NONE)
    word = tl.load(scratch_links + t * 2, mask=inside, other=0)
    digest = tl.load(scratch_links + t * 2 + 1, mask=inside, other=0)
    written = inside & (slot >= 0)
    slot = tl.maximum(slot, 0)
    link = words_at(tl.load(group + _LINKS_AT)) + slot * 2
    found = tl.load(link, mask=written, other=0)
    found_digest = tl.load(link + 1, mask=written, other=0)
    lost = written & ((found != word) | (found_digest != digest))
    if tl.max(lost.to(tl.int32)) > 0:
        row = tl.load(scratch_rows + t, mask=lost, other=0)
        page = page_of(open_pool(group), slot, POW2)
        writer = tl.load(words_at(tl.load(group + _SEALS_AT)) + slot * 2 + 1, mask=lost, other=0)
        owner = tl.load(words_at(tl.load(group + _OWNER_AT)) + page, mask=lost, other=0)
        unknown = (found | found_digest) == 0
        kind = t * 0 + _WRITE_CONFLICT
        report(
            counters, rows, meta, lost, kind, role, g, row_flag(rows, row, kind * 0), (kind * 0 + 1) << kind, row, slot,
            page, position_of(word), tl.where(unknown, NONE, position_of(found)), code_of(word),
            tl.where(unknown, NONE, code_of(found)), digest, found_digest, 0, 0, writer, owner, NONE, kind < 0,
        )  # fmt: skip


@triton.jit
def _live_rows(batch_rows, starts, contexts, request_rows, num_requests, wide, max_rows, BLOCK: tl.constexpr):
    count = tl.zeros([BLOCK], tl.int64)
    at = batch_rows * 0
    while at < batch_rows:
        b = at + tl.arange(0, BLOCK).to(tl.int64)
        live, _, _, _, _ = batch_row(b, batch_rows, starts, contexts, request_rows, num_requests, wide, max_rows)
        count += live.to(tl.int64)
        at += BLOCK
    return tl.sum(count, 0)


@triton.jit
def _span(item, group, b, context, forward, least, meta, batch_rows, starts, contexts, request_rows, num_requests,
          wide, max_rows, BLOCK: tl.constexpr):  # fmt: skip
    """Which old positions of a row are read: (lowest required, first of the moving stretch, its length, newest)."""
    item_wide = tl.load(item + _WIDE)
    required = tl.load(item + _REQUIRED)
    firsts = tl.load(item + _FIRST)
    window = tl.load(group + _WINDOW)
    ring = tl.load(group + _RING)
    low = index_at(firsts, b, is_wide(item_wide, _FIRST), firsts != 0)
    low = tl.where(window != 0, tl.maximum(low, context - (window - 1)), low)
    low = tl.where(required != 0, index_at(required, b, is_wide(item_wide, _REQUIRED), required != 0), low)
    low = tl.where(ring != 0, tl.maximum(low, context - ring), low)
    low = tl.minimum(tl.maximum(low, 0), context)
    length = context - low
    turn = low
    first_count = length
    half = length * 0
    if length > least:
        live = _live_rows(batch_rows, starts, contexts, request_rows, num_requests, wide, max_rows, BLOCK)
        cap = tl.maximum(least * 0 + 64, tl.load(meta + _HEAD_ENTRIES) // live)
        if length > cap:
            half = cap // 2
            rest = length - half
            turn = low + (forward * (cap - half)) % rest
            first_count = tl.minimum(turn + cap - half, low + rest) - turn
    return low, turn, first_count, half


@triton.jit
def _plain_entry(entries, wide, width, column, mask):
    """An entry of a plain table, -1 where there is none or where it is out of all bounds."""
    inside = mask & (column >= 0) & (column < width)
    place = (entries + (column.to(tl.int64) << (2 + wide))).to(tl.pointer_type(tl.int32))
    entry_ = tl.load(place, mask=inside, other=NONE)
    above = tl.load(place + 1, mask=inside & flag(wide != 0), other=0)
    return tl.where(above == 0, entry_, NONE)


@triton.jit
def _all_right(group, item, b, row, low, count, start, step, mix_in, mix_out, TILE: tl.constexpr):
    """Whether all entries of a program are mapped, ordinary, at their positions, linked, and lead to the next one."""
    seed, held, wanted, _ = row
    entries, wide, width, first, pages, _, _, _, _ = open_table(group, item, b, True)
    shift = tl.where(pages != 0, tl.load(group + _PAGE_SHIFT), 0).to(tl.int32)
    # In units of entries: reserved pages, or their slots.
    unit = tl.where(pages != 0, 0, tl.load(group + _PAGE_SHIFT)).to(tl.int32)
    limit = (tl.load(group + _NUM_PAGES).to(tl.int32)) << unit
    low0 = tl.load(group + _RESERVED).to(tl.int32) << unit
    end0 = tl.load(group + _RESERVED + 1).to(tl.int32) << unit
    low1 = tl.load(group + _RESERVED + 2).to(tl.int32) << unit
    end1 = tl.load(group + _RESERVED + 3).to(tl.int32) << unit
    links = words_at(tl.load(group + _LINKS_AT))
    width = width.to(tl.int32)
    first = first.to(tl.int32)
    low = low.to(tl.int32)
    count = count.to(tl.int32)
    step = step.to(tl.int32)
    at = start.to(tl.int32)
    inner = (1 << shift) - 1
    wrong = tl.zeros([TILE], tl.int32)
    while at < count:
        i = at + tl.arange(0, TILE)
        inside = i < count
        followed = i + 1 < count
        p = low + i
        entry_ = _plain_entry(entries, wide, width, (p >> shift) - first, inside)
        next_ = _plain_entry(entries, wide, width, ((p + 1) >> shift) - first, followed)
        ordinary = (entry_ >= 0) & (entry_ < limit)
        ordinary = ordinary & ((entry_ < low0) | (entry_ >= end0)) & ((entry_ < low1) | (entry_ >= end1))
        next_there = followed & (next_ >= 0) & (next_ < limit)
        slot = (entry_ << shift) + (p & inner)
        next_slot = (next_ << shift) + ((p + 1) & inner)
        link = links + slot.to(tl.int64) * 2
        word = tl.load(link, mask=inside & ordinary, other=0)
        digest = tl.load(link + 1, mask=inside & ordinary, other=0)
        after = tl.load(links + next_slot.to(tl.int64) * 2 + 1, mask=next_there, other=0)
        after = tl.where(followed, after, wanted)
        right = ordinary & (position_of(word) == p) & (digest != 0)
        right = right & ((digest + mix(word, mix_in, mix_out) == after) | ~(followed | held))
        right = right & ((p != 0) | (digest == seed) | flag(seed == 0))
        wrong |= (inside & ~right).to(tl.int32)
        at += step
    return tl.max(wrong, 0) == 0


@triton.jit
def _count_clean(counters, g, row, count, start, step, TILE: tl.constexpr):
    """Count the entries of a program that found nothing wrong; the one with the last entry counts the row's end."""
    _, held, _, armed = row
    last = count - 1
    rounds = (count - start + step - 1) // step
    final = start + (rounds - 1) * step
    entries = (rounds - 1) * TILE + tl.minimum(count - final, TILE)
    count_verified(counters, g, _LINKS, entries)
    mine = (last // TILE) * TILE == final
    count_verified(counters, g, _ROW_ENDS, tl.where(mine & held & armed, 1, 0).to(tl.int64))
    count_unverified(counters, g, _UNARMED_ROW, tl.where(mine & ((held == 0) | (armed == 0)), 1, 0).to(tl.int64))


@triton.jit
def _judge_row(counters, rows, meta, g, group, item, b, row, known_row, span, begin, step, mix_in, mix_out,
               POW2: tl.constexpr, TILE: tl.constexpr):  # fmt: skip
    """Judge, count and report the entries of a program."""
    _, context, turn, first_count, half = span
    _, _, wanted, _ = known_row
    count = first_count + half
    pool = open_pool(group)
    mapping = open_map(item)
    table = open_table(group, item, b, POW2)
    lane = tl.arange(0, TILE)
    links = tl.zeros([TILE], tl.int32)
    unknown = tl.zeros([TILE], tl.int32)
    unlinked = tl.zeros([TILE], tl.int32)
    ends = tl.zeros([TILE], tl.int32)
    lowest = count
    start = begin
    while start < count:
        i = start + lane
        p, index, slot, page, word, digest, expected, after, faults, counts = _judge(
            group, table, pool, mapping, known_row, span, i, i < count, mix_in, mix_out, POW2
        )
        links += counts & _KNOWN
        unknown += (counts // _CLAIMS_NOTHING) & 1
        unlinked += (counts // _NO_PREFIX) & 1
        ends |= counts & (_END_VERIFIED | _END_UNARMED)
        if tl.max(faults, 0) > 0:
            lowest = tl.minimum(lowest, tl.min(tl.where((faults & _MISSING) != 0, i, count), 0))
            _report_entries(
                counters, rows, meta, g, group, row, p, index, slot, page, word, digest, expected, after, wanted, faults
            )
        start += step
    count_verified(counters, g, _LINKS, tl.sum(links, 0).to(tl.int64))
    count_unverified(counters, g, _UNKNOWN_RECORD, tl.sum(unknown, 0).to(tl.int64))
    count_unverified(counters, g, _UNLINKED, tl.sum(unlinked, 0).to(tl.int64))
    end = tl.max(ends, 0)
    count_verified(counters, g, _ROW_ENDS, tl.where(end == _END_VERIFIED, 1, 0).to(tl.int64))
    count_unverified(counters, g, _UNARMED_ROW, tl.where(end == _END_UNARMED, 1, 0).to(tl.int64))
    # Only the lowest missing position of the row counts, so look whether another program has a lower one.
    before = tl.zeros([TILE], tl.int32)
    start = begin * 0
    while (lowest < count) & (start < lowest):
        i = start + lane
        _p, _i, _s, _g, _w, _d, _e, _a, missing, _c = _judge(
            group, table, pool, mapping, known_row, span, i, i < lowest, mix_in, mix_out, POW2
        )
        before |= missing & _MISSING
        start += TILE
    if (lowest < count) & (tl.max(before, 0) == 0):
        place = tl.where(lowest < first_count, turn + lowest, context - half + (lowest - first_count))
        kind = place * 0 + _WINDOW_KIND
        report(
            counters, rows, meta, kind > 0, kind, _ROLE, g, row_flag(rows, row, kind * 0), (kind * 0 + 1) << kind, row,
            NONE, NONE, place, NONE, NONE, NONE, 0, 0, 0, 0, 0, 0, NONE, kind < 0,
        )  # fmt: skip


@entry
def check_kernel(
    counters_at: tl.int64, rows_at: tl.int64, history_at: tl.int64, meta_at: tl.int64, scratch_slots_at: tl.int64,
    scratch_links_at: tl.int64, scratch_rows_at: tl.int64, items_at: tl.int64, starts: tl.int64, contexts: tl.int64,
    request_rows: tl.int64, num_requests: tl.int64, wide: tl.int64, batch_rows: tl.int64, max_tokens: tl.int64,
    max_rows: tl.int64, selected: tl.int64, least: tl.int64, mix_in: tl.int64, mix_out: tl.int64,
    PLAIN: tl.constexpr, POW2: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Grid ``[batch rows, programs a row, groups]``. ``least``: a row this long is never over capacity."""
    b = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1).to(tl.int64)
    g = tl.program_id(2).to(tl.int64)
    counters = words_at(counters_at)
    if (b == 0) & (part == 0) & (g == 0):
        tl.atomic_add(counters + _LAUNCHES, 1, sem="relaxed")
    if (tl.load(counters + _ARMED) == 0) | (((selected >> g) & 1) == 0):
        return
    rows = words_at(rows_at)
    meta = words_at(meta_at)
    group = meta + (g + 1) * _STATE_ROW
    item = words_at(items_at) + g * _ITEM_ROW
    forward = tl.load(counters + _FORWARD)
    live, row, _first, _end, context = batch_row(b, batch_rows, starts, contexts, request_rows, num_requests, wide, max_rows)
    programs = tl.num_programs(1).to(tl.int64)
    if live & (context > 0):
        low, turn, first_count, half = _span(
            item, group, b, context, forward, least, meta, batch_rows, starts, contexts, request_rows, num_requests,
            wide, max_rows, TILE,
        )  # fmt: skip
        count = first_count + half
        there = (tl.load(item + _ITEM_FLAGS) & _TABLE) != 0
        if part == 0:
            count_unverified(counters, g, _OUT_OF_WINDOW, low)
            count_unverified(counters, g, _NO_TABLE, tl.where(there, 0, context - low))
            count_unverified(counters, g, _OVER_CAPACITY, tl.where(there, context - low - count, 0))
        if there & (part * TILE < count):
            words = rows + row * _ROW_WORDS
            high = tl.load(words + _HIGH)
            held = flag((high >= 0) & (tl.load(words + _LOW) <= context) & (context <= high))
            wanted = tl.load(words_at(history_at) + row * _HISTORY + (context & (_HISTORY - 1)))
            armed = flag((tl.load(words + _FLAGS) & _ROW_ARMED) != 0)
            known_row = (tl.load(words + _SEED), held, wanted, armed)
            clean = False
            if PLAIN:
                if half == 0:
                    clean = _all_right(
                        group, item, b, known_row, low, count, part * TILE, programs * TILE, mix_in, mix_out, TILE
                    )
            if clean:
                _count_clean(counters, g, known_row, count, part * TILE, programs * TILE, TILE)
            else:
                span = (low, context, turn, first_count, half)
                _judge_row(
                    counters, rows, meta, g, group, item, b, row, known_row, span, part * TILE, programs * TILE, mix_in,
                    mix_out, POW2, TILE,
                )  # fmt: skip
    if tl.load(group + _RING) == 0:
        tokens = tl.load(counters + _SCRATCH_TOKENS)
        start = (b * programs + part) * TILE
        while start < tokens:
            report_conflicts(
                counters, rows, meta, g, group, _ROLE, start + tl.arange(0, TILE).to(tl.int64), tokens,
                words_at(scratch_slots_at) + g * max_tokens, words_at(scratch_links_at), words_at(scratch_rows_at), POW2,
            )  # fmt: skip
            start += batch_rows * programs * TILE
