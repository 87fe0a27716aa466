"""One forward: the tables on the device as the scenario has them, and a model that writes bytes."""

from __future__ import annotations

from typing import NamedTuple

import torch

from kvcanary.batch import ForwardBatch, GroupBatch, PageTable
from kvcanary.faults.scenario.engine import Engine, Held
from kvcanary.faults.scenario.happenings import Launch, Places, Row
from kvcanary.faults.scenario.parse import Group
from kvcanary.faults.scenario.pool import WorldError
from kvcanary.faults.scenario.words import PADDING


class Line(NamedTuple):
    """One row of a forward, in one group: its table from position ``first`` on, and where its new tokens go.

    ``lands``: where their bytes really go, if that is elsewhere.
    """

    reads: list[int]
    first: int
    writes: list[int]
    lands: list[int] | None = None


class Sequence(NamedTuple):
    """One row of a forward."""

    row: Row
    held: Held | None
    context: int
    new: int
    lines: dict[str, Line]


class Forward:
    """Builds the batch of a launch, and is its model.

    Attributes:
        batch: what the canary is told, which are the very tensors that attention reads.
    """

    def __init__(self, engine: Engine, launch: Launch, translation: dict[str, torch.Tensor]) -> None:
        self.engine = engine
        self.pool = engine.pool
        self.launch = launch
        self._translation = translation
        self.sequences = [self._sequence(row) for row in launch.rows]
        self.tables: dict[str, torch.Tensor] = {}
        self.batch = self._batch()

    def rewrite(self, request: str, slots: dict[str, list[int]]) -> bool:
        """Overwrite the device table of a request; False if this forward has no row of it."""
        for number, sequence in enumerate(self.sequences):
            if sequence.row.request == request:
                for group, some in slots.items():
                    self.tables[group][number, : len(some)] = torch.tensor(some, dtype=torch.int32)
                return True
        return False

    def model(self) -> None:
        """Write the bytes of the new tokens, wherever they really land."""
        for sequence in self.sequences:
            fault = sequence.row.fault
            if fault.lost:
                continue
            for group, line in sequence.lines.items():
                lands = line.lands
                if lands is None:  # where the tables say; a negative slot is no place then
                    lands = [slot for slot in self._translated(group, line.writes) if slot >= 0]
                for slot in lands:
                    self.pool.write_token(group, slot, only=fault.only, part=self.launch.part, nan=fault.nan)

    def finish(self) -> None:
        """The scheduler counts the new tokens as computed."""
        for sequence in self.sequences:
            if sequence.held is not None and sequence.held.live:
                sequence.held.length = sequence.context + sequence.new

    # --- rows ---------------------------------------------------------------------------------------------

    def _sequence(self, row: Row) -> Sequence:
        held = None if row.request == PADDING else self.engine.of(row.request)
        reads, first = self._placed(row.reads)
        writes = self._placed(row.writes)[0]
        lands = self._placed(row.fault.lands)[0] if row.fault.lands else {}
        context = self._context(held, row, reads, first)
        new = max((len(slots) for slots in writes.values()), default=0 if row.writes == () or held is None else 1)
        lines: dict[str, Line] = {}
        for name, group in self.pool.groups.items():
            line = self._line(held, group, (reads, first, writes), context, new)
            if line is not None:
                lines[name] = line._replace(lands=lands.get(name))
        if not lines and held is not None:
            raise WorldError(f"request {row.request!r} has no slots; use alloc or hit before, or say what it reads")
        return Sequence(row, held, context, new, lines)

    def _placed(self, places: Places | None) -> tuple[dict[str, list[int]], dict[str, int]]:
        """Slots and the first position, by group."""
        slots = self.engine.numbers(places or ())
        first = {self.engine.group_of(term.space): term.at for term in places or () if term.at is not None}
        return slots, first

    def _context(self, held: Held | None, row: Row, reads: dict[str, list[int]], first: dict[str, int]) -> int:
        if row.reads is None:
            return held.length if held is not None else 0
        lengths = {
            name: first.get(name, 0) + len(slots)
            for name, slots in reads.items()
            if self.pool.groups[name].ring is None
        }
        if len(set(lengths.values())) > 1:
            raise WorldError(
                f"request {row.request!r} reads up to different positions: {lengths}; 'at' says where it begins"
            )
        return next(iter(lengths.values()), held.length if held is not None and reads else 0)

    def _line(
        self,
        held: Held | None,
        group: Group,
        told: tuple[dict[str, list[int]], dict[str, int], dict[str, list[int]]],
        context: int,
        new: int,
    ) -> Line | None:
        """A row in one group; None where it takes no part in it."""
        reads, first, writes = told
        # A translated group is addressed by the full slots.
        name = self.pool.first if group.translated else group.name
        own = list(held.tables.get(name, ())) if held is not None else []
        table = reads.get(name)
        if table is None and not own and name not in writes:
            return None
        begin = first.get(name, 0)
        if table is None:
            table = own
        positions = range(context, context + new)
        slots = writes.get(name)
        if slots is None:
            places = [position % group.ring if group.ring is not None else position - begin for position in positions]
            if table is not own and group.ring is None:
                # What is read was told, so what is written is where the request's own table goes on.
                slots = [own[p] if p < len(own) else -1 for p in positions]
            else:
                slots = [table[p] if p < len(table) else -1 for p in places]
        if len(slots) != new:
            raise WorldError(f"group {name!r}: {len(slots)} slots for {new} new tokens")
        if group.ring is None and len(table) == context - begin:
            table = table + slots  # a table names the new tokens' places too
        return Line(table, begin, slots)

    # --- tensors ------------------------------------------------------------------------------------------

    def _tensor(self, values: list[int], dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=self.pool.device)

    def _batch(self) -> ForwardBatch:
        texts, sequences = self.engine.texts, self.sequences
        fed: list[int] = []
        expected: list[int] = []
        salts: list[int] = []
        ids: list[int] = []
        starts = [0]
        for sequence in sequences:
            request, fault = sequence.row.request, sequence.row.fault
            for position in range(sequence.context, sequence.context + sequence.new):
                pad = sequence.held is None
                true = 0 if pad else texts.token(request, position)
                fed.append(true)
                expected.append(true if not pad and texts.known(request, position) else -1)
                salts.append(0 if pad else texts.salt(request, position))
                ids.append(position if fault.at is None else fault.at + position - sequence.context)
            if fault.token and sequence.new:
                guess = texts.guess(request, sequence.context + sequence.new - 1)
                fed[-1] = int(fault.token) if fault.token.lstrip("-").isdigit() else guess
            starts.append(starts[-1] + sequence.new)
        told = any(sequence.row.fault.at is not None for sequence in sequences)
        return ForwardBatch(
            input_ids=self._tensor(fed, torch.int64),
            query_start_loc=self._tensor(starts),
            context_lens=self._tensor([sequence.context for sequence in sequences]),
            request_rows=self._tensor([-1 if s.held is None else s.held.row for s in sequences]),
            groups=tuple(self._group_batch(name) for name in self.pool.groups),
            positions=self._tensor(ids) if told else None,
            token_salts=self._tensor(salts, torch.int64) if any(salts) else None,
            expected_ids=self._tensor(expected, torch.int64),
            last_ids=self._tensor([self._last(sequence) for sequence in sequences], torch.int64),
            linked=not self.launch.unlinked,
        )

    def _last(self, sequence: Sequence) -> int:
        """The id that the scheduler has for the last old position, where it knows it, and it is no placeholder."""
        texts, place, request = self.engine.texts, sequence.context - 1, sequence.row.request
        if sequence.held is None or place < 0 or not texts.known(request, place) or texts.salt(request, place):
            return -1
        return texts.token(request, place)

    def _group_batch(self, name: str) -> GroupBatch | None:
        lines = [sequence.lines.get(name) for sequence in self.sequences]
        if not any(line is not None and (line.reads or line.writes) for line in lines):
            return None
        group = self.pool.groups[name]
        width = max(len(line.reads) for line in lines if line is not None)
        table = torch.full((len(lines), max(width, 1)), -1, dtype=torch.int32, device=self.pool.device)
        mapping: list[int] = []
        for number, (line, sequence) in enumerate(zip(lines, self.sequences, strict=True)):
            if line is None:
                mapping += [-1] * sequence.new
                continue
            table[number, : len(line.reads)] = self._tensor(line.reads)
            mapping += line.writes
        self.tables[name] = table
        first = [0 if line is None else line.first for line in lines]
        entries = PageTable(entries=table, unit="slot", first_position=self._tensor(first) if any(first) else None)
        return GroupBatch(
            slot_mapping=self._tensor(mapping),
            table=entries,
            translation=self._translation.get(name) if group.translated else None,
        )

    def _translated(self, group: str, slots: list[int]) -> list[int]:
        if not self.pool.groups[group].translated:
            return slots
        table = self._translation[group]
        return [int(table[slot]) or -1 if slot >= 0 else -1 for slot in slots]
