"""Things that go wrong in the cases of ``kvcanary selftest``, done alike on both sides."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from kvcanary.cli.benches.traffic import Forward
from kvcanary.cli.selftest_cases import ROWS, Case
from kvcanary.record import FLAG_SHIFT, FORWARD_BITS
from kvcanary.state import RowWord

Fault = Callable[[Case, Forward], Forward]


def _old_slots(case: Case, forward: Forward) -> list[tuple[int, int]]:
    """(group, slot) of old positions that some row reads."""
    return [
        (group, slot)
        for row in forward.rows
        for group in range(len(case.shapes))
        for position in range(max(0, row.context - 15), row.context)
        if (slot := case.traffic.slot(group, row.request, position)) >= 0
    ]


def _link(word: int, bit: int) -> Fault:
    def change(case: Case, forward: Forward) -> Forward:
        if slots := _old_slots(case, forward):
            group, slot = case.rng.choice(slots)
            for side in case.sides:
                side.state.groups[group].links[slot, word] ^= 1 << bit
        return forward

    return change


def _byte(case: Case, forward: Forward) -> Forward:
    if slots := _old_slots(case, forward):
        case.flip_byte(*case.rng.choice(slots))
    return forward


def _not_a_number(case: Case, forward: Forward) -> Forward:
    case.spoiled = case.rng.randint(1, 3)
    return forward


def _lost_writes(case: Case, forward: Forward) -> Forward:
    """The model leaves out some writes; only poison tells."""
    case.dropped = case.rng.randint(1, 3)
    return forward


def _dirty_null_page(case: Case, forward: Forward) -> Forward:
    for group, shape in enumerate(case.shapes):
        if shape.reserved == "null":
            case.spoil(group, case.rng.randrange(shape.how.page_size))
    return forward


def _table(case: Case, forward: Forward) -> Forward:
    """Another entry where only old positions are looked up."""
    group = case.rng.randrange(len(case.shapes))
    how, item = case.shapes[group].how, forward.batch.groups[group]
    table = None if item is None else item.table
    if table is None or how.flat or how.ring is not None:
        return forward
    batch_rows = forward.batch.request_rows.tolist()
    for row in forward.rows:
        entries = row.context // how.page_size if how.unit == "page" else row.context
        if entries > 1 and row.request.row in batch_rows:
            wild = case.rng.choice((-1, -7, 2_000_000_000, 1, 3))
            table.entries[batch_rows.index(row.request.row), case.rng.randrange(entries)] = wild
            break
    return forward


def _field(name: str, change: Callable[[Case, torch.Tensor], None]) -> Fault:
    def apply(case: Case, forward: Forward) -> Forward:
        tensor: torch.Tensor | None = getattr(forward.batch, name)
        if tensor is not None and tensor.numel():
            change(case, tensor)
        return forward

    return apply


def _set_one(*values: int) -> Callable[[Case, torch.Tensor], None]:
    def change(case: Case, tensor: torch.Tensor) -> None:
        tensor[case.rng.randrange(tensor.numel())] = case.rng.choice(values)

    return change


def _change_context(case: Case, tensor: torch.Tensor) -> None:
    row = case.rng.randrange(tensor.numel())
    if int(tensor[row]) > 6:
        tensor[row] += case.rng.choice((1, -1, -5))


def _swap_rows(case: Case, forward: Forward) -> Forward:
    """Two requests trade their rows. Padding stays where it is: a row that came twice would be committed twice."""
    rows, live = forward.batch.request_rows, [row.request.row for row in forward.rows]
    if len(live) > 1:
        places = [rows.tolist().index(row) for row in case.rng.sample(live, 2)]
        rows[places] = rows[places[::-1]]
    return forward


def _swap_mapping(case: Case, forward: Forward) -> Forward:
    item = forward.batch.groups[0]
    mapping = None if item is None else item.slot_mapping
    if mapping is not None and mapping.numel() > 1 and case.shapes[0].how.ring is None:
        one, two = case.rng.sample(range(mapping.numel()), 2)
        mapping[[one, two]] = mapping[[two, one]]
    return forward


def _unlinked(case: Case, forward: Forward) -> Forward:
    del case
    return replace(forward, batch=replace(forward.batch, linked=False))


def _rows(word: RowWord, value: int) -> Fault:
    def change(case: Case, forward: Forward) -> Forward:
        row = case.rng.randrange(ROWS)
        for side in case.sides:
            side.state.rows[row, word] = value
        return forward

    return change


def _owner(case: Case, forward: Forward) -> Forward:
    group = case.rng.randrange(len(case.shapes))
    bit = case.rng.choice((FORWARD_BITS, FLAG_SHIFT))
    for side in case.sides:
        owner = side.state.groups[group].owner
        owner[(owner >> FLAG_SHIFT) == 1] += 1 << bit
    return forward


FAULTS: dict[str, Fault] = {
    "token of a record": _link(0, 3),
    "position of a record": _link(0, 33),
    "digest of a record": _link(1, 11),
    "byte": _byte,
    "bytes that are no numbers": _not_a_number,
    "lost writes": _lost_writes,
    "null page": _dirty_null_page,
    "table entry": _table,
    "input id": _field("input_ids", _set_one(5, -1, 1 << 30)),
    "position": _field("positions", _set_one(3, 77, -1)),
    "last id": _field("last_ids", _set_one(3, 9)),
    "rows swapped": _swap_rows,
    "context": _field("context_lens", _change_context),
    "mapping swapped": _swap_mapping,
    "unlinked": _unlinked,
    "history forgotten": _rows(RowWord.HIGH, -1),
    "seed dropped": _rows(RowWord.SEED, 0),
    "owners changed": _owner,
}


def disturb(case: Case, forward: Forward) -> Forward:
    """Break one thing: the batch, the records, the owners, the rows or the bytes. Returns the broken forward."""
    name = case.rng.choice(sorted(FAULTS))
    case.broken.append(name)
    return FAULTS[name](case, forward)
