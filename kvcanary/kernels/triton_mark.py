"""Mark, on the device: judge a forward's inputs, claim the slots of its new tokens, fill the scratch.

One program takes every ``programs``-th tile of new tokens of one batch row for one group. The prefix digests of a
tile are a sum over the row's earlier tokens, which the program adds up anew: that costs less than a second
launch. Group 0's programs also do what all groups share.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from kvcanary.kernels.batch_descriptors import ItemFlag, ItemWord
from kvcanary.kernels.descriptors import GroupWord
from kvcanary.kernels.triton_clock import is_timed, stamp_entry, start_clock
from kvcanary.kernels.triton_constants import (
    BATCH_CONTEXT,
    BATCH_DIGEST,
    BATCH_NEW,
    BATCH_ROW,
    BATCH_SOURCE,
    BATCH_WORDS,
    GROUP_LINKS,
    GROUP_NUM_SLOTS,
    GROUP_OWNER,
    GROUP_PARTS,
    GROUP_RING,
    GROUP_SEALS,
    HISTORY,
    ITEM_FLAG_TABLE,
    ITEM_FLAGS,
    ITEM_ROW,
    ITEM_WIDE,
    KIND_SLOT_RANGE,
    OWNER_FREED,
    OWNER_HELD,
    OWNER_NULL,
    OWNER_TRASH,
    ROLE_MARK,
    ROW_HIGH,
    ROW_LOW,
    ROW_SEED,
    ROW_TAG,
    ROW_WORDS,
    SOURCE_HISTORY,
    SOURCE_SEED,
    SOURCE_SLOTS,
    SOURCE_UNKNOWN,
    STATE_ROW,
    TAG_SHIFT,
    WORD_ARMED,
    WORD_FORWARD,
    WORD_SCRATCH_ROWS,
    WORD_SCRATCH_TOKENS,
)
from kvcanary.kernels.triton_inputs import judge_inputs, token_words
from kvcanary.kernels.triton_launch import entry
from kvcanary.kernels.triton_poison import place_poison
from kvcanary.kernels.triton_rows import STARTS, batch_row
from kvcanary.kernels.triton_tables import (
    engine_index,
    index_of_position,
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
    holds,
    index_at,
    lowest_fault,
    mix,
    position_of,
    report,
    row_flag,
    state_of,
    tag_of,
    words_at,
)
from kvcanary.record import OWNER_UNKNOWN, Kind
from kvcanary.state import BatchWord, Check, Reason, Role, Word

_NEW_TOKENS = tl.constexpr(int(Word.NEW_TOKENS))
_LAUNCHES = tl.constexpr(int(Word.LAUNCHES) + int(Role.MARK))
_B_FIRST = tl.constexpr(int(BatchWord.FIRST_TOKEN))
_FOLLOWS = tl.constexpr(int(GroupWord.FOLLOWS))
_HAS_TRASH = tl.constexpr(int(GroupWord.HAS_TRASH))
_SLOT_MAPPING = tl.constexpr(int(ItemWord.SLOT_MAPPING))
_COVERS = tl.constexpr(int(ItemFlag.COVERS_NEW))
_UNKNOWN = tl.constexpr(OWNER_UNKNOWN)
_WRITES = tl.constexpr(int(Check.WRITES))
_UNKNOWN_OWNER = tl.constexpr(int(Reason.UNKNOWN_OWNER))
_WRITE_FREED = tl.constexpr(int(Kind.WRITE_FREED))
_WRITE_FOREIGN = tl.constexpr(int(Kind.WRITE_FOREIGN))
_TABLE_MISMATCH = tl.constexpr(int(Kind.TABLE_MISMATCH))

# Bits of a lane's faults, lowest reported first.
_RANGE = tl.constexpr(1)
_INTO_FREED = tl.constexpr(2)
_INTO_FOREIGN = tl.constexpr(4)
_MISMATCH = tl.constexpr(8)


@triton.jit
def _open_row(rows, history, row, context):
    """What :func:`_row_digest` and the claims need to know of a row."""
    words = rows + row * ROW_WORDS
    past = tl.load(history + row * HISTORY + (context & (HISTORY - 1)))
    return (
        tl.load(words + ROW_TAG),
        tl.load(words + ROW_SEED),
        tl.load(words + ROW_LOW),
        tl.load(words + ROW_HIGH),
        past,
    )


@triton.jit
def _row_digest(row, group, item, usable, b, context, mix_in, mix_out, POW2: tl.constexpr):
    """The digest at a live row's old length, and where it comes from."""
    _, seed, low, high, past = row
    held = holds(low, high, context)
    digest = tl.where(held, past, 0)
    source = tl.where(held, SOURCE_HISTORY, SOURCE_UNKNOWN)
    seeded = (context == 0) & (seed != 0)
    digest = tl.where(seeded, seed, digest)
    source = tl.where(seeded, SOURCE_SEED, source)
    if (source == SOURCE_UNKNOWN) & (context > 0) & (usable != 0):
        pool = open_pool(group)
        table = open_table(group, item, b, POW2)
        last = context - 1
        index = translate(open_map(item), index_of_position(table, pool, last, last >= 0, POW2), last >= 0)
        slot = slot_of_index(pool, index, POW2)
        link = words_at(tl.load(group + GROUP_LINKS)) + tl.maximum(slot, 0) * 2
        word = tl.load(link, mask=slot >= 0, other=0)
        before = tl.load(link + 1, mask=slot >= 0, other=0)
        known = (slot >= 0) & (before != 0) & (position_of(word) == last)
        digest = tl.where(known, before + mix(word, mix_in, mix_out), digest)
        source = tl.where(known, SOURCE_SLOTS, source)
    return digest, source.to(tl.int64)


