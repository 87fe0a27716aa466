"""Mark: judge a forward's inputs, claim the slots of its new tokens, and leave in the scratch what the exit needs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from kvcanary.batch import ForwardBatch
from kvcanary.kernels import ref_poison
from kvcanary.kernels.ref_poison import Marked
from kvcanary.kernels.ref_report import Launch, link_expected, link_found, report
from kvcanary.kernels.ref_rows import BatchRows, Tokens
from kvcanary.kernels.ref_tables import NONE, OUTSIDE, Places, SlotMap
from kvcanary.kernels.ref_words import divide, link_words, mix, modulo, states_of, tags_of, token_codes
from kvcanary.record import OWNER_FREED, OWNER_HELD, OWNER_UNKNOWN, TAG_BITS, TAG_SHIFT, Kind
from kvcanary.state import (
    OWNER_NULL,
    OWNER_TRASH,
    Check,
    DigestSource,
    Reason,
    RowWord,
    Word,
)
from kvcanary.state import ViolationWord as V


class Inputs(NamedTuple):
    """What the model receives for the live tokens, ``[n]`` each; positions and salts may be absent."""

    ids: torch.Tensor
    codes: torch.Tensor
    positions: torch.Tensor | None
    salts: torch.Tensor | None


class Writes(NamedTuple):
    """Live tokens that have a slot, ``[n]`` each: the slot, its page, the page's owner word, the record to be."""

    tokens: Tokens
    slot: torch.Tensor
    page: torch.Tensor
    owner: torch.Tensor
    links: torch.Tensor


def mark(launch: Launch, batch: ForwardBatch, groups: Sequence[int], *, first: bool, poison: str) -> None:
    """See :meth:`kvcanary.kernels.Kernels.mark`.

    Tokens of an unlinked batch take their position from ``batch.positions`` (a draft tree has several tokens at
    one position) and their place in the table from ``context + place``; their positions are not judged.
    """
    rows = BatchRows(launch.state, batch)
    tokens = Tokens(rows)
    if first:
        _open(launch, rows, tokens)
    if len(tokens):
        for g in groups:
            _mark_group(launch, rows, tokens, g, poison)


# --- the scratch --------------------------------------------------------------------------------------------


def _open(launch: Launch, rows: BatchRows, tokens: Tokens) -> None:
    """Fill the scratch of a forward and judge its inputs."""
    state, batch = launch.state, rows.batch
    digest, source = rows.digests()
    inputs, words = _inputs(batch, tokens)
    links = torch.stack((words, _token_digests(rows, tokens, words, digest, source)), 1)
    count = batch.num_tokens
    state.scratch_slots[:, :count] = NONE
    if tokens.all_live:
        state.scratch_rows[:count] = tokens.row
        state.scratch_links[:count] = links
    else:
        state.scratch_rows[:count] = -1
        state.scratch_links[:count] = 0
        state.scratch_rows[tokens.token] = tokens.row
        state.scratch_links[tokens.token] = links
    state.scratch_batch[: batch.num_rows] = _batch_words(rows, digest, source)
    launch[Word.SCRATCH_TOKENS] = count
    launch[Word.SCRATCH_ROWS] = batch.num_rows
    launch[Word.NEW_TOKENS] += len(tokens)
    group = next((g for g, item in enumerate(batch.groups) if item is not None), 0)
    if batch.linked:
        _judge_lengths(launch, rows, group)
    _judge_tokens(launch, rows, tokens, inputs, group)
    if batch.last_ids is not None:
        _judge_last(launch, rows, batch.last_ids.to(torch.int64), group)


def _inputs(batch: ForwardBatch, tokens: Tokens) -> tuple[Inputs, torch.Tensor]:
    """The inputs, and word 0 of the new records."""
    ids = tokens.pick(batch.input_ids)
    salts = None if batch.token_salts is None else tokens.pick(batch.token_salts)
    given = None if batch.positions is None else tokens.pick(batch.positions)
    position = tokens.position if batch.linked or given is None else given
    codes = token_codes(ids, position, salts)
    return Inputs(ids, codes, given, salts), link_words(codes, position)


def _token_digests(
    rows: BatchRows, tokens: Tokens, words: torch.Tensor, digest: torch.Tensor, source: torch.Tensor
) -> torch.Tensor:
    """Prefix digests of the new tokens; 0 where the row's is unknown or the batch is not linked."""
    if not rows.batch.linked:
        return torch.zeros_like(words)
    before = digest.index_select(0, tokens.batch_row)
    if bool(tokens.place.any()):
        mixes = mix(rows.state.keys, words)
        sums = mixes.cumsum(0).sub_(mixes)
        # A live row's tokens are neighbours, so its first one lies ``place`` back.
        firsts = torch.arange(len(tokens), device=sums.device).sub_(tokens.place)
        before = before.add_(sums).sub_(sums.index_select(0, firsts))
    known = source != DigestSource.UNKNOWN
    return before if bool(known.all()) else before * known.index_select(0, tokens.batch_row)


