"""Scrub: read sealed bytes again, first the slots in the queue, then the next ones of every slot space in turn.

A mismatch counts only when a later launch sees it again: writers that no stream orders may be half-way through.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from kvcanary.kernels.ref_bytes import PartReader
from kvcanary.kernels.ref_report import Launch, link_found, report
from kvcanary.kernels.ref_words import divide, flag_bits, sealed, states_of
from kvcanary.record import Kind, SealFlag
from kvcanary.state import (
    OWNER_NULL,
    PART_SHIFT,
    QUEUE_PER_LAUNCH,
    SCRUB_CURSOR,
    SCRUB_PASS_FORWARD,
    SCRUB_PASSES,
    SPACE_SHIFT,
    SUSPECT_ROWS,
    Check,
    Reason,
    Word,
    group_base,
)
from kvcanary.state import ViolationWord as V

_SLOT_MASK = (1 << SPACE_SHIFT) - 1
_SUSPECT = flag_bits(SealFlag.SUSPECT)
_SKIPPED = _SUSPECT | flag_bits(SealFlag.CONTENT)

Readers = Callable[[int, int], PartReader]
"""The reader of (space, part number)."""


def scrub(launch: Launch, budget: int, readers: Readers) -> None:
    """Read the queue, then about ``budget`` bytes: of each slot space a share by its size, and at least one slot."""
    layout = launch.state.layout
    spaces = sorted(set(layout.spaces))
    sizes = {g: layout.groups[g].num_slots * layout.groups[g].token_bytes for g in spaces}
    total = sum(sizes.values())
    counts = {
        g: min(max(budget * sizes[g] // total // layout.groups[g].token_bytes, 1), layout.groups[g].num_slots)
        for g in spaces
    }
    # Before the queue is worked through, since a slot may be in both, and both may be looked at at once.
    walks = {g: _walk(launch, g, counts[g]) for g in spaces}
    _scrub_queue(launch, spaces, readers)
    for g, (slots, writers) in walks.items():
        _scrub_space(launch, g, slots, writers, readers)


def _walk(launch: Launch, g: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The next slots of a space, and their writer words ``[parts, slots]``."""
    state = launch.state
    cursor = launch[group_base(g) + SCRUB_CURSOR]
    places = torch.arange(cursor, cursor + count, device=state.counters.device)
    slots = places % state.layout.groups[g].num_slots
    return slots, state.groups[g].seals[:, slots, 1]


def enqueue(launch: Launch, space: int, part: int, slots: torch.Tensor) -> None:
    """Put slots of one part at the end of the queue. What overtakes the ring is lost to the queue, not to the scrub."""
    queue = launch.state.suspects
    start = launch[Word.SUSPECTS]
    launch[Word.SUSPECTS] += slots.numel()
    first = max(0, slots.numel() - SUSPECT_ROWS)
    places = torch.arange(start + first, start + slots.numel(), device=queue.device) % SUSPECT_ROWS
    queue[places] = slots[first:] | (space << SPACE_SHIFT) | (part << PART_SHIFT)


def _scrub_queue(launch: Launch, spaces: list[int], readers: Readers) -> None:
    state, end = launch.state, launch[Word.SUSPECTS]
    start = max(launch[Word.SUSPECTS_DONE], end - SUSPECT_ROWS)
    stop = min(end, start + QUEUE_PER_LAUNCH)
    launch[Word.SUSPECTS_DONE] = stop
    if start == stop:
        return
    words = state.suspects[torch.arange(start, stop, device=state.suspects.device) % SUSPECT_ROWS]
    for space in spaces:
        for part in range(state.groups[space].seals.shape[0]):
            wanted = (words >> SPACE_SHIFT) == (space | part << (PART_SHIFT - SPACE_SHIFT))
            slots = words[wanted] & _SLOT_MASK
            if slots.numel():
                _look_again(launch, space, part, slots, readers(space, part))


def _look_again(launch: Launch, space: int, part: int, slots: torch.Tensor, reader: PartReader) -> None:
    seals = launch.state.groups[space].seals[part]
    known = sealed(seals[slots, 1])
    launch.unverified(space, Reason.UNSEALED, int((~known).sum()))
    slots = slots[known]
    if not slots.numel():
        return
    launch.verified(space, Check.CONTENT, slots.numel())
    found, words = reader.fingerprints(slots), seals[slots]
    wrong = found != words[:, 0]
    twice = wrong & ((words[:, 1] & _SUSPECT) != 0)
    seals[slots, 1] = torch.where(wrong, words[:, 1] | _SUSPECT, words[:, 1] & ~_SUSPECT)
    once = slots[wrong & ~twice].unique()
    if once.numel():
        enqueue(launch, space, part, once)
    fields = {
        V.SLOT: slots,
        V.PAGE: divide(slots, launch.state.layout.groups[space].page_size),
        V.PART: torch.full_like(slots, part),
        V.FINGERPRINT_EXPECTED: words[:, 0],
        V.FINGERPRINT_FOUND: found,
        **link_found(launch.state.groups[space].links[slots]),
    }
    report(launch, Kind.CONTENT, space, fields, twice, flag_part=part)


def _scrub_space(launch: Launch, g: int, slots: torch.Tensor, writers: torch.Tensor, readers: Readers) -> None:
    group, base, count = launch.state.layout.groups[g], group_base(g), slots.numel()
    cursor = launch[base + SCRUB_CURSOR]
    for part, words in enumerate(writers):
        _scrub_part(launch, g, part, slots, words, readers)
    if cursor + count >= group.num_slots:
        launch[base + SCRUB_PASSES] += 1
        launch[base + SCRUB_PASS_FORWARD] = launch.forward
    launch[base + SCRUB_CURSOR] = (cursor + count) % group.num_slots


def _scrub_part(launch: Launch, g: int, part: int, slots: torch.Tensor, words: torch.Tensor, readers: Readers) -> None:
    records = launch.state.groups[g]
    seals = records.seals[part]
    due = slots[sealed(words).logical_and_((words & _SKIPPED) == 0)]
    if due.numel():
        launch.verified(g, Check.CONTENT, due.numel())
        wrong = due[readers(g, part).fingerprints(due) != seals[due, 0]]
        wrong = wrong[(seals[wrong, 1] & _SUSPECT) == 0]  # else the queue's look has just put it there
        if wrong.numel():
            seals[wrong, 1] |= _SUSPECT
            enqueue(launch, g, part, wrong)
    group = launch.state.layout.groups[g]
    if not group.null_pages:
        return
    page = divide(slots, group.page_size)
    null = slots[states_of(records.owner[page]) == OWNER_NULL]
    if null.numel():
        dirty = readers(g, part).dirty(null, zero=group.null_is_zero)
        if dirty is not None:
            fields = {V.SLOT: null, V.PAGE: divide(null, group.page_size), V.PART: torch.full_like(null, part)}
            report(launch, Kind.NULL_DIRTY, g, fields, dirty, flag_part=part)