@triton.jit
def _open_group(group, item):
    """What claims need to know of a group and of what a batch brings for it."""
    return (
        words_at(tl.load(group + GROUP_LINKS)),
        words_at(tl.load(group + GROUP_OWNER)),
        words_at(tl.load(group + GROUP_SEALS)),
        tl.load(group + GROUP_NUM_SLOTS),
        tl.load(group + GROUP_PARTS),
        tl.load(group + GROUP_RING),
        flag(tl.load(group + _FOLLOWS) != 0),
        flag(tl.load(group + _HAS_TRASH) == 0),
        tl.load(item + ITEM_WIDE),
        tl.load(item + ITEM_FLAGS),
        tl.load(item + _SLOT_MAPPING),
    )


@triton.jit
def _claim(opened, pool, map_, group, item, b, p, t, end, inside, POW2: tl.constexpr):
    """Where a tile's tokens go, who owns that place, and what it says so far. Only reads."""
    links, owners, _, _, _, ring, _, no_trash, wide, flags, mapping = opened
    given = index_at(mapping, t, is_wide(wide, _SLOT_MAPPING), inside & flag(mapping != 0))
    named = p * 0 + NONE
    if ((flags & ITEM_FLAG_TABLE) != 0) & ((mapping == 0) | ((flags & _COVERS) != 0)):
        table = open_table(group, item, b, POW2)
        named = translate(map_, index_of_position(table, pool, p, inside, POW2), inside)
    index = tl.where(mapping != 0, translate(map_, given, inside), named)
    slot = slot_of_index(pool, index, POW2)
    # Of more new tokens than a ring has places only the newest stay: the others are overwritten on purpose.
    written = inside & (slot >= 0) & (flag(ring == 0) | (t + ring >= end))
    page = page_of(pool, tl.maximum(slot, 0), POW2)
    link = links + tl.maximum(slot, 0) * 2
    owner = tl.load(owners + page, mask=written, other=0)
    old_word = tl.load(link, mask=written, other=0)
    old_digest = tl.load(link + 1, mask=written, other=0)
    written = written & (no_trash | (state_of(owner) != OWNER_TRASH))
    return index, named, slot, page, written, owner, old_word, old_digest


