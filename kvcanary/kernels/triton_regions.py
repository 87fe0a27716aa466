"""Which slots a seal reads: regions for the byte kernel, planned on the host from what it knows about sizes."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from kvcanary.kernels.descriptors import MAX_REGIONS, REGION_ROW, RegionKind, RegionWord, fill_row
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
        self._recorded: set[tuple[str, int, int]] = set()
        """plans whose rows graphs alone have written so far"""

    def plan(self, part: str, tokens: int, scrub_bytes: int) -> Plan:
        """The regions of a seal of ``part`` with up to ``tokens`` tokens and a scrub."""
        key = (part, round_up(tokens), scrub_bytes)
        plan = self._plans.get(key)
        if plan is None or key in self._recorded:
            (self._recorded.add if self._workspace.capturing() else self._recorded.discard)(key)
            plan = self._plans[key] = self._make(*key)
        return plan

    def _make(self, part: str, tokens: int, scrub_bytes: int) -> Plan:
        # Tokens last: the scrub passes over what has no seal before this launch.
        regions = [self._suspects(), *self._scrub_regions(scrub_bytes)] if scrub_bytes > 0 else []
        regions += self._token_regions(part, tokens)
        large = sum(region[RegionWord.ITEMS] for region in regions) >= self._workspace.tuning.large_items
        tuning = self._workspace.tuning
        each, sub, *_ = tuning.large if large else tuning.small
        rows: list[tuple[int, ...]] = []
        launches: list[Launch] = []
        for at in range(0, len(regions), MAX_REGIONS):
            taken = regions[at : at + MAX_REGIONS]
            program, firsts = 0, []
            for region in taken:
                region[RegionWord.SPLITS] = -(-region[RegionWord.BUNDLES] // sub)
            units = [-(-region[RegionWord.ITEMS] // each) * region[RegionWord.SPLITS] for region in taken]
            for region, count in zip(taken, units, strict=True):
                programs = min(count, tuning.sum_programs * count // sum(units))
                if region[RegionWord.KIND] == RegionKind.SUSPECTS:
                    programs = tuning.suspect_programs
                region[RegionWord.PROGRAMS] = max(1, programs)
                region[RegionWord.FIRST_PROGRAM] = program
                firsts.append(program)
                program += region[RegionWord.PROGRAMS]
                rows.append(tuple(region))
            firsts += [NO_PROGRAM] * (MAX_REGIONS - len(firsts))
            launches.append(Launch(0, len(taken), program, tuple(firsts[1:])))
        # Few sizes ever come up, so their rows stay.
        address = self._workspace.regions.find(tuple(rows), keep=True)
        step = MAX_REGIONS * REGION_ROW * 8
        tiles = max((region[RegionWord.ITEMS] for region in regions), default=1)
        placed = (replace(launch, regions=address + i * step) for i, launch in enumerate(launches))
        return Plan(tuple(placed), large, tiles)

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


def list_region(workspace: Workspace, space: int, part: int, slots: torch.Tensor, sums: torch.Tensor) -> list[int]:
    """A region of explicit ``slots``; ``sums`` must be zero."""
    words = workspace.part_words(space, part) | {
        RegionWord.KIND: RegionKind.LIST,
        RegionWord.ITEMS: slots.shape[0],
        RegionWord.SLOTS: slots.data_ptr(),
        RegionWord.SUMS: sums.data_ptr(),
    }
    return fill_row(words, REGION_ROW)
