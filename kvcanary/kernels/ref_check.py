"""Check: compare the records of every row's old positions with one another and with the row's own history."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from kvcanary.batch import ForwardBatch, GroupBatch
from kvcanary.kernels.ref_report import Launch, link_expected, link_found, report
from kvcanary.kernels.ref_rows import BatchRows
from kvcanary.kernels.ref_tables import OUTSIDE, Places, SlotMap
from kvcanary.kernels.ref_words import divide, mix, positions_of, states_of
from kvcanary.layout import AttentionGroup
from kvcanary.record import FLAG_SHIFT, OWNER_FREED, OWNER_HELD, Kind
from kvcanary.state import MIN_ENTRIES_PER_ROW, OWNER_TRASH, Check, Reason, Word
from kvcanary.state import ViolationWord as V


class Entries(NamedTuple):
    """Old positions to read: ``row`` (of the batch) and ``position``, ``[N]``, ascending within each row.

    ``judged`` is False for positions that are read only because the next one is judged by them; None: all are
    judged. ``starts``: first entry of each run of consecutive positions, and ``begin`` its position. ``ends``: last
    entry of each row in ``ending``.
    """

    row: torch.Tensor
    position: torch.Tensor
    judged: torch.Tensor | None
    starts: torch.Tensor
    begin: torch.Tensor
    ends: torch.Tensor
    ending: torch.Tensor


class Records(NamedTuple):
    """What was read for the entries, ``[N]`` each.

    ``after`` is the digest that the next record must have, ``expected`` the one that this record must have; of the
    first record of a run something is expected only where ``bound`` ``[runs]`` says so.
    """

    places: Places
    words: torch.Tensor
    digests: torch.Tensor
    after: torch.Tensor
    expected: torch.Tensor
    bound: torch.Tensor


def check(launch: Launch, batch: ForwardBatch, groups: Sequence[int]) -> None:
    """See :meth:`kvcanary.kernels.Kernels.check`.

    A ring keeps only its newest places, so older positions are never required of it.
    """
    rows = BatchRows(launch.state, batch)
    for g in groups:
        item = batch.groups[g]
        if item is not None and rows.num_live:
            _check_group(launch, rows, g, item)
    for g in groups:
        if batch.groups[g] is not None and launch.state.layout.groups[g].ring is None:
            report_conflicts(launch, g)


def report_conflicts(launch: Launch, g: int) -> None:
    """Report tokens of the scratch whose slot holds another token's record by now."""
    state, count = launch.state, launch[Word.SCRATCH_TOKENS]
    slot, wanted = state.scratch_slots[g, :count], state.scratch_links[:count]
    there = slot.clamp(min=0)
    found = state.groups[g].links.index_select(0, there)
    if torch.equal(found, wanted):
        return
    fields = {
        V.ROW: state.scratch_rows[:count],
        V.SLOT: there,
        V.PAGE: divide(there, state.layout.groups[g].page_size),
        **link_expected(wanted),
        **link_found(found),
    }
    report(launch, Kind.WRITE_CONFLICT, g, fields, (found != wanted).any(1).logical_and_(slot >= 0))


def first_required(rows: BatchRows, group: AttentionGroup, item: GroupBatch) -> torch.Tensor:
    """First old position of each batch row that must be mapped, at most the row's length; ``[B]``."""
    if item.required_from is not None:
        low = item.required_from.to(torch.int64)
    else:
        low = torch.zeros_like(rows.context)
        if item.table is not None and item.table.first_position is not None:
            low = item.table.first_position.to(torch.int64)
        if group.window is not None:
            low = torch.maximum(low, rows.context - (group.window - 1))
    if group.ring is not None:
        low = torch.maximum(low, rows.context - group.ring)
    return torch.minimum(low.clamp(min=0), rows.context.clamp(min=0))


# --- which positions ----------------------------------------------------------------------------------------


