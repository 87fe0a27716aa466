"""Seal, on the device: turn the sums over bytes into seals and verdicts, commit the rows, end the forward.

Programs of the grid's second axis take one region of the byte kernel each; with ``LAST`` one more commits rows and
histories. The last program to arrive moves the cursors, writes the header and goes on to the next forward.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from kvcanary.kernels.descriptors import REGION_ROW, ROW, GroupWord, RegionKind, RegionWord, StateWord
from kvcanary.kernels.triton_judge import report_conflicts
from kvcanary.kernels.triton_launch import entry
from kvcanary.kernels.triton_scrub import count_lanes, look_again, scrub_slots, take_sums
from kvcanary.kernels.triton_tables import open_pool, page_of
from kvcanary.kernels.triton_words import (
    NONE,
    count_verified,
    flag,
    mix,
    position_of,
    report,
    words_at,
    writer_of,
)
from kvcanary.record import FLAG_SHIFT, Kind, SealFlag
from kvcanary.state import (
    BATCH_WORDS,
    GLOBAL_WORDS,
    GROUP_WORDS,
    HISTORY,
    ROW_WORDS,
    SCRATCH_ROWS,
    SCRUB_CURSOR,
    SCRUB_PASS_FORWARD,
    SCRUB_PASSES,
    BatchWord,
    Check,
    DigestSource,
    Role,
    RowFlag,
    RowWord,
    Word,
)

_STATE_ROW = tl.constexpr(ROW)
_ARMED = tl.constexpr(int(Word.ARMED))
_FORWARD = tl.constexpr(int(Word.FORWARD))
_SEQUENCE = tl.constexpr(int(Word.SEQUENCE))
_DIGEST_SUM = tl.constexpr(int(Word.DIGEST_SUM))
_ABANDONED = tl.constexpr(int(Word.ABANDONED))
_SUSPECTS_DONE = tl.constexpr(int(Word.SUSPECTS_DONE))
_SCRATCH_TOKENS = tl.constexpr(int(Word.SCRATCH_TOKENS))
_SCRATCH_ROWS = tl.constexpr(SCRATCH_ROWS)
_SEAL_LAUNCHES = tl.constexpr(int(Word.LAUNCHES) + int(Role.SEAL))
_SCRUB_LAUNCHES = tl.constexpr(int(Word.LAUNCHES) + int(Role.SCRUB))
_SEAL_ROLE = tl.constexpr(int(Role.SEAL))
_GROUP_WORDS = tl.constexpr(GROUP_WORDS)
_CURSOR = tl.constexpr(GLOBAL_WORDS + SCRUB_CURSOR)
_PASSES = tl.constexpr(GLOBAL_WORDS + SCRUB_PASSES)
_PASS_FORWARD = tl.constexpr(GLOBAL_WORDS + SCRUB_PASS_FORWARD)
_HEADERS = tl.constexpr(int(StateWord.HEADERS))
_SNAPSHOTS = tl.constexpr(int(StateWord.SNAPSHOTS))
_HEADER_WORDS = tl.constexpr(int(StateWord.HEADER_WORDS))
_REGION_ROW = tl.constexpr(REGION_ROW)
_KIND = tl.constexpr(int(RegionWord.KIND))
_GROUP = tl.constexpr(int(RegionWord.GROUP))
_SPACE = tl.constexpr(int(RegionWord.SPACE))
_PART = tl.constexpr(int(RegionWord.PART))
_ITEMS = tl.constexpr(int(RegionWord.ITEMS))
_SLOTS = tl.constexpr(int(RegionWord.SLOTS))
_SUMS = tl.constexpr(int(RegionWord.SUMS))
_FLAGS = tl.constexpr(int(RegionWord.FLAGS))
_TOKENS_KIND = tl.constexpr(int(RegionKind.TOKENS))
_SUSPECTS_KIND = tl.constexpr(int(RegionKind.SUSPECTS))
_SCRUB_KIND = tl.constexpr(int(RegionKind.SCRUB))
_LINKS_AT = tl.constexpr(int(GroupWord.LINKS))
_SEALS_AT = tl.constexpr(int(GroupWord.SEALS))
_OWNER_AT = tl.constexpr(int(GroupWord.OWNER))
_NUM_SLOTS = tl.constexpr(int(GroupWord.NUM_SLOTS))
_RING = tl.constexpr(int(GroupWord.RING))
_ROW_WORDS = tl.constexpr(ROW_WORDS)
_TAG = tl.constexpr(int(RowWord.TAG))
_LOW = tl.constexpr(int(RowWord.LOW))
_HIGH = tl.constexpr(int(RowWord.HIGH))
_ROW_FLAGS = tl.constexpr(int(RowWord.FLAGS))
_ANCHOR_POSITION = tl.constexpr(int(RowWord.ANCHOR_POSITION))
_ANCHOR_DIGEST = tl.constexpr(int(RowWord.ANCHOR_DIGEST))
_ROW_ARMED = tl.constexpr(int(RowFlag.ARMED))
_HISTORY = tl.constexpr(HISTORY)
_BATCH_WORDS = tl.constexpr(BATCH_WORDS)
_B_ROW = tl.constexpr(int(BatchWord.ROW))
_B_NEW = tl.constexpr(int(BatchWord.NEW))
_B_CONTEXT = tl.constexpr(int(BatchWord.CONTEXT))
_B_DIGEST = tl.constexpr(int(BatchWord.DIGEST))
_B_SOURCE = tl.constexpr(int(BatchWord.SOURCE))
_FROM_UNKNOWN = tl.constexpr(int(DigestSource.UNKNOWN))
_FROM_HISTORY = tl.constexpr(int(DigestSource.HISTORY))
_FROM_SLOTS = tl.constexpr(int(DigestSource.SLOTS))
_FROM_SEED = tl.constexpr(int(DigestSource.SEED))
_SEALED = tl.constexpr(int(Check.SEALED))
_NONFINITE_KIND = tl.constexpr(int(Kind.NONFINITE))
_NONFINITE_FLAG = tl.constexpr(int(SealFlag.NONFINITE) << FLAG_SHIFT)


@triton.jit
def _seal_tokens(counters, rows, meta, region, t, scratch_links, scratch_rows, forward, count, report_nonfinite,
                 NONFINITE: tl.constexpr, POW2: tl.constexpr):  # fmt: skip
    g = tl.load(region + _GROUP)
    part = tl.load(region + _PART)
    group = meta + (g + 1) * _STATE_ROW
    slots = words_at(tl.load(region + _SLOTS))
    inside = t < count
    if (part == 0) & (tl.load(group + _RING) != 0):
        report_conflicts(counters, rows, meta, g, group, _SEAL_ROLE, t, count, slots, scratch_links, scratch_rows, POW2)
    found, flawed = take_sums(
        words_at(tl.load(region + _SUMS)), words_at(tl.load(region + _FLAGS)), t, inside, NONFINITE
    )
    slot = tl.load(slots + t, mask=inside, other=NONE)
    written = inside & (slot >= 0)
    slot = tl.maximum(slot, 0)
    link = words_at(tl.load(group + _LINKS_AT)) + slot * 2
    word = tl.load(scratch_links + t * 2, mask=written, other=0)
    digest = tl.load(scratch_links + t * 2 + 1, mask=written, other=0)
    mine = written & (tl.load(link, mask=written, other=0) == word)
    mine = mine & (tl.load(link + 1, mask=written, other=0) == digest)
    row = tl.load(scratch_rows + t, mask=mine, other=0)
    writer = writer_of(forward, tl.load(rows + row * _ROW_WORDS + _TAG, mask=mine, other=0))
    first_part = words_at(tl.load(group + _SEALS_AT)) + slot * 2
    seal = first_part + part * tl.load(group + _NUM_SLOTS) * 2
    tl.store(seal, found, mask=mine)
    tl.store(seal + 1, writer, mask=mine)
    count_verified(counters, g, _SEALED, tl.where(part == 0, count_lanes(mine), 0))
    if NONFINITE:
        wrong = mine & (flawed != 0) & flag(report_nonfinite != 0)
        if tl.max(wrong.to(tl.int32), 0) > 0:
            # The flag goes into a word that was just stored, perhaps by another thread.
            tl.debug_barrier()
            page = page_of(open_pool(group), slot, POW2)
            owner = tl.load(words_at(tl.load(group + _OWNER_AT)) + page, mask=wrong, other=0)
            old = tl.load(first_part + 1, mask=wrong, other=0, volatile=True)
            kind = t * 0 + _NONFINITE_KIND
            report(
                counters, rows, meta, wrong, kind, _SEAL_ROLE, g, (first_part + 1).to(tl.int64),
                t * 0 + _NONFINITE_FLAG, row, slot, page, position_of(word), NONE, NONE, NONE, 0, 0, 0, 0, old, owner,
                part, kind < 0,
            )  # fmt: skip


@triton.jit
def _commit_rows(rows, b, count, scratch_batch):
    """Advance the rows' lengths by what the model received."""
    entry = scratch_batch + b * _BATCH_WORDS
    inside = b < count
    row = tl.load(entry + _B_ROW, mask=inside, other=NONE)
    new = tl.load(entry + _B_NEW, mask=inside, other=0)
    context = tl.load(entry + _B_CONTEXT, mask=inside, other=0)
    source = tl.load(entry + _B_SOURCE, mask=inside, other=0)
    fed = inside & (row >= 0) & (new > 0)
    words = rows + tl.where(fed, row, 0) * _ROW_WORDS
    flags = tl.load(words + _ROW_FLAGS, mask=fed, other=0)
    low = tl.load(words + _LOW, mask=fed, other=0)
    known = fed & (source != _FROM_UNKNOWN)
    # An anchor digest of 0 says that the row went on without one: a base that comes later is not its start.
    anchored = fed & ((source == _FROM_SLOTS) | (source == _FROM_UNKNOWN))
    high = context + new
    low = tl.where(source == _FROM_HISTORY, low, context)
    tl.store(words + _HIGH, tl.where(known, high, NONE), mask=fed)
    tl.store(words + _LOW, tl.maximum(low, high - (_HISTORY - 1)), mask=known)
    flags = tl.where(source == _FROM_SEED, flags | _ROW_ARMED, flags)
    flags = tl.where(anchored, flags & ~_ROW_ARMED, flags)
    tl.store(words + _ROW_FLAGS, flags, mask=fed)
    tl.store(words + _ANCHOR_POSITION, context, mask=anchored)
    tl.store(words + _ANCHOR_DIGEST, tl.load(entry + _B_DIGEST, mask=anchored, other=0), mask=anchored)


