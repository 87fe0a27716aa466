"""Pages, on the device: owners and records that a fact changes. Device functions."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from kvcanary import record
from kvcanary.kernels import FactOp
from kvcanary.kernels.descriptors import FactWord, GroupWord
from kvcanary.kernels.triton_constants import (
    FACT_OP,
    FACT_TAG,
    GROUP_LINKS,
    GROUP_NUM_PAGES,
    GROUP_NUM_SLOTS,
    GROUP_OWNER,
    GROUP_PAGE_SIZE,
    GROUP_PARTS,
    GROUP_SEALS,
    MASK32,
    OWNER_FREED,
    OWNER_HELD,
    OWNER_TRASH,
    ROLE_FACTS,
    STATE_ROW,
    WORD_ARMED,
)
from kvcanary.kernels.triton_scrub import enqueue, queue_entry
from kvcanary.kernels.triton_words import NONE, index_at, is_sealed, report, state_of, words_at, writer_of
from kvcanary.record import FLAG_SHIFT, Kind

_COUNT = tl.constexpr(int(FactWord.COUNT))
_PAGES = tl.constexpr(int(FactWord.PAGES))
_TARGETS = tl.constexpr(int(FactWord.TARGETS))
_PAGES_KIND = tl.constexpr(int(FactWord.PAGES_KIND))
_TARGETS_KIND = tl.constexpr(int(FactWord.TARGETS_KIND))
_RECORDS = tl.constexpr(int(FactWord.RECORDS))
_JUDGED = tl.constexpr(int(FactWord.JUDGED))
_DOUBLE_FREE = tl.constexpr(int(Kind.DOUBLE_FREE))
_DOUBLE_ALLOC = tl.constexpr(int(Kind.DOUBLE_ALLOC))
_ALLOC = tl.constexpr(int(FactOp.ALLOC))
_FREE = tl.constexpr(int(FactOp.FREE))
_OWN = tl.constexpr(int(FactOp.OWN))
_COPY = tl.constexpr(int(FactOp.COPY))
_EXPORT = tl.constexpr(int(FactOp.EXPORT))
_IMPORT = tl.constexpr(int(FactOp.IMPORT))
_WIPE = tl.constexpr(int(FactOp.WIPE))
_RESTAMP = tl.constexpr(int(FactOp.RESTAMP))
_QUEUE_OP = tl.constexpr(int(FactOp.QUEUE))
_ARENA = tl.constexpr(int(GroupWord.ARENA))
_ARENA_PAGES = tl.constexpr(int(GroupWord.ARENA_PAGES))
_ARENA_GROUPS = tl.constexpr(int(GroupWord.ARENA_GROUPS))
_HELD_WORD = tl.constexpr(record.OWNER_HELD << FLAG_SHIFT)
_FREED_WORD = tl.constexpr(record.OWNER_FREED << FLAG_SHIFT)
_TAG_MASK = tl.constexpr(((1 << FLAG_SHIFT) - 1) & ~record.MASK32)

HOST_LIST = 2
"""Kind of a list that lies among the facts: its address is an offset in words. Otherwise 1: int64, 0: int32."""
_HOST_LIST = tl.constexpr(HOST_LIST)


@triton.jit
def _page(fact, words, AT: tl.constexpr, KIND: tl.constexpr, i, inside):
    """Entry ``i`` of a fact's list of pages."""
    kind = tl.load(fact + KIND)
    at = tl.load(fact + AT)
    address = tl.where(kind == _HOST_LIST, words.to(tl.int64) + at * 8, at)
    return index_at(address, i, tl.minimum(kind, 1), inside)


