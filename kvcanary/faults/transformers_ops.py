"""The faults, one function each: choose a victim in a prepared forward and break something of it.

Each takes the batch, a random generator and the name of a group (None: any) and returns what it hit, or None when
this forward has no fitting victim, in which case nothing was changed.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass

import torch

from kvcanary.faults.transformers_batch import Batch, GroupView, Row
from kvcanary.layout import KVSource


@dataclass(frozen=True, slots=True)
class Hit:
    """What a fault did: the requests it hits, and where."""

    requests: tuple[str, ...] = ()
    group: str = ""
    slot: int = -1
    detail: str = ""


Operation = Callable[[Batch, random.Random, "str | None"], "Hit | None"]


def flip_bit(batch: Batch, rng: random.Random, group: str | None) -> Hit | None:
    """Flip one bit of one layer's V of an old token that only one request holds."""
    victims = [(view, row) for view, rows in batch.decoding(group) for row in rows if _private(view, row)]
    if not victims:
        return None
    view, row = rng.choice(victims)
    slot = view.slot(_last(view, row))
    values = [source for source in _sources(batch, view) if source.component == "v"] or _sources(batch, view)
    source = rng.choice(values)
    data = _token_bytes(source, slot)
    bit = rng.randrange(8 * data.numel())
    byte = data[bit // 8 : bit // 8 + 1]
    byte.bitwise_xor_(1 << bit % 8)
    return Hit((row.request,), view.layout.name, slot, f"bit {bit} of {source.name} flipped in slot {slot}")


def swap_pages(batch: Batch, rng: random.Random, group: str | None) -> Hit | None:
    """Swap one page between the tables of two rows."""
    victims = [
        (view, one, other, page)
        for view, rows in batch.decoding(group)
        for one, other in itertools.combinations(rows, 2)
        for page in range(min(view.full_pages(one), view.full_pages(other)))
        # Rows without prefix sharing hold copies of a common prefix; swapping those would change nothing.
        if view.context(one, page + 1) != view.context(other, page + 1)
    ]
    if not victims:
        return None
    view, one, other, page = rng.choice(victims)
    first, second = view.page_entries(one, page), view.page_entries(other, page)
    if first is None or second is None:
        return None
    kept = first.clone()
    first.copy_(second)
    second.copy_(kept)
    detail = f"page {page} swapped between the tables of {one.request} and {other.request}"
    return Hit((one.request, other.request), view.layout.name, -1, detail)


def shift_table(batch: Batch, rng: random.Random, group: str | None) -> Hit | None:
    """Let a row read its table from the second entry on."""
    victims = [(v, row) for v, rows in batch.decoding(group) for row in rows if _length(v, row) > 1]
    if not victims:
        return None
    view, row = rng.choice(victims)
    entries = view.entries(row)
    if entries is None:
        return None
    entries[:-1] = entries[1:].clone()
    return Hit((row.request,), view.layout.name, -1, f"the table of {row.request} is read one entry late")


def foreign_table(batch: Batch, rng: random.Random, group: str | None) -> Hit | None:
    """Let a row read through the table of another one that is at least as long."""
    victims = [
        (view, row, other)
        for view, rows in batch.decoding(group)
        for row, other in itertools.permutations(rows, 2)
        if _length(view, row) <= _length(view, other) and _private(view, row)
        if row.tokens[: row.old] != other.tokens[: row.old]
    ]
    if not victims:
        return None
    view, row, other = rng.choice(victims)
    mine, theirs = view.entries(row), view.entries(other)
    if mine is None or theirs is None:
        return None
    mine.copy_(theirs[: mine.numel()])
    return Hit((row.request,), view.layout.name, -1, f"{row.request} reads through the table of {other.request}")


def stale_slot(batch: Batch, rng: random.Random, group: str | None) -> Hit | None:
    """Let a row write where it wrote in the step before."""
    victims = [
        (view, row)
        for view, rows in batch.decoding(group)
        for row in rows
        if view.write_index is not None and _private(view, row)
    ]
    if not victims:
        return None
    view, row = rng.choice(victims)
    index = _last(view, row)
    _redirect(view, row, index)
    detail = f"{row.request} writes position {row.old} into the slot of position {row.old - 1}"
    return Hit((row.request,), view.layout.name, view.slot(index), detail)


def foreign_write(batch: Batch, rng: random.Random, group: str | None) -> Hit | None:
    """Let a row write into the page that another row fills at the moment, over one of its old tokens."""
    victims = [
        (view, row, other)
        for view, rows in batch.decoding(group)
        if view.write_index is not None
        for row, other in itertools.permutations(rows, 2)
        if _private(view, other) and _offset(view, row) <= _last(view, other) % view.stride
    ]
    if not victims:
        return None
    view, row, other = rng.choice(victims)
    page = _last(view, other) // view.stride
    index = page * view.stride + _offset(view, row)
    _redirect(view, row, index)
    detail = f"{row.request} writes position {row.old} into page {page} of {other.request}"
    return Hit((row.request, other.request), view.layout.name, view.slot(index), detail)


def drop_write(batch: Batch, rng: random.Random, group: str | None) -> Hit | None:
    """Send a row's new token to the trash."""
    victims = [
        (view, row)
        for view, rows in batch.decoding(group)
        if view.write_index is not None and view.layout.trash_pages and view.layout.ring is None
        for row in rows
    ]
    if not victims:
        return None
    view, row = rng.choice(victims)
    _redirect(view, row, view.layout.trash_pages[0] * view.stride)
    return Hit((row.request,), view.layout.name, -1, f"position {row.old} of {row.request} is written to the trash")


def wrong_token(batch: Batch, rng: random.Random, group: str | None) -> Hit | None:
    """Give a decoding row another token than the one it generated; a carried one loses its carry-over."""
    del group
    rows = [row for row in batch.rows if row.decodes]
    if not rows:
        return None
    row = rng.choice(rows)
    token = batch.input_ids[row.first]
    carried = batch.carry_over_ids is not None and int(batch.carry_over_ids[row.first]) != -1
    if carried and batch.carry_over_ids is not None:
        batch.carry_over_ids[row.first] = -1
        token.clamp_(min=0)
        return Hit((row.request,), "", -1, f"{row.request} receives the token of an earlier step")
    wrong = (int(token) + 1 + rng.randrange(batch.vocabulary - 1)) % batch.vocabulary
    token.fill_(wrong)
    return Hit((row.request,), "", -1, f"{row.request} receives another token than the one it generated")


def wrong_position(batch: Batch, rng: random.Random, group: str | None) -> Hit | None:
    """Shift the position of a decoding row's new token by one."""
    del group
    rows = [row for row in batch.rows if row.decodes]
    if not rows:
        return None
    row = rng.choice(rows)
    batch.position_ids[row.first] += 1
    return Hit((row.request,), "", -1, f"{row.request} is at position {row.old} but is told {row.old + 1}")


def break_record(batch: Batch, rng: random.Random, group: str | None) -> Hit | None:
    """Flip a bit of the digest that the canary keeps of a row's last old token."""
    victims = [(view, row) for view, rows in batch.decoding(group) for row in rows if _private(view, row)]
    victims = [(view, row) for view, row in victims if _length(view, row) > 1]
    if not victims:
        return None
    view, row = rng.choice(victims)
    slot = view.slot(_last(view, row))
    batch.canary.state.groups[view.number].links[slot, 1].bitwise_xor_(1 << rng.randrange(1, 63))
    return Hit((row.request,), view.layout.name, slot, f"the record of slot {slot} has another digest")


def stall_kernel(batch: Batch, rng: random.Random, group: str | None) -> Hit | None:
    """Launch the check no more."""
    del rng, group
    batch.canary.suppress("check")
    return Hit(detail="the check is launched no more")


OPERATIONS: dict[str, Operation] = {
    "flipped-bit": flip_bit,
    "swapped-pages": swap_pages,
    "shifted-table": shift_table,
    "foreign-table": foreign_table,
    "stale-slot": stale_slot,
    "foreign-write": foreign_write,
    "dropped-write": drop_write,
    "wrong-token": wrong_token,
    "wrong-position": wrong_position,
    "broken-record": break_record,
    "stalled-kernel": stall_kernel,
}


def _length(view: GroupView, row: Row) -> int:
    entries = view.entries(row)
    return 0 if entries is None else entries.numel()


def _last(view: GroupView, row: Row) -> int:
    index = view.last_index(row)
    return -1 if index is None else index


def _private(view: GroupView, row: Row) -> bool:
    """Whether the page of the row's last old token belongs to it alone: rings never share, full pages may."""
    return view.layout.ring is not None or row.old % view.layout.page_size > 0


def _offset(view: GroupView, row: Row) -> int:
    """Where in its page the row's new token belongs."""
    ring = view.layout.ring
    return (row.old if ring is None else row.old % ring) % view.layout.page_size


def _redirect(view: GroupView, row: Row, index: int) -> None:
    if view.write_index is not None:
        view.write_index[row.first] = index


def _sources(batch: Batch, view: GroupView) -> tuple[KVSource, ...]:
    return batch.canary.layout.groups[batch.canary.layout.spaces[view.number]].sources


def _token_bytes(source: KVSource, slot: int) -> torch.Tensor:
    """The bytes of a token's first run, as a view of the engine's cache."""
    page, offset = divmod(slot, source.page_size)
    run = source.runs[0]
    return source.view_bytes(run.offset, run.num_bytes)[page, offset]
