"""One launch: what it counts and what it reports.

Which columns a kind fills, beside KIND, ROLE, GROUP, FORWARD and, where a row or a slot is named, TAG and TAINTED
of the row, PAGE, OWNER and WRITER of the slot:

========================================  =====================================================================
INPUT_POSITION                            row, positions (row's length or ``context + j`` expected, given one found)
INPUT_TOKEN, INPUT_PLACEHOLDER            row, position expected, codes (expected: the scheduler's)
SLOT_RANGE                                row, the index as SLOT (no page), position expected
WINDOW                                    row, lowest missing position expected
TABLE_MISMATCH                            row, slot written, position expected, slot that the table names as found
WRITE_FREED, WRITE_FOREIGN                row, slot, the new record as expected, the old one as found
WRITE_CONFLICT                            row, slot, the record of this token as expected, the other one as found
POSITION, UNWRITTEN                       row, slot, position expected, the record as found
DIGEST                                    the same, and the digest that the record before implies
REQUEST_DIGEST                            the same for the last old position; digests are those *after* it
NONFINITE                                 row, slot, part, the token's position
WRITE_MISSING                             row, slot, part, code and position of the token that was to be written
CONTENT                                   slot, part, both fingerprints, the record's code, position and digest
NULL_DIRTY                                slot, part
DOUBLE_FREE, DOUBLE_ALLOC                 the page's first slot
========================================  =====================================================================

Input kinds belong to no group; they are counted under the first group that takes part in the forward.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from kvcanary.kernels.ref_words import codes_of, flag_bits, positions_of
from kvcanary.record import NUM_KINDS, Kind, SealFlag, signed
from kvcanary.state import (
    KIND_COUNTS,
    NOTHING,
    REPEATS,
    UNVERIFIED,
    VERIFIED,
    VIOLATION_WORDS,
    Check,
    DeviceState,
    Reason,
    Role,
    RowFlag,
    RowWord,
    ViolationWord,
    Word,
    group_base,
)

SLOT_FLAGS: dict[Kind, SealFlag] = {
    Kind.POSITION: SealFlag.POSITION,
    Kind.DIGEST: SealFlag.DIGEST,
    Kind.UNWRITTEN: SealFlag.UNWRITTEN,
    Kind.CONTENT: SealFlag.CONTENT,
    Kind.NONFINITE: SealFlag.NONFINITE,
    Kind.WRITE_MISSING: SealFlag.WRITE_MISSING,
    Kind.NULL_DIRTY: SealFlag.CONTENT,
}
"""Kinds that are reported once a slot; all others but those of :data:`EACH` are reported once a row."""

EACH = frozenset({Kind.DOUBLE_FREE, Kind.DOUBLE_ALLOC})
"""Kinds that are reported every time: a page that is freed three times was freed wrongly twice."""

TAINTING = frozenset({Kind.REQUEST_DIGEST, Kind.INPUT_TOKEN, Kind.INPUT_POSITION})

_NOTHING_COLUMNS = [
    ViolationWord.SLOT,
    ViolationWord.PAGE,
    ViolationWord.ROW,
    ViolationWord.POSITION_EXPECTED,
    ViolationWord.POSITION_FOUND,
    ViolationWord.CODE_EXPECTED,
    ViolationWord.CODE_FOUND,
    ViolationWord.PART,
]

Fields = Mapping[ViolationWord, torch.Tensor]


class Launch:
    """Counts are collected on the host and added to the device's in one go by :meth:`finish`.

    Attributes:
        state: what the launch works on.
        role: named in violations; None: no launch, and nothing to report.
        forward: number of the forward in progress.
        armed: whether records may be touched.
    """

    __slots__ = ("_adds", "_words", "armed", "forward", "role", "state")

    def __init__(self, state: DeviceState, role: Role | None) -> None:
        self.state = state
        self.role = role
        self._words: list[int] = state.counters.tolist()
        self._adds = [0] * len(self._words)
        self.forward = self._words[Word.FORWARD]
        self.armed = self._words[Word.ARMED] != 0
        if role is not None:
            self.launched(role)

    def launched(self, role: Role) -> None:
        """Count a launch of ``role``."""
        self._adds[Word.LAUNCHES + role] += 1

    def __getitem__(self, index: int) -> int:
        """The counter as it will be."""
        return self._words[index] + self._adds[index]

    def __setitem__(self, index: int, value: int) -> None:
        self._adds[index] = signed(value - self._words[index])

    def verified(self, group: int, check: Check, count: int) -> None:
        """Count what was verified."""
        self._adds[group_base(group) + VERIFIED + check] += count

    def unverified(self, group: int, reason: Reason, count: int) -> None:
        """Count what was not, and why."""
        self._adds[group_base(group) + UNVERIFIED + reason] += count

    def values(self) -> list[int]:
        """All counters as they will be."""
        return [signed(word + more) for word, more in zip(self._words, self._adds, strict=True)]

    def finish(self) -> None:
        """Add everything that was counted."""
        counters = self.state.counters
        counters.add_(torch.tensor(self._adds, dtype=torch.int64, device=counters.device))
        self._words = self.values()
        self._adds = [0] * len(self._words)


def report(launch: Launch, kind: Kind, group: int, fields: Fields, wrong: torch.Tensor, *, flag_part: int = 0) -> None:
    """Report findings of one kind, in order; the first fresh one of each row (or slot) wins.

    Tensors in ``fields`` are int64 ``[n]``; ``wrong``, bool ``[n]``, picks the findings among them; nothing happens
    when there are none. ``flag_part`` is the seal whose flag says that a slot was reported.
    """
    only = wrong.nonzero().squeeze(1)
    if not only.numel():
        return
    if kind in EACH:
        _publish(launch, kind, group, fields, only, flag_part)
        return
    flag = SLOT_FLAGS.get(kind)
    keys = fields[ViolationWord.ROW if flag is None else ViolationWord.SLOT][only]
    distinct, first = first_of_each(keys)
    if flag is None:
        marks = launch.state.rows.select(1, RowWord.REPORTED)
        bit = 1 << kind
    else:
        marks = launch.state.groups[group].seals[flag_part].select(1, 1)
        bit = flag_bits(flag)
    words = marks[distinct]
    fresh = only[first[(words & bit) == 0].sort().values]
    launch[group_base(group) + REPEATS] += only.numel() - fresh.numel()
    # Before the flags are set, so that WRITER shows the word as it was found.
    _publish(launch, kind, group, fields, fresh, flag_part)
    marks[distinct] = words | bit
    if kind in TAINTING:
        launch.state.rows[distinct, RowWord.FLAGS] |= RowFlag.TAINTED


def link_expected(links: torch.Tensor) -> dict[ViolationWord, torch.Tensor]:
    """Columns that say what record ``links`` ``[n, 2]`` was expected."""
    return {
        ViolationWord.POSITION_EXPECTED: positions_of(links[:, 0]),
        ViolationWord.CODE_EXPECTED: codes_of(links[:, 0]),
        ViolationWord.DIGEST_EXPECTED: links[:, 1],
    }


def link_found(links: torch.Tensor) -> dict[ViolationWord, torch.Tensor]:
    """Columns that say what record was found; unknown ones claim nothing."""
    unknown = (links[:, 0] | links[:, 1]) == 0
    return {
        ViolationWord.POSITION_FOUND: torch.where(unknown, NOTHING, positions_of(links[:, 0])),
        ViolationWord.CODE_FOUND: torch.where(unknown, NOTHING, codes_of(links[:, 0])),
        ViolationWord.DIGEST_FOUND: links[:, 1],
    }


def _publish(launch: Launch, kind: Kind, group: int, fields: Fields, fresh: torch.Tensor, flag_part: int) -> None:
    """Count findings and store as many of them as the quota lets through."""
    counter = group_base(group) + KIND_COUNTS + kind
    room = launch.state.limits.ring_quota - (launch[counter] - int(launch.state.acked[group * NUM_KINDS + kind]))
    launch[counter] += fresh.numel()
    if fresh.numel() and room > 0:
        _store(launch, kind, group, fields, fresh[:room], flag_part)


def first_of_each(keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Distinct keys, and the place of the first occurrence of each."""
    distinct, inverse = torch.unique(keys, return_inverse=True)
    places = torch.arange(keys.numel(), device=keys.device)
    first = torch.full_like(distinct, keys.numel()).scatter_reduce_(0, inverse, places, "amin")
    return distinct, first


