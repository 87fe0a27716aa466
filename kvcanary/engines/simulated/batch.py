"""One forward: its rows, and the tensors that the model gets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from kvcanary.engines.simulated.requests import Request
from kvcanary.engines.simulated.style import Style

LATER = -1
"""Stands for a token that an earlier forward will sample."""


@dataclass(slots=True, eq=False)
class Row:
    """One request's part of a forward.

    Attributes:
        request: whose.
        context: tokens before it.
        ids: new ones, :data:`LATER` where nobody knows them yet.
        drafts: so many of them, at the end, are guesses.
        samples: the token that follows is sampled.
        first: number of its first token in the batch.
        result: accepted guesses and what was sampled; the device's answer.
    """

    request: Request
    context: int
    ids: list[int]
    drafts: int = 0
    samples: bool = False
    first: int = 0
    result: list[int] = field(default_factory=list[int])

    @property
    def end(self) -> int:
        """Tokens after it."""
        return self.context + len(self.ids)


@dataclass(slots=True, eq=False)
class Batch:
    """Tensors lie on the device; they are what a watcher should look at.

    Attributes:
        forward: its number, from 1.
        rows: without padding.
        padding: dead rows of one token each, at the end.
        input_ids, positions: ``[T]``.
        starts: ``[B + 1]``, first token of each row.
        context: ``[B]``.
        tables: per group ``[B, max]``, pages or slots; beyond a row's end they hold what was there before.
        mapping: per group ``[T]``, the slot of each new token.
        wanted: per group and row, the slots that the scheduler means.
        values: ``[T]``, what keys and values of each token come to; the device's own.
    """

    forward: int
    rows: list[Row]
    padding: int
    input_ids: torch.Tensor
    positions: torch.Tensor
    starts: torch.Tensor
    context: torch.Tensor
    tables: dict[str, torch.Tensor] = field(default_factory=dict[str, torch.Tensor])
    mapping: dict[str, torch.Tensor] = field(default_factory=dict[str, torch.Tensor])
    wanted: dict[str, list[list[int]]] = field(default_factory=dict[str, list[list[int]]])
    values: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))


def build(forward: int, rows: Sequence[Row], style: Style, device: torch.device, junk: Sequence[int]) -> Batch:
    """The tensors of a forward. ``junk`` fills tables beyond a row's end, and stands for what was left there."""
    ids: list[int] = []
    positions: list[int] = []
    starts, context = [0], []
    for row in rows:
        row.first = len(ids)
        ids += row.ids
        positions += range(row.context, row.end)
        starts.append(len(ids))
        context.append(row.context)
    for _ in range(style.padding):
        ids.append(0)
        positions.append(0)
        starts.append(len(ids))
        context.append(0)
    batch = Batch(
        forward=forward,
        rows=list(rows),
        padding=style.padding,
        input_ids=torch.tensor(ids, device=device),
        positions=torch.tensor(positions, device=device),
        starts=torch.tensor(starts, dtype=torch.int32, device=device),
        context=torch.tensor(context, dtype=torch.int32, device=device),
    )
    for group in style.groups:
        ring = style.ring if group == "window" else None
        wanted = batch.wanted[group] = [_slots(row, group, style.page_size, ring) for row in rows]
        if group == "full" or style.sliding != "translated":
            # Padding writes into the reserved page, unless attention may fetch that: then nowhere.
            nowhere = -1 if group == "window" and style.sliding == "null" else 0
            flat = [slot for slots in wanted for slot in slots] + [nowhere] * style.padding
            batch.mapping[group] = torch.tensor(flat, dtype=torch.int32, device=device)
            lines = [_line(row, group, style) for row in rows] + [[]] * style.padding
            width = max(1, *map(len, lines))
            full = [[*line, *junk[len(line) : width]] for line in lines]
            batch.tables[group] = torch.tensor(full, dtype=torch.int32, device=device)
    return batch


def _slots(row: Row, group: str, size: int, ring: int | None) -> list[int]:
    pages, end = row.request.pages[group], row.end
    if ring is None:
        return [pages[p // size] * size + p % size for p in range(row.context, end)]
    # Of more tokens than the ring has places, the newest are kept.
    places = [p % ring for p in range(row.context, end)]
    kept = [pages[place // size] * size + place % size for place in places]
    return [slot if end - p <= ring else -1 for p, slot in enumerate(kept, row.context)]


def _line(row: Row, group: str, style: Style) -> list[int]:
    pages = row.request.pages[group]
    if not style.slot_tables:
        return pages
    size = style.page_size
    return [page * size + place for page in pages for place in range(size)][: row.end]
