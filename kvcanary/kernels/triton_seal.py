"""Seal, on the device: turn the sums over bytes into seals and verdicts, commit the rows, end the forward.

Programs of the grid's second axis take one region of the byte kernel each; with ``LAST`` two more commit histories
and rows. The last program to arrive writes the header and goes on to the next forward.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from kvcanary.kernels.descriptors import RegionWord, StateWord
from kvcanary.kernels.triton_clock import reset_clock, start_exit, take_time
from kvcanary.kernels.triton_constants import (
    BATCH_CONTEXT,
    BATCH_DIGEST,
    BATCH_NEW,
    BATCH_ROW,
    BATCH_SOURCE,
    BATCH_WORDS,
    GROUP_OWNER,
    GROUP_SEALS,
    HISTORY,
    KIND_OF_SUSPECTS,
    KIND_OF_TOKENS,
    REGION_FLAGS,
    REGION_ITEMS,
    REGION_KIND,
    REGION_PART,
    REGION_ROW,
    REGION_SEALS,
    REGION_SLOTS,
    REGION_SUMS,
    ROLE_SEAL,
    ROW_ANCHOR_DIGEST,
    ROW_ANCHOR_POSITION,
    ROW_FLAG_ARMED,
    ROW_FLAGS,
    ROW_HIGH,
    ROW_LOW,
    ROW_TAG,
    ROW_WORDS,
    SOURCE_HISTORY,
    SOURCE_SEED,
    SOURCE_SLOTS,
    SOURCE_UNKNOWN,
    STATE_ROW,
    WORD_ARMED,
    WORD_FORWARD,
    WORD_SCRATCH_ROWS,
    WORD_SCRATCH_TOKENS,
    WORD_SEQUENCE,
    WORD_SUSPECTS_DONE,
)
from kvcanary.kernels.triton_judge import report_conflicts
from kvcanary.kernels.triton_launch import entry
from kvcanary.kernels.triton_poison import look_for_poison
from kvcanary.kernels.triton_scrub import advance_cursor, clear_sums, count_lanes, look_again, read_sums, scrub_slots
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
from kvcanary.state import Check, Role, Word

_DIGEST_SUM = tl.constexpr(int(Word.DIGEST_SUM))
_ABANDONED = tl.constexpr(int(Word.ABANDONED))
_SEAL_LAUNCHES = tl.constexpr(int(Word.LAUNCHES) + int(Role.SEAL))
_SCRUB_LAUNCHES = tl.constexpr(int(Word.LAUNCHES) + int(Role.SCRUB))
_HEADERS = tl.constexpr(int(StateWord.HEADERS))
_SNAPSHOTS = tl.constexpr(int(StateWord.SNAPSHOTS))
_HEADER_WORDS = tl.constexpr(int(StateWord.HEADER_WORDS))
_GROUP = tl.constexpr(int(RegionWord.GROUP))
_RING = tl.constexpr(int(RegionWord.RING))
_LINKS = tl.constexpr(int(RegionWord.LINKS))
_SEALED = tl.constexpr(int(Check.SEALED))
_NONFINITE_KIND = tl.constexpr(int(Kind.NONFINITE))
_NONFINITE_FLAG = tl.constexpr(int(SealFlag.NONFINITE) << FLAG_SHIFT)


@triton.jit
def _seal_tokens(counters, rows, meta, region, t, scratch_links, scratch_rows, forward, count, report_nonfinite,
                 poison_at, NONFINITE: tl.constexpr, POISON: tl.constexpr, POW2: tl.constexpr):  # fmt: skip
    g = tl.load(region + _GROUP)
    part = tl.load(region + REGION_PART)
    ring = tl.load(region + _RING)
    slots = words_at(tl.load(region + REGION_SLOTS))
    links = words_at(tl.load(region + _LINKS))
    seals = words_at(tl.load(region + REGION_SEALS))
    sums, flags = words_at(tl.load(region + REGION_SUMS)), words_at(tl.load(region + REGION_FLAGS))
    inside = t < count
    slot = tl.load(slots + t, mask=inside, other=NONE)
    row = tl.load(scratch_rows + t, mask=inside, other=NONE)
    word = tl.load(scratch_links + t * 2, mask=inside, other=0)
    digest = tl.load(scratch_links + t * 2 + 1, mask=inside, other=0)
    found, flawed = read_sums(sums, flags, t, inside, NONFINITE)
    written = inside & (slot >= 0)
    slot = tl.maximum(slot, 0)
    link = links + slot * 2
    old_word = tl.load(link, mask=written, other=0)
    old_digest = tl.load(link + 1, mask=written, other=0)
    tag = tl.load(rows + tl.maximum(row, 0) * ROW_WORDS + ROW_TAG, mask=written, other=0)
    clear_sums(sums, flags, t, inside, found, flawed, NONFINITE)
    group = meta + (g + 1) * STATE_ROW
    if (part == 0) & (ring != 0):
        report_conflicts(counters, rows, meta, g, group, ROLE_SEAL, t, count, slots, scratch_links, scratch_rows, POW2)
    mine = written & (old_word == word) & (old_digest == digest)
    writer = writer_of(forward, tag)
    seal = seals + slot * 2
    tl.store(seal, found, mask=mine)
    tl.store(seal + 1, writer, mask=mine)
    count_verified(counters, g, _SEALED, tl.where(part == 0, count_lanes(mine), 0))
    if NONFINITE:
        wrong = mine & (flawed != 0) & flag(report_nonfinite != 0)
        if tl.max(wrong.to(tl.int32), 0) > 0:
            # The flag goes into a word that was just stored, perhaps by another thread.
            tl.debug_barrier()
            page = page_of(open_pool(group), slot, POW2)
            owner = tl.load(words_at(tl.load(group + GROUP_OWNER)) + page, mask=wrong, other=0)
            first_part = words_at(tl.load(group + GROUP_SEALS)) + slot * 2
            old = tl.load(first_part + 1, mask=wrong, other=0, volatile=True)
            kind = t * 0 + _NONFINITE_KIND
            report(
                counters, rows, meta, wrong, kind, ROLE_SEAL, g, (first_part + 1).to(tl.int64),
                t * 0 + _NONFINITE_FLAG, row, slot, page, position_of(word), NONE, NONE, NONE, 0, 0, 0, 0, old, owner,
                part, kind < 0,
            )  # fmt: skip
    if POISON:
        first_part = words_at(tl.load(group + GROUP_SEALS)) + slot * 2
        look_for_poison(
            counters, rows, meta, poison_at, g, group, part, first_part, t, mine, slot, row, word, forward, POW2
        )


@triton.jit
def _commit_rows(rows, b, count, scratch_batch):
    """Advance the rows' lengths by what the model received."""
    entry = scratch_batch + b * BATCH_WORDS
    inside = b < count
    row = tl.load(entry + BATCH_ROW, mask=inside, other=NONE)
    new = tl.load(entry + BATCH_NEW, mask=inside, other=0)
    context = tl.load(entry + BATCH_CONTEXT, mask=inside, other=0)
    source = tl.load(entry + BATCH_SOURCE, mask=inside, other=0)
    fed = inside & (row >= 0) & (new > 0)
    words = rows + tl.where(fed, row, 0) * ROW_WORDS
    flags = tl.load(words + ROW_FLAGS, mask=fed, other=0)
    low = tl.load(words + ROW_LOW, mask=fed, other=0)
    known = fed & (source != SOURCE_UNKNOWN)
    # An anchor digest of 0 says that the row went on without one: a base that comes later is not its start.
    anchored = fed & ((source == SOURCE_SLOTS) | (source == SOURCE_UNKNOWN))
    high = context + new
    low = tl.where(source == SOURCE_HISTORY, low, context)
    tl.store(words + ROW_HIGH, tl.where(known, high, NONE), mask=fed)
    tl.store(words + ROW_LOW, tl.maximum(low, high - (HISTORY - 1)), mask=known)
    flags = tl.where(source == SOURCE_SEED, flags | ROW_FLAG_ARMED, flags)
    flags = tl.where(anchored, flags & ~ROW_FLAG_ARMED, flags)
    tl.store(words + ROW_FLAGS, flags, mask=fed)
    tl.store(words + ROW_ANCHOR_POSITION, context, mask=anchored)
    tl.store(words + ROW_ANCHOR_DIGEST, tl.load(entry + BATCH_DIGEST, mask=anchored, other=0), mask=anchored)


