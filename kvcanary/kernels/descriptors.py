"""Descriptors: states, layouts and facts as rows of int64 words that kernels read.

What never changes (state, groups, sources) is written once, when a workspace is made. What a forward brings:
:mod:`kvcanary.kernels.batch_descriptors`.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import TYPE_CHECKING, TypeVar

from kvcanary.errors import ConfigError
from kvcanary.layout import AttentionGroup

if TYPE_CHECKING:
    from kvcanary.state import DeviceState

ROW = 32
"""Words of a state or group row."""
CHUNK_ROW = 8
BUNDLE = 4
"""Chunks that a program loads together; all of a bundle are read the same way."""
REGION_ROW = 32
FACT_ROW = 16
MAX_REGIONS = 8
"""Regions of one launch."""
MAX_GROUPS = 63
MAX_INDEX = (1 << 31) - 1

_Words = TypeVar("_Words", bound=IntEnum)


class StateWord(IntEnum):
    """Words of a state's row: what kernels need of it only when they have something to say."""

    VIOLATIONS = 0
    ACKED = 1
    RING_CAPACITY = 2
    RING_QUOTA = 3
    GROUPS = 4
    HEADERS = 5
    SNAPSHOTS = 6
    HEADER_WORDS = 7
    OUTBOX = 8
    SUSPECTS = 9
    MAX_TOKENS = 10
    HEAD_ENTRIES = 11
    PARTS = 12
    """address of the directory of parts, see :class:`PartWord`"""
    MAX_PARTS = 13
    SCRATCH_SLOTS = 14
    SCRATCH_POISON = 15
    GPU_TIME_EVERY = 16


class GroupWord(IntEnum):
    """Words of a group's row."""

    LINKS = 0
    SEALS = 1
    OWNER = 2
    NUM_SLOTS = 3
    NUM_PAGES = 4
    PAGE_SIZE = 5
    PAGE_SHIFT = 6
    INDEX_STRIDE = 7
    INDEX_SHIFT = 8
    ENTRY_STRIDE = 9
    ENTRY_SHIFT = 10
    PAGE_LIMIT = 11
    """pages above this have no 32-bit index"""
    RING = 12
    WINDOW = 13
    FOLLOWS = 14
    """1: the offset in the page follows the position"""
    PARTS = 15
    RESERVED = 16
    """two ranges (first page, end) that hold the trash and null pages; all other pages are ordinary"""
    NULL_IS_ZERO = 20
    SPACE = 21
    ARENA = 22
    ARENA_PAGES = 23
    """pages of this group in one arena page"""
    ARENA_GROUPS = 24
    """bit set of the groups with a space of their own that share the arena"""
    HAS_TRASH = 25


class ChunkWord(IntEnum):
    """Words of a chunk: contiguous bytes of one token, no more than a kernel's block."""

    BASE = 0
    PAGE_STRIDE = 1
    TOKEN_STRIDE = 2
    NUM_BYTES = 3
    KEY = 4
    """the 32-bit state of the key generator at the chunk's first word"""
    EXPONENT = 5
    """``mask | top << 32``: exponent bits of all values in a 32-bit word, and the top bit of each value"""
    ACCESS = 6
    """bytes that a lane may load at once: 16, 4 or 1"""


class PartWord(IntEnum):
    """Words of a part's row in the directory ``[groups, parts]``."""

    CHUNKS = 0
    BUNDLES = 1
    PAGE_STRIDE = 2
    TOKEN_STRIDE = 3


PART_ROW = 4


class RegionWord(IntEnum):
    """Words of a region: items (a slot in one part each) that the byte kernels work through together."""

    KIND = 0
    GROUP = 1
    SPACE = 2
    PART = 3
    ITEMS = 4
    """how many; of tokens and suspects the device knows better"""
    FIRST_PROGRAM = 5
    PROGRAMS = 6
    SPLITS = 7
    """programs that share an item"""
    CHUNKS = 8
    BUNDLES = 9
    SLOTS = 10
    """address of a list of slots"""
    SUMS = 11
    """address of one sum an item, zero between launches"""
    FLAGS = 12
    """address of one word an item: not zero when a value was not finite"""
    WRITERS = 13
    """address of one word an item: its writer word before this launch sealed anything"""
    # What the group's and the part's rows say too, beside the rest so that one load leads to the bytes, not three.
    SEALS = 14
    """address of the part's seals"""
    NUM_SLOTS = 15
    PAGE_SIZE = 16
    PAGE_SHIFT = 17
    RESERVED = 18
    """as :attr:`GroupWord.RESERVED`"""
    RESERVED_END = 19
    RESERVED_2 = 20
    RESERVED_2_END = 21
    PAGE_STRIDE = 22
    """of all chunks, where they are alike"""
    TOKEN_STRIDE = 23
    EXPONENT = 24
    LINKS = 25
    OWNER = 26
    RING = 27
    NULL_IS_ZERO = 28


class RegionKind(IntEnum):
    """Where the slots of a region come from."""

    TOKENS = 0
    SUSPECTS = 1
    SCRUB = 2
    LIST = 3


class FactWord(IntEnum):
    """Words of a fact."""

    OP = 0
    GROUP = 1
    SPACE = 2
    ROW = 3
    TAG = 4
    POSITION = 5
    DIGEST = 6
    SEED = 7
    ARMED = 8
    COUNT = 9
    """pages"""
    PAGES = 10
    TARGETS = 11
    PAGES_KIND = 12
    TARGETS_KIND = 13
    RECORDS = 14
    """address of a table of records, or of the sums of a restamp"""
    JUDGED = 15