@triton.jit
def _mark_slots(counters, rows, meta, g, opened, pool, claim, row, tag, p, t, inside, word, digest, scratch_slots,
                max_tokens, poison_at, POISON: tl.constexpr, POW2: tl.constexpr):  # fmt: skip
    """Judge whether a tile's tokens may be written where they go, and write their links."""
    links, owners, first_seals, num_slots, parts, ring, follows, _, _, flags, mapping = opened
    index, named, slot, page, written, owner, old_word, old_digest = claim
    state = state_of(owner)
    faults = tl.where(inside & (slot == OUTSIDE), _RANGE, 0)
    harmful = (old_word != word) | (old_digest != digest) | (digest == 0)
    holder = tag_of(owner)
    foreign = ((state == OWNER_HELD) & (holder != tag) & (holder != 0) & flag(tag != 0)) | (state == OWNER_NULL)
    # Pages that were handed out to nobody by name belong to the first row that writes into them.
    taken = written & (state == OWNER_HELD) & (holder == 0) & flag(tag != 0)
    faults |= tl.where(written & harmful & (state == OWNER_FREED), _INTO_FREED, 0)
    faults |= tl.where(written & harmful & foreign, _INTO_FOREIGN, 0)
    _, page_size, _, _, _ = pool
    wrapped = p
    if ring > 0:
        wrapped = p % ring
    shifted = follows & (slot - page * page_size != wrapped % page_size)
    compared = flag((mapping != 0) & ((flags & ITEM_FLAG_TABLE) != 0) & ((flags & _COVERS) != 0))
    named_slot = slot_of_index(pool, named, POW2)
    faults |= tl.where(written & ((compared & (named_slot != slot)) | shifted), _MISMATCH, 0)
    unknown = tl.sum((written & (state == _UNKNOWN)).to(tl.int32), 0)
    count_unverified(counters, g, _UNKNOWN_OWNER, unknown.to(tl.int64))
    count_verified(counters, g, _WRITES, (tl.sum(written.to(tl.int32), 0) - unknown).to(tl.int64))
    seal = first_seals + tl.maximum(slot, 0) * 2
    if tl.max(faults) > 0:
        writer = tl.load(seal + 1, mask=written & (faults != 0), other=0)
        while tl.max(faults) > 0:
            fault = lowest_fault(faults)
            faults = faults & ~fault
            into = (fault == _INTO_FREED) | (fault == _INTO_FOREIGN)
            kind = tl.where(
                fault == _RANGE, KIND_SLOT_RANGE, tl.where(fault == _MISMATCH, _TABLE_MISMATCH, _WRITE_FOREIGN)
            )
            kind = tl.where(fault == _INTO_FREED, _WRITE_FREED, kind).to(tl.int64)
            out = fault == _RANGE
            mismatch_found = tl.where(compared, named_slot, NONE)
            unknown_old = (old_word | old_digest) == 0
            report(
                counters, rows, meta, fault != 0, kind, ROLE_MARK, g, row_flag(rows, row, kind * 0),
                (kind * 0 + 1) << kind, row, tl.where(out, engine_index(index), slot), tl.where(out, NONE, page),
                tl.where(into, position_of(word), p),
                tl.where(into, tl.where(unknown_old, NONE, position_of(old_word)), tl.where(out, NONE, mismatch_found)),
                tl.where(into, code_of(word), NONE), tl.where(into & (unknown_old == 0), code_of(old_word), NONE),
                tl.where(into, digest, 0),
                tl.where(into, old_digest, 0), 0, 0, tl.where(out, 0, writer), tl.where(out, 0, owner), NONE, fault < 0,
            )  # fmt: skip
    if POISON:
        changed = (old_word != word) | (old_digest != digest)
        forward = tl.load(counters + WORD_FORWARD)
        place_poison(meta, poison_at, g, pool, forward, t, slot, written, owner, tag, changed, POW2)
    tl.store(owners + page, owner | (tag << TAG_SHIFT), mask=taken)
    link = links + tl.maximum(slot, 0) * 2
    tl.store(link, word, mask=written)
    tl.store(link + 1, digest, mask=written)
    for _ in range(parts):
        tl.store(seal, word * 0, mask=written)
        tl.store(seal + 1, word * 0, mask=written)
        seal += num_slots * 2
    tl.store(scratch_slots + g * max_tokens + t, tl.where(written, slot, NONE), mask=inside)


