"""Builds the tables and slot mappings of a step, in every form that a batch allows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from kvcanary.batch import GroupBatch, PageTable

if TYPE_CHECKING:
    from tests.kernels.cases import Request, World


def build_groups(
    world: World, rows: Sequence[tuple[Request, int, int] | None], starts: Sequence[int], tokens: int
) -> tuple[tuple[GroupBatch, ...], list[list[int]]]:
    """One item a group, and per group the slots that will be written."""
    items, writes = [], []
    for g in range(len(world.specs)):
        written = _written(world, g, rows)
        mapping = _mapping(world, g, rows, starts, tokens) if world.specs[g].mapping else None
        items.append(GroupBatch(slot_mapping=mapping, table=_table(world, g, rows), translation=_translation(world, g)))
        writes.append(written)
    return tuple(items), writes


def engine_page(world: World, g: int, page: int) -> int:
    """The page number that the engine uses for a page of the group (before translation)."""
    order = world.permutations[g]
    return page if order is None else order[page]


def engine_index(world: World, g: int, slot: int) -> int:
    """The engine's index of a slot."""
    spec = world.specs[g]
    return engine_page(world, g, slot // spec.page_size) * spec.index_stride + slot % spec.page_size


def _written(world: World, g: int, rows: Sequence[tuple[Request, int, int] | None]) -> list[int]:
    spec, slots = world.specs[g], []
    for request, context, new in filter(None, rows):
        first = max(context, context + new - spec.ring) if spec.ring else context
        slots += [world.slot(request, g, p) for p in range(first, context + new)]
    return slots


def _mapping(
    world: World, g: int, rows: Sequence[tuple[Request, int, int] | None], starts: Sequence[int], tokens: int
) -> torch.Tensor:
    # Padding goes to the trash page where there is one, else nowhere.
    filler = engine_index(world, g, 0) if world.specs[g].trash else -1
    values = [filler] * tokens
    for b, row in enumerate(rows):
        if row is not None:
            request, context, new = row
            for j in range(new):
                values[starts[b] + j] = engine_index(world, g, world.slot(request, g, context + j))
    return world.tensor(values, torch.int32 if world.specs[g].int32 else torch.int64)


def _table(world: World, g: int, rows: Sequence[tuple[Request, int, int] | None]) -> PageTable | None:
    spec = world.specs[g]
    if spec.unit is None:
        return None
    firsts = [_first(world, g, row) for row in rows]
    lists = [_entries(world, g, row, first) for row, first in zip(rows, firsts, strict=True)]
    dtype = torch.int32 if spec.int32 else torch.int64
    fields: dict[str, torch.Tensor] = {}
    if spec.offset:
        fields["first_position"] = world.tensor(firsts, dtype)
    if spec.flat:
        offsets = [0]
        for entries in lists:
            offsets.append(offsets[-1] + len(entries))
        flat = [e for entries in lists for e in entries]
        return PageTable(
            entries=world.tensor([*flat, 999_999], dtype),
            unit=spec.unit,
            row_offsets=world.tensor(offsets, dtype),
            covers_new=spec.covers_new,
            **fields,
        )
    order = list(range(len(rows)))
    if spec.row_index:
        world.rng.shuffle(order)
        fields["row_index"] = world.tensor(order, dtype)
    width = max((len(entries) for entries in lists), default=0) + world.pick((0, 2))
    grid = torch.full((len(rows), width + 1), 999_999, dtype=dtype)
    for b, entries in enumerate(lists):
        grid[order[b], : len(entries)] = torch.tensor(entries, dtype=dtype)
    # A slice of a wider table, so that rows are not contiguous.
    view = grid.to(world.device)[:, :width]
    return PageTable(entries=view, unit=spec.unit, covers_new=spec.covers_new, **fields)


def _first(world: World, g: int, row: tuple[Request, int, int] | None) -> int:
    spec = world.specs[g]
    if row is None or not spec.offset:
        return 0
    first = max(0, row[1] - (spec.window or 0) + 1)
    return first if spec.unit == "slot" else first // spec.page_size * spec.page_size + first % spec.page_size


def _entries(world: World, g: int, row: tuple[Request, int, int] | None, first: int) -> list[int]:
    if row is None:
        return []
    spec = world.specs[g]
    request, context, new = row
    end = min(context + new, spec.ring) if spec.ring else context + new
    first = 0 if spec.ring else first
    if spec.unit == "page":
        pages = request.pages[g][first // spec.page_size : -(-end // spec.page_size)]
        return [_gone(world, g, "page") if p is None else engine_page(world, g, p) * spec.entry_stride for p in pages]
    slots = [world.slot(request, g, p) for p in range(first, end)]
    return [_gone(world, g, "slot") if s < 0 else engine_index(world, g, s) for s in slots]


def _gone(world: World, g: int, unit: str) -> int:
    """How a table names a page that left the window: the null page where there is one."""
    spec = world.specs[g]
    if not spec.null:
        return -1
    page = engine_page(world, g, 1)
    return page * spec.entry_stride if unit == "page" else page * spec.index_stride


def _translation(world: World, g: int) -> torch.Tensor | None:
    order = world.permutations[g]
    if order is None:
        return None
    spec = world.specs[g]
    values = [-1] * (spec.pages * spec.index_stride)
    for page, name in enumerate(order):
        for offset in range(spec.page_size):
            values[name * spec.index_stride + offset] = page * spec.index_stride + offset
    return world.tensor(values, torch.int32 if spec.int32 else torch.int64)
