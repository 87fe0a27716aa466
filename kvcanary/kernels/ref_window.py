"""Window: proof that a sliding window is really in use, counted from the tables of a full and a window group."""

from __future__ import annotations

import torch

from kvcanary.batch import ForwardBatch
from kvcanary.kernels.ref_report import Launch
from kvcanary.kernels.ref_rows import BatchRows
from kvcanary.kernels.ref_tables import SlotMap
from kvcanary.kernels.ref_words import divide
from kvcanary.record import FLAG_SHIFT
from kvcanary.state import OWNER_TRASH, VERIFIED, Check, Word, group_base


def window(launch: Launch, batch: ForwardBatch, full: int, swa: int) -> None:
    """See :meth:`kvcanary.kernels.Kernels.window`. A group without a table has no slot anywhere."""
    state, layout = launch.state, launch.state.layout
    full_item, swa_item = batch.groups[full], batch.groups[swa]
    if full_item is None or swa_item is None:
        return
    rows = BatchRows(state, batch)
    length = (rows.context * rows.live).clamp_(min=0)
    row = torch.arange(batch.num_rows, device=length.device).repeat_interleave(length)
    stops = length.cumsum(0)
    position = torch.arange(row.numel(), device=length.device) - (stops - length)[row]
    in_full = SlotMap(layout.groups[full], full_item, batch).at(row, position).slot
    in_swa = SlotMap(layout.groups[swa], swa_item, batch).at(row, position).slot
    page = divide(in_swa.clamp(min=0), layout.groups[swa].page_size)
    mapped = (in_swa >= 0) & (state.groups[swa].owner[page] < OWNER_TRASH << FLAG_SHIFT)
    table = swa_item.table
    if table is not None and table.first_position is not None:
        mapped &= position >= table.first_position.to(torch.int64)[row]
    launch[Word.SWA_OUT_OF_WINDOW] = int((~mapped).sum())
    launch[Word.SWA_DIVERGENCE] = int((mapped & (in_swa != in_full)).sum())
    launch[Word.SWA_FORWARD] = launch.forward
    launch[Word.SWA_FULL] = launch[group_base(full) + VERIFIED + Check.LINKS]
    launch[Word.SWA_WINDOW] = launch[group_base(swa) + VERIFIED + Check.LINKS]