@triton.jit
def _commit_tokens(counters, history, t, count, scratch_links, scratch_rows, mix_in, mix_out):
    """Remember the digests of the newest positions. A zero digest is unknown, and so is its row's history."""
    inside = t < count
    word = tl.load(scratch_links + t * 2, mask=inside, other=0)
    digest = tl.load(scratch_links + t * 2 + 1, mask=inside, other=0)
    row = tl.load(scratch_rows + t, mask=inside, other=NONE)
    live = inside & (row >= 0)
    step = mix(word, mix_in, mix_out)
    total = tl.sum(tl.where(live, step, 0), 0)
    tl.atomic_add(counters + _DIGEST_SUM, total, mask=total != 0, sem="relaxed")
    # Of a row's tokens, neighbours all, those with fewer than 63 behind them are among the last 64 positions.
    behind = tl.load(scratch_rows + t + (_HISTORY - 1), mask=live & (t + (_HISTORY - 1) < count), other=NONE)
    after = tl.load(scratch_rows + t + 1, mask=live & (t + 1 < count), other=NONE)
    kept = live & (digest != 0) & (behind != row)
    past = history + tl.where(live, row, 0) * _HISTORY
    position = position_of(word)
    tl.store(past + (position & (_HISTORY - 1)), digest, mask=kept)
    tl.store(past + ((position + 1) & (_HISTORY - 1)), digest + step, mask=kept & (after != row))


