"""Device state: everything that the kernels read and write beside the engine's own bytes.

All of it is allocated once, at attach. Word layouts are fixed here and nowhere else; the kernels, the
snapshot and the decoder import these numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Literal

import torch

from kvcanary.layout import AttentionGroup, PoolLayout
from kvcanary.record import NUM_KINDS, OWNER_FREED, Keys, owner_word

OWNER_TRASH = OWNER_FREED + 1
OWNER_NULL = OWNER_FREED + 2
"""State bytes of reserved pages in the owner table; :meth:`DeviceState.reset` writes them."""

HISTORY = 64
"""Positions of a row whose digests the device remembers (a power of two)."""


PoisonMode = Literal["off", "sample", "full"]
"""``sample``: a few bytes of each new slot, chosen anew for each forward; ``full``: also whole slots, at allotment."""


class Role(IntEnum):
    """What a launch does. Each role counts its launches on the device."""

    FACTS = 0
    MARK = 1
    CHECK = 2
    SEAL = 3
    SCRUB = 4
    WINDOW = 5


class Check(IntEnum):
    """What was verified, counted per group."""

    LINKS = 0
    """old positions read and compared"""
    ROW_ENDS = 1
    """row ends compared with the expected digest"""
    WRITES = 2
    """new tokens marked whose target was checked"""
    SEALED = 3
    """new tokens whose bytes were sealed"""
    CONTENT = 4
    """slots whose bytes were re-read by the scrub"""
    WRITTEN = 5
    """new tokens that took poison, which the model overwrote"""


class Reason(IntEnum):
    """Why something was not verified, counted per group."""

    UNKNOWN_RECORD = 0
    """the slot was written before the canary was armed"""
    UNARMED_ROW = 1
    """no expected digest for the row (no base yet, or outside its history)"""
    UNLINKED = 2
    """draft trees, or a token whose prefix is unknown"""
    NO_TABLE = 3
    """a row has old tokens but the forward names no table"""
    OVER_CAPACITY = 4
    """more entries than ``head_entries_per_forward``"""
    UNKNOWN_OWNER = 5
    """a write into a page whose owner nobody told us"""
    UNSEALED = 6
    """a slot without a seal came up in the scrub queue"""
    OUT_OF_WINDOW = 7
    """old positions before ``required_from``: expected, and no gap in coverage"""


class Word(IntEnum):
    """Counters that belong to no group; index into ``counters`` and into a header."""

    SEQUENCE = 0
    """header only: written last; equals FORWARD of the same header, or the header is torn"""
    FORWARD = 1
    """in ``counters``: number of the forward in progress, from 1; in a header: of the one that ended"""
    ARMED = 2
    STORED = 3
    """violation rows given out so far (some may not fit the ring)"""
    NEW_TOKENS = 4
    DIGEST_SUM = 5
    """sum of all mixes of all tokens sealed; equal over tensor-parallel ranks"""
    OUTBOX = 6
    """audit rows given out so far"""
    SUSPECTS = 7
    """slots in the scrub's queue, written so far"""
    SUSPECTS_DONE = 8
    SWA_FORWARD = 9
    """forward in which the window counters were taken"""
    SWA_DIVERGENCE = 10
    SWA_OUT_OF_WINDOW = 11
    ABANDONED = 12
    """forwards that raised before their exit"""
    SWA_FULL = 13
    SWA_WINDOW = 14
    """running totals of entries verified in full and window groups when the window counters were taken"""
    SCRATCH_TOKENS = 15
    """tokens (padding included) of the forward in the scratch"""
    LAUNCHES = 16
    """first of 8 launch counters, indexed by Role"""
    SCRATCH_ROWS = 24
    """rows (padding included) of the forward in the scratch"""
    CLOCK_BEGAN = 25
    """when the entry of the forward in progress began, on the GPU's clock in ns; 0: it is not timed"""
    CLOCK_ENTERED = 26
    CLOCK_LEAVING = 27
    GPU_NS = 28
    """device time of the canary's own launches in the forward GPU_FORWARD"""
    GPU_FORWARD = 29
    """the last forward that was timed; 0: none"""


GLOBAL_WORDS = int(Word.GPU_FORWARD) + 1
VERIFIED = 0
UNVERIFIED = VERIFIED + len(Check)
SCRUB_CURSOR = UNVERIFIED + len(Reason)
SCRUB_PASSES = SCRUB_CURSOR + 1
SCRUB_PASS_FORWARD = SCRUB_PASSES + 1
"""forward in which the running scrub pass of this group's space began"""
REPEATS = SCRUB_PASS_FORWARD + 1
"""violations that were found again after they had been reported"""
KIND_COUNTS = REPEATS + 1
"""first of NUM_KINDS counts of violations reported (or dropped for want of quota), exact"""
GROUP_WORDS = KIND_COUNTS + NUM_KINDS
"""Words of one group: verified, unverified, scrub, then a count per kind of violation."""


def group_base(group: int) -> int:
    """Index of a group's first word in ``counters`` and headers."""
    return GLOBAL_WORDS + group * GROUP_WORDS