@triton.jit
def _slots(fact, words, group, AT: tl.constexpr, KIND: tl.constexpr, i, inside):
    """Slot ``i`` of a fact's pages, and whether there is one."""
    page_size = tl.load(group + GROUP_PAGE_SIZE)
    page = _page(fact, words, AT, KIND, i // page_size, inside)
    there = inside & (page >= 0) & (page < tl.load(group + GROUP_NUM_PAGES))
    return tl.where(there, page * page_size + i % page_size, 0), there


@triton.jit
def _wipe(group, slot, mask):
    """Clear the records of slots."""
    zero = slot * 0
    link = words_at(tl.load(group + GROUP_LINKS)) + slot * 2
    tl.store(link, zero, mask=mask)
    tl.store(link + 1, zero, mask=mask)
    seal = words_at(tl.load(group + GROUP_SEALS)) + slot * 2
    for _ in range(tl.load(group + GROUP_PARTS)):
        tl.store(seal, zero, mask=mask)
        tl.store(seal + 1, zero, mask=mask)
        seal += tl.load(group + GROUP_NUM_SLOTS) * 2


@triton.jit
def _as_of(word, forward):
    """The tag of an owner or writer word, as of this forward."""
    return (word & _TAG_MASK) | (forward & MASK32)


@triton.jit
def _new_owner(fact, freed, old, forward):
    """What becomes of an owner word: the fact's tag holds the page, or with ``freed`` the old one has held it."""
    held = writer_of(forward, tl.load(fact + FACT_TAG)) | _HELD_WORD
    return tl.where(freed, _as_of(old, forward) | _FREED_WORD, held)


@triton.jit
def _set_owners(fact, words, group, forward, lane, TILE: tl.constexpr):
    """New owners; reserved pages keep their state whatever a fact says."""
    op = tl.load(fact + FACT_OP)
    count = tl.load(fact + _COUNT)
    start = count * 0
    while start < count:
        i = start + lane
        page = _page(fact, words, _PAGES, _PAGES_KIND, i, i < count)
        there = (i < count) & (page >= 0) & (page < tl.load(group + GROUP_NUM_PAGES))
        at = words_at(tl.load(group + GROUP_OWNER)) + tl.where(there, page, 0)
        old = tl.load(at, mask=there, other=0)
        tl.store(at, _new_owner(fact, op == _FREE, old, forward), mask=there & (state_of(old) < OWNER_TRASH))
        start += TILE


@triton.jit
def _judge_owners(counters, rows, meta, fact, words, space, group, forward, lane, TILE: tl.constexpr):
    """New owners for pages whose numbers the host does not know: report those that were allotted or free already."""
    freed = tl.load(fact + FACT_OP) == _FREE
    kind = tl.where(freed, _DOUBLE_FREE, _DOUBLE_ALLOC).to(tl.int64)
    count = tl.load(fact + _COUNT)
    start = count * 0
    while start < count:
        i = start + lane
        page = _page(fact, words, _PAGES, _PAGES_KIND, i, i < count)
        there = (i < count) & (page >= 0) & (page < tl.load(group + GROUP_NUM_PAGES))
        at = words_at(tl.load(group + GROUP_OWNER)) + tl.where(there, page, 0)
        old = tl.load(at, mask=there, other=0)
        there = there & (state_of(old) < OWNER_TRASH)
        new = _new_owner(fact, freed, old, forward)
        # An exchange, so that of two lanes with one page the second finds what the first put there.
        old = tl.atomic_xchg(at, new, mask=there, sem="relaxed")
        slot = page * tl.load(group + GROUP_PAGE_SIZE)
        seal = words_at(tl.load(group + GROUP_SEALS)) + tl.where(there, slot, 0) * 2
        again = there & (state_of(old) == tl.where(freed, OWNER_FREED, OWNER_HELD))
        report(
            counters, rows, meta, again, kind + i * 0, ROLE_FACTS, space,
            counters.to(tl.int64) + i * 0, i * 0, NONE, slot, page, NONE, NONE, NONE, NONE, 0, 0, 0, 0,
            tl.load(seal + 1, mask=there, other=0), old, NONE, i < 0,
        )  # fmt: skip
        start += TILE


@triton.jit
def _take_arena(fact, words, meta, space, group, lane, TILE: tl.constexpr):
    """Wipe the records of whoever held the bytes of the pages before."""
    count = tl.load(fact + _COUNT)
    holder = words_at(tl.load(group + _ARENA))
    others = tl.load(group + _ARENA_GROUPS) & ~((space * 0 + 1) << space)
    start = count * 0
    while start < count:
        i = start + lane
        page = _page(fact, words, _PAGES, _PAGES_KIND, i, i < count)
        there = (i < count) & (page >= 0) & (page < tl.load(group + GROUP_NUM_PAGES))
        area = tl.where(there, page, 0) // tl.load(group + _ARENA_PAGES)
        changed = there & (tl.load(holder + area, mask=there, other=0) != space + 1)
        other = space * 0
        while (others >> other) != 0:
            if ((others >> other) & 1) != 0:
                its = meta + (other + 1) * STATE_ROW
                size = tl.load(its + _ARENA_PAGES) * tl.load(its + GROUP_PAGE_SIZE)
                j = space * 0
                while j < size:
                    slot = area * size + j
                    _wipe(its, slot, changed & (slot < tl.load(its + GROUP_NUM_SLOTS)))
                    j += 1
            other += 1
        tl.store(holder + area, area * 0 + space + 1, mask=changed)
        start += TILE


@triton.jit
def _present(fingerprint, writer, forward):
    """A seal that moved: written in this forward, with nothing of what was queued for its old place."""
    sealed = is_sealed(writer)
    return tl.where(sealed, fingerprint, 0), tl.where(sealed, _as_of(writer, forward), 0)


@triton.jit
def _save_records(fact, group, slot, there, i):
    """Records to a table ``[slots, 2 + 2 * parts]``."""
    parts = tl.load(group + GROUP_PARTS)
    out = words_at(tl.load(fact + _RECORDS)) + i * (2 + 2 * parts)
    link = words_at(tl.load(group + GROUP_LINKS)) + slot * 2
    tl.store(out, tl.load(link, mask=there, other=0), mask=there)
    tl.store(out + 1, tl.load(link + 1, mask=there, other=0), mask=there)
    seal = words_at(tl.load(group + GROUP_SEALS)) + slot * 2
    for _ in range(parts):
        out += 2
        tl.store(out, tl.load(seal, mask=there, other=0), mask=there)
        tl.store(out + 1, tl.load(seal + 1, mask=there, other=0), mask=there)
        seal += tl.load(group + GROUP_NUM_SLOTS) * 2


@triton.jit
def _restore_records(fact, group, slot, there, i, forward):
    """Records from such a table."""
    parts = tl.load(group + GROUP_PARTS)
    source = words_at(tl.load(fact + _RECORDS)) + i * (2 + 2 * parts)
    link = words_at(tl.load(group + GROUP_LINKS)) + slot * 2
    tl.store(link, tl.load(source, mask=there, other=0), mask=there)
    tl.store(link + 1, tl.load(source + 1, mask=there, other=0), mask=there)
    seal = words_at(tl.load(group + GROUP_SEALS)) + slot * 2
    for _ in range(parts):
        source += 2
        fingerprint = tl.load(source, mask=there, other=0)
        fingerprint, writer = _present(fingerprint, tl.load(source + 1, mask=there, other=0), forward)
        tl.store(seal, fingerprint, mask=there)
        tl.store(seal + 1, writer, mask=there)
        seal += tl.load(group + GROUP_NUM_SLOTS) * 2


@triton.jit
def _restamp(fact, group, slot, there, i, total, forward):
    """New fingerprints, from sums ``[parts, slots]``, for slots that have a link."""
    link = words_at(tl.load(group + GROUP_LINKS)) + slot * 2
    linked = there & ((tl.load(link, mask=there, other=0) | tl.load(link + 1, mask=there, other=0)) != 0)
    sums = words_at(tl.load(fact + _RECORDS)) + i
    seal = words_at(tl.load(group + GROUP_SEALS)) + slot * 2
    for _ in range(tl.load(group + GROUP_PARTS)):
        writer = tl.load(seal + 1, mask=linked, other=0)
        tl.store(seal, tl.load(sums, mask=linked, other=0), mask=linked)
        tl.store(seal + 1, _as_of(writer, forward), mask=linked)
        sums += total
        seal += tl.load(group + GROUP_NUM_SLOTS) * 2


@triton.jit
def apply_to_pages(counters, rows, meta, fact, words, space, group, forward, lane, TILE: tl.constexpr):
    """Every fact about pages."""
    op = tl.load(fact + FACT_OP)
    if (op == _ALLOC) | (op == _FREE) | (op == _OWN) | (op == _IMPORT):
        told = (op == _ALLOC) | (op == _FREE)
        if told & (tl.load(fact + _JUDGED) != 0) & (tl.load(counters + WORD_ARMED) != 0):
            _judge_owners(counters, rows, meta, fact, words, space, group, forward, lane, TILE)
        else:
            _set_owners(fact, words, group, forward, lane, TILE)
    total = tl.load(fact + _COUNT) * tl.load(group + GROUP_PAGE_SIZE)
    if (op != _FREE) & (op != _OWN):
        start = total * 0
        while start < total:
            i = start + lane
            slot, there = _slots(fact, words, group, _PAGES, _PAGES_KIND, i, i < total)
            if (op == _ALLOC) | (op == _WIPE):
                _wipe(group, slot, there)
            if (op == _COPY) | (op == _EXPORT):
                _save_records(fact, group, slot, there, i)
            if op == _IMPORT:
                _restore_records(fact, group, slot, there, i, forward)
            if op == _RESTAMP:
                _restamp(fact, group, slot, there, i, total, forward)
            start += TILE
    tl.debug_barrier()
    if op == _COPY:
        start = total * 0
        while start < total:
            i = start + lane
            slot, there = _slots(fact, words, group, _TARGETS, _TARGETS_KIND, i, i < total)
            _, named = _slots(fact, words, group, _PAGES, _PAGES_KIND, i, i < total)
            _restore_records(fact, group, slot, there & named, i, forward)
            start += TILE
    if (op == _QUEUE_OP) | (op == _IMPORT):
        seals = words_at(tl.load(group + GROUP_SEALS))
        part = space * 0
        while part < tl.load(group + GROUP_PARTS):
            start = total * 0
            while start < total:
                i = start + lane
                slot, there = _slots(fact, words, group, _PAGES, _PAGES_KIND, i, i < total)
                writer = tl.load(seals + (part * tl.load(group + GROUP_NUM_SLOTS) + slot) * 2 + 1, mask=there, other=0)
                enqueue(counters, meta, queue_entry(space, part, slot), there & is_sealed(writer))
                start += TILE
            part += 1
    if op == _ALLOC:
        if tl.load(group + _ARENA) != 0:
            _take_arena(fact, words, meta, space, group, lane, TILE)
