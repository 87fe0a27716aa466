"""Rows of a batch, on the device: device functions."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from kvcanary.kernels.batch_descriptors import ItemWord
from kvcanary.kernels.descriptors import GroupWord, StateWord
from kvcanary.kernels.triton_constants import (
    GROUP_RING,
    HISTORY,
    ITEM_FIRST,
    ITEM_WIDE,
    ROW_FLAG_ARMED,
    ROW_FLAGS,
    ROW_HIGH,
    ROW_LOW,
    ROW_SEED,
    ROW_WORDS,
)
from kvcanary.kernels.triton_tables import is_wide
from kvcanary.kernels.triton_words import flag, holds, index_at, words_at
from kvcanary.state import MIN_ENTRIES_PER_ROW

# Places in the tuple of a batch's addresses; their bits say which are int64.
IDS = tl.constexpr(0)
STARTS = tl.constexpr(1)
CONTEXTS = tl.constexpr(2)
ROWS = tl.constexpr(3)
POSITIONS = tl.constexpr(4)
SALTS = tl.constexpr(5)
EXPECTED = tl.constexpr(6)
LAST = tl.constexpr(7)
COUNT = tl.constexpr(8)

_MIN_ENTRIES = tl.constexpr(MIN_ENTRIES_PER_ROW)
_HEAD_ENTRIES = tl.constexpr(int(StateWord.HEAD_ENTRIES))
_WINDOW = tl.constexpr(int(GroupWord.WINDOW))
_REQUIRED = tl.constexpr(int(ItemWord.REQUIRED))


@triton.jit
def batch_row(b, batch_rows, starts, contexts, request_rows, num_requests, wide, max_rows):
    """One row of a batch: (live, row in the row table, first token, end of its tokens, old positions)."""
    row = index_at(request_rows, b, is_wide(wide, ROWS), b < batch_rows)
    first = index_at(starts, b, is_wide(wide, STARTS), b < batch_rows)
    end = index_at(starts, b + 1, is_wide(wide, STARTS), b < batch_rows)
    context = index_at(contexts, b, is_wide(wide, CONTEXTS), b < batch_rows)
    given = index_at(num_requests, num_requests * 0, is_wide(wide, COUNT), num_requests != 0)
    count = tl.where(num_requests == 0, batch_rows, given)
    live = (row >= 0) & (row < max_rows) & (b < count) & (b < batch_rows)
    return live, tl.where(live, row, 0), first, end, context


@triton.jit
def open_row(rows_at, history_at, row, context):
    """What a row knows of its old positions: (seed, whether the digest at their end is known, that digest, armed)."""
    words = words_at(rows_at) + row * ROW_WORDS
    high = tl.load(words + ROW_HIGH)
    held = flag(holds(tl.load(words + ROW_LOW), high, context))
    digest = tl.load(words_at(history_at) + row * HISTORY + (context & (HISTORY - 1)))
    return tl.load(words + ROW_SEED), held, digest, flag((tl.load(words + ROW_FLAGS) & ROW_FLAG_ARMED) != 0)


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
def old_span(item, group, b, context, forward, least, meta, batch_rows, starts, contexts, request_rows, num_requests,
             wide, max_rows, BLOCK: tl.constexpr):  # fmt: skip
    """Which old positions of a row are read: (lowest required, first of the moving stretch, its length, newest)."""
    item_wide = tl.load(item + ITEM_WIDE)
    required = tl.load(item + _REQUIRED)
    firsts = tl.load(item + ITEM_FIRST)
    window = tl.load(group + _WINDOW)
    ring = tl.load(group + GROUP_RING)
    low = index_at(firsts, b, is_wide(item_wide, ITEM_FIRST), firsts != 0)
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
        cap = tl.maximum(least * 0 + _MIN_ENTRIES, tl.load(meta + _HEAD_ENTRIES) // live)
        if length > cap:
            half = cap // 2
            rest = length - half
            turn = low + (forward * (cap - half)) % rest
            first_count = tl.minimum(turn + cap - half, low + rest) - turn
    return low, turn, first_count, half
