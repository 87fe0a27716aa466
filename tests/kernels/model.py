"""The semantics of the kernels once more, in plain Python, one token and one position at a time.

Slow, and written without a look at the vectorised code: where the two disagree, one of them is wrong. State is kept in
lists; :meth:`Model.differences` compares it with a :class:`~kvcanary.state.DeviceState`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from kvcanary import record
from kvcanary.batch import ForwardBatch, GroupBatch
from kvcanary.layout import KVSource, Run
from kvcanary.record import Kind, SealFlag, signed
from kvcanary.state import (
    KIND_COUNTS,
    REPEATS,
    UNVERIFIED,
    VERIFIED,
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
from tests.kernels.pools import run_addresses, storage_bytes

NONE, OUTSIDE = -1, -2
SLOT_KINDS = {
    Kind.POSITION: SealFlag.POSITION,
    Kind.DIGEST: SealFlag.DIGEST,
    Kind.UNWRITTEN: SealFlag.UNWRITTEN,
    Kind.CONTENT: SealFlag.CONTENT,
    Kind.NONFINITE: SealFlag.NONFINITE,
    Kind.WRITE_MISSING: SealFlag.WRITE_MISSING,
    Kind.NULL_DIRTY: SealFlag.CONTENT,
}
EXPONENTS = {
    torch.bfloat16: (2, 0x7F80),
    torch.float16: (2, 0x7C00),
    torch.float32: (4, 0x7F800000),
    torch.float8_e5m2: (1, 0x7C),
    torch.float8_e4m3fn: (1, 0x7F),
}
Link = tuple[int, int]


def position_of(word: int) -> int:
    position = (word & record.MASK64) >> 32
    return position - (1 << 32) if position >> 31 else position


class ModelBase:
    """State in lists, counting and reporting, tables and bytes."""

    def __init__(self, state: DeviceState) -> None:
        self.layout, self.keys, self.limits = state.layout, state.keys, state.limits
        self.load(state)

    def load(self, state: DeviceState) -> None:
        """Take over everything."""
        self.counters: list[int] = state.counters.tolist()
        self.rows: list[list[int]] = state.rows.tolist()
        self.history: list[list[int]] = state.history.tolist()
        self.scratch_slots: list[list[int]] = state.scratch_slots.tolist()
        self.scratch_links: list[list[int]] = state.scratch_links.tolist()
        self.scratch_rows: list[int] = state.scratch_rows.tolist()
        self.scratch_poison: list[list[int]] = state.scratch_poison.tolist()
        self.scratch_batch: list[list[int]] = state.scratch_batch.tolist()
        self.suspects: list[int] = state.suspects.tolist()
        self.acked: list[int] = state.acked.tolist()
        self.headers: list[list[int]] = state.headers.tolist()
        self.outbox: list[list[int]] = state.outbox.tolist()
        self.links: dict[int, list[list[int]]] = {}
        self.seals: dict[int, list[list[list[int]]]] = {}
        self.owner: dict[int, list[int]] = {}
        for space in sorted(set(self.layout.spaces)):
            group = state.groups[space]
            self.links[space], self.seals[space] = group.links.tolist(), group.seals.tolist()
            self.owner[space] = group.owner.tolist()
        self.arenas = {name: table.tolist() for name, table in state.arenas.items()}
        self.violations: list[dict[ViolationWord, int]] = []
        self.stored_before = self.counters[Word.STORED]

    def differences(self, state: DeviceState) -> list[str]:
        """Names of tensors that differ from the model's, with the first places."""
        found = []
        for name in [
            "counters",
            "rows",
            "history",
            "scratch_slots",
            "scratch_links",
            "scratch_rows",
            "scratch_poison",
            "scratch_batch",
            "suspects",
            "headers",
            "outbox",
        ]:
            found += _compare(name, getattr(self, name), getattr(state, name))
        for space in self.links:
            group = state.groups[space]
            found += _compare(f"links{space}", self.links[space], group.links)
            found += _compare(f"seals{space}", self.seals[space], group.seals)
            found += _compare(f"owner{space}", self.owner[space], group.owner)
        for name, table in self.arenas.items():
            found += _compare(f"arena {name}", table, state.arenas[name])
        mine = sorted(_key(row) for row in self.violations)
        stored = range(self.stored_before, self.counters[Word.STORED])
        rows = [state.violations[s % len(state.violations)].tolist() for s in stored]
        theirs = sorted(_key({word: row[word] for word in ViolationWord}) for row in rows)
        if mine != theirs:
            found.append(
                f"violations: model only {[k for k in mine if k not in theirs][:3]}, other only "
                f"{[k for k in theirs if k not in mine][:3]}, {len(mine)} and {len(theirs)}"
            )
        return found

    # --- counting and reporting -----------------------------------------------------------------------------

    @property
    def forward(self) -> int:
        return self.counters[Word.FORWARD]

    def launch(self, role: Role) -> bool:
        self.counters[Word.LAUNCHES + role] += 1
        return self.counters[Word.ARMED] != 0

    def verified(self, g: int, check: Check, count: int = 1) -> None:
        self.counters[group_base(g) + VERIFIED + check] += count

    def unverified(self, g: int, reason: Reason, count: int = 1) -> None:
        self.counters[group_base(g) + UNVERIFIED + reason] += count

    def report(
        self, kind: Kind, role: Role, g: int, row: int = -1, slot: int = -1, flag_part: int = 0, **known: int
    ) -> None:
        space = self.layout.spaces[g]
        flag = SLOT_KINDS.get(kind)
        if flag is None:
            fresh = not self.rows[row][RowWord.REPORTED] >> kind & 1
            self.rows[row][RowWord.REPORTED] |= 1 << kind
        else:
            word = self.seals[space][flag_part][slot]
            fresh = not word[1] >> 56 & flag
            old = word[1]
            word[1] |= int(flag) << 56
        base = group_base(g)
        if not fresh:
            self.counters[base + REPEATS] += 1
        else:
            count = self.counters[base + KIND_COUNTS + kind]
            self.counters[base + KIND_COUNTS + kind] += 1
            if count - self.acked[g * record.NUM_KINDS + kind] < self.limits.ring_quota:
                self.counters[Word.STORED] += 1
                fields = dict.fromkeys(ViolationWord, 0)
                for column in [
                    "SLOT",
                    "PAGE",
                    "ROW",
                    "POSITION_EXPECTED",
                    "POSITION_FOUND",
                    "CODE_EXPECTED",
                    "CODE_FOUND",
                    "PART",
                ]:
                    fields[ViolationWord[column]] = -1
                for name, value in known.items():
                    fields[ViolationWord[name.upper()]] = value
                fields[ViolationWord.KIND], fields[ViolationWord.ROLE], fields[ViolationWord.GROUP] = kind, role, g
                fields[ViolationWord.FORWARD], fields[ViolationWord.SLOT] = self.forward, slot
                if row >= 0:
                    fields[ViolationWord.ROW], fields[ViolationWord.TAG] = row, self.rows[row][RowWord.TAG]
                if slot >= 0 and kind != Kind.SLOT_RANGE:
                    page = slot // self.layout.groups[g].page_size
                    fields[ViolationWord.PAGE], fields[ViolationWord.OWNER] = page, self.owner[space][page]
                    fields[ViolationWord.WRITER] = old if flag else self.seals[space][0][slot][1]
                self.violations.append(fields)
        if kind in (Kind.REQUEST_DIGEST, Kind.INPUT_TOKEN, Kind.INPUT_POSITION):
            self.rows[row][RowWord.FLAGS] |= RowFlag.TAINTED

    # --- batches and tables ---------------------------------------------------------------------------------

    def batch_rows(self, batch: ForwardBatch) -> Iterator[tuple[int, int, int, int, int]]:
        """(batch row, row, first token, new tokens, old positions) of live rows."""
        starts = batch.query_start_loc.tolist()
        live = batch.num_rows if batch.num_requests is None else int(batch.num_requests)
        for b, (row, context) in enumerate(zip(batch.request_rows.tolist(), batch.context_lens.tolist(), strict=True)):
            if b < live and 0 <= row < self.limits.max_rows:
                yield b, row, starts[b], starts[b + 1] - starts[b], context

    def lookup(self, g: int, item: GroupBatch, b: int, p: int) -> int:  # noqa: PLR0911
        """Engine index of position p before translation."""
        group, table = self.layout.groups[g], item.table
        if table is None or p < 0:
            return NONE
        size = group.page_size
        ring = group.ring if table.row_offsets is None else None
        first = 0 if table.first_position is None or ring else int(table.first_position[b])
        place = p % ring if ring else p
        column = place - first if table.unit == "slot" else place // size - first // size
        if column < 0:
            return NONE
        if table.row_offsets is not None:
            at = int(table.row_offsets[b]) + column
            if at >= int(table.row_offsets[b + 1]):
                return NONE
            entry = int(table.entries[at])
        else:
            line = b if table.row_index is None else int(table.row_index[b])
            if column >= table.entries.shape[1]:
                return NONE
            entry = int(table.entries[line, column])
        if entry < 0:
            return NONE
        if table.unit == "slot":
            return entry
        return entry // group.page_entry_stride * (group.index_stride or size) + place % size

    def slot(self, g: int, item: GroupBatch, index: int) -> tuple[int, int]:
        """(index after translation, slot)."""
        group = self.layout.groups[g]
        if index < 0:
            return NONE, NONE
        if item.translation is not None:
            if index >= len(item.translation):
                return index, OUTSIDE
            index = int(item.translation[index])
            if index <= 0:
                return NONE, NONE
        stride = group.index_stride or group.page_size
        page, offset = divmod(index, stride)
        if page >= group.num_pages or offset >= group.page_size:
            return index, OUTSIDE
        return index, page * group.page_size + offset

    def state_of(self, g: int, slot: int) -> record.Owner:
        return record.parse_owner(self.owner[self.layout.spaces[g]][slot // self.layout.groups[g].page_size])

    def link(self, g: int, slot: int) -> Link:
        word, digest = self.links[self.layout.spaces[g]][slot]
        return word, digest

    def after(self, link: Link) -> int:
        return signed(link[1] + record.mix(self.keys, link[0] & record.MASK32, position_of(link[0])))

    # --- bytes ----------------------------------------------------------------------------------------------

    def token_bytes(self, source: KVSource, slot: int) -> list[bytes]:
        raw = storage_bytes(source)
        return [bytes(raw[a : a + n].tolist()) for a, n in run_addresses(source, slot)]

    def sources(self, g: int, part: str) -> Sequence[KVSource]:
        return self.layout.groups[self.layout.spaces[g]].part_sources(part)

    def fingerprint(self, g: int, part: str, slot: int) -> int:
        total = 0
        for source in self.sources(g, part):
            seed = record.source_seed(self.keys, source.layer, source.component)
            for run, data in zip(source.runs, self.token_bytes(source, slot), strict=True):
                total += record.fingerprint_bytes(seed, data, run.first_word)
        return signed(total)

    def poison_runs(self, g: int, part: str) -> list[tuple[KVSource, Run]]:
        group = self.layout.groups[g]
        if group.ring is not None or group.kind == "state" or group.zero_on_allot:
            return []
        runs = [(source, run) for source in self.sources(g, part) for run in source.runs]
        long = [pair for pair in runs if pair[1].num_bytes >= 16]
        return long or [pair for pair in runs if pair[1].num_bytes >= 8]

    def poison_spot(self, g: int, runs: list[tuple[KVSource, Run]], slot: int) -> tuple[torch.Tensor, int, bytes]:
        """The buffer, where in it this forward's poison goes, and the poison."""
        poison = record.poison(self.keys, self.forward, g)
        source, run = runs[poison.choice % len(runs)]
        starts = dict(zip(source.runs, run_addresses(source, slot), strict=True))
        first, size = starts[run]
        return storage_bytes(source), first + poison.start(size), poison.pattern[:size]

    def nonfinite(self, g: int, part: str, slot: int) -> bool:
        for source in self.sources(g, part):
            if source.dtype in EXPONENTS:
                size, mask = EXPONENTS[source.dtype]
                for data in self.token_bytes(source, slot):
                    values = (int.from_bytes(data[i : i + size], "little") for i in range(0, len(data), size))
                    if any(value & mask == mask for value in values):
                        return True
        return False


def _compare(name: str, mine: list[Any], theirs: torch.Tensor) -> list[str]:
    expected = torch.tensor(mine, dtype=torch.int64)
    if torch.equal(expected, theirs.cpu()):
        return []
    places = (expected != theirs.cpu()).nonzero()[:4].tolist()
    values = [(p, int(expected[tuple(p)]), int(theirs[tuple(p)])) for p in places]
    return [f"{name}: (place, model, other) {values}"]


def _key(row: dict[ViolationWord, int]) -> tuple[int, ...]:
    """What must agree of a violation: its number, and flags set earlier in one launch, depend on the order of kinds."""
    left_out = (ViolationWord.SEQUENCE, ViolationWord.TAINTED, ViolationWord.WRITER)
    writer = row[ViolationWord.WRITER] & ((1 << record.FLAG_SHIFT) - 1)
    return (*(value for word, value in row.items() if word not in left_out), writer)