@triton.jit
def close_forward(counters, meta, HEADER: tl.constexpr):
    """Write the header of the forward in progress to the host and go on to the next one."""
    lane = tl.arange(0, HEADER)
    forward = tl.load(counters + _FORWARD, volatile=True)
    words = tl.load(meta + _HEADER_WORDS)
    header = words_at(tl.load(meta + _HEADERS)) + (forward % tl.load(meta + _SNAPSHOTS)) * words
    # A reader on another thread takes a header only if its sequence word equals its forward.
    tl.store(header + _SEQUENCE, forward * 0)
    inside = (lane > _SEQUENCE) & (lane < words)
    tl.debug_barrier()
    tl.store(header + lane, tl.load(counters + lane, mask=inside, other=0, volatile=True), mask=inside)
    tl.debug_barrier()
    tl.atomic_add(counters + _SEQUENCE, 0, sem="acq_rel", scope="sys")
    tl.store(header + _SEQUENCE, forward)
    tl.store(counters + _FORWARD, forward + 1)
    tl.store(counters + _SCRATCH_TOKENS, forward * 0)


@entry
def abandon_kernel(counters_at: tl.int64, meta_at: tl.int64, HEADER: tl.constexpr):
    """End a forward that raised."""
    counters = words_at(counters_at)
    tl.atomic_add(counters + _ABANDONED, 1, sem="relaxed")
    tl.debug_barrier()
    close_forward(counters, words_at(meta_at), HEADER)