@triton.jit
def _commit_tokens(counters, history, t, count, scratch_links, scratch_rows, mix_in, mix_out):
    """Remember the digests of the newest positions. A zero digest is unknown, and so is its row's history."""
    inside = t < count
    word = tl.load(scratch_links + t * 2, mask=inside, other=0)
    digest = tl.load(scratch_links + t * 2 + 1, mask=inside, other=0)
    row = tl.load(scratch_rows + t, mask=inside, other=NONE)
    # Of a row's tokens, neighbours all, those with fewer than 63 behind them are among the last 64 positions.
    behind = tl.load(scratch_rows + t + (HISTORY - 1), mask=t + (HISTORY - 1) < count, other=NONE)
    after = tl.load(scratch_rows + t + 1, mask=t + 1 < count, other=NONE)
    live = inside & (row >= 0)
    step = mix(word, mix_in, mix_out)
    total = tl.sum(tl.where(live, step, 0), 0)
    tl.atomic_add(counters + _DIGEST_SUM, total, mask=total != 0, sem="relaxed")
    kept = live & (digest != 0) & (behind != row)
    past = history + tl.where(live, row, 0) * HISTORY
    position = position_of(word)
    tl.store(past + (position & (HISTORY - 1)), digest, mask=kept)
    tl.store(past + ((position + 1) & (HISTORY - 1)), digest + step, mask=kept & (after != row))


@triton.jit
def open_header(meta):
    """Where headers go: (address of the first, words of one, how many there are)."""
    return tl.load(meta + _HEADERS), tl.load(meta + _HEADER_WORDS), tl.load(meta + _SNAPSHOTS)