class RowWord(IntEnum):
    """Columns of the row table."""

    TAG = 0
    """0: the row is free"""
    SEED = 1
    LOW = 2
    """first position whose digest the history holds"""
    HIGH = 3
    """the row's length: digests of LOW..HIGH are held; -1: none yet"""
    FLAGS = 4
    REPORTED = 5
    """bit ``kind`` is set once a row kind was reported"""
    ANCHOR_POSITION = 6
    """where an unarmed row took its digest from the slots, for comparison when its base arrives; -1: nowhere"""
    ANCHOR_DIGEST = 7


ROW_WORDS = len(RowWord)
"""a power of two: kernels clear a row with one lane a column"""


class RowFlag(IntEnum):
    """Bits of ``RowWord.FLAGS``."""

    ARMED = 1
    """the history goes back to a digest that the host vouched for"""
    TAINTED = 2
    """a row kind was reported; what follows says so"""


class BatchWord(IntEnum):
    """Columns of ``scratch_batch``: what the exit needs to know of each batch row."""

    ROW = 0
    """row of the row table, -1: padding"""
    FIRST_TOKEN = 1
    NEW = 2
    """new tokens"""
    CONTEXT = 3
    DIGEST = 4
    """digest before the first new token, 0: unknown"""
    SOURCE = 5
    """a :class:`DigestSource`"""


class PoisonBit(IntEnum):
    """Bits of ``scratch_poison``."""

    PLACED = 1
    """the mark put the forward's poison into the slot"""
    FOUND = 2
    """the exit found bytes that still hold what they were filled with at allotment"""


class DigestSource(IntEnum):
    """Where a row's digest at its old length comes from."""

    UNKNOWN = 0
    HISTORY = 1
    SLOTS = 2
    """outside the history: taken from the record of the last old position"""
    SEED = 3
    """the row starts at position 0"""


BATCH_WORDS = len(BatchWord)


class ViolationWord(IntEnum):
    """Columns of a row in the violation ring."""

    SEQUENCE = 0
    """its number from 1, written last"""
    KIND = 1
    ROLE = 2
    GROUP = 3
    SLOT = 4
    PAGE = 5
    ROW = 6
    TAG = 7
    POSITION_EXPECTED = 8
    POSITION_FOUND = 9
    CODE_EXPECTED = 10
    CODE_FOUND = 11
    DIGEST_EXPECTED = 12
    DIGEST_FOUND = 13
    FINGERPRINT_EXPECTED = 14
    FINGERPRINT_FOUND = 15
    WRITER = 16
    OWNER = 17
    FORWARD = 18
    PART = 19
    TAINTED = 20


VIOLATION_WORDS = 24
"""columns, filled up to whole lines of 64 bytes, so that no line of the host's memory holds parts of two rows"""
NOTHING = -1
"""In a violation row: this field does not apply (digests and fingerprints: 0)."""


class OutboxWord(IntEnum):
    """Columns of an audit row: the digest of a request that ended."""

    SEQUENCE = 0
    """its number from 1, written last"""
    TAG = 1
    LENGTH = 2
    """as it was asked for"""
    HELD = 3
    """1: the history held the digest there"""
    DIGEST = 4
    FORWARD = 5


OUTBOX_ROWS = 256
OUTBOX_WORDS = len(OutboxWord)

SUSPECT_ROWS = 4096
"""Ring of (space, slot, part) whose bytes the scrub looks at first."""
SPACE_SHIFT = 48
PART_SHIFT = 56
"""An entry is ``slot | space << SPACE_SHIFT | part << PART_SHIFT``."""
QUEUE_PER_LAUNCH = 1024
"""Entries that one scrub takes."""

MIN_ENTRIES_PER_ROW = 64
"""Old positions of a row that a check reads, however many rows share ``Limits.head_entries``."""


@dataclass(slots=True, eq=False)
class GroupState:
    """Records of one slot space. Groups that share a space share the very tensors.

    Attributes:
        links: int64 ``[num_slots, 2]``.
        seals: int64 ``[parts, num_slots, 2]``.
        owner: int64 ``[num_pages]``.
    """

    links: torch.Tensor
    seals: torch.Tensor
    owner: torch.Tensor


@dataclass(frozen=True, slots=True)
class Limits:
    """Capacities fixed at attach."""

    max_tokens: int
    max_batch_rows: int
    max_rows: int
    ring_capacity: int = 1024
    ring_quota: int = 64
    snapshots: int = 64
    head_entries: int = 4 << 20
    poison: PoisonMode = "off"
    gpu_time_every: int = 0
    """forwards between samples of the canary's own device time; 0: never"""


