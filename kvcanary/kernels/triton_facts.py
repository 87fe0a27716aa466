"""Facts, on the device: what the engine says about pages and rows, applied in order by one program.

The facts are read from host memory once, in one sweep, and applied from a copy: a fact at a time over the bus would
cost more than all of them.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from kvcanary.kernels import FactOp
from kvcanary.kernels.descriptors import FACT_ROW, FactWord, StateWord
from kvcanary.kernels.triton_constants import (
    FACT_OP,
    FACT_TAG,
    HISTORY,
    KIND_REQUEST_DIGEST,
    ROLE_FACTS,
    ROW_ANCHOR_DIGEST,
    ROW_ANCHOR_POSITION,
    ROW_FLAG_ARMED,
    ROW_FLAGS,
    ROW_HIGH,
    ROW_LOW,
    ROW_SEED,
    ROW_TAG,
    ROW_WORDS,
    STATE_ROW,
    WORD_FORWARD,
    WORD_SEQUENCE,
)
from kvcanary.kernels.triton_launch import entry
from kvcanary.kernels.triton_pages import apply_to_pages
from kvcanary.kernels.triton_words import NONE, holds, report, row_flag, words_at
from kvcanary.state import OUTBOX_ROWS, OUTBOX_WORDS, OutboxWord, Role, Word

_FACT_ROW = tl.constexpr(FACT_ROW)
_OUTBOX = tl.constexpr(int(Word.OUTBOX))
_LAUNCHES = tl.constexpr(int(Word.LAUNCHES) + int(Role.FACTS))
_OUTBOX_AT = tl.constexpr(int(StateWord.OUTBOX))
_GROUP = tl.constexpr(int(FactWord.GROUP))
_SPACE = tl.constexpr(int(FactWord.SPACE))
_ROW = tl.constexpr(int(FactWord.ROW))
_POSITION = tl.constexpr(int(FactWord.POSITION))
_DIGEST = tl.constexpr(int(FactWord.DIGEST))
_SEED = tl.constexpr(int(FactWord.SEED))
_ARMED = tl.constexpr(int(FactWord.ARMED))
_ADMIT = tl.constexpr(int(FactOp.ADMIT))
_ANCHOR = tl.constexpr(int(FactOp.ANCHOR))
_FINISH = tl.constexpr(int(FactOp.FINISH))
_OUTBOX_ROWS = tl.constexpr(OUTBOX_ROWS)
_OUTBOX_WORDS = tl.constexpr(OUTBOX_WORDS)
_OUT_SEQUENCE = tl.constexpr(int(OutboxWord.SEQUENCE))
_OUT_TAG = tl.constexpr(int(OutboxWord.TAG))
_OUT_LENGTH = tl.constexpr(int(OutboxWord.LENGTH))
_OUT_HELD = tl.constexpr(int(OutboxWord.HELD))
_OUT_DIGEST = tl.constexpr(int(OutboxWord.DIGEST))
_OUT_FORWARD = tl.constexpr(int(OutboxWord.FORWARD))


@triton.jit
def _set_base(row, history, number, position, digest):
    tl.store(row + ROW_LOW, position)
    tl.store(row + ROW_HIGH, position)
    tl.store(row + ROW_FLAGS, tl.load(row + ROW_FLAGS) | ROW_FLAG_ARMED)
    tl.store(row + ROW_ANCHOR_POSITION, position * 0 + NONE)
    tl.store(row + ROW_ANCHOR_DIGEST, position * 0)
    tl.store(history + number * HISTORY + (position & (HISTORY - 1)), digest)


@triton.jit
def _admit(rows, history, fact):
    number = tl.load(fact + _ROW)
    row = rows + number * ROW_WORDS
    column = tl.arange(0, ROW_WORDS).to(tl.int64)
    start = tl.where((column == ROW_HIGH) | (column == ROW_ANCHOR_POSITION), NONE, 0).to(tl.int64)
    start = tl.where(column == ROW_TAG, tl.load(fact + FACT_TAG), start)
    tl.store(row + column, tl.where(column == ROW_SEED, tl.load(fact + _SEED), start))
    tl.debug_barrier()
    position = tl.load(fact + _POSITION)
    seed = tl.load(fact + _SEED)
    if (position == 0) & (seed != 0):
        _set_base(row, history, number, position, seed)
    elif tl.load(fact + _ARMED) != 0:
        _set_base(row, history, number, position, tl.load(fact + _DIGEST))


@triton.jit
def _anchor(counters, rows, history, meta, fact):
    """A base arrived. A row that went on without any digest stays as it is: where it stands now is not known."""
    number = tl.load(fact + _ROW)
    row = rows + number * ROW_WORDS
    position = tl.load(fact + _POSITION)
    digest = tl.load(fact + _DIGEST)
    if tl.load(row + ROW_TAG) == tl.load(fact + FACT_TAG):
        place = tl.load(row + ROW_ANCHOR_POSITION)
        assumed = tl.load(row + ROW_ANCHOR_DIGEST)
        if (tl.load(fact + _ARMED) != 0) | ((tl.load(row + ROW_HIGH) < 0) & (place < 0)):
            _set_base(row, history, number, position, digest)
        elif (place == position) & (assumed != 0):
            if assumed == digest:
                tl.store(row + ROW_FLAGS, tl.load(row + ROW_FLAGS) | ROW_FLAG_ARMED)
                tl.store(row + ROW_ANCHOR_POSITION, position * 0 + NONE)
                tl.store(row + ROW_ANCHOR_DIGEST, position * 0)
            else:
                kind = position * 0 + KIND_REQUEST_DIGEST
                report(
                    counters, rows, meta, kind > 0, kind, ROLE_FACTS, tl.load(fact + _GROUP),
                    row_flag(rows, number, kind * 0), (kind * 0 + 1) << kind, number, NONE, NONE, position, NONE,
                    NONE, NONE, digest, assumed, 0, 0, 0, 0, NONE, kind > 0,
                )  # fmt: skip


@triton.jit
def _finish(counters, rows, history, meta, fact, forward):
    """Put the row's digest at the final length into the outbox and free the row."""
    number = tl.load(fact + _ROW)
    tag = tl.load(fact + FACT_TAG)
    position = tl.load(fact + _POSITION)
    row = rows + tl.maximum(number, 0) * ROW_WORDS
    mine = (number >= 0) & (tl.load(row + ROW_TAG) == tag)
    high = tl.load(row + ROW_HIGH)
    held = mine & holds(tl.load(row + ROW_LOW), high, position)
    digest = tl.load(history + tl.maximum(number, 0) * HISTORY + (position & (HISTORY - 1)), mask=held, other=0)
    tl.debug_barrier()
    tl.store(row + ROW_TAG, tag * 0, mask=mine)
    tl.store(row + ROW_HIGH, tag * 0 + NONE, mask=mine)
    count = tl.load(counters + _OUTBOX)
    out = words_at(tl.load(meta + _OUTBOX_AT)) + (count % _OUTBOX_ROWS) * _OUTBOX_WORDS
    tl.store(out + _OUT_TAG, tag)
    tl.store(out + _OUT_LENGTH, position)
    tl.store(out + _OUT_HELD, held.to(tl.int64))
    tl.store(out + _OUT_DIGEST, digest)
    tl.store(out + _OUT_FORWARD, forward)
    # The sequence word last, behind a fence: a reader on another thread must not take half a row for a whole one.
    tl.atomic_add(counters + WORD_SEQUENCE, 0, sem="acq_rel", scope="sys")
    tl.store(out + _OUT_SEQUENCE, count + 1)
    tl.debug_barrier()
    tl.store(counters + _OUTBOX, count + 1)


