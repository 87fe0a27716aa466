"""What the Triton kernels keep beside a state: tables that describe it, sums, and the facts' way to the device."""

from __future__ import annotations

import ctypes
from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton.language as tl

from kvcanary.batch import ForwardBatch
from kvcanary.errors import ConfigError
from kvcanary.kernels.descriptors import (
    BUNDLE,
    ITEM_ROW,
    MAX_GROUPS,
    PART_ROW,
    REGION_ROW,
    ChunkWord,
    GroupWord,
    PartWord,
    RegionWord,
    StateWord,
    fill_row,
    group_row,
    item_row,
    powers_of_two,
    state_row,
)
from kvcanary.kernels.triton_bytes import COPIED_CURSORS
from kvcanary.kernels.triton_launch import Kernel, entry
from kvcanary.kernels.triton_sources import are_alike, block_words, chunk_rows
from kvcanary.kernels.triton_spots import PoisonTables
from kvcanary.kernels.triton_words import words_at
from kvcanary.state import QUEUE_PER_LAUNCH, DeviceState

SEAL_BYTES = 16
COPY_WORDS = COPIED_CURSORS + MAX_GROUPS
ROWS_AT_ONCE = 256
"""Descriptor rows allocated together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """Sizes that cost or save time and change no result.

    Attributes:
        mark_tile, check_tile, commit_tile, window_tile, facts_tile: lanes of one program; decode_tile: those of a mark
            whose rows have few tokens; sum_tile: tokens added up at a time for a prefix digest.
        programs: how many programs a mark or check aims at, and the least a long row gets of them (``row_programs``).
        check_warps: most warps of a check's program; one needs no barrier.
        small, large: (items a program, bundles a program, warps, registers) of the byte kernel; large from
            ``large_items`` items on. A thread with too few registers spills, and local memory is slow to come cold.
        mark_registers, check_registers: bounds of those kernels, see :class:`kvcanary.kernels.triton_launch.Kernel`.
        sum_programs: most programs of a byte kernel; suspect_programs: those that wait for the scrub's queue, mostly
            in vain.
    """

    mark_tile: int = 512
    decode_tile: int = 32
    mark_registers: int = 255
    sum_tile: int = 2048
    check_tile: int = 32
    check_registers: int = 96
    check_warps: int = 1
    commit_tile: int = 256
    window_tile: int = 256
    facts_tile: int = 512
    programs: int = 2112
    row_programs: int = 8
    small: tuple[int, int, int, int] = (1, 2, 1, 128)
    large: tuple[int, int, int, int] = (1, 24, 1, 128)
    large_items: int = 1536
    sum_programs: int = 1 << 20
    suspect_programs: int = 132


INTERPRETED = Tuning(
    sum_programs=8, programs=2, row_programs=1, small=(64, 16, 1, 0), large=(64, 16, 1, 0), suspect_programs=1
)
"""For Triton's interpreter, which runs one program after the other and takes its time over each."""


@entry
def _describe_kernel(  # type: ignore[no-untyped-def]
    row: tl.int64, count: tl.int64, w0: tl.int64, w1: tl.int64, w2: tl.int64, w3: tl.int64, w4: tl.int64, w5: tl.int64,
    w6: tl.int64, w7: tl.int64, w8: tl.int64, w9: tl.int64, w10: tl.int64, w11: tl.int64, w12: tl.int64, w13: tl.int64,
):  # fmt: skip
    """Write up to 14 words of a descriptor row. They travel as arguments, so a captured graph keeps them."""
    out = words_at(row)
    tl.store(out, w0, mask=count > 0)
    tl.store(out + 1, w1, mask=count > 1)
    tl.store(out + 2, w2, mask=count > 2)
    tl.store(out + 3, w3, mask=count > 3)
    tl.store(out + 4, w4, mask=count > 4)
    tl.store(out + 5, w5, mask=count > 5)
    tl.store(out + 6, w6, mask=count > 6)
    tl.store(out + 7, w7, mask=count > 7)
    tl.store(out + 8, w8, mask=count > 8)
    tl.store(out + 9, w9, mask=count > 9)
    tl.store(out + 10, w10, mask=count > 10)
    tl.store(out + 11, w11, mask=count > 11)
    tl.store(out + 12, w12, mask=count > 12)
    tl.store(out + 13, w13, mask=count > 13)


