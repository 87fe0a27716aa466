"""Poison: put at the entry, or when pages are handed out, and looked for at the exit."""

from __future__ import annotations

from typing import NamedTuple

import torch

from kvcanary.kernels.poison import fill_runs, poison_runs
from kvcanary.kernels.ref_report import Launch, report
from kvcanary.kernels.ref_words import codes_of, divide, modulo, positions_of, states_of, tags_of
from kvcanary.layout import KVSource, Run
from kvcanary.record import OWNER_HELD, POISON_BYTES, Kind, Poison, poison
from kvcanary.state import Check, PoisonBit, PoisonMode
from kvcanary.state import ViolationWord as V


class Span(NamedTuple):
    """A stretch of each slot's bytes: ``buffer`` is uint8 ``[pages, page_size, bytes]``, a view."""

    buffer: torch.Tensor
    page_size: int

    def put(self, slots: torch.Tensor, pattern: torch.Tensor) -> None:
        """Write ``pattern`` ``[bytes]`` into every slot."""
        self.buffer[divide(slots, self.page_size), modulo(slots, self.page_size)] = pattern

    def at(self, slots: torch.Tensor) -> torch.Tensor:
        """The bytes ``[n, bytes]`` of slots."""
        return self.buffer[divide(slots, self.page_size), modulo(slots, self.page_size)]


class Marked(NamedTuple):
    """Written tokens of a group, ``[n]`` each: number in the batch, slot, the page's owner, the row's tag, records."""

    token: torch.Tensor
    slot: torch.Tensor
    owner: torch.Tensor
    tag: torch.Tensor
    old: torch.Tensor
    new: torch.Tensor


def place(launch: Launch, g: int, part: str, marked: Marked) -> None:
    """Put the forward's poison into the slots that are the rows' own and get a new record."""
    runs = poison_runs(launch.state.layout, g, part)
    if not runs:
        return
    mine = (states_of(marked.owner) == OWNER_HELD) & (tags_of(marked.owner) == marked.tag) & (marked.tag != 0)
    mine &= (marked.old != marked.new).any(1)
    found = poison(launch.state.keys, launch.forward, g)
    span, pattern = _spot(runs, found)
    span.put(marked.slot[mine], pattern)
    launch.state.scratch_poison[g][marked.token] = mine * int(PoisonBit.PLACED)


def fill(launch: Launch, space: int, slots: torch.Tensor) -> None:
    """Fill slots that are handed out."""
    found = poison(launch.state.keys, 0, space)
    for source, run in fill_runs(launch.state.layout, space):
        pattern = _pattern(found, run.num_bytes, source.tensor.device)
        _span(source, run.offset, run.num_bytes).put(slots, pattern)


class Sealed(NamedTuple):
    """Sealed tokens of a group, ``[n]`` each: number in the batch, slot, row, record."""

    token: torch.Tensor
    slot: torch.Tensor
    row: torch.Tensor
    links: torch.Tensor


def look(launch: Launch, g: int, part: int, mode: PoisonMode, sealed: Sealed) -> None:
    """Report the tokens whose bytes still hold what was put there."""
    state, layout = launch.state, launch.state.layout
    space = layout.spaces[g]
    runs = poison_runs(layout, g, layout.groups[space].parts[part])
    if not runs:
        return
    scratch = state.scratch_poison[g]
    if mode == "full" and fill_runs(layout, space):
        filled = poison(state.keys, 0, space)
        left = torch.zeros_like(sealed.slot, dtype=torch.bool)
        for source, run in runs:
            left |= _left(source, run, filled, sealed.slot)
        scratch[sealed.token] |= left * int(PoisonBit.FOUND)
    bits = scratch[sealed.token]
    placed = (bits & PoisonBit.PLACED) != 0
    span, pattern = _spot(runs, poison(state.keys, launch.forward, g))
    missing = placed & (span.at(sealed.slot) == pattern).all(1)
    missing |= (bits & PoisonBit.FOUND) != 0
    launch.verified(g, Check.WRITTEN, int((placed & ~missing).sum()))
    fields = {
        V.ROW: sealed.row,
        V.SLOT: sealed.slot,
        V.PAGE: divide(sealed.slot, layout.groups[g].page_size),
        V.PART: torch.full_like(sealed.slot, part),
        V.POSITION_EXPECTED: positions_of(sealed.links[:, 0]),
        V.CODE_EXPECTED: codes_of(sealed.links[:, 0]),
    }
    report(launch, Kind.WRITE_MISSING, g, fields, missing)


def _spot(runs: list[tuple[KVSource, Run]], found: Poison) -> tuple[Span, torch.Tensor]:
    """The bytes that a forward chose, and their poison."""
    source, run = runs[found.choice % len(runs)]
    size = min(run.num_bytes, POISON_BYTES)
    span = _span(source, run.offset + found.start(run.num_bytes), size)
    return span, _pattern(found, size, source.tensor.device)


def _left(source: KVSource, run: Run, found: Poison, slots: torch.Tensor) -> torch.Tensor:
    """Which slots hold poison in any sixteen bytes of a run; the last sixteen may overlap those before."""
    size = min(run.num_bytes, POISON_BYTES)
    same = _span(source, run.offset, run.num_bytes).at(slots) == _pattern(found, run.num_bytes, slots.device)
    starts = sorted({*range(0, run.num_bytes - size + 1, POISON_BYTES), run.num_bytes - size})
    return torch.stack([same[:, start : start + size].all(1) for start in starts]).any(0)


def _span(source: KVSource, offset: int, size: int) -> Span:
    start = source.tensor.storage_offset() * source.tensor.element_size() + offset
    buffer = torch.empty(0, dtype=torch.uint8, device=source.tensor.device)
    shape, strides = (source.num_pages, source.page_size, size), (source.page_stride, source.token_stride, 1)
    buffer.set_(source.tensor.untyped_storage(), start, shape, strides)
    return Span(buffer, source.page_size)


def _pattern(found: Poison, size: int, device: torch.device) -> torch.Tensor:
    """The pattern over and over, ``[size]``."""
    repeated = found.pattern * -(-size // POISON_BYTES)
    return torch.tensor(list(repeated[:size]), dtype=torch.uint8, device=device)
