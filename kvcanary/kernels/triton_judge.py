"""Judging old positions one by one, and reporting what is wrong with them: device functions."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from kvcanary.kernels.triton_constants import (
    CHECK_LINKS,
    CHECK_ROW_ENDS,
    GROUP_LINKS,
    GROUP_OWNER,
    GROUP_SEALS,
    KIND_REQUEST_DIGEST,
    KIND_SLOT_RANGE,
    OWNER_FREED,
    OWNER_HELD,
    OWNER_TRASH,
    REASON_UNARMED_ROW,
    ROLE_CHECK,
    WORD_FORWARD,
)
from kvcanary.kernels.triton_rows import batch_row, old_span, open_row
from kvcanary.kernels.triton_tables import (
    engine_index,
    index_of_position,
    is_reserved,
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
    lowest_fault,
    mix,
    position_of,
    report,
    row_flag,
    state_of,
    words_at,
)
from kvcanary.record import FLAG_SHIFT, Kind, SealFlag
from kvcanary.state import Reason

_UNKNOWN_RECORD = tl.constexpr(int(Reason.UNKNOWN_RECORD))
_UNLINKED = tl.constexpr(int(Reason.UNLINKED))
_WINDOW_KIND = tl.constexpr(int(Kind.WINDOW))
_UNWRITTEN = tl.constexpr(int(Kind.UNWRITTEN))
_POSITION = tl.constexpr(int(Kind.POSITION))
_DIGEST = tl.constexpr(int(Kind.DIGEST))
_WRITE_CONFLICT = tl.constexpr(int(Kind.WRITE_CONFLICT))
_UNWRITTEN_FLAG = tl.constexpr(int(SealFlag.UNWRITTEN) << FLAG_SHIFT)
_POSITION_FLAG = tl.constexpr(int(SealFlag.POSITION) << FLAG_SHIFT)
_DIGEST_FLAG = tl.constexpr(int(SealFlag.DIGEST) << FLAG_SHIFT)
_OUT = tl.constexpr(1)
_EMPTY = tl.constexpr(2)
_SHIFTED = tl.constexpr(4)
_BROKEN = tl.constexpr(8)
_END = tl.constexpr(16)
_MISSING = tl.constexpr(32)
_KNOWN = tl.constexpr(1)
_CLAIMS_NOTHING = tl.constexpr(2)
_NO_PREFIX = tl.constexpr(4)
_END_VERIFIED = tl.constexpr(8)
_END_UNARMED = tl.constexpr(16)


@triton.jit
def _read(group, table, pool, mapping, p, mask, POW2: tl.constexpr):
    """The record of position ``p``: (slot, page, word 0, digest, owner).

    The owner is read only where it can matter: in reserved pages, and for slots without a record.
    """
    index = translate(mapping, index_of_position(table, pool, p, mask, POW2), mask)
    slot = slot_of_index(pool, index, POW2)
    there = mask & (slot >= 0)
    inside = tl.maximum(slot, 0)
    page = page_of(pool, inside, POW2)
    link = words_at(tl.load(group + GROUP_LINKS)) + inside.to(tl.int64) * 2
    word = tl.load(link, mask=there, other=0)
    digest = tl.load(link + 1, mask=there, other=0)
    matters = there & (is_reserved(group, page) | ((word | digest) == 0))
    owner = tl.load(words_at(tl.load(group + GROUP_OWNER)) + page, mask=matters, other=0)
    return slot, page, word, digest, owner


@triton.jit
def _judge(group, table, pool, mapping, row, span, i, inside, mix_in, mix_out, POW2: tl.constexpr):
    """Entries ``i`` of a row: their positions and records, what was found to be wrong, and what was counted."""
    low, context, turn, first_count, half = span
    seed, held, wanted, armed = row
    p = tl.where(i < first_count, turn + i, context - half + (i - first_count)).to(tl.int32)
    slot, page, word, digest, owner = _read(group, table, pool, mapping, p, inside, POW2)
    led = inside & (p > low)
    last_slot, _, last_word, last_digest, last_owner = _read(group, table, pool, mapping, p - 1, led, POW2)
    last_known = led & (last_slot >= 0) & (state_of(last_owner) < OWNER_TRASH) & (position_of(last_word) == p - 1)
    last_known = last_known & (last_digest != 0)
    from_seed = inside & (p == 0) & flag(seed != 0)
    expected = tl.where(from_seed, seed, last_digest + mix(last_word, mix_in, mix_out))

    state = state_of(owner)
    usable = inside & (slot >= 0) & (state < OWNER_TRASH)
    known = usable & ((word | digest) != 0)
    right = known & (position_of(word) == p)
    linked = right & (digest != 0)
    claimed = (state == OWNER_HELD) | (state == OWNER_FREED)
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
    return p, slot, page, word, digest, expected, after, faults, counts


@triton.jit
def _report_entries(counters, rows, meta, g, group, table, pool, mapping, row, p, slot, page, word, digest, expected,
                    after, wanted, faults, POW2: tl.constexpr):  # fmt: skip
    """Report all but missing positions of a tile."""
    faults = faults & (_MISSING - 1)
    p = p.to(tl.int64)
    # Once more with all its bits, to be named.
    index = translate(mapping, index_of_position(table, pool, p, faults != 0, POW2), faults != 0)
    inside = tl.maximum(slot, 0).to(tl.int64)
    seal = words_at(tl.load(group + GROUP_SEALS)) + inside * 2 + 1
    owner = tl.load(words_at(tl.load(group + GROUP_OWNER)) + page, mask=(faults != 0) & (slot >= 0), other=0)
    unknown = (word | digest) == 0
    while tl.max(faults) > 0:
        fault = lowest_fault(faults)
        faults = faults & ~fault
        out = fault == _OUT
        by_row = out | (fault == _END)
        # With the flags that the kinds before have set, perhaps through other threads.
        tl.debug_barrier()
        writer = tl.load(seal, mask=(fault != 0) & (slot >= 0), other=0, volatile=True)
        kind = tl.where(out, KIND_SLOT_RANGE, tl.where(fault == _EMPTY, _UNWRITTEN, KIND_REQUEST_DIGEST))
        kind = tl.where(fault == _SHIFTED, _POSITION, tl.where(fault == _BROKEN, _DIGEST, kind)).to(tl.int64)
        slot_bit = tl.where(fault == _EMPTY, _UNWRITTEN_FLAG, tl.where(fault == _SHIFTED, _POSITION_FLAG, _DIGEST_FLAG))
        reported = tl.where(by_row, row_flag(rows, row, kind * 0), seal.to(tl.int64))
        wanted_digest = tl.where(fault == _END, wanted, tl.where(fault == _BROKEN, expected, 0))
        report(
            counters, rows, meta, fault != 0, kind, ROLE_CHECK, g, reported,
            tl.where(by_row, (kind * 0 + 1) << kind, slot_bit), row,
            tl.where(out, engine_index(index), slot).to(tl.int64), tl.where(out, NONE, page).to(tl.int64), p,
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
    link = words_at(tl.load(group + GROUP_LINKS)) + slot * 2
    found = tl.load(link, mask=written, other=0)
    found_digest = tl.load(link + 1, mask=written, other=0)
    lost = written & ((found != word) | (found_digest != digest))
    if tl.max(lost.to(tl.int32)) > 0:
        row = tl.load(scratch_rows + t, mask=lost, other=0)
        page = page_of(open_pool(group), slot, POW2)
        writer = tl.load(words_at(tl.load(group + GROUP_SEALS)) + slot * 2 + 1, mask=lost, other=0)
        owner = tl.load(words_at(tl.load(group + GROUP_OWNER)) + page, mask=lost, other=0)
        unknown = (found | found_digest) == 0
        kind = t * 0 + _WRITE_CONFLICT
        report(
            counters, rows, meta, lost, kind, role, g, row_flag(rows, row, kind * 0), (kind * 0 + 1) << kind, row, slot,
            page, position_of(word), tl.where(unknown, NONE, position_of(found)), code_of(word),
            tl.where(unknown, NONE, code_of(found)), digest, found_digest, 0, 0, writer, owner, NONE, kind < 0,
        )  # fmt: skip


@triton.jit
def judge_row(counters, rows_at, history_at, meta, g, group, item, b, part, batch, wide, batch_rows, max_rows, least,
              mix_in, mix_out, POW2: tl.constexpr, TILE: tl.constexpr):  # fmt: skip
    """Judge, count and report the entries of a program.

    All is read again from memory: what the caller knows would hold registers in its short loop.
    """
    starts, contexts, request_rows, num_requests = batch
    rows = words_at(rows_at)
    _live, row, _first, _end, context = batch_row(
        b, batch_rows, starts, contexts, request_rows, num_requests, wide, max_rows
    )
    low, turn, first_count, half = old_span(
        item, group, b, context, tl.load(counters + WORD_FORWARD), least, meta, batch_rows, starts, contexts,
        request_rows, num_requests, wide, max_rows, TILE,
    )  # fmt: skip
    known_row = open_row(rows_at, history_at, row, context)
    _seed, _held, wanted, _armed = known_row
    span = (low, context, turn, first_count, half)
    begin = part * TILE
    step = tl.num_programs(1).to(tl.int64) * TILE
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
        p, slot, page, word, digest, expected, after, faults, counts = _judge(
            group, table, pool, mapping, known_row, span, i, i < count, mix_in, mix_out, POW2
        )
        links += counts & _KNOWN
        unknown += (counts // _CLAIMS_NOTHING) & 1
        unlinked += (counts // _NO_PREFIX) & 1
        ends |= counts & (_END_VERIFIED | _END_UNARMED)
        if tl.max(faults, 0) > 0:
            lowest = tl.minimum(lowest, tl.min(tl.where((faults & _MISSING) != 0, i, count), 0))
            _report_entries(
                counters, rows, meta, g, group, table, pool, mapping, row, p, slot, page, word, digest, expected, after,
                wanted, faults, POW2,
            )  # fmt: skip
        start += step
    count_verified(counters, g, CHECK_LINKS, tl.sum(links, 0).to(tl.int64))
    count_unverified(counters, g, _UNKNOWN_RECORD, tl.sum(unknown, 0).to(tl.int64))
    count_unverified(counters, g, _UNLINKED, tl.sum(unlinked, 0).to(tl.int64))
    end = tl.max(ends, 0)
    count_verified(counters, g, CHECK_ROW_ENDS, tl.where(end == _END_VERIFIED, 1, 0).to(tl.int64))
    count_unverified(counters, g, REASON_UNARMED_ROW, tl.where(end == _END_UNARMED, 1, 0).to(tl.int64))
    # Only the lowest missing position of the row counts, so look whether another program has a lower one.
    before = tl.zeros([TILE], tl.int32)
    start = begin * 0
    while (lowest < count) & (start < lowest):
        i = start + lane
        _p, _s, _g, _w, _d, _e, _a, missing, _c = _judge(
            group, table, pool, mapping, known_row, span, i, i < lowest, mix_in, mix_out, POW2
        )
        before |= missing & _MISSING
        start += TILE
    if (lowest < count) & (tl.max(before, 0) == 0):
        place = tl.where(lowest < first_count, turn + lowest, context - half + (lowest - first_count))
        kind = place * 0 + _WINDOW_KIND
        report(
            counters, rows, meta, kind > 0, kind, ROLE_CHECK, g, row_flag(rows, row, kind * 0), (kind * 0 + 1) << kind,
            row, NONE, NONE, place, NONE, NONE, NONE, 0, 0, 0, 0, 0, 0, NONE, kind < 0,
        )  # fmt: skip
