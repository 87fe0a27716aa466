"""Which slots a seal reads: regions for the byte kernel, planned on the host from what it knows about sizes."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from kvcanary.kernels.descriptors import MAX_REGIONS, REGION_ROW, RegionKind, RegionWord, fill_row
from kvcanary.kernels.triton_capture import Written
from kvcanary.kernels.triton_workspace import Workspace
from kvcanary.state import QUEUE_PER_LAUNCH, DeviceState

NO_PROGRAM = (1 << 62) - 1
"""First program of a region that is not there."""


@dataclass(frozen=True, slots=True)
class Launch:
    """One launch of the byte kernel, and of the commit kernel after it: some regions of a plan.

    ``firsts``: first program of each region but the first.
    """

    regions: int
    count: int
    programs: int
    firsts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """All regions of one seal.

    Attributes:
        launches: most layouts need one.
        large: which configuration of the byte kernel suits.
        tiles: items of the largest region, for the commit kernel's grid.
    """

    launches: tuple[Launch, ...]
    large: bool
    tiles: int


def round_up(tokens: int) -> int:
    """A size that stands for ``tokens`` and somewhat more, so that few plans are ever made."""
    if tokens <= 256:
        return 1 << max(0, tokens - 1).bit_length() if tokens else 0
    step = 256 if tokens <= 4096 else 2048
    return -(-tokens // step) * step


class Planner:
    """Plans of one state, by what they are for."""

    def __init__(self, state: DeviceState, workspace: Workspace) -> None:
        # What it needs of the state, not the state itself: that would keep it alive for ever.
        self._layout = state.layout
        self._slots = state.scratch_slots
        self._workspace = workspace
        self._plans: dict[tuple[str, int, int], Plan] = {}
        self._written = Written[tuple[str, int, int]](workspace.device)

    def plan(self, part: str, tokens: int, scrub_bytes: int) -> Plan:
        """The regions of a seal of ``part`` with up to ``tokens`` tokens and a scrub."""
        key = (part, round_up(tokens), scrub_bytes)
        if self._written.is_due(key):
            self._plans[key] = self._make(*key)
        return self._plans[key]

    def of_slots(self, space: int, part: int, slots: torch.Tensor, sums: torch.Tensor) -> Plan:
        """A region of explicit ``slots`` (int64, at least one); ``sums`` must be zero."""
        words = self._workspace.part_words(space, part) | {
            RegionWord.KIND: RegionKind.LIST,
            RegionWord.ITEMS: slots.shape[0],
            RegionWord.SLOTS: slots.data_ptr(),
            RegionWord.SUMS: sums.data_ptr(),
        }
        return self._place([fill_row(words, REGION_ROW)], keep=self._workspace.capturing())

    def _make(self, part: str, tokens: int, scrub_bytes: int) -> Plan:
        # Tokens last: the scrub passes over what has no seal before this launch.
        regions = [self._suspects(), *self._scrub_regions(scrub_bytes)] if scrub_bytes > 0 else []
        regions += self._token_regions(part, tokens)
        # Few sizes ever come up, so their rows stay.
        return self._place(regions, keep=True)

    def _place(self, regions: list[list[int]], *, keep: bool) -> Plan:
        """Share the regions out among launches and programs, and put their rows on the device."""
        items = [region[RegionWord.ITEMS] for region in regions]
        large = sum(items) >= self._workspace.tuning.large_items
        pieces = [regions[at : at + MAX_REGIONS] for at in range(0, len(regions), MAX_REGIONS)]
        launches = [self._launch(piece, large=large) for piece in pieces]
        address = self._workspace.regions.find(tuple(map(tuple, regions)), keep=keep)
        step = MAX_REGIONS * REGION_ROW * 8
        placed = (replace(launch, regions=address + i * step) for i, launch in enumerate(launches))
        return Plan(tuple(placed), large, max(items, default=1))

    def _launch(self, regions: list[list[int]], *, large: bool) -> Launch:
        """Programs for each of the regions of one launch; their place is not known yet."""
        tuning = self._workspace.tuning
        each, sub, *_ = tuning.large if large else tuning.small
        for region in regions:
            region[RegionWord.SPLITS] = -(-region[RegionWord.BUNDLES] // sub)
        units = [-(-region[RegionWord.ITEMS] // each) * region[RegionWord.SPLITS] for region in regions]
        program, firsts = 0, []
        for region, count in zip(regions, units, strict=True):
            programs = min(count, tuning.sum_programs * count // max(1, sum(units)))
            if region[RegionWord.KIND] == RegionKind.SUSPECTS:
                programs = tuning.suspect_programs
            region[RegionWord.PROGRAMS] = max(1, programs)
            region[RegionWord.FIRST_PROGRAM] = program
            firsts.append(program)
            program += region[RegionWord.PROGRAMS]
        firsts += [NO_PROGRAM] * (MAX_REGIONS - len(firsts))
        return Launch(0, len(regions), program, tuple(firsts[1:]))

    def _token_regions(self, part: str, tokens: int) -> list[list[int]]:
        layout, workspace = self._layout, self._workspace
        regions: list[list[int]] = []
        for g, space in enumerate(layout.spaces):
            parts = layout.groups[space].parts
            if part not in parts:
                continue
            number = parts.index(part)
            words = {
                RegionWord.KIND: RegionKind.TOKENS,
                RegionWord.GROUP: g,
                RegionWord.ITEMS: tokens,
                RegionWord.SLOTS: self._slots[g].data_ptr(),
                RegionWord.RING: layout.groups[g].ring or 0,
            }
            regions.append(self._region(words, space, number, workspace.token_sums[:, g]))
        return regions

    def _suspects(self) -> list[int]:
        workspace = self._workspace
        words = {
            RegionWord.KIND: RegionKind.SUSPECTS,
            RegionWord.ITEMS: QUEUE_PER_LAUNCH,
            RegionWord.BUNDLES: max(table.bundles for table in workspace.parts.values()),
            RegionWord.SUMS: workspace.queue_sums[0].data_ptr(),
            RegionWord.FLAGS: workspace.queue_sums[1].data_ptr(),
            RegionWord.WRITERS: workspace.queue_sums[2].data_ptr(),
        }
        return fill_row(words, REGION_ROW)

    def _scrub_regions(self, scrub_bytes: int) -> list[list[int]]:
        layout, workspace = self._layout, self._workspace
        sizes = {g: layout.groups[g].num_slots * layout.groups[g].token_bytes for g in workspace.spaces}
        regions: list[list[int]] = []
        for g in workspace.spaces:
            group = layout.groups[g]
            share = scrub_bytes * sizes[g] // sum(sizes.values())
            count = min(max(share // group.token_bytes, 1), group.num_slots)
            for number in range(len(group.parts)):
                words = {RegionWord.KIND: RegionKind.SCRUB, RegionWord.GROUP: g, RegionWord.ITEMS: count}
                regions.append(self._region(words, g, number, workspace.scrub_sums_of(g, number, count)))
        return regions

    def _region(self, words: dict[RegionWord, int], space: int, part: int, sums: torch.Tensor) -> list[int]:
        words |= self._workspace.part_words(space, part) | {
            RegionWord.SUMS: sums[0].data_ptr(),
            RegionWord.FLAGS: sums[1].data_ptr(),
            RegionWord.WRITERS: sums[-1].data_ptr(),
        }
        return fill_row(words, REGION_ROW)
