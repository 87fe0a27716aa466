"""What a forward is fed, on the device: its tokens as records, and what is wrong with them. Device functions."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from kvcanary.kernels.triton_constants import HISTORY, ROLE_MARK, ROW_HIGH, ROW_LOW, ROW_WORDS
from kvcanary.kernels.triton_rows import EXPECTED, IDS, LAST, POSITIONS, SALTS
from kvcanary.kernels.triton_tables import is_wide
from kvcanary.kernels.triton_words import (
    NONE,
    flag,
    holds,
    index_at,
    link_of,
    lowest_fault,
    mix,
    report,
    row_flag,
    token_code,
)
from kvcanary.record import Kind

_INPUT_POSITION = tl.constexpr(int(Kind.INPUT_POSITION))
_INPUT_TOKEN = tl.constexpr(int(Kind.INPUT_TOKEN))
_INPUT_PLACEHOLDER = tl.constexpr(int(Kind.INPUT_PLACEHOLDER))

# Bits of a lane's faults, lowest reported first.
_LENGTH = tl.constexpr(1)
_POSITION = tl.constexpr(2)
_PLACEHOLDER = tl.constexpr(4)
_TOKEN = tl.constexpr(8)
_LAST = tl.constexpr(16)


@triton.jit
def token_words(ids, salts, positions, wide, context, first, t, inside, UNLINKED: tl.constexpr):
    """Word 0 of the links of tokens ``t``, their codes, ids and salts."""
    token = index_at(ids, t, is_wide(wide, IDS), inside)
    salt = index_at(salts, t, is_wide(wide, SALTS), inside & flag(salts != 0))
    p = context + (t - first)
    if UNLINKED:
        # A draft tree has several tokens at one position.
        given = index_at(positions, t, is_wide(wide, POSITIONS), inside & flag(positions != 0))
        p = tl.where(positions != 0, given, p)
    code = token_code(token, p, salt)
    return link_of(code, p), code, token, salt


@triton.jit
def judge_inputs(
    counters, rows, history, meta, row, context, t, inside, alone, token, code, salt, p, batch, wide, mix_in, mix_out,
    input_group, max_rewind, b, UNLINKED: tl.constexpr,
):  # fmt: skip
    """Report what is wrong with the inputs of a tile; lane 0 of a row's first tile (``alone``) speaks for the row."""
    positions, expected, last_ids = batch
    words = rows + row * ROW_WORDS
    low = tl.load(words + ROW_LOW)
    high = tl.load(words + ROW_HIGH)
    faults = tl.where(inside & (token < 0), _PLACEHOLDER, 0)
    given = p
    if not UNLINKED:
        given = index_at(positions, t, is_wide(wide, POSITIONS), inside & flag(positions != 0))
        faults |= tl.where(inside & flag(positions != 0) & (given != p), _POSITION, 0)
        skipped = (context > high) | ((max_rewind >= 0) & (high - context > max_rewind))
        faults |= tl.where(alone & flag((high >= 0) & skipped), _LENGTH, 0)
    wanted = index_at(expected, t, is_wide(wide, EXPECTED), inside & flag(expected != 0))
    faults |= tl.where(inside & flag(expected != 0) & (wanted >= 0) & (wanted != token), _TOKEN, 0)
    last = index_at(last_ids, b, is_wide(wide, LAST), last_ids != 0)
    held = holds(low, high, context)
    checked = (last_ids != 0) & (last >= 0) & (context >= 1) & (low <= context - 1) & held
    last_code = token_code(last, context - 1, last * 0)
    past = history + row * HISTORY
    now = tl.load(past + (context & (HISTORY - 1)), mask=checked, other=0)
    before = tl.load(past + ((context - 1) & (HISTORY - 1)), mask=checked, other=0)
    lost = checked & (now - before != mix(link_of(last_code, context - 1), mix_in, mix_out))
    faults |= tl.where(alone & flag(lost), _LAST, 0)
    while tl.max(faults) > 0:
        fault = lowest_fault(faults)
        faults = faults & ~fault
        position = (fault == _POSITION) | (fault == _LENGTH)
        kind = tl.where(position, _INPUT_POSITION, tl.where(fault == _PLACEHOLDER, _INPUT_PLACEHOLDER, _INPUT_TOKEN))
        kind = kind.to(tl.int64)
        place = tl.where(fault == _LENGTH, high, tl.where(fault == _LAST, context - 1, p))
        found = tl.where(fault == _LENGTH, context, tl.where(fault == _POSITION, given, NONE))
        wanted_code = tl.where(fault == _LAST, last_code, tl.where(fault == _TOKEN, token_code(wanted, p, salt), NONE))
        found_code = tl.where((fault == _PLACEHOLDER) | (fault == _TOKEN), code, NONE)
        report(
            counters, rows, meta, fault != 0, kind, ROLE_MARK, input_group, row_flag(rows, row, kind * 0),
            (kind * 0 + 1) << kind, row, NONE, NONE, place, found, wanted_code, found_code, 0, 0, 0, 0, 0, 0, NONE,
            fault != _PLACEHOLDER,
        )  # fmt: skip
