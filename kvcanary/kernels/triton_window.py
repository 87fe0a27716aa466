"""Window, on the device: proof that a sliding window is really in use, counted from the tables of two groups."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from kvcanary.kernels.triton_constants import (
    GROUP_OWNER,
    GROUP_WORDS,
    ITEM_FIRST,
    ITEM_ROW,
    ITEM_WIDE,
    OWNER_TRASH,
    STATE_ROW,
    WORD_ARMED,
    WORD_FORWARD,
)
from kvcanary.kernels.triton_launch import entry
from kvcanary.kernels.triton_rows import batch_row
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
from kvcanary.kernels.triton_words import flag, index_at, state_of, words_at
from kvcanary.state import GLOBAL_WORDS, VERIFIED, Check, Role, Word

_LAUNCHES = tl.constexpr(int(Word.LAUNCHES) + int(Role.WINDOW))
_SWA_FORWARD = tl.constexpr(int(Word.SWA_FORWARD))
_SWA_DIVERGENCE = tl.constexpr(int(Word.SWA_DIVERGENCE))
_SWA_OUT_OF_WINDOW = tl.constexpr(int(Word.SWA_OUT_OF_WINDOW))
_SWA_FULL = tl.constexpr(int(Word.SWA_FULL))
_SWA_WINDOW = tl.constexpr(int(Word.SWA_WINDOW))
_LINKS = tl.constexpr(GLOBAL_WORDS + VERIFIED + int(Check.LINKS))


@triton.jit
def _slot(group, item, table, p, inside, POW2: tl.constexpr):
    pool = open_pool(group)
    index = translate(open_map(item), index_of_position(table, pool, p, inside, POW2), inside)
    slot = slot_of_index(pool, index, POW2)
    return slot, page_of(pool, tl.maximum(slot, 0), POW2)


@entry
def window_kernel(
    counters_at: tl.int64, meta_at: tl.int64, items_at: tl.int64, totals_at: tl.int64, starts: tl.int64,
    contexts: tl.int64, request_rows: tl.int64, num_requests: tl.int64, wide: tl.int64, batch_rows: tl.int64,
    max_rows: tl.int64, full: tl.int64, swa: tl.int64, both: tl.int64, every: tl.int64,
    POW2: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Grid ``[batch rows, programs a row]``. ``totals``: two sums and a ticket, zero between launches."""
    b = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1).to(tl.int64)
    counters = words_at(counters_at)
    forward = tl.load(counters + WORD_FORWARD)
    if forward % every != 0:
        return
    if (b == 0) & (part == 0):
        tl.atomic_add(counters + _LAUNCHES, 1, sem="relaxed")
    if (tl.load(counters + WORD_ARMED) == 0) | (both == 0):
        return
    meta = words_at(meta_at)
    totals = words_at(totals_at)
    full_item = words_at(items_at) + full * ITEM_ROW
    swa_item = words_at(items_at) + swa * ITEM_ROW
    full_group = meta + (full + 1) * STATE_ROW
    swa_group = meta + (swa + 1) * STATE_ROW
    live, _row, _first, _end, context = batch_row(
        b, batch_rows, starts, contexts, request_rows, num_requests, wide, max_rows
    )
    context = tl.where(live, context, 0)
    full_table = open_table(full_group, full_item, b, POW2)
    swa_table = open_table(swa_group, swa_item, b, POW2)
    firsts = tl.load(swa_item + ITEM_FIRST)
    first = index_at(firsts, b, is_wide(tl.load(swa_item + ITEM_WIDE), ITEM_FIRST), firsts != 0)
    owners = words_at(tl.load(swa_group + GROUP_OWNER))
    lane = tl.arange(0, TILE).to(tl.int64)
    outside = tl.zeros([TILE], tl.int64)
    diverging = tl.zeros([TILE], tl.int64)
    start = part * TILE
    while start < context:
        p = start + lane
        inside = p < context
        in_full, _page = _slot(full_group, full_item, full_table, p, inside, POW2)
        in_swa, page = _slot(swa_group, swa_item, swa_table, p, inside, POW2)
        mapped = inside & (in_swa >= 0)
        owner = tl.load(owners + page, mask=mapped & is_reserved(swa_group, page), other=0)
        mapped = mapped & (state_of(owner) < OWNER_TRASH) & (flag(firsts == 0) | (p >= first))
        outside += (inside & (mapped == 0)).to(tl.int64)
        diverging += (mapped & (in_swa != in_full)).to(tl.int64)
        start += tl.num_programs(1).to(tl.int64) * TILE
    tl.atomic_add(totals, tl.sum(outside, 0), sem="relaxed")
    tl.atomic_add(totals + 1, tl.sum(diverging, 0), sem="relaxed")
    tl.debug_barrier()
    programs = tl.num_programs(0).to(tl.int64) * tl.num_programs(1)
    if tl.atomic_add(totals + 2, 1, sem="acq_rel") == programs - 1:
        tl.store(counters + _SWA_OUT_OF_WINDOW, tl.load(totals, volatile=True))
        tl.store(counters + _SWA_DIVERGENCE, tl.load(totals + 1, volatile=True))
        tl.store(counters + _SWA_FORWARD, forward)
        tl.store(counters + _SWA_FULL, tl.load(counters + full * GROUP_WORDS + _LINKS))
        tl.store(counters + _SWA_WINDOW, tl.load(counters + swa * GROUP_WORDS + _LINKS))
        tl.store(totals, forward * 0)
        tl.store(totals + 1, forward * 0)
        tl.store(totals + 2, forward * 0)
