"""The Triton kernels behind :class:`kvcanary.kernels.Kernels`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch

from kvcanary.errors import LayoutError
from kvcanary.kernels.batch_descriptors import batch_addresses
from kvcanary.kernels.descriptors import is_plain
from kvcanary.kernels.triton_launch import Kernel
from kvcanary.kernels.triton_regions import Launch, Plan, Planner
from kvcanary.kernels.triton_requests import FactEncoder
from kvcanary.kernels.triton_tuning import INTERPRETED, Tuning
from kvcanary.kernels.triton_variants import POISON_TILE, Variants
from kvcanary.kernels.triton_workspace import Workspace
from kvcanary.state import MIN_ENTRIES_PER_ROW

if TYPE_CHECKING:
    from kvcanary.batch import ForwardBatch
    from kvcanary.kernels import DeviceFact
    from kvcanary.state import DeviceState, PoisonMode


class TritonKernels:
    """Implements :class:`kvcanary.kernels.Kernels`.

    Everything but a state's first operation (see :meth:`prepare`) and :meth:`facts` may be captured in a CUDA graph.
    Nothing is read on the host. Two forwards of one state must not run at the same time.

    Args:
        tuning: sizes; None: what suits an H200, or the interpreter on a CPU.
    """

    name = "triton"

    def __init__(self, tuning: Tuning | None = None) -> None:
        self._tuning = tuning
        self._bound: WeakKeyDictionary[DeviceState, _Bound] = WeakKeyDictionary()

    def prepare(self, state: DeviceState) -> None:
        """Make what belongs to ``state`` and compile all that any call for it may launch: nothing does while serving.

        Raises:
            ConfigError: a stream is being captured, or the layout has more groups or larger indices than fit.
        """
        for kernel in self.variants(state):
            kernel.compile()

    def variants(self, state: DeviceState) -> list[Kernel]:
        """Every compiled form that serving ``state`` may need."""
        return self._of(state).kernels.all()

    def facts(self, state: DeviceState, facts: Sequence[DeviceFact]) -> None:
        """Apply ``facts`` in order."""
        self._of(state).facts(facts)

    def mark(
        self, state: DeviceState, batch: ForwardBatch, groups: Sequence[int], *, first: bool, poison: str = ""
    ) -> None:
        """Claim the slots of the new tokens; judge the inputs and open the scratch if ``first``."""
        self._of(state).mark(batch, groups, first=first, poison=poison)

    def check(self, state: DeviceState, batch: ForwardBatch, groups: Sequence[int]) -> None:
        """Check old positions."""
        self._of(state).check(batch, groups)

    def seal(
        self,
        state: DeviceState,
        part: str,
        scrub_bytes: int,
        *,
        last: bool,
        nonfinite: bool,
        poison: PoisonMode = "off",
    ) -> None:
        """Seal new tokens, scrub, and with ``last`` end the forward."""
        self._of(state).seal(part, scrub_bytes, last=last, nonfinite=nonfinite, poison=poison)

    def abandon(self, state: DeviceState) -> None:
        """End a forward that raised."""
        self._of(state).abandon()

    def window(self, state: DeviceState, batch: ForwardBatch, full: int, swa: int, *, every: int) -> None:
        """Count diverging and out-of-window positions in every ``every``-th forward."""
        self._of(state).window(batch, full, swa, every=every)

    def fingerprint(self, state: DeviceState, group: int, part: str, slots: torch.Tensor) -> torch.Tensor:
        """Fingerprints of ``slots``.

        Raises:
            LayoutError: the group has no such part.
        """
        space = state.layout.spaces[group]
        own = state.layout.groups[space]
        if part not in own.parts:
            raise LayoutError(f"group {own.name!r} has no part {part!r}, it has {list(own.parts)}")
        return self._of(state).sums(space, own.parts.index(part), slots.to(torch.int64).contiguous())

    def _of(self, state: DeviceState) -> _Bound:
        bound = self._bound.get(state)
        if bound is None:
            tuning = self._tuning or (Tuning() if state.device.type == "cuda" else INTERPRETED)
            bound = self._bound[state] = _Bound(state, tuning)
        return bound


@dataclass(frozen=True, slots=True, kw_only=True)
class Described:
    """A batch as the kernels take it. Group sets are bit sets.

    Attributes:
        batch: what is described; let go when its forward ends.
        addresses, wide: of BATCH_FIELDS, and a bit set of those that are int64.
        items: address of the groups' rows.
        present: groups that take part; detours: those whose indices are not simply slots.
        first_group: input kinds are counted there; digest_group: whose table knows digests, -1: none.
        max_rewind: the smallest of the groups', -1: none.
        longest: positions that a table can name for one row.
    """

    batch: ForwardBatch
    addresses: list[int]
    wide: int
    items: int
    present: int
    detours: int
    first_group: int
    digest_group: int
    max_rewind: int
    longest: int

    def select(self, groups: Sequence[int]) -> int:
        """Those of ``groups`` that take part."""
        return sum([1 << g for g in groups]) & self.present


class _Bound:
    """The kernels of one state: launches with all that never changes filled in."""

    def __init__(self, state: DeviceState, tuning: Tuning) -> None:
        # Keeps tensors and sizes, not the state itself: that would keep it alive for ever.
        self._layout = state.layout
        self._limits = state.limits
        self._keys = (state.keys.mix_in, state.keys.mix_out)
        self._workspace = workspace = Workspace(state, tuning)
        self._planner = Planner(state, workspace)
        self._encoder = FactEncoder(state.layout, state.limits.max_rows, state.device)
        self._tuning = tuning
        self._tensors = (state.counters, state.rows, state.history, state.scratch_slots, state.scratch_links)
        self._counters, self._rows, self._history, self._slots, self._links = (t.data_ptr() for t in self._tensors)
        self._scratch = (state.scratch_rows, state.scratch_batch)
        self._scratch_rows, self._scratch_batch = (t.data_ptr() for t in self._scratch)
        self._plain = [is_plain(group) for group in state.layout.groups]
        self.kernels = Variants(workspace, state.layout, state.header_words, state.limits.poison)
        self._described: Described | None = None
        self._null_pages = any(group.null_pages and not group.null_is_zero for group in self._layout.groups)

    # --- operations -----------------------------------------------------------------------------------------

    def facts(self, facts: Sequence[DeviceFact]) -> None:
        workspace = self._workspace
        count = self._encoder.max_facts
        for at in range(0, len(facts), count):
            encoded = self._encoder.encode(facts[at : at + count], self.sums, self.fill)
            host, target, generation = workspace.staging.put(encoded.words)
            self.kernels.facts(
                (1, 1, 1),
                self._counters,
                self._rows,
                self._history,
                workspace.meta,
                host,
                target,
                len(encoded.words),
                encoded.count,
                workspace.staging.progress.data_ptr(),
                generation,
                int(at == 0),
            )
            encoded.finish()

    def _describe(self, batch: ForwardBatch) -> Described:
        """What the launches of a forward have in common; made once, since all get the same batch."""
        described = self._described
        if described is None or described.batch is not batch:
            addresses, wide = batch_addresses(batch)
            given = [(g, item) for g, item in enumerate(batch.groups) if item is not None]
            groups = self._layout.groups
            rewinds = [limit for g, _ in given if (limit := groups[g].max_rewind) is not None]
            widths = [
                item.table.entries.shape[-1] * (groups[g].page_size if item.table.unit == "page" else 1)
                for g, item in given
                if item.table is not None
            ]
            described = self._described = Described(
                batch=batch,
                addresses=addresses,
                wide=wide,
                items=self._workspace.item_rows(batch),
                present=sum(1 << g for g, _ in given),
                detours=sum(1 << g for g, item in given if not self._plain[g] or item.translation is not None),
                first_group=given[0][0] if given else 0,
                digest_group=next((g for g, item in given if item.table is not None), -1),
                max_rewind=min(rewinds, default=-1),
                longest=max(widths, default=0),
            )
        return described

    def mark(self, batch: ForwardBatch, groups: Sequence[int], *, first: bool, poison: str) -> None:
        workspace, tuning = self._workspace, self._tuning
        described = self._describe(batch)
        tokens, rows = batch.num_tokens, batch.num_rows
        workspace.tokens = tokens
        tile = tuning.decode_tile if tokens <= 4 * rows else tuning.mark_tile
        programs = min(max(tuning.programs // (rows + 1), tuning.row_programs), max(1, -(-tokens // tile)))
        self.kernels.mark(tile, first=first, linked=batch.linked, poison=bool(poison))(
            (rows + 1, programs, len(batch.groups) + int(first)),
            self._counters,
            self._rows,
            self._history,
            workspace.meta,
            self._slots,
            self._links,
            self._scratch_rows,
            self._scratch_batch,
            described.items,
            *described.addresses,
            described.wide,
            tokens,
            rows,
            self._limits.max_tokens,
            self._limits.max_rows,
            described.select(groups),
            described.digest_group,
            described.first_group,
            described.max_rewind,
            *self._keys,
            workspace.poison.part(poison),
        )

    def check(self, batch: ForwardBatch, groups: Sequence[int]) -> None:
        workspace, tuning = self._workspace, self._tuning
        described = self._describe(batch)
        _, starts, contexts, request_rows, _, _, _, _, count = described.addresses
        rows, head, selected = batch.num_rows, self._limits.head_entries, described.select(groups)
        tiles = -(-max(described.longest, batch.num_tokens // max(1, rows), 1) // tuning.check_tile)
        programs = min(max(tuning.programs // max(1, rows * len(batch.groups)), tuning.row_programs), tiles)
        self.kernels.check(plain=rows > 0 and not selected & described.detours)(
            (rows + 1, programs, len(batch.groups)),
            self._counters,
            self._rows,
            self._history,
            workspace.meta,
            self._slots,
            self._links,
            self._scratch_rows,
            described.items,
            starts,
            contexts,
            request_rows,
            count,
            described.wide,
            rows,
            self._limits.max_tokens,
            self._limits.max_rows,
            selected,
            max(MIN_ENTRIES_PER_ROW, head // max(1, rows)),
            *self._keys,
        )

    def seal(self, part: str, scrub_bytes: int, *, last: bool, nonfinite: bool, poison: PoisonMode) -> None:
        workspace = self._workspace
        plan = self._planner.plan(part, workspace.tokens, scrub_bytes)
        if last:
            self._described = None
        flags = nonfinite or (scrub_bytes > 0 and self._null_pages)
        for launch in plan.launches:
            self._launch_sums(launch, large=plan.large, nonfinite=flags)
        if poison == "full":
            self._search(part)
        spots = workspace.poison.part(part) if poison != "off" else 0
        self._launch_commits(plan, last=last, flags=flags, nonfinite=nonfinite, scrub=scrub_bytes > 0, spots=spots)

    def _search(self, part: str) -> None:
        """Look through all bytes of the new tokens for what pages are filled with."""
        workspace = self._workspace
        tiles, runs = -(-max(1, workspace.tokens) // POISON_TILE), workspace.poison.most_runs(part)
        if runs:
            self.kernels.search(
                (tiles, runs, len(self._layout.groups)),
                self._counters,
                workspace.meta,
                self._links,
                workspace.poison.part(part),
            )

    def fill(self, space: int, slots: torch.Tensor) -> None:
        """Fill slots that are handed out."""
        workspace = self._workspace
        count, runs = slots.shape[0], workspace.poison.fill_runs(space)
        if count and runs:
            grid = (-(-count // POISON_TILE), runs, 1)
            self.kernels.fill(grid, slots.data_ptr(), count, workspace.meta, workspace.poison.filled, space)

    def _launch_sums(self, launch: Launch, *, large: bool, nonfinite: bool, always: bool = False) -> None:
        workspace = self._workspace
        self.kernels.sum(large=large, nonfinite=nonfinite)(
            (launch.programs, 1, 1),
            self._counters,
            workspace.meta,
            launch.regions,
            workspace.queue_copy.data_ptr(),
            int(always),
            *launch.firsts,
        )

    def _launch_commits(self, plan: Plan, *, last: bool, flags: bool, nonfinite: bool, scrub: bool, spots: int) -> None:
        workspace = self._workspace
        launches = plan.launches or (Launch(0, 0, 0, ()),)
        tiles = -(-max(plan.tiles, workspace.tokens if last else 1, 1) // self._tuning.commit_tile)
        for launch in launches:
            end = launch is launches[-1]
            self.kernels.commit(last=last and end, nonfinite=flags, poison=spots != 0)(
                (tiles, max(1, launch.count + 2 * int(last and end)), 1),
                self._counters,
                self._rows,
                self._history,
                workspace.meta,
                self._links,
                self._scratch_rows,
                self._scratch_batch,
                launch.regions,
                launch.count,
                workspace.queue_copy.data_ptr(),
                workspace.tickets.data_ptr(),
                int(nonfinite),
                int(end),
                int(scrub and end),
                *self._keys,
                spots,
            )

    def abandon(self) -> None:
        self._described = None
        self.kernels.abandon((1, 1, 1), self._counters, self._workspace.meta)

    def window(self, batch: ForwardBatch, full: int, swa: int, *, every: int) -> None:
        workspace, tuning = self._workspace, self._tuning
        described = self._describe(batch)
        _, starts, contexts, request_rows, _, _, _, _, count = described.addresses
        rows = max(1, batch.num_rows)
        tiles = -(-max(1, described.longest) // tuning.window_tile)
        self.kernels.window(
            (rows, min(max(tuning.programs // rows, tuning.row_programs), tiles), 1),
            self._counters,
            workspace.meta,
            described.items,
            workspace.tickets.data_ptr() + 8,
            starts,
            contexts,
            request_rows,
            count,
            described.wide,
            batch.num_rows,
            self._limits.max_rows,
            full,
            swa,
            int(batch.groups[full] is not None and batch.groups[swa] is not None),
            every,
        )

    def sums(self, space: int, part: int, slots: torch.Tensor) -> torch.Tensor:
        """Fingerprints of ``slots`` of one space and part number."""
        workspace = self._workspace
        found = torch.zeros(slots.shape[0], dtype=torch.int64, device=workspace.device)
        if not slots.shape[0]:
            return found
        plan = self._planner.of_slots(space, part, slots, found)
        for launch in plan.launches:
            self._launch_sums(launch, large=plan.large, nonfinite=False, always=True)
        return found