@triton.jit
def _open_batch(scratch_batch, b, live, row, first, new, context, digest, source):
    """What the exit needs to know of a batch row."""
    entry = scratch_batch + b * BATCH_WORDS
    tl.store(entry + BATCH_ROW, tl.where(live, row, NONE))
    tl.store(entry + _B_FIRST, tl.where(live, first, 0))
    tl.store(entry + BATCH_NEW, tl.where(live, new, 0))
    tl.store(entry + BATCH_CONTEXT, tl.where(live, context, 0))
    tl.store(entry + BATCH_DIGEST, tl.where(live, digest, 0))
    tl.store(entry + BATCH_SOURCE, tl.where(live, source, SOURCE_UNKNOWN).to(tl.int64))


@entry
def mark_kernel(
    counters_at: tl.int64, rows_at: tl.int64, history_at: tl.int64, meta_at: tl.int64, scratch_slots_at: tl.int64,
    scratch_links_at: tl.int64, scratch_rows_at: tl.int64, scratch_batch_at: tl.int64, items_at: tl.int64,
    ids: tl.int64, starts: tl.int64, contexts: tl.int64, request_rows: tl.int64, positions: tl.int64, salts: tl.int64,
    expected: tl.int64, last_ids: tl.int64, num_requests: tl.int64, wide: tl.int64, tokens: tl.int64,
    batch_rows: tl.int64, max_tokens: tl.int64, max_rows: tl.int64, selected: tl.int64,
    digest_group: tl.int64, input_group: tl.int64, max_rewind: tl.int64, mix_in: tl.int64, mix_out: tl.int64,
    poison_at: tl.int64,
    FIRST: tl.constexpr, UNLINKED: tl.constexpr, POISON: tl.constexpr, POW2: tl.constexpr, TILE: tl.constexpr,
    SUM: tl.constexpr,
):  # fmt: skip
    """Grid ``[batch rows + 1, programs a row, groups (with FIRST behind one for what they share)]``.

    The last row's programs clear what no row has. A program's time is its chain of loads that need each other, so it
    asks for all that it can before it looks at any of it: first the batch's row and the group, then the row, the
    tokens and their slots, then the slots' records and owners.
    """
    b = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1).to(tl.int64)
    z = tl.program_id(2).to(tl.int64)
    counters = words_at(counters_at)
    shared = z < 0
    g = z
    if FIRST:
        shared = z == 0
        g = tl.maximum(z - 1, 0)
    if (b == 0) & (part == 0) & (z == 0):
        tl.atomic_add(counters + _LAUNCHES, 1, sem="relaxed")
    rows = words_at(rows_at)
    history = words_at(history_at)
    meta = words_at(meta_at)
    timed = is_timed(counters)
    group = meta + (g + 1) * STATE_ROW
    item = words_at(items_at) + g * ITEM_ROW
    armed = tl.load(counters + WORD_ARMED)
    live, row, first, end, context = batch_row(
        b, batch_rows, starts, contexts, request_rows, num_requests, wide, max_rows
    )
    # What no row has counts as padding: the tokens before the first row and after the last.
    outer = b == batch_rows
    head = index_at(starts, b * 0, is_wide(wide, STARTS), outer)
    tail = index_at(starts, batch_rows + b * 0, is_wide(wide, STARTS), outer)
    opened = _open_group(group, item)
    pool = open_pool(group)
    map_ = open_map(item)
    if armed == 0:
        return
    start_clock(counters, meta, (b == 0) & (part == 0) & (z == 0))
    if FIRST:
        if shared & (b == 0) & (part == 0):
            tl.store(counters + WORD_SCRATCH_TOKENS, tokens)
            tl.store(counters + WORD_SCRATCH_ROWS, batch_rows)
    known_row = _open_row(rows, history, row, context)
    tag = known_row[0]
    scratch_slots = words_at(scratch_slots_at)
    scratch_links = words_at(scratch_links_at)
    scratch_rows = words_at(scratch_rows_at)
    lane = tl.arange(0, TILE).to(tl.int64)
    step = tl.num_programs(1).to(tl.int64) * TILE
    first = tl.where(outer, 0, tl.maximum(first, 0))
    end = tl.where(outer, tokens, tl.minimum(end, tokens))
    claims = live & (shared == 0) & (((selected >> g) & 1) != 0)
    speaks = shared & (part == 0) & (b < batch_rows)
    digest, source = context * 0, context * 0 + SOURCE_UNKNOWN
    fresh = b >= 0
    summed = first
    start = first + part * TILE
    # The one that speaks for a row runs once even without new tokens: the row's length is judged all the same.
    stop = tl.maximum(end, tl.where(speaks, first + 1, first))
    while start < stop:
        t = start + lane
        inside = t < end
        inside = inside & (flag(b < batch_rows) | (t < head) | (t >= tail))
        p = context + (t - first)
        claim = _claim(opened, pool, map_, group, item, b, p, t, end, inside & flag(claims), POW2)
        word = t * 0
        before = t * 0
        if FIRST:
            if live:
                word, code, token, salt = token_words(ids, salts, positions, wide, context, first, t, inside, UNLINKED)
                if fresh:
                    digest, source = _row_digest(
                        known_row, meta + (digest_group + 1) * STATE_ROW, words_at(items_at) + digest_group * ITEM_ROW,
                        digest_group >= 0, b, context, mix_in, mix_out, POW2,
                    )  # fmt: skip
                if not UNLINKED:
                    while summed < start:
                        s = summed + tl.arange(0, SUM).to(tl.int64)
                        part_word, _, _, _ = token_words(
                            ids, salts, positions, wide, context, first, s, s < start, UNLINKED
                        )
                        digest += tl.sum(tl.where(s < start, mix(part_word, mix_in, mix_out), 0), 0)
                        summed += SUM
                    before = t * 0 + digest
                    if end - first > 1:
                        mixes = tl.where(inside, mix(word, mix_in, mix_out), 0)
                        before += tl.cumsum(mixes, 0) - mixes
                    before = tl.where(inside & flag(source != SOURCE_UNKNOWN), before, 0)
                    summed = start
                word = tl.where(inside, word, 0)
                if shared:
                    judge_inputs(
                        counters, rows, history, meta, row, context, t, inside, flag(part == 0) & (t == first), token,
                        code, salt, p, (positions, expected, last_ids), wide, mix_in, mix_out, input_group, max_rewind,
                        b, UNLINKED,
                    )  # fmt: skip
            if shared:
                tl.store(scratch_links + t * 2, word, mask=inside)
                tl.store(scratch_links + t * 2 + 1, before, mask=inside)
                tl.store(scratch_rows + t, t * 0 + tl.where(live, row, NONE), mask=inside)
                if speaks & fresh:
                    new = end - first
                    if UNLINKED:
                        new = new * 0
                    _open_batch(words_at(scratch_batch_at), b, live, row, first, new, context, digest, source)
                    count = tl.where(live, tl.maximum(end - first, 0), 0)
                    tl.atomic_add(counters + _NEW_TOKENS, count, mask=count > 0, sem="relaxed")
        elif claims:
            word = tl.load(scratch_links + t * 2, mask=inside, other=0)
            before = tl.load(scratch_links + t * 2 + 1, mask=inside, other=0)
        if claims:
            _mark_slots(
                counters, rows, meta, g, opened, pool, claim, row, tag, p, t, inside, word, before, scratch_slots,
                max_tokens, poison_at, POISON, POW2,
            )  # fmt: skip
        elif FIRST:
            tl.store(scratch_slots + g * max_tokens + t, t * 0 + NONE, mask=inside & flag(shared == 0))
        fresh = b < 0
        start += step
    stamp_entry(counters, timed)