def _store(launch: Launch, kind: Kind, group: int, fields: Fields, fresh: torch.Tensor, flag_part: int) -> None:
    state = launch.state
    table = torch.zeros(fresh.numel(), VIOLATION_WORDS, dtype=torch.int64, device=fresh.device)
    table[:, _NOTHING_COLUMNS] = NOTHING
    for column, values in fields.items():
        table[:, column] = values[fresh]
    constants = {
        ViolationWord.KIND: kind,
        ViolationWord.ROLE: NOTHING if launch.role is None else launch.role,
        ViolationWord.GROUP: group,
        ViolationWord.FORWARD: launch.forward,
    }
    for column, value in constants.items():
        table[:, column] = value
    if ViolationWord.ROW in fields:
        rows = state.rows[table[:, ViolationWord.ROW]]
        table[:, ViolationWord.TAG] = rows[:, RowWord.TAG]
        table[:, ViolationWord.TAINTED] = (rows[:, RowWord.FLAGS] & RowFlag.TAINTED) != 0
    if ViolationWord.PAGE in fields:
        records = state.groups[group]
        table[:, ViolationWord.OWNER] = records.owner[table[:, ViolationWord.PAGE]]
        table[:, ViolationWord.WRITER] = records.seals[flag_part, table[:, ViolationWord.SLOT], 1]
    _append(launch, table)


def _append(launch: Launch, table: torch.Tensor) -> None:
    ring, acked = launch.state.violations, int(launch.state.acked[-1])
    start = launch[Word.STORED]
    launch[Word.STORED] += table.shape[0]
    room = ring.shape[0] - (start - acked)
    if room <= 0:
        return
    table = table[:room].to(ring.device)
    sequence = torch.arange(start, start + table.shape[0])
    places = sequence % ring.shape[0]
    # The sequence word last: a reader on another thread must not take half a row for a whole one.
    ring[places, 1:] = table[:, 1:]
    ring[places, 0] = sequence + 1