class DeviceState:
    """All device tensors of one canary. ``pinned`` ones lie in page-locked host memory on CUDA.

    Attributes:
        layout, keys, limits: what they were made for.
        groups: one :class:`GroupState` a group.
        arenas: per arena name, int64 ``[arena pages]``: group + 1 that holds the bytes, 0 unknown.
        counters: int64; see :class:`Word` and :func:`group_base`.
        rows: int64 ``[max_rows, ROW_WORDS]``; history: int64 ``[max_rows, HISTORY]``, the digest before position p
            at ``p % HISTORY``.
        scratch_slots: int64 ``[groups, max_tokens]``: where each new token goes, -1 nowhere.
        scratch_links: int64 ``[max_tokens, 2]``: the link each new token should have.
        scratch_rows: int64 ``[max_tokens]``: row of each token, -1 padding.
        scratch_poison: int64 ``[groups, max_tokens]``: :class:`PoisonBit` of each written token of groups that take
            poison.
        scratch_batch: int64 ``[max_batch_rows, BATCH_WORDS]``.
        suspects: int64 ``[SUSPECT_ROWS]``: ``slot | space << SPACE_SHIFT | part << PART_SHIFT``.
        headers: pinned int64 ``[snapshots, header words]``; violations: pinned int64 ``[ring_capacity,
            VIOLATION_WORDS]``; outbox: pinned int64 ``[OUTBOX_ROWS, OUTBOX_WORDS]``.
        acked: pinned int64 ``[groups * NUM_KINDS + 1]``: how many of each kind and group the host has seen; the last
            entry counts rows taken from the ring.
    """

    def __init__(self, layout: PoolLayout, keys: Keys, limits: Limits) -> None:
        self.layout = layout
        self.keys = keys
        self.limits = limits
        self.device = device = layout.device
        self.groups = _group_states(layout, device)
        self.arenas = _arena_tables(layout, device)
        self.header_words = group_base(len(layout.groups))
        self.counters = torch.zeros(self.header_words, dtype=torch.int64, device=device)
        self.rows = torch.zeros(limits.max_rows, ROW_WORDS, dtype=torch.int64, device=device)
        self.history = torch.zeros(limits.max_rows, HISTORY, dtype=torch.int64, device=device)
        count = len(layout.groups)
        self.scratch_slots = torch.full((count, limits.max_tokens), -1, dtype=torch.int64, device=device)
        self.scratch_links = torch.zeros(limits.max_tokens, 2, dtype=torch.int64, device=device)
        self.scratch_rows = torch.full((limits.max_tokens,), -1, dtype=torch.int64, device=device)
        self.scratch_poison = torch.zeros(count, limits.max_tokens, dtype=torch.int64, device=device)
        self.scratch_batch = torch.zeros(limits.max_batch_rows, BATCH_WORDS, dtype=torch.int64, device=device)
        self.suspects = torch.zeros(SUSPECT_ROWS, dtype=torch.int64, device=device)
        pin = device.type == "cuda"
        self.headers = torch.zeros(limits.snapshots, self.header_words, dtype=torch.int64, pin_memory=pin)
        self.violations = torch.zeros(limits.ring_capacity, VIOLATION_WORDS, dtype=torch.int64, pin_memory=pin)
        self.outbox = torch.zeros(OUTBOX_ROWS, OUTBOX_WORDS, dtype=torch.int64, pin_memory=pin)
        self.acked = torch.zeros(count * NUM_KINDS + 1, dtype=torch.int64, pin_memory=pin)
        self.counters[Word.FORWARD] = 1
        self.reset()

    def reset(self) -> None:
        """Forget every record, owner and row; counters and rings go on. Runs on the current stream."""
        for index, (group, records) in enumerate(zip(self.layout.groups, self.groups, strict=True)):
            if self.layout.spaces[index] != index:
                continue
            for tensor in (records.links, records.seals, records.owner):
                tensor.zero_()
            for pages, state in ((group.trash_pages, OWNER_TRASH), (group.null_pages, OWNER_NULL)):
                if pages:
                    records.owner[list(pages)] = owner_word(0, 0, state)
        for table in self.arenas.values():
            table.zero_()
        self.rows.zero_()
        self.rows[:, RowWord.HIGH] = -1
        self.rows[:, RowWord.ANCHOR_POSITION] = -1
        self.history.zero_()
        self.scratch_slots.fill_(-1)
        self.scratch_rows.fill_(-1)
        self.counters[Word.SUSPECTS_DONE] = self.counters[Word.SUSPECTS]


def _group_states(layout: PoolLayout, device: torch.device) -> tuple[GroupState, ...]:
    states: list[GroupState] = []
    for index, group in enumerate(layout.groups):
        space = layout.spaces[index]
        states.append(states[space] if space != index else _new_group_state(group, device))
    return tuple(states)


def _new_group_state(group: AttentionGroup, device: torch.device) -> GroupState:
    return GroupState(
        links=torch.zeros(group.num_slots, 2, dtype=torch.int64, device=device),
        seals=torch.zeros(len(group.parts), group.num_slots, 2, dtype=torch.int64, device=device),
        owner=torch.zeros(group.num_pages, dtype=torch.int64, device=device),
    )


def _arena_tables(layout: PoolLayout, device: torch.device) -> dict[str, torch.Tensor]:
    sizes: dict[str, int] = {}
    for group in layout.groups:
        if group.arena is not None:
            pages = -(-group.num_pages // group.arena.pages_per_arena_page)
            sizes[group.arena.name] = max(sizes.get(group.arena.name, 0), pages)
    return {name: torch.zeros(size, dtype=torch.int64, device=device) for name, size in sizes.items()}
