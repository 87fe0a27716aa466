"""What the Triton kernels keep beside a state: tables that describe it, and sums."""

from __future__ import annotations

from typing import NamedTuple

import torch

from kvcanary.batch import ForwardBatch
from kvcanary.errors import ConfigError
from kvcanary.kernels.batch_descriptors import ITEM_ROW, item_row
from kvcanary.kernels.descriptors import (
    BUNDLE,
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
    powers_of_two,
    state_row,
)
from kvcanary.kernels.triton_bytes import COPIED_CURSORS
from kvcanary.kernels.triton_capture import Written, is_capturing
from kvcanary.kernels.triton_launch import Kernel
from kvcanary.kernels.triton_rowsets import RowSets, describe_kernel
from kvcanary.kernels.triton_sources import are_alike, block_words, chunk_rows
from kvcanary.kernels.triton_spots import PoisonTables
from kvcanary.kernels.triton_staging import Staging
from kvcanary.kernels.triton_tuning import Tuning
from kvcanary.state import QUEUE_PER_LAUNCH, DeviceState

SEAL_BYTES = 16
COPY_WORDS = COPIED_CURSORS + MAX_GROUPS


_NO_ITEM = (0,) * ITEM_ROW


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
        describe = Kernel(describe_kernel, 1)
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
        self._zeroed = Written[tuple[int, int]](device)

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
            self._zeroed.forget((space, part))
        if self._zeroed.is_due((space, part)):
            sums.zero_()
        return sums