@entry
def facts_kernel(
    counters_at: tl.int64, rows_at: tl.int64, history_at: tl.int64, meta_at: tl.int64, host_at: tl.int64,
    words_at_: tl.int64, length: tl.int64, count: tl.int64, progress_at: tl.int64, generation: tl.int64,
    counted: tl.int64, TILE: tl.constexpr,
):  # fmt: skip
    """One program. ``length`` words at ``host`` hold ``count`` facts and their lists."""
    counters = words_at(counters_at)
    rows = words_at(rows_at)
    history = words_at(history_at)
    meta = words_at(meta_at)
    host = words_at(host_at)
    words = words_at(words_at_)
    lane = tl.arange(0, TILE).to(tl.int64)
    start = length * 0
    while start < length:
        i = start + lane
        tl.store(words + i, tl.load(host + i, mask=i < length, other=0), mask=i < length)
        start += TILE
    tl.debug_barrier()
    tl.store(words_at(progress_at), generation)
    tl.atomic_add(counters + _LAUNCHES, counted, sem="relaxed")
    forward = tl.load(counters + WORD_FORWARD)
    number = count * 0
    while number < count:
        fact = words + number * _FACT_ROW
        op = tl.load(fact + FACT_OP)
        if op == _ADMIT:
            _admit(rows, history, fact)
        elif op == _ANCHOR:
            _anchor(counters, rows, history, meta, fact)
        elif op == _FINISH:
            _finish(counters, rows, history, meta, fact, forward)
        else:
            space = tl.load(fact + _SPACE)
            apply_to_pages(
                counters, rows, meta, fact, words, space, meta + (space + 1) * STATE_ROW, forward, lane, TILE
            )  # fmt: skip
        # What one fact wrote, other threads read for the next.
        tl.debug_barrier()
        number += 1