def _batch_words(rows: BatchRows, digest: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """Columns in the order of :class:`~kvcanary.state.BatchWord`."""
    first = rows.starts[:-1]
    # An unlinked forward commits nothing: rows without new tokens are passed over.
    new = rows.starts[1:] - first if rows.batch.linked else torch.zeros_like(first)
    table = torch.stack((rows.row, first, new, rows.context, digest, source), 1)
    if not rows.all_live:
        dead = torch.tensor([-1, 0, 0, 0, 0, 0], device=table.device)
        table = torch.where(rows.live.unsqueeze(1), table, dead)
    return table


# --- inputs -------------------------------------------------------------------------------------------------


def _judge_lengths(launch: Launch, rows: BatchRows, group: int) -> None:
    """A row may not skip positions, nor go back further than its windows allow."""
    groups = launch.state.layout.groups
    limits = [groups[g].max_rewind for g, item in enumerate(rows.batch.groups) if item is not None]
    rewind = min((limit for limit in limits if limit is not None), default=None)
    back = rows.high - rows.context
    wrong = back < 0
    if rewind is not None:
        wrong.logical_or_(back > rewind)
    if not bool(wrong.any()):
        return
    wrong &= rows.live & (rows.high >= 0)
    fields = {V.ROW: rows.row, V.POSITION_EXPECTED: rows.high, V.POSITION_FOUND: rows.context}
    report(launch, Kind.INPUT_POSITION, group, fields, wrong)


def _judge_tokens(launch: Launch, rows: BatchRows, tokens: Tokens, inputs: Inputs, group: int) -> None:
    batch, place = rows.batch, {V.ROW: tokens.row, V.POSITION_EXPECTED: tokens.position}
    if batch.linked and inputs.positions is not None and not torch.equal(inputs.positions, tokens.position):
        fields = {**place, V.POSITION_FOUND: inputs.positions}
        report(launch, Kind.INPUT_POSITION, group, fields, inputs.positions != tokens.position)
    # Where every code is the id itself, none is negative.
    if inputs.codes is not inputs.ids:
        report(launch, Kind.INPUT_PLACEHOLDER, group, {**place, V.CODE_FOUND: inputs.codes}, inputs.ids < 0)
    if batch.expected_ids is not None:
        expected = tokens.pick(batch.expected_ids)
        wrong = (expected != inputs.ids).logical_and_(expected >= 0)
        if bool(wrong.any()):
            wanted = token_codes(expected, tokens.position, inputs.salts)
            fields = {**place, V.CODE_EXPECTED: wanted, V.CODE_FOUND: inputs.codes}
            report(launch, Kind.INPUT_TOKEN, group, fields, wrong)


def _judge_last(launch: Launch, rows: BatchRows, last: torch.Tensor, group: int) -> None:
    """Compare what the scheduler says came last with what the history was advanced by.

    The id is taken without a salt: where the last token had one, the scheduler should have no opinion.
    """
    place = rows.context - 1
    checked = (rows.words[:, RowWord.LOW] <= place).logical_and_(place >= 0).logical_and_(rows.held)
    checked.logical_and_(last >= 0).logical_and_(rows.live)
    codes = token_codes(last, place, None)
    step = rows.digest - rows.past(place)
    wrong = checked.logical_and_(step != mix(rows.state.keys, link_words(codes, place)))
    fields = {V.ROW: rows.row, V.POSITION_EXPECTED: place, V.CODE_EXPECTED: codes}
    report(launch, Kind.INPUT_TOKEN, group, fields, wrong)


# --- slots --------------------------------------------------------------------------------------------------


def _mark_group(launch: Launch, rows: BatchRows, tokens: Tokens, g: int, poison: str) -> None:
    state, item = launch.state, rows.batch.groups[g]
    if item is None:
        return
    records, where = state.groups[g], SlotMap(state.layout.groups[g], item, rows.batch)
    if item.slot_mapping is None:
        places = where.at(tokens.batch_row, tokens.position)
    else:
        places = where.mapped(tokens.pick(item.slot_mapping))
    tokens, slot = _with_slot(launch, rows, tokens, g, places)
    page = divide(slot, state.layout.groups[g].page_size)
    links = state.scratch_links
    links = links[: len(tokens)] if tokens.all_live else links.index_select(0, tokens.token)
    writes = Writes(tokens, slot, page, records.owner.index_select(0, page), links)
    mine = _all_mine(launch, rows, g, writes)
    if not mine:
        writes = _judge_owners(launch, rows, g, writes)
    if not len(writes.tokens):
        return
    _judge_table(launch, g, where, writes, compare=item.slot_mapping is not None)
    if not mine:
        _take_pages(launch, rows, g, writes)
    if poison:
        tag = rows.tag.index_select(0, writes.tokens.batch_row)
        old = records.links[writes.slot]
        ref_poison.place(
            launch, g, poison, Marked(writes.tokens.token, writes.slot, writes.owner, tag, old, writes.links)
        )
    records.links[writes.slot] = writes.links
    records.seals.index_fill_(1, writes.slot, 0)
    state.scratch_slots[g][writes.tokens.token] = writes.slot


def _with_slot(launch: Launch, rows: BatchRows, tokens: Tokens, g: int, places: Places) -> tuple[Tokens, torch.Tensor]:
    """The tokens that have a slot.

    Of more new tokens than a ring has places only the newest are written: the others are overwritten in the same
    forward, on purpose.
    """
    ring = launch.state.layout.groups[g].ring
    if places.clean and ring is None:
        return tokens, places.slot
    fields = {V.ROW: tokens.row, V.SLOT: places.engine_index, V.POSITION_EXPECTED: tokens.position}
    report(launch, Kind.SLOT_RANGE, g, fields, places.slot == OUTSIDE)
    written = places.slot >= 0
    if ring is not None:
        written &= tokens.token + ring >= rows.starts[1:].index_select(0, tokens.batch_row)
    return tokens.only(written), places.slot[written]


def _all_mine(launch: Launch, rows: BatchRows, g: int, writes: Writes) -> bool:
    """The common case, in few operations: every page is held by the row that writes into it."""
    tag = rows.tag.index_select(0, writes.tokens.batch_row)
    if not torch.equal(writes.owner >> TAG_SHIFT, tag + (OWNER_HELD << TAG_BITS)):
        return False
    launch.verified(g, Check.WRITES, len(writes.tokens))
    return True


def _judge_owners(launch: Launch, rows: BatchRows, g: int, writes: Writes) -> Writes:
    """Report writes into what is not the row's; those that go to trash pages are left out."""
    if launch.state.layout.groups[g].trash_pages:
        kept = states_of(writes.owner) != OWNER_TRASH
        writes = Writes(writes.tokens.only(kept), *(column[kept] for column in writes[1:]))
    tokens, slot, page, owner, links = writes
    tag, state = rows.tag.index_select(0, tokens.batch_row), states_of(owner)
    unknown = int((state == OWNER_UNKNOWN).sum())
    launch.unverified(g, Reason.UNKNOWN_OWNER, unknown)
    launch.verified(g, Check.WRITES, len(tokens) - unknown)
    old = launch.state.groups[g].links[slot]
    # The same token after the same prefix: rewriting it changes nothing for whoever owns the page.
    harmful = (old != links).any(1).logical_or_(links[:, 1] == 0)
    held, holder = state == OWNER_HELD, tags_of(owner)
    foreign = (held & (holder != tag) & (holder != 0) & (tag != 0)) | (state == OWNER_NULL)
    fields = {V.ROW: tokens.row, V.SLOT: slot, V.PAGE: page, **link_expected(links), **link_found(old)}
    report(launch, Kind.WRITE_FREED, g, fields, harmful & (state == OWNER_FREED))
    report(launch, Kind.WRITE_FOREIGN, g, fields, harmful & foreign)
    return writes


def _take_pages(launch: Launch, rows: BatchRows, g: int, writes: Writes) -> None:
    """Pages that were handed out to nobody by name belong to the first row that writes into them."""
    tag, owner = rows.tag.index_select(0, writes.tokens.batch_row), writes.owner
    taken = ((states_of(owner) == OWNER_HELD) & (tags_of(owner) == 0) & (tag != 0)).nonzero().squeeze(1)
    launch.state.groups[g].owner[writes.page[taken]] = owner[taken] | (tag[taken] << TAG_SHIFT)


def _judge_table(launch: Launch, g: int, where: SlotMap, writes: Writes, *, compare: bool) -> None:
    """Compare the slots written with the table's, and with the offset that their position gives."""
    group, tokens, slot = where.group, writes.tokens, writes.slot
    compare = compare and where.table is not None and where.table.covers_new
    named = where.at(tokens.batch_row, tokens.position).slot if compare else torch.full_like(slot, NONE)
    follows = group.offset_follows_position and group.page_size > 1
    offset = modulo(slot, group.page_size) if follows else slot
    wanted = where.offset_of(tokens.position) if follows else slot
    if (not compare or torch.equal(named, slot)) and torch.equal(offset, wanted):
        return
    wrong = offset != wanted
    if compare:
        wrong |= named != slot
    fields = {
        V.ROW: tokens.row,
        V.SLOT: slot,
        V.PAGE: writes.page,
        V.POSITION_EXPECTED: tokens.position,
        V.POSITION_FOUND: named,
    }
    report(launch, Kind.TABLE_MISMATCH, g, fields, wrong)