def shift_of(value: int) -> int:
    """The shift that divides by ``value``; 0 when it is no power of two."""
    return value.bit_length() - 1 if value & (value - 1) == 0 else 0


def powers_of_two(groups: Sequence[AttentionGroup]) -> bool:
    """Whether kernels may shift where they would divide."""
    values = [v for g in groups for v in (g.page_size, g.index_stride or g.page_size, g.page_entry_stride)]
    return all(v & (v - 1) == 0 for v in values)


def is_plain(group: AttentionGroup) -> bool:
    """Whether a group's indices are slots and its entries pages, without detours."""
    return (
        group.ring is None
        and group.page_entry_stride == 1
        and group.index_stride in (None, group.page_size)
        and group.page_size & (group.page_size - 1) == 0
    )


def state_row(state: DeviceState) -> list[int]:
    """The row of :class:`StateWord`; the directory of parts is filled in by its owner."""
    limits = state.limits
    words = {
        StateWord.VIOLATIONS: state.violations.data_ptr(),
        StateWord.ACKED: state.acked.data_ptr(),
        StateWord.RING_CAPACITY: limits.ring_capacity,
        StateWord.RING_QUOTA: limits.ring_quota,
        StateWord.GROUPS: len(state.layout.groups),
        StateWord.HEADERS: state.headers.data_ptr(),
        StateWord.SNAPSHOTS: limits.snapshots,
        StateWord.HEADER_WORDS: state.header_words,
        StateWord.OUTBOX: state.outbox.data_ptr(),
        StateWord.SUSPECTS: state.suspects.data_ptr(),
        StateWord.MAX_TOKENS: limits.max_tokens,
        StateWord.HEAD_ENTRIES: limits.head_entries,
        StateWord.SCRATCH_SLOTS: state.scratch_slots.data_ptr(),
        StateWord.SCRATCH_POISON: state.scratch_poison.data_ptr(),
        StateWord.GPU_TIME_EVERY: limits.gpu_time_every,
    }
    return fill_row(words, ROW)


def group_row(state: DeviceState, index: int) -> list[int]:
    """The row of :class:`GroupWord` of one group.

    Raises:
        ConfigError: the group's indices do not fit 32 bits.
    """
    layout = state.layout
    group, records = layout.groups[index], state.groups[index]
    stride = group.index_stride or group.page_size
    if group.num_pages * stride > MAX_INDEX:
        raise ConfigError(
            f"group {group.name!r}: indices reach {group.num_pages * stride} ({group.num_pages} pages, stride "
            f"{stride}), the triton backend takes at most {MAX_INDEX}; use backend='reference' or split the pool"
        )
    own = layout.groups[layout.spaces[index]]
    arena = group.arena
    words = {
        GroupWord.LINKS: records.links.data_ptr(),
        GroupWord.SEALS: records.seals.data_ptr(),
        GroupWord.OWNER: records.owner.data_ptr(),
        GroupWord.NUM_SLOTS: group.num_slots,
        GroupWord.NUM_PAGES: group.num_pages,
        GroupWord.PAGE_SIZE: group.page_size,
        GroupWord.PAGE_SHIFT: shift_of(group.page_size),
        GroupWord.INDEX_STRIDE: stride,
        GroupWord.INDEX_SHIFT: shift_of(stride),
        GroupWord.ENTRY_STRIDE: group.page_entry_stride,
        GroupWord.ENTRY_SHIFT: shift_of(group.page_entry_stride),
        GroupWord.PAGE_LIMIT: (MAX_INDEX - stride) // stride,
        GroupWord.RING: group.ring or 0,
        GroupWord.WINDOW: group.window or 0,
        GroupWord.FOLLOWS: int(group.offset_follows_position and group.page_size > 1),
        GroupWord.PARTS: records.seals.shape[0],
        GroupWord.NULL_IS_ZERO: int(own.null_is_zero),
        GroupWord.SPACE: layout.spaces[index],
        GroupWord.ARENA: 0 if arena is None else state.arenas[arena.name].data_ptr(),
        GroupWord.ARENA_PAGES: 1 if arena is None else arena.pages_per_arena_page,
        GroupWord.ARENA_GROUPS: 0 if arena is None else _arena_groups(state, arena.name),
        GroupWord.HAS_TRASH: int(bool(group.trash_pages)),
    }
    row = fill_row(words, ROW)
    row[GroupWord.RESERVED : GroupWord.RESERVED + 4] = _reserved_ranges((*own.trash_pages, *own.null_pages))
    return row


def _reserved_ranges(pages: Sequence[int]) -> list[int]:
    """Two ranges that hold all of ``pages``, apart at their widest gap."""
    if not pages:
        return [0, 0, 0, 0]
    ordered = sorted(pages)
    gaps = [second - first for first, second in itertools.pairwise(ordered)] or [0]
    cut = gaps.index(max(gaps)) + 1
    rest = ordered[cut:]
    return [ordered[0], ordered[cut - 1] + 1, rest[0] if rest else 0, rest[-1] + 1 if rest else 0]


def _arena_groups(state: DeviceState, name: str) -> int:
    layout = state.layout
    groups = enumerate(layout.groups)
    return sum(1 << i for i, g in groups if layout.spaces[i] == i and g.arena is not None and g.arena.name == name)


def fill_row(words: Mapping[_Words, int], length: int) -> list[int]:
    """``words`` at their places in a row of zeros."""
    row = [0] * length
    for word, value in words.items():
        row[word] = value
    return row
