"""Facts: what the engine says about pages and rows, applied to the records in order.

Reserved pages (trash, null) keep their state whatever a fact says: engines free and hand out whole table rows, padding
included.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from kvcanary.errors import BatchError
from kvcanary.kernels import DeviceFact, FactOp, ref_poison
from kvcanary.kernels.ref_report import Launch, first_of_each, report
from kvcanary.kernels.ref_scrub import Readers, enqueue
from kvcanary.kernels.ref_words import sealed, states_of
from kvcanary.record import FLAG_SHIFT, MASK32, OWNER_FREED, OWNER_HELD, Kind, owner_word
from kvcanary.state import (
    HISTORY,
    NOTHING,
    OUTBOX_ROWS,
    OWNER_TRASH,
    GroupState,
    OutboxWord,
    RowFlag,
    RowWord,
    Word,
)
from kvcanary.state import ViolationWord as V

_TAG_MASK = ((1 << FLAG_SHIFT) - 1) & ~MASK32


def apply(launch: Launch, facts: Sequence[DeviceFact], readers: Readers) -> None:
    """See :meth:`kvcanary.kernels.Kernels.facts`.

    Raises:
        BatchError: a fact names a row, page or record tensor that does not exist or does not fit.
    """
    for fact in facts:
        Application(launch, fact, readers).run()


class Application:
    """One fact and what it works on."""

    def __init__(self, launch: Launch, fact: DeviceFact, readers: Readers) -> None:
        self.launch = launch
        self.state = launch.state
        self.fact = fact
        self.readers = readers
        self.space = launch.state.layout.spaces[fact.group]
        self.group = launch.state.layout.groups[self.space]
        self.records: GroupState = launch.state.groups[self.space]

    def run(self) -> None:
        """Apply it."""
        operations: dict[FactOp, Callable[[], None]] = {
            FactOp.ALLOC: self._alloc,
            FactOp.FREE: self._free,
            FactOp.OWN: self._own,
            FactOp.ADMIT: self._admit,
            FactOp.ANCHOR: self._anchor,
            FactOp.FINISH: self._finish,
            FactOp.COPY: self._copy,
            FactOp.EXPORT: self._export,
            FactOp.IMPORT: self._import,
            FactOp.WIPE: self._wipe,
            FactOp.RESTAMP: self._restamp,
            FactOp.QUEUE: self._queue,
            FactOp.POISON: self._poison,
        }
        operations[self.fact.op]()

    # --- pages ----------------------------------------------------------------------------------------------

    def _alloc(self) -> None:
        pages = self._pages()
        self._judged_owner(
            pages, owner_word(self.launch.forward, self.fact.tag, OWNER_HELD), Kind.DOUBLE_ALLOC, OWNER_HELD
        )
        _wipe(self.records, self._slots(pages))
        if self.group.arena is not None:
            self._take_arena(pages)

    def _take_arena(self, pages: torch.Tensor) -> None:
        """Wipe the records of whoever held the bytes of ``pages`` before."""
        layout, arena = self.state.layout, self.group.arena
        if arena is None:
            return
        holder = self.state.arenas[arena.name]
        taken = torch.unique(torch.div(pages, arena.pages_per_arena_page, rounding_mode="floor"))
        changed = taken[holder[taken] != self.space + 1]
        holder[taken] = self.space + 1
        if not changed.numel():
            return
        for g, other in enumerate(layout.groups):
            if g != self.space and layout.spaces[g] == g and other.arena is not None and other.arena.name == arena.name:
                per_page = other.arena.pages_per_arena_page
                overlaid = _runs(changed * per_page, per_page)
                _wipe(
                    self.state.groups[g], _runs(overlaid[overlaid < other.num_pages] * other.page_size, other.page_size)
                )

    def _free(self) -> None:
        pages = self._pages()
        tags = self.records.owner[pages] & _TAG_MASK
        words = tags | owner_word(self.launch.forward, 0, OWNER_FREED)
        self._judged_owner(pages, words, Kind.DOUBLE_FREE, OWNER_FREED)

    def _own(self) -> None:
        self._set_owner(self._pages(), owner_word(self.launch.forward, self.fact.tag, OWNER_HELD))

    def _wipe(self) -> None:
        _wipe(self.records, self._slots(self._pages()))

    def _poison(self) -> None:
        ref_poison.fill(self.launch, self.space, self._slots(self._pages()))

    def _judged_owner(self, pages: torch.Tensor, words: torch.Tensor | int, kind: Kind, state: int) -> None:
        """Set owners; of a judged fact, report pages that were in ``state`` already, or are named twice."""
        if not self.fact.judged or not self.launch.armed:
            self._set_owner(pages, words)
            return
        found = states_of(self.records.owner[pages])
        again = torch.ones_like(pages, dtype=torch.bool)
        again[first_of_each(pages)[1]] = False
        fields = {V.SLOT: pages * self.group.page_size, V.PAGE: pages}
        report(self.launch, kind, self.space, fields, (found == state) & ~again)
        self._set_owner(pages, words)
        # The second time a list names a page, the page is in that state because of the first.
        report(self.launch, kind, self.space, fields, again & (found < OWNER_TRASH))

    def _set_owner(self, pages: torch.Tensor, words: torch.Tensor | int) -> None:
        old = self.records.owner[pages]
        self.records.owner[pages] = torch.where(states_of(old) >= OWNER_TRASH, old, words)

    # --- records --------------------------------------------------------------------------------------------

    def _copy(self) -> None:
        pages, targets = self._pages(), self._pages(targets=True)
        if pages.numel() != targets.numel():
            raise BatchError(f"{self._name}: {pages.numel()} pages go to {targets.numel()} targets; name one each")
        sources, slots = self._slots(pages), self._slots(targets)
        seals = self._present(self.records.seals[:, sources])
        self.records.links[slots] = self.records.links[sources]
        self.records.seals[:, slots] = seals

    def _present(self, seals: torch.Tensor) -> torch.Tensor:
        """Seals that moved: written in this forward, with nothing of what was queued for their old place."""
        writers = (seals[..., 1] & _TAG_MASK) | (self.launch.forward & MASK32)
        moved = torch.stack((seals[..., 0], writers), -1)
        return torch.where(sealed(seals[..., 1]).unsqueeze(-1), moved, 0)

    def _export(self) -> None:
        slots = self._slots(self._pages())
        records = self._record_tensor(slots.numel())
        seals = self.records.seals[:, slots].permute(1, 0, 2).flatten(1)
        records.copy_(torch.cat((self.records.links[slots], seals), 1))

    def _import(self) -> None:
        pages = self._pages()
        slots = self._slots(pages)
        records = self._record_tensor(slots.numel()).to(self.state.device)
        self.records.links[slots] = records[:, :2]
        seals = records[:, 2:].unflatten(1, (-1, 2)).permute(1, 0, 2)
        self.records.seals[:, slots] = self._present(seals)
        self._set_owner(pages, owner_word(self.launch.forward, self.fact.tag, OWNER_HELD))
        self._enqueue(slots)

    def _restamp(self) -> None:
        slots = self._slots(self._pages())
        slots = slots[(self.records.links[slots] != 0).any(1)]
        if not slots.numel():
            return
        for part, seals in enumerate(self.records.seals):
            writers = (seals[slots, 1] & _TAG_MASK) | (self.launch.forward & MASK32)
            seals[slots] = torch.stack((self.readers(self.space, part).fingerprints(slots), writers), 1)

    def _queue(self) -> None:
        self._enqueue(self._slots(self._pages()))

    def _enqueue(self, slots: torch.Tensor) -> None:
        for part, seals in enumerate(self.records.seals):
            enqueue(self.launch, self.space, part, slots[sealed(seals[slots, 1])])

    # --- rows -----------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        fact, row = self.fact, self._row()
        row.zero_()
        row[RowWord.TAG] = fact.tag
        row[RowWord.SEED] = fact.seed
        row[RowWord.HIGH] = -1
        row[RowWord.ANCHOR_POSITION] = NOTHING
        if fact.position == 0 and fact.seed:
            self._set_base(row, fact.seed)
        elif fact.armed:
            self._set_base(row, fact.digest)

    def _set_base(self, row: torch.Tensor, digest: int) -> None:
        position = self.fact.position
        row[RowWord.LOW] = position
        row[RowWord.HIGH] = position
        row[RowWord.FLAGS] |= RowFlag.ARMED
        row[RowWord.ANCHOR_POSITION] = NOTHING
        row[RowWord.ANCHOR_DIGEST] = 0
        self.state.history[self.fact.row, position % HISTORY] = digest

    def _anchor(self) -> None:
        """A base arrived. A row that went on without any digest stays as it is: where it stands now is not known."""
        fact, row = self.fact, self._row()
        words = row.tolist()
        if words[RowWord.TAG] != fact.tag:
            return
        position, assumed = words[RowWord.ANCHOR_POSITION], words[RowWord.ANCHOR_DIGEST]
        if fact.armed or (words[RowWord.HIGH] < 0 and position < 0):
            self._set_base(row, fact.digest)
        elif position == fact.position and assumed:
            if assumed == fact.digest:
                row[RowWord.FLAGS] |= RowFlag.ARMED
                row[RowWord.ANCHOR_POSITION] = NOTHING
                row[RowWord.ANCHOR_DIGEST] = 0
            else:
                self._report_base(assumed)

    def _report_base(self, assumed: int) -> None:
        values = {
            V.ROW: self.fact.row,
            V.POSITION_EXPECTED: self.fact.position,
            V.DIGEST_EXPECTED: self.fact.digest,
            V.DIGEST_FOUND: assumed,
        }
        device = self.state.device
        fields = {column: torch.tensor([value], device=device) for column, value in values.items()}
        wrong = torch.ones(1, dtype=torch.bool, device=device)
        report(self.launch, Kind.REQUEST_DIGEST, self.fact.group, fields, wrong)

    def _finish(self) -> None:
        fact, launch = self.fact, self.launch
        number = launch[Word.OUTBOX]
        launch[Word.OUTBOX] += 1
        held, digest = False, 0
        if fact.row >= 0:
            row = self._row()
            words = row.tolist()
            if words[RowWord.TAG] == fact.tag:
                held = words[RowWord.HIGH] >= 0 and words[RowWord.LOW] <= fact.position <= words[RowWord.HIGH]
                digest = int(self.state.history[fact.row, fact.position % HISTORY]) if held else 0
                row[RowWord.TAG] = 0
                row[RowWord.HIGH] = -1
        out = self.state.outbox[number % OUTBOX_ROWS]
        # The sequence word last: a reader on another thread must not take half a row for a whole one.
        out[OutboxWord.TAG :] = torch.tensor([fact.tag, fact.position, int(held), digest, launch.forward])
        out[OutboxWord.SEQUENCE] = number + 1

    # --- what a fact names ----------------------------------------------------------------------------------

    @property
    def _name(self) -> str:
        return f"fact {self.fact.op.name} for group {self.group.name!r}"

    def _row(self) -> torch.Tensor:
        if not 0 <= self.fact.row < self.state.limits.max_rows:
            raise BatchError(f"{self._name}: row {self.fact.row} is none of the {self.state.limits.max_rows} rows")
        return self.state.rows[self.fact.row]

    def _pages(self, *, targets: bool = False) -> torch.Tensor:
        named = self.fact.targets if targets else self.fact.pages
        pages = torch.as_tensor(named, dtype=torch.int64, device=self.state.device).flatten()
        if pages.numel() and self.fact.judged:
            # Nobody could look at these numbers before.
            there = (pages >= 0) & (pages < self.group.num_pages)
            return pages if bool(there.all()) else pages[there]
        if pages.numel():
            low, high = (int(bound) for bound in pages.aminmax())
            if low < 0 or high >= self.group.num_pages:
                raise BatchError(f"{self._name}: pages {low}..{high} reach out of 0..{self.group.num_pages - 1}")
        return pages

    def _slots(self, pages: torch.Tensor) -> torch.Tensor:
        return _runs(pages * self.group.page_size, self.group.page_size)

    def _record_tensor(self, slots: int) -> torch.Tensor:
        shape = (slots, 2 + 2 * len(self.group.parts))
        records = self.fact.records
        if records is None or tuple(records.shape) != shape or records.dtype != torch.int64:
            found = "none" if records is None else f"{records.dtype} {tuple(records.shape)}"
            raise BatchError(f"{self._name}: records must be int64 {shape}, got {found}")
        return records


def _runs(starts: torch.Tensor, length: int) -> torch.Tensor:
    """``length`` consecutive numbers from each start, strung together."""
    return (starts.unsqueeze(1) + torch.arange(length, device=starts.device)).flatten()


def _wipe(records: GroupState, slots: torch.Tensor) -> None:
    records.links[slots] = 0
    records.seals[:, slots] = 0