@triton.jit
def close_forward(counters, place, forward, HEADER: tl.constexpr):
    """Write the header of the forward in progress to the host and go on to the next one."""
    headers, words, snapshots = place
    lane = tl.arange(0, HEADER)
    header = words_at(headers) + (forward % snapshots) * words
    inside = (lane > WORD_SEQUENCE) & (lane < words)
    counted = tl.load(counters + lane, mask=inside, other=0, volatile=True)
    # A reader on another thread takes a header only if its sequence word equals its forward.
    tl.store(header + WORD_SEQUENCE, forward * 0)
    tl.debug_barrier()
    tl.store(header + lane, counted, mask=inside)
    tl.debug_barrier()
    tl.atomic_add(counters + WORD_SEQUENCE, 0, sem="acq_rel", scope="sys")
    tl.store(header + WORD_SEQUENCE, forward)
    tl.store(counters + WORD_FORWARD, forward + 1)
    tl.store(counters + WORD_SCRATCH_TOKENS, forward * 0)
    reset_clock(counters, forward)


@entry
def abandon_kernel(counters_at: tl.int64, meta_at: tl.int64, HEADER: tl.constexpr):
    """End a forward that raised."""
    counters = words_at(counters_at)
    tl.atomic_add(counters + _ABANDONED, 1, sem="relaxed")
    forward = tl.load(counters + WORD_FORWARD)
    tl.debug_barrier()
    close_forward(counters, open_header(words_at(meta_at)), forward, HEADER)


@entry
def commit_kernel(
    counters_at: tl.int64, rows_at: tl.int64, history_at: tl.int64, meta_at: tl.int64, scratch_links_at: tl.int64,
    scratch_rows_at: tl.int64, scratch_batch_at: tl.int64, regions_at: tl.int64, region_count: tl.int64,
    queue_copy_at: tl.int64, ticket_at: tl.int64, report_nonfinite: tl.int64, seals: tl.int64, scrubs: tl.int64,
    mix_in: tl.int64, mix_out: tl.int64, poison_at: tl.int64,
    LAST: tl.constexpr, NONFINITE: tl.constexpr, POISON: tl.constexpr, POW2: tl.constexpr, TILE: tl.constexpr,
    HEADER: tl.constexpr,
):  # fmt: skip
    """Grid ``[tiles, regions (and two: for histories and for rows)]``."""
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
    region = words_at(regions_at) + number * REGION_ROW
    here = number < region_count
    kind = tl.load(region + REGION_KIND, mask=here, other=0)
    part = tl.load(region + REGION_PART, mask=here, other=0)
    items = tl.load(region + REGION_ITEMS, mask=here, other=0)
    armed = tl.load(counters + WORD_ARMED) != 0
    forward = tl.load(counters + WORD_FORWARD)
    tokens = tl.load(counters + WORD_SCRATCH_TOKENS)
    batch_rows = tl.load(counters + WORD_SCRATCH_ROWS)
    queued = tl.load(copy + 1)
    entries = queued - tl.load(copy)
    place = open_header(meta)
    first = begin == 0
    start_exit(counters, (number == 0) & first)
    if (number == 0) & first:
        tl.atomic_add(counters + _SEAL_LAUNCHES, seals, sem="relaxed")
        tl.atomic_add(counters + _SCRUB_LAUNCHES, scrubs, sem="relaxed")
    if armed:
        if here:
            if kind == KIND_OF_TOKENS:
                while begin < tokens:
                    _seal_tokens(
                        counters, rows, meta, region, begin + lane, scratch_links, scratch_rows, forward, tokens,
                        report_nonfinite, poison_at, NONFINITE, POISON, POW2,
                    )  # fmt: skip
                    begin += step
            elif kind == KIND_OF_SUSPECTS:
                while begin < entries:
                    look_again(counters, rows, meta, region, begin + lane, copy, entries, NONFINITE)
                    begin += step
                if first:
                    tl.store(counters + WORD_SUSPECTS_DONE, queued)
            else:
                while begin < items:
                    scrub_slots(counters, rows, meta, region, begin + lane, copy, NONFINITE, POW2)
                    begin += step
                if first & (part == 0):
                    advance_cursor(counters, region, copy, forward)
        if LAST:
            if number == region_count:
                while begin < tokens:
                    _commit_tokens(
                        counters, words_at(history_at), begin + lane, tokens, scratch_links, scratch_rows, mix_in,
                        mix_out,
                    )  # fmt: skip
                    begin += step
            if (number == region_count + 1) & (tokens > 0):
                while begin < batch_rows:
                    _commit_rows(rows, begin + lane, batch_rows, words_at(scratch_batch_at))
                    begin += step
    tl.debug_barrier()
    ticket = words_at(ticket_at)
    programs = tl.num_programs(0).to(tl.int64) * tl.num_programs(1)
    if tl.atomic_add(ticket, 1, sem="acq_rel") == programs - 1:
        tl.store(ticket, forward * 0)
        if LAST:
            take_time(counters, forward)
            close_forward(counters, place, forward, HEADER)