DESCRIBED = 14
"""Words of a row that one launch writes at most."""


_NO_ITEM = (0,) * ITEM_ROW


def is_capturing(device: torch.device) -> bool:
    """Whether the current stream of a device is being captured in a graph: what is launched now runs at its replays."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


class RowSets:
    """Descriptor rows on the device, remembered by what they say.

    Sets that were used while a stream was captured stay for ever, since the graph reads them at every replay; of the
    others the oldest is written anew when all are taken.
    """

    def __init__(self, rows: int, words: int, device: torch.device, describe: Kernel) -> None:
        self._rows = max(1, rows)
        self._row_words = words
        self._device = device
        self._describe = describe
        self._known: dict[tuple[object, ...], int] = {}
        self._kept: set[tuple[object, ...]] = set()
        self._recorded: set[tuple[object, ...]] = set()
        """written by graphs alone so far: until one of them is replayed they say nothing"""
        self._chunks: list[torch.Tensor] = []
        self._free: list[int] = []

    def find(self, rows: tuple[tuple[int, ...], ...], *, keep: bool) -> int:
        """The address of a set of rows."""
        address = self._known.get(rows)
        if address is None or rows in self._recorded:
            (self._recorded.add if is_capturing(self._device) else self._recorded.discard)(rows)
            address = self._take() if address is None else address
            for i, words in enumerate(rows):
                for at in range(0, len(words), DESCRIBED):
                    some = words[at : at + DESCRIBED]
                    place = address + (i * self._row_words + at) * 8
                    self._describe((1, 1, 1), place, len(some), *some, *[0] * (DESCRIBED - len(some)))
            self._known[rows] = address
        if keep:
            self._kept.add(rows)
        return address

    def _take(self) -> int:
        if not self._free and len(self._known) - len(self._kept) >= ROWS_AT_ONCE // 2:
            oldest = next(rows for rows in self._known if rows not in self._kept)
            return self._known.pop(oldest)
        if not self._free:
            words = self._rows * self._row_words
            # Not zeroed: a fill that was captured in a graph would wipe the rows at every replay.
            chunk = torch.empty(ROWS_AT_ONCE, words, dtype=torch.int64, device=self._device)
            self._chunks.append(chunk)
            self._free = [chunk.data_ptr() + i * words * 8 for i in reversed(range(ROWS_AT_ONCE))]
        return self._free.pop()


class Staging:
    """Words on their way to the device, in page-locked memory that the kernel reads by itself.

    The kernel stores the launch's generation when it has read them; until then their place is not used again. When
    the ring is full, a larger one takes over, so the engine's thread never waits.
    """

    def __init__(self, device: torch.device, words: int = 1 << 15) -> None:
        self._pin = device.type == "cuda"
        self._device = device
        self.progress = torch.zeros(1, dtype=torch.int64, pin_memory=self._pin)
        self._generation = 0
        self._old: list[torch.Tensor] = []
        self._make(words)

    def _make(self, words: int) -> None:
        self._words = words
        self._ring = torch.zeros(words, dtype=torch.int64, pin_memory=self._pin)
        self.target = torch.zeros(words, dtype=torch.int64, device=self._device)
        self._pending: deque[tuple[int, int]] = deque()
        self._next = 0

    def put(self, words: Sequence[int]) -> tuple[int, int, int]:
        """Copy ``words`` to the ring; (address there, address of the device's copy, generation)."""
        count = len(words)
        start = self._room(count)
        source = array("q", words)
        address = self._ring.data_ptr() + start * 8
        ctypes.memmove(address, source.buffer_info()[0], count * 8)
        self._generation += 1
        self._pending.append((self._generation, start))
        self._next = start + count
        return address, self.target.data_ptr(), self._generation

    def _room(self, count: int) -> int:
        done = int(self.progress[0])
        while self._pending and self._pending[0][0] <= done:
            self._pending.popleft()
        first = self._pending[0][1] if self._pending else None
        if first is None and count <= self._words:
            return 0
        if first is not None:
            if self._next > first and self._next + count <= self._words:
                return self._next
            start = self._next if self._next <= first else 0
            if start + count < first:
                return start
        self._old += [self._ring, self.target]
        self._make(2 * max(self._words, count))
        return 0


class PartTable(NamedTuple):
    """Chunks of one part: their address, how many bundles, and what the first one says of strides and exponents."""

    chunks: int
    bundles: int
    page_stride: int
    token_stride: int
    exponent: int


class Workspace:
    """Everything of one state. Made once, outside of graph capture.

    Attributes:
        meta: address of the row of :class:`~kvcanary.kernels.descriptors.StateWord`; the groups' rows follow.
        pow2: kernels may shift where they would divide.
        block: words of a chunk of bytes.
        parts: per (space, part number) its chunks; poison: what takes poison.
        alike: every part's chunks fill a block and differ only in their addresses and keys.
    """

    def __init__(self, state: DeviceState, tuning: Tuning) -> None:
        layout, device = state.layout, state.device
        if is_capturing(device):
            raise ConfigError(
                "the triton kernels meet this state for the first time while a CUDA graph is captured; run one "
                "forward, or TritonKernels.prepare(state), before the capture"
            )
        if len(layout.groups) > MAX_GROUPS:
            raise ConfigError(
                f"the layout has {len(layout.groups)} groups, the triton backend takes {MAX_GROUPS}; "
                "use backend='reference'"
            )
        self.device = device
        self.tuning = tuning
        self.pow2 = powers_of_two(layout.groups)
        self.spaces = sorted(set(layout.spaces))
        sources = [source for group in layout.groups for source in group.sources]
        self.block = block_words(sources)
        self.words, self.bytes, self.alike = False, False, True
        self.parts: dict[tuple[int, int], PartTable] = {}
        self._tensors: list[torch.Tensor] = []
        self._describe_sources(state)
        self.poison = PoisonTables(layout, state.keys, self._upload)
        self._group_rows = [group_row(state, g) for g in range(len(layout.groups))]
        rows = [state_row(state), *self._group_rows]
        self.max_parts = max(len(layout.groups[g].parts) for g in self.spaces)
        rows[0][StateWord.PARTS] = self._upload(self._directory(len(layout.groups)))
        rows[0][StateWord.MAX_PARTS] = self.max_parts
        self.meta = self._upload(rows)
        describe = Kernel(_describe_kernel, 1)
        self.items = RowSets(len(layout.groups), ITEM_ROW, device, describe)
        self.regions = RowSets(len(layout.groups) + 1 + len(self.parts), REGION_ROW, device, describe)
        self.describe = describe
        self.staging = Staging(device)
        self.tokens = 0
        """new tokens of the latest forward, as far as the host knows; sizes grids, never results"""
        self.token_sums = torch.zeros(2, len(layout.groups), state.limits.max_tokens, dtype=torch.int64, device=device)
        self.queue_sums = torch.zeros(3, QUEUE_PER_LAUNCH, dtype=torch.int64, device=device)
        self.queue_copy = torch.zeros(COPY_WORDS, dtype=torch.int64, device=device)
        self.tickets = torch.zeros(8, dtype=torch.int64, device=device)
        self.scrub_sums: dict[tuple[int, int], torch.Tensor] = {}
        self._unset: set[tuple[int, int]] = set()
        """sums that graphs alone have set to zero so far"""

    def _describe_sources(self, state: DeviceState) -> None:
        layout = state.layout
        for g in self.spaces:
            group = layout.groups[g]
            for number, part in enumerate(group.parts):
                chunks = chunk_rows(group.part_sources(part), state.keys, self.block)
                self.words |= any(row[ChunkWord.ACCESS] == 4 for row in chunks)
                self.bytes |= any(row[ChunkWord.ACCESS] == 1 for row in chunks)
                self.alike &= are_alike(chunks, self.block)
                first = chunks[0]
                self.parts[g, number] = PartTable(
                    chunks=self._upload(chunks),
                    bundles=len(chunks) // BUNDLE,
                    page_stride=first[ChunkWord.PAGE_STRIDE],
                    token_stride=first[ChunkWord.TOKEN_STRIDE],
                    exponent=first[ChunkWord.EXPONENT],
                )

    def _directory(self, groups: int) -> list[list[int]]:
        rows = [[0] * PART_ROW for _ in range(groups * self.max_parts)]
        for (space, part), table in self.parts.items():
            rows[space * self.max_parts + part] = fill_row(
                {
                    PartWord.CHUNKS: table.chunks,
                    PartWord.BUNDLES: table.bundles,
                    PartWord.PAGE_STRIDE: table.page_stride,
                    PartWord.TOKEN_STRIDE: table.token_stride,
                },
                PART_ROW,
            )
        return rows

    def part_words(self, space: int, part: int) -> dict[RegionWord, int]:
        """What a region says of the part that its items lie in."""
        table, group = self.parts[space, part], self._group_rows[space]
        low, end, second, second_end = group[GroupWord.RESERVED : GroupWord.RESERVED + 4]
        return {
            RegionWord.SPACE: space,
            RegionWord.PART: part,
            RegionWord.CHUNKS: table.chunks,
            RegionWord.BUNDLES: table.bundles,
            RegionWord.SEALS: group[GroupWord.SEALS] + part * group[GroupWord.NUM_SLOTS] * SEAL_BYTES,
            RegionWord.NUM_SLOTS: group[GroupWord.NUM_SLOTS],
            RegionWord.PAGE_SIZE: group[GroupWord.PAGE_SIZE],
            RegionWord.PAGE_SHIFT: group[GroupWord.PAGE_SHIFT],
            RegionWord.PAGE_STRIDE: table.page_stride,
            RegionWord.TOKEN_STRIDE: table.token_stride,
            RegionWord.EXPONENT: table.exponent,
            RegionWord.RESERVED: low,
            RegionWord.RESERVED_END: end,
            RegionWord.RESERVED_2: second,
            RegionWord.RESERVED_2_END: second_end,
            RegionWord.LINKS: group[GroupWord.LINKS],
            RegionWord.OWNER: group[GroupWord.OWNER],
            RegionWord.NULL_IS_ZERO: group[GroupWord.NULL_IS_ZERO],
        }

    def _upload(self, rows: list[list[int]]) -> int:
        tensor = torch.tensor(rows, dtype=torch.int64).to(self.device)
        self._tensors.append(tensor)
        return tensor.data_ptr()

    def capturing(self) -> bool:
        """Whether the current stream is being captured."""
        return is_capturing(self.device)

    def item_rows(self, batch: ForwardBatch) -> int:
        """Address of the rows that describe the groups' parts of a batch."""
        # Also of groups that take no part: kernels load addresses from a row before they look whether it counts.
        rows = tuple([_NO_ITEM if item is None else item_row(item, batch.num_rows) for item in batch.groups])
        return self.items.find(rows, keep=self.capturing())

    def scrub_sums_of(self, space: int, part: int, count: int) -> torch.Tensor:
        """Sums, flags and writers ``[3, n]`` for the scrub of ``count`` slots; larger ones replace smaller ones."""
        sums = self.scrub_sums.get((space, part))
        if sums is None or sums.shape[1] < count:
            # Graphs may still use the smaller ones.
            sums = torch.empty(3, count, dtype=torch.int64, device=self.device)
            self.scrub_sums[space, part] = sums
            self._tensors.append(sums)
            self._unset.add((space, part))
        if (space, part) in self._unset:
            sums.zero_()
            if not self.capturing():
                self._unset.discard((space, part))
        return sums
