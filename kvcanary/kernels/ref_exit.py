"""Exit: seal the bytes of new tokens, then commit the rows' histories and write the header."""

from __future__ import annotations

import torch

from kvcanary.kernels import ref_poison
from kvcanary.kernels.ref_bytes import PartReader
from kvcanary.kernels.ref_check import report_conflicts
from kvcanary.kernels.ref_poison import Sealed
from kvcanary.kernels.ref_report import Launch, report
from kvcanary.kernels.ref_words import divide, mix, positions_of, writer_words
from kvcanary.record import Kind, signed
from kvcanary.state import (
    HISTORY,
    BatchWord,
    Check,
    DeviceState,
    DigestSource,
    GroupState,
    PoisonMode,
    RowFlag,
    RowWord,
    Word,
)
from kvcanary.state import ViolationWord as V


def seal_group(launch: Launch, g: int, part: int, reader: PartReader, *, nonfinite: bool, poison: PoisonMode) -> None:
    """Seal ``part`` of the scratch's tokens in group ``g``; tokens whose slot holds another record are left out."""
    state, count = launch.state, launch[Word.SCRATCH_TOKENS]
    group, records = state.layout.groups[g], state.groups[g]
    if part == 0 and group.ring is not None:
        report_conflicts(launch, g)
    slot, links, row = state.scratch_slots[g, :count], state.scratch_links[:count], state.scratch_rows[:count]
    token = torch.arange(count, device=slot.device)
    if not _all_there(records, slot, links):
        found = records.links.index_select(0, slot.clamp(min=0))
        mine = (found == links).all(1).logical_and_(slot >= 0)
        token, slot, links, row = token[mine], slot[mine], links[mine], row[mine]
        if not slot.numel():
            return
    fingerprint, bad = reader.seal(slot) if nonfinite else (reader.fingerprints(slot), None)
    writers = writer_words(launch.forward, state.rows.select(1, RowWord.TAG).index_select(0, row))
    records.seals[part].index_copy_(0, slot, torch.stack((fingerprint, writers), 1))
    if part == 0:
        launch.verified(g, Check.SEALED, slot.numel())
    if bad is not None:
        fields = {
            V.ROW: row,
            V.SLOT: slot,
            V.PAGE: divide(slot, group.page_size),
            V.PART: torch.full_like(slot, part),
            V.POSITION_EXPECTED: positions_of(links[:, 0]),
        }
        report(launch, Kind.NONFINITE, g, fields, bad)
    if poison != "off":
        ref_poison.look(launch, g, part, poison, Sealed(token, slot, row, links))


def _all_there(records: GroupState, slot: torch.Tensor, links: torch.Tensor) -> bool:
    """The common case: every token has a slot, and the slot its record."""
    return int(slot.min()) >= 0 and torch.equal(records.links.index_select(0, slot), links)


def commit(launch: Launch) -> None:
    """Advance the histories of the rows in the scratch by the tokens that the model received."""
    state = launch.state
    count, num_rows = launch[Word.SCRATCH_TOKENS], launch[Word.SCRATCH_ROWS]
    words, digests = state.scratch_links[:count].unbind(1)
    token_row = state.scratch_rows[:count]
    mixes = mix(state.keys, words)
    all_live = int(token_row.min()) >= 0
    total = mixes if all_live else mixes * (token_row >= 0)
    launch[Word.DIGEST_SUM] = signed(launch[Word.DIGEST_SUM] + int(total.sum()))
    batch = state.scratch_batch[:num_rows]
    due = (batch[:, BatchWord.NEW] > 0).logical_and_(batch[:, BatchWord.ROW] >= 0)
    if not bool(due.all()):
        batch = batch[due]
    if not batch.shape[0]:
        return
    row, first, new, context, _, _ = batch.unbind(1)
    high = context + new
    started = _advance_rows(state, batch, high)
    ends = first.add(new).sub_(1)
    if started is not None:
        row, high, ends = row[started], high[started], ends[started]
    history = state.history.view(-1)
    position = positions_of(words)
    places = (position & (HISTORY - 1)).add_(token_row, alpha=HISTORY)
    if all_live and started is None and count < HISTORY:
        history.index_copy_(0, places, digests)
    else:
        length = state.rows.select(1, RowWord.HIGH).index_select(0, token_row.clamp(min=0))
        kept = (position > length - HISTORY).logical_and_(length >= 0).logical_and_(token_row >= 0)
        history.index_copy_(0, places[kept], digests[kept])
    history.index_copy_(0, (high & (HISTORY - 1)).add_(row, alpha=HISTORY), (digests + mixes).index_select(0, ends))


def _advance_rows(state: DeviceState, batch: torch.Tensor, high: torch.Tensor) -> torch.Tensor | None:
    """Set the new bounds of the rows' histories; returns which rows have one (None: all)."""
    row, _, _, context, digest, source = batch.unbind(1)
    oldest = high - (HISTORY - 1)
    if bool((source == DigestSource.HISTORY).all()):
        low = torch.maximum(state.rows.select(1, RowWord.LOW).index_select(0, row), oldest)
        state.rows.select(1, RowWord.LOW).index_copy_(0, row, low)
        state.rows.select(1, RowWord.HIGH).index_copy_(0, row, high)
        return None
    words = state.rows.index_select(0, row)
    known = source != DigestSource.UNKNOWN
    # A digest of 0 says that the row went on without one, so that a base that comes later is not taken for its start.
    anchored = (source == DigestSource.SLOTS).logical_or_(~known)
    low = torch.maximum(torch.where(source == DigestSource.HISTORY, words[:, RowWord.LOW], context), oldest)
    words[:, RowWord.LOW] = torch.where(known, low, words[:, RowWord.LOW])
    words[:, RowWord.HIGH] = torch.where(known, high, -1)
    flags = words[:, RowWord.FLAGS]
    flags = torch.where(source == DigestSource.SEED, flags | RowFlag.ARMED, flags)
    words[:, RowWord.FLAGS] = torch.where(anchored, flags & ~RowFlag.ARMED, flags)
    words[anchored, RowWord.ANCHOR_POSITION] = context[anchored]
    words[anchored, RowWord.ANCHOR_DIGEST] = digest[anchored]
    state.rows.index_copy_(0, row, words)
    return known


def end_forward(launch: Launch) -> None:
    """Write the header of the forward in progress and go on to the next one."""
    number, headers = launch.forward, launch.state.headers
    header = headers[number % headers.shape[0]]
    # A reader on another thread takes a header only if its sequence word equals its forward, before and after.
    header[Word.SEQUENCE] = 0
    header[1:] = torch.tensor(launch.values()[1:])
    header[Word.SEQUENCE] = number
    launch[Word.FORWARD] = number + 1
    launch[Word.SCRATCH_TOKENS] = 0
