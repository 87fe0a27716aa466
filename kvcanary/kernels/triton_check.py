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

from kvcanary.kernels.triton_clock import is_timed, stamp_entry, start_clock
from kvcanary.kernels.triton_constants import (
    CHECK_LINKS,
    CHECK_ROW_ENDS,
    GROUP_LINKS,
    GROUP_NUM_PAGES,
    GROUP_PAGE_SHIFT,
    GROUP_RESERVED,
    GROUP_RING,
    ITEM_FLAG_TABLE,
    ITEM_FLAGS,
    ITEM_ROW,
    REASON_UNARMED_ROW,
    ROLE_CHECK,
    STATE_ROW,
    WORD_ARMED,
    WORD_FORWARD,
    WORD_SCRATCH_TOKENS,
)
from kvcanary.kernels.triton_judge import judge_row, report_conflicts
from kvcanary.kernels.triton_launch import entry
from kvcanary.kernels.triton_rows import batch_row, old_span, open_row
from kvcanary.kernels.triton_tables import open_table
from kvcanary.kernels.triton_words import NONE, count_unverified, count_verified, flag, mix, position_of, words_at
from kvcanary.state import Reason, Role, Word

_LAUNCHES = tl.constexpr(int(Word.LAUNCHES) + int(Role.CHECK))
_NO_TABLE = tl.constexpr(int(Reason.NO_TABLE))
_OVER_CAPACITY = tl.constexpr(int(Reason.OVER_CAPACITY))
_OUT_OF_WINDOW = tl.constexpr(int(Reason.OUT_OF_WINDOW))


@triton.jit
def _plain_entry(entries, wide, width, column, mask):
    """An entry of a plain table, -1 where there is none or where it is out of all bounds."""
    inside = mask & (column >= 0) & (column < width)
    place = (entries + (column.to(tl.int64) << (2 + wide))).to(tl.pointer_type(tl.int32))
    entry_ = tl.load(place, mask=inside, other=NONE)
    above = tl.load(place + 1, mask=inside & flag(wide != 0), other=0)
    return tl.where(above == 0, entry_, NONE)


@triton.jit
def _open_plain(group, item, b):
    """A plain table and its pool, in units of entries (pages, or slots): a tuple for :func:`_all_right`."""
    entries, wide, width, first, pages, _, _, _, _ = open_table(group, item, b, True)
    page_shift = tl.load(group + GROUP_PAGE_SHIFT)
    shift = tl.where(pages != 0, page_shift, 0).to(tl.int32)
    unit = tl.where(pages != 0, 0, page_shift).to(tl.int32)
    limit = (tl.load(group + GROUP_NUM_PAGES).to(tl.int32)) << unit
    low0 = tl.load(group + GROUP_RESERVED).to(tl.int32) << unit
    end0 = tl.load(group + GROUP_RESERVED + 1).to(tl.int32) << unit
    low1 = tl.load(group + GROUP_RESERVED + 2).to(tl.int32) << unit
    end1 = tl.load(group + GROUP_RESERVED + 3).to(tl.int32) << unit
    links = words_at(tl.load(group + GROUP_LINKS))
    reserved = (low0, end0, low1, end1)
    return entries, wide, width.to(tl.int32), first.to(tl.int32), shift, limit, reserved, links


