"""Things that go wrong, for tests that compare kernels. Each changes a step, the records of all states, or bytes."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from kvcanary.state import DeviceState, RowWord
from tests.kernels.pools import flip_bit, run_addresses, storage_bytes

if TYPE_CHECKING:
    from tests.kernels.cases import Step, World

Fault = Callable[["World", "Step", Sequence[DeviceState], random.Random], None]


def _live_slots(world: World, step: Step) -> list[tuple[int, int]]:
    """(group, slot) of old positions that some row of the step reads."""
    found = []
    for request, context, _ in step.scheduled:
        for g in range(len(world.specs)):
            found += [
                (g, slot) for p in range(max(0, context - 15), context) if (slot := world.slot(request, g, p)) >= 0
            ]
    return found


def _change_link(word: int) -> Fault:
    def change(world: World, step: Step, states: Sequence[DeviceState], rng: random.Random) -> None:
        if slots := _live_slots(world, step):
            g, slot = rng.choice(slots)
            bit = 1 << rng.randrange(20) if word else (1 << 33 if rng.random() < 0.5 else 1)
            for state in states:
                state.groups[g].links[slot, word] ^= bit

    return change


def _wipe_link(world: World, step: Step, states: Sequence[DeviceState], rng: random.Random) -> None:
    if slots := _live_slots(world, step):
        g, slot = rng.choice(slots)
        for state in states:
            state.groups[g].links[slot] = 0


def _flip_byte(world: World, step: Step, states: Sequence[DeviceState], rng: random.Random) -> None:
    if slots := _live_slots(world, step):
        g, slot = rng.choice(slots)
        source = rng.choice(world.layout.groups[world.layout.spaces[g]].sources)
        flip_bit(source, slot, rng.randrange(source.token_bytes), rng.randrange(8))


def _swap_entries(world: World, step: Step, states: Sequence[DeviceState], rng: random.Random) -> None:
    entries = _entries(step, rng)
    if entries is not None and entries.numel() > 1:
        flat = [tuple(int(x) for x in place) for place in torch.ones_like(entries).nonzero()]
        one, two = rng.sample(flat, 2)
        kept = entries[one].clone()
        entries[one] = entries[two]
        entries[two] = kept


def _wild_entry(world: World, step: Step, states: Sequence[DeviceState], rng: random.Random) -> None:
    entries = _entries(step, rng)
    if entries is not None and entries.numel():
        place = rng.choice([tuple(int(x) for x in place) for place in torch.ones_like(entries).nonzero()])
        entries[place] = rng.choice((-1, -7, 2_000_000_000, 0, 1, 5))


def _entries(step: Step, rng: random.Random) -> torch.Tensor | None:
    tables = [item.table for item in step.batch.groups if item is not None and item.table is not None]
    return rng.choice(tables).entries if tables else None


def _wild_mapping(world: World, step: Step, states: Sequence[DeviceState], rng: random.Random) -> None:
    mappings = [item.slot_mapping for item in step.batch.groups if item is not None and item.slot_mapping is not None]
    if mappings and mappings[0].numel():
        mapping = rng.choice(mappings)
        mapping[rng.randrange(mapping.numel())] = rng.choice((-1, -9, 2_000_000_000, 0, 1, 2, 3, 40))


def _shift_mapping(world: World, step: Step, states: Sequence[DeviceState], rng: random.Random) -> None:
    mappings = [item.slot_mapping for item in step.batch.groups if item is not None and item.slot_mapping is not None]
    if mappings and mappings[0].numel():
        mapping = rng.choice(mappings)
        mapping.copy_(mapping.roll(1))


def _same_slot(world: World, step: Step, states: Sequence[DeviceState], rng: random.Random) -> None:
    mappings = [item.slot_mapping for item in step.batch.groups if item is not None and item.slot_mapping is not None]
    if mappings and mappings[0].numel() > 1:
        mapping = rng.choice(mappings)
        one, two = rng.sample(range(mapping.numel()), 2)
        mapping[one] = mapping[two]


def _spoil_new(world: World, step: Step, states: Sequence[DeviceState], rng: random.Random) -> None:
    """The model writes NaN."""
    written = [(g, slot) for g, slots in enumerate(step.writes) for slot in slots]
    if written:
        g, slot = rng.choice(written)
        source = rng.choice(world.layout.groups[world.layout.spaces[g]].sources)
        step.spoil += [(source, *run) for run in run_addresses(source, slot)]


def _drop_write(world: World, step: Step, states: Sequence[DeviceState], rng: random.Random) -> None:
    """The model writes one token less; only poison tells."""
    written = [(g, slot) for g, slots in enumerate(step.writes) for slot in slots]
    if written:
        g, slot = rng.choice(written)
        step.writes[g].remove(slot)


def _dirty_null(world: World, step: Step, states: Sequence[DeviceState], rng: random.Random) -> None:
    for g in sorted(set(world.layout.spaces)):
        if world.layout.groups[g].null_pages:
            source = rng.choice(world.layout.groups[g].sources)
            step.spoil += [(source, *run) for run in run_addresses(source, world.specs[g].page_size)]


def _wrong_token(world: World, step: Step, states: Sequence[DeviceState], rng: random.Random) -> None:
    if step.batch.num_tokens:
        step.batch.input_ids[rng.randrange(step.batch.num_tokens)] = rng.choice((5, -1, 1 << 30))


def _wrong_position(world: World, step: Step, states: Sequence[DeviceState], rng: random.Random) -> None:
    if step.batch.positions is not None and step.batch.num_tokens:
        step.batch.positions[rng.randrange(step.batch.num_tokens)] += 1


def _wrong_context(world: World, step: Step, states: Sequence[DeviceState], rng: random.Random) -> None:
    b = rng.randrange(step.batch.num_rows) if step.batch.num_rows else 0
    if step.batch.num_rows and int(step.batch.context_lens[b]) > 6:
        step.batch.context_lens[b] += rng.choice((1, -1, -5))


def _wrong_last_id(world: World, step: Step, states: Sequence[DeviceState], rng: random.Random) -> None:
    if step.batch.last_ids is not None and step.batch.num_rows:
        step.batch.last_ids[rng.randrange(step.batch.num_rows)] = 3


def _swap_rows(world: World, step: Step, states: Sequence[DeviceState], rng: random.Random) -> None:
    if step.batch.num_rows > 1:
        step.batch.request_rows.copy_(step.batch.request_rows.roll(1))


def _forget_history(world: World, step: Step, states: Sequence[DeviceState], rng: random.Random) -> None:
    if step.scheduled:
        row = rng.choice(step.scheduled)[0].row
        for state in states:
            state.rows[row, RowWord.HIGH] = -1


def _drop_seed(world: World, step: Step, states: Sequence[DeviceState], rng: random.Random) -> None:
    if step.scheduled:
        row = rng.choice(step.scheduled)[0].row
        for state in states:
            state.rows[row, RowWord.SEED] = 0
            state.rows[row, RowWord.HIGH] = -1


def _free_owner(world: World, step: Step, states: Sequence[DeviceState], rng: random.Random) -> None:
    g = rng.randrange(len(world.specs))
    for state in states:
        owner = state.groups[g].owner
        held = owner >> 56 == 1
        owner[held] += rng.choice((1 << 56, 1 << 32)) if rng.random() < 0.5 else -(1 << 56)


def _poison(world: World, step: Step, states: Sequence[DeviceState], rng: random.Random) -> None:
    """All ones is NaN in every floating type."""
    if slots := _live_slots(world, step):
        g, slot = rng.choice(slots)
        source = rng.choice(world.layout.groups[world.layout.spaces[g]].sources)
        address, size = rng.choice(run_addresses(source, slot))
        storage_bytes(source)[address : address + size] = 0xFF


def _unlink(world: World, step: Step, states: Sequence[DeviceState], rng: random.Random) -> None:
    step.batch = replace(step.batch, linked=False)


FAULTS: dict[str, Fault] = {
    "code or position of a record": _change_link(0),
    "digest of a record": _change_link(1),
    "record wiped": _wipe_link,
    "byte flipped": _flip_byte,
    "table entries swapped": _swap_entries,
    "wild table entry": _wild_entry,
    "wild mapping": _wild_mapping,
    "mapping shifted": _shift_mapping,
    "one slot for two tokens": _same_slot,
    "NaN written": _spoil_new,
    "write dropped": _drop_write,
    "null page written": _dirty_null,
    "wrong token": _wrong_token,
    "wrong position": _wrong_position,
    "wrong context": _wrong_context,
    "wrong last id": _wrong_last_id,
    "rows swapped": _swap_rows,
    "history forgotten": _forget_history,
    "seed dropped": _drop_seed,
    "owner changed": _free_owner,
    "poisoned bytes": _poison,
    "unlinked": _unlink,
}