@triton.jit
def _advance_cursors(counters, meta, regions, count, copy, forward):
    """The scrub's walk and queue go on behind what this launch has read."""
    i = count * 0
    while i < count:
        region = regions + i * _REGION_ROW
        kind = tl.load(region + _KIND)
        if (kind == _SCRUB_KIND) & (tl.load(region + _PART) == 0):
            space = tl.load(region + _SPACE)
            at = counters + _CURSOR + space * _GROUP_WORDS
            end = tl.load(meta + (space + 1) * _STATE_ROW + _NUM_SLOTS)
            cursor = tl.load(at) + tl.load(region + _ITEMS)
            if cursor >= end:
                words = counters + space * _GROUP_WORDS
                tl.store(words + _PASSES, tl.load(words + _PASSES) + 1)
                tl.store(words + _PASS_FORWARD, forward)
                cursor -= end
            tl.store(at, cursor)
        if kind == _SUSPECTS_KIND:
            tl.store(counters + _SUSPECTS_DONE, tl.load(copy + 1))
        i += 1


@entry
def commit_kernel(
    counters_at: tl.int64, rows_at: tl.int64, history_at: tl.int64, meta_at: tl.int64, scratch_links_at: tl.int64,
    scratch_rows_at: tl.int64, scratch_batch_at: tl.int64, regions_at: tl.int64, region_count: tl.int64,
    queue_copy_at: tl.int64, ticket_at: tl.int64, report_nonfinite: tl.int64, seals: tl.int64, scrubs: tl.int64,
    mix_in: tl.int64, mix_out: tl.int64,
    LAST: tl.constexpr, NONFINITE: tl.constexpr, POW2: tl.constexpr, TILE: tl.constexpr, HEADER: tl.constexpr,
):  # fmt: skip
    """Grid ``[tiles, regions (and one for the rows)]``."""
    counters = words_at(counters_at)
    meta = words_at(meta_at)
    rows = words_at(rows_at)
    copy = words_at(queue_copy_at)
    scratch_links = words_at(scratch_links_at)
    scratch_rows = words_at(scratch_rows_at)
    number = tl.program_id(1).to(tl.int64)
    step = tl.num_programs(0).to(tl.int64) * TILE
    begin = tl.program_id(0).to(tl.int64) * TILE
    lane = tl.arange(0, TILE).to(tl.int64)
    armed = tl.load(counters + _ARMED) != 0
    forward = tl.load(counters + _FORWARD)
    tokens = tl.load(counters + _SCRATCH_TOKENS)
    if armed:
        if number < region_count:
            region = words_at(regions_at) + number * _REGION_ROW
            kind = tl.load(region + _KIND)
            if kind == _TOKENS_KIND:
                while begin < tokens:
                    _seal_tokens(
                        counters, rows, meta, region, begin + lane, scratch_links, scratch_rows, forward, tokens,
                        report_nonfinite, NONFINITE, POW2,
                    )  # fmt: skip
                    begin += step
            elif kind == _SUSPECTS_KIND:
                entries = tl.load(copy + 1) - tl.load(copy)
                while begin < entries:
                    look_again(counters, rows, meta, region, begin + lane, copy, entries, NONFINITE)
                    begin += step
            else:
                while begin < tl.load(region + _ITEMS):
                    scrub_slots(counters, rows, meta, region, begin + lane, NONFINITE, POW2)
                    begin += step
        if LAST:
            if (number == region_count) & (tokens > 0):
                batch_rows = tl.load(counters + _SCRATCH_ROWS)
                while begin < tl.maximum(tokens, batch_rows):
                    _commit_tokens(
                        counters, words_at(history_at), begin + lane, tokens, scratch_links, scratch_rows, mix_in,
                        mix_out,
                    )  # fmt: skip
                    _commit_rows(rows, begin + lane, batch_rows, words_at(scratch_batch_at))
                    begin += step
    tl.debug_barrier()
    ticket = words_at(ticket_at)
    programs = tl.num_programs(0).to(tl.int64) * tl.num_programs(1)
    if tl.atomic_add(ticket, 1, sem="acq_rel") == programs - 1:
        tl.store(ticket, forward * 0)
        tl.atomic_add(counters + _SEAL_LAUNCHES, seals, sem="relaxed")
        tl.atomic_add(counters + _SCRUB_LAUNCHES, scrubs, sem="relaxed")
        if armed:
            _advance_cursors(counters, meta, words_at(regions_at), region_count, copy, forward)
        tl.debug_barrier()
        if LAST:
            close_forward(counters, meta, HEADER)