@triton.jit
def _all_right(plain, row, low, count, start, step, mix_in, mix_out, TILE: tl.constexpr):
    """Whether all entries of a program are mapped, ordinary, at their positions, linked, and lead to the next one."""
    seed, held, wanted, _ = row
    entries, wide, width, first, shift, limit, reserved, links = plain
    low0, end0, low1, end1 = reserved
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
    count_verified(counters, g, CHECK_LINKS, entries)
    mine = (last // TILE) * TILE == final
    count_verified(counters, g, CHECK_ROW_ENDS, tl.where(mine & held & armed, 1, 0).to(tl.int64))
    count_unverified(counters, g, REASON_UNARMED_ROW, tl.where(mine & ((held == 0) | (armed == 0)), 1, 0).to(tl.int64))


@entry
def check_kernel(
    counters_at: tl.int64, rows_at: tl.int64, history_at: tl.int64, meta_at: tl.int64, scratch_slots_at: tl.int64,
    scratch_links_at: tl.int64, scratch_rows_at: tl.int64, items_at: tl.int64, starts: tl.int64, contexts: tl.int64,
    request_rows: tl.int64, num_requests: tl.int64, wide: tl.int64, batch_rows: tl.int64, max_tokens: tl.int64,
    max_rows: tl.int64, selected: tl.int64, least: tl.int64, mix_in: tl.int64, mix_out: tl.int64,
    PLAIN: tl.constexpr, POW2: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Grid ``[batch rows + 1, programs a row, groups]``. ``least``: a row this long is never over capacity.

    All that needs no table is loaded before the first branch, so that it is on its way at the same time.
    """
    b = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1).to(tl.int64)
    g = tl.program_id(2).to(tl.int64)
    counters = words_at(counters_at)
    meta = words_at(meta_at)
    timed = is_timed(counters)
    group = meta + (g + 1) * STATE_ROW
    item = words_at(items_at) + g * ITEM_ROW
    armed = tl.load(counters + WORD_ARMED)
    forward = tl.load(counters + WORD_FORWARD)
    tokens = tl.load(counters + WORD_SCRATCH_TOKENS)
    ring = tl.load(group + GROUP_RING)
    there = (tl.load(item + ITEM_FLAGS) & ITEM_FLAG_TABLE) != 0
    live, row, _first, _end, context = batch_row(
        b, batch_rows, starts, contexts, request_rows, num_requests, wide, max_rows
    )
    if PLAIN:
        plain = _open_plain(group, item, tl.minimum(b, batch_rows - 1))
        known_row = open_row(rows_at, history_at, row, context)
    if (b == 0) & (part == 0) & (g == 0):
        tl.atomic_add(counters + _LAUNCHES, 1, sem="relaxed")
    if armed != 0:
        start_clock(counters, meta, (b == 0) & (part == 0) & (g == 0))
    if (armed == 0) | (((selected >> g) & 1) == 0):
        return
    programs = tl.num_programs(1).to(tl.int64)
    if live & (context > 0):
        low, _turn, first_count, half = old_span(
            item, group, b, context, forward, least, meta, batch_rows, starts, contexts, request_rows, num_requests,
            wide, max_rows, TILE,
        )  # fmt: skip
        count = first_count + half
        right = part < 0
        if PLAIN:
            if there & (part * TILE < count) & (half == 0):
                right = _all_right(plain, known_row, low, count, part * TILE, programs * TILE, mix_in, mix_out, TILE)
                if right:
                    _count_clean(counters, g, known_row, count, part * TILE, programs * TILE, TILE)
        if part == 0:
            count_unverified(counters, g, _OUT_OF_WINDOW, low)
            count_unverified(counters, g, _NO_TABLE, tl.where(there, 0, context - low))
            count_unverified(counters, g, _OVER_CAPACITY, tl.where(there, context - low - count, 0))
        if there & (part * TILE < count) & (right == 0):
            judge_row(
                counters, rows_at, history_at, meta, g, group, item, b, part,
                (starts, contexts, request_rows, num_requests), wide, batch_rows, max_rows, least, mix_in, mix_out,
                POW2, TILE,
            )  # fmt: skip
    if ring == 0:
        # The last row's programs first: nobody's old positions keep them busy.
        start = ((batch_rows - b) * programs + part) * TILE
        while start < tokens:
            report_conflicts(
                counters, words_at(rows_at), meta, g, group, ROLE_CHECK, start + tl.arange(0, TILE).to(tl.int64),
                tokens, words_at(scratch_slots_at) + g * max_tokens, words_at(scratch_links_at),
                words_at(scratch_rows_at), POW2,
            )  # fmt: skip
            start += (batch_rows + 1) * programs * TILE
    stamp_entry(counters, timed)