def _check_group(launch: Launch, rows: BatchRows, g: int, item: GroupBatch) -> None:
    group = launch.state.layout.groups[g]
    low, high = first_required(rows, group, item), rows.context.clamp(min=0)
    if not rows.all_live:
        low, high = low * rows.live, high * rows.live
    lengths = high - low
    skipped, count = torch.stack((low, lengths)).sum(1).tolist()
    launch.unverified(g, Reason.OUT_OF_WINDOW, skipped)
    if item.table is None:
        launch.unverified(g, Reason.NO_TABLE, count)
        return
    if not count:
        return
    cap = max(MIN_ENTRIES_PER_ROW, launch.state.limits.head_entries // rows.num_live)
    if count <= cap or int(lengths.max()) <= cap:
        entries = _all_entries(low, lengths)
    else:
        entries = _capped_entries(launch, g, low, lengths, cap)
    places = SlotMap(group, item, rows.batch).at(entries.row, entries.position)
    records = _read(launch, rows, g, entries, places)
    usable: torch.Tensor | None = None
    if not _all_right(launch, g, entries, records):
        usable = _classify(launch, rows, g, entries, records)
    _compare_ends(launch, rows, g, entries, records, usable)


def _all_entries(low: torch.Tensor, lengths: torch.Tensor) -> Entries:
    ending = lengths.nonzero().squeeze(1)
    begin, count = low.index_select(0, ending), lengths.index_select(0, ending)
    stops = count.cumsum(0)
    starts = stops - count
    row, position = _numbered(begin - starts, count, ending)
    return Entries(row, position, None, starts, begin, stops - 1, ending)


def _numbered(shift: torch.Tensor, count: torch.Tensor, owner: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Each run's owner, and the entry's number plus the run's shift, for every entry of runs of ``count``."""
    run = torch.repeat_interleave(count)
    position = torch.arange(run.numel(), device=run.device).add_(shift.index_select(0, run))
    return owner.index_select(0, run), position


def _capped_entries(launch: Launch, g: int, low: torch.Tensor, lengths: torch.Tensor, cap: int) -> Entries:
    """Of rows longer than ``cap`` the newest half of it, and a stretch of the rest that moves on each forward."""
    long = lengths > cap
    half = cap - cap // 2
    rest = (lengths - cap // 2).clamp(min=1)
    begin = torch.where(long, low + (launch.forward * half) % rest, low)
    end = torch.where(long, torch.minimum(begin + half, low + rest), low)
    newest = torch.where(long, low + rest, low)
    segment_low = torch.stack((begin, newest), 1).flatten()
    segment_high = torch.stack((end, low + lengths), 1).flatten()
    owner = torch.arange(low.numel(), device=low.device).repeat_interleave(2)
    used = (segment_high > segment_low).nonzero().squeeze(1)
    segment_low, segment_high, owner = segment_low[used], segment_high[used], owner[used]
    launch.unverified(g, Reason.OVER_CAPACITY, int(lengths.sum() - (segment_high - segment_low).sum()))
    # One position before each stretch is read too, so that its first one has something to be judged by.
    lead = (segment_low > low[owner]).to(torch.int64)
    count = segment_high - segment_low + lead
    stops = count.cumsum(0)
    starts = stops - count
    begin = segment_low - lead
    row, position = _numbered(begin - starts, count, owner)
    judged = torch.ones_like(row, dtype=torch.bool)
    judged[starts[lead == 1]] = False
    last = torch.ones_like(owner, dtype=torch.bool)
    last[:-1] = owner[1:] != owner[:-1]
    return Entries(row, position, judged, starts, begin, stops[last] - 1, owner[last])


# --- what they hold -----------------------------------------------------------------------------------------


def _read(launch: Launch, rows: BatchRows, g: int, entries: Entries, places: Places) -> Records:
    state = launch.state
    links = state.groups[g].links.index_select(0, places.slot if places.clean else places.slot.clamp(min=0))
    words, digests = links.unbind(1)
    after = mix(state.keys, words).add_(digests)
    seed = rows.seed.index_select(0, entries.row.index_select(0, entries.starts))
    bound = (entries.begin == 0).logical_and_(seed != 0)
    at_start = torch.where(bound, seed, digests.index_select(0, entries.starts))
    expected = after.roll(1).index_copy_(0, entries.starts, at_start)
    return Records(places, words, digests, after, expected, bound)


def _all_right(launch: Launch, g: int, entries: Entries, records: Records) -> bool:
    """The common case, in few operations: everything mapped, known, linked and right."""
    if not records.places.clean or entries.judged is not None:
        return False
    if not torch.equal(positions_of(records.words), entries.position):
        return False
    if not torch.equal(records.digests, records.expected) or not bool(records.digests.all()):
        return False
    if _has_reserved(launch, g):
        page = divide(records.places.slot, launch.state.layout.groups[g].page_size)
        if int(launch.state.groups[g].owner.index_select(0, page).max()) >= OWNER_TRASH << FLAG_SHIFT:
            return False
    launch.verified(g, Check.LINKS, entries.row.numel())
    return True


def _has_reserved(launch: Launch, g: int) -> bool:
    own = launch.state.layout.groups[launch.state.layout.spaces[g]]
    return bool(own.trash_pages or own.null_pages)


def _classify(launch: Launch, rows: BatchRows, g: int, entries: Entries, records: Records) -> torch.Tensor:
    """Judge every entry; returns which ones are known, linked and at their position."""
    state, group = launch.state, launch.state.layout.groups[g]
    places, position, digests = records.places, entries.position, records.digests
    slot = places.slot.clamp(min=0)
    page = divide(slot, group.page_size)
    owner = states_of(state.groups[g].owner[page])
    usable = (places.slot >= 0) & (owner < OWNER_TRASH)
    known = usable & ((records.words | digests) != 0)
    right = known & (positions_of(records.words) == position)
    linked = right & (digests != 0)
    bound = linked.roll(1).index_copy_(0, entries.starts, records.bound)
    judged = torch.ones_like(linked) if entries.judged is None else entries.judged
    claimed = (owner == OWNER_HELD) | (owner == OWNER_FREED)
    empty = usable & ~known & judged
    launch.verified(g, Check.LINKS, int((known & judged).sum()))
    launch.unverified(g, Reason.UNKNOWN_RECORD, int((empty & ~claimed).sum()))
    launch.unverified(g, Reason.UNLINKED, int((right & ~linked & judged).sum()))

    place = {V.ROW: rows.row[entries.row], V.POSITION_EXPECTED: position}
    missing = judged & (places.slot != OUTSIDE) & ~usable
    report(launch, Kind.WINDOW, g, place, _lowest_of_rows(entries.row, missing))
    report(launch, Kind.SLOT_RANGE, g, {**place, V.SLOT: places.engine_index}, judged & (places.slot == OUTSIDE))
    found = link_found(torch.stack((records.words, digests), 1))
    record = {**place, V.SLOT: slot, V.PAGE: page, **found}
    report(launch, Kind.UNWRITTEN, g, record, empty & claimed)
    report(launch, Kind.POSITION, g, record, judged & known & ~right)
    broken = judged & linked & bound & (digests != records.expected)
    report(launch, Kind.DIGEST, g, {**record, V.DIGEST_EXPECTED: records.expected}, broken)
    return linked


def _lowest_of_rows(row: torch.Tensor, missing: torch.Tensor) -> torch.Tensor:
    """Of each row's missing entries the first; a row's entries are neighbours, in order."""
    places = missing.nonzero().squeeze(1)
    rows = row[places]
    lowest = torch.ones_like(places, dtype=torch.bool)
    lowest[1:] = rows[1:] != rows[:-1]
    return torch.zeros_like(missing).index_fill_(0, places[lowest], value=True)


def _compare_ends(
    launch: Launch, rows: BatchRows, g: int, entries: Entries, records: Records, usable: torch.Tensor | None
) -> None:
    """Compare what the last old record implies with the row's own history; ``usable`` None: every record is."""
    ends, row = entries.ends, entries.ending
    after, wanted = records.after.index_select(0, ends), rows.digest.index_select(0, row)
    held, armed = rows.held.index_select(0, row), rows.armed.index_select(0, row)
    count = ends.numel()
    if usable is None and torch.equal(after, wanted) and bool((held & armed).all()):
        launch.verified(g, Check.ROW_ENDS, count)
        return
    verified = held & armed & (after == wanted)
    wrong = held & (after != wanted)
    if usable is not None:
        usable = usable.index_select(0, ends)
        verified, wrong, count = verified & usable, wrong & usable, int(usable.sum())
    good, bad = int(verified.sum()), int(wrong.sum())
    launch.verified(g, Check.ROW_ENDS, good)
    launch.unverified(g, Reason.UNARMED_ROW, count - good - bad)
    if bad:
        slot = records.places.slot[ends].clamp(min=0)
        fields = {
            V.ROW: rows.row[row],
            V.SLOT: slot,
            V.PAGE: divide(slot, launch.state.layout.groups[g].page_size),
            V.POSITION_EXPECTED: entries.position[ends],
            **link_found(torch.stack((records.words[ends], after), 1)),
            V.DIGEST_EXPECTED: wanted,
        }
        report(launch, Kind.REQUEST_DIGEST, g, fields, wrong)
