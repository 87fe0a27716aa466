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
from kvcanary.layout import KVSource
from kvcanary.record import Kind, SealFlag, signed
from kvcanary.state import (
    HISTORY,
    KIND_COUNTS,
    OWNER_NULL,
    OWNER_TRASH,
    REPEATS,
    SCRATCH_ROWS,
    UNVERIFIED,
    VERIFIED,
    Check,
    DeviceState,
    DigestSource,
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
        for name in (
            "counters rows history scratch_slots scratch_links scratch_rows scratch_batch suspects headers outbox".split()
        ):
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

    def report(self, kind: Kind, role: Role, g: int, row: int = -1, slot: int = -1, flag_part: int = 0, **known: int) -> None:
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
                for column in "SLOT PAGE ROW POSITION_EXPECTED POSITION_FOUND CODE_EXPECTED CODE_FOUND PART".split():
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

    def lookup(self, g: int, item: GroupBatch, b: int, p: int) -> int:
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


class EntryModel(ModelBase):
    """Mark and check."""

    def mark(self, batch: ForwardBatch, groups: Sequence[int], *, first: bool) -> None:
        if not self.launch(Role.MARK):
            return
        if first:
            self._open(batch)
            self._judge_inputs(batch)
        for g in groups:
            item = batch.groups[g]
            if item is not None:
                self._mark_group(batch, g, item)

    def _position(self, batch: ForwardBatch, t: int, p: int) -> int:
        return int(batch.positions[t]) if not batch.linked and batch.positions is not None else p

    def _open(self, batch: ForwardBatch) -> None:
        tokens = batch.num_tokens
        self.counters[Word.SCRATCH_TOKENS], self.counters[SCRATCH_ROWS] = tokens, batch.num_rows
        for slots in self.scratch_slots:
            slots[:tokens] = [-1] * tokens
        self.scratch_rows[:tokens] = [-1] * tokens
        self.scratch_links[:tokens] = [[0, 0] for _ in range(tokens)]
        self.scratch_batch[: batch.num_rows] = [[-1, 0, 0, 0, 0, 0] for _ in range(batch.num_rows)]
        for b, row, start, new, context in self.batch_rows(batch):
            digest, source = self._digest(batch, b, row, context)
            self.scratch_batch[b] = [row, start, new if batch.linked else 0, context, digest, source]
            self.counters[Word.NEW_TOKENS] += new
            for t in range(start, start + new):
                p = self._position(batch, t, context + t - start)
                salt = 0 if batch.token_salts is None else int(batch.token_salts[t])
                code = record.token_code(int(batch.input_ids[t]), p, salt)
                known = batch.linked and source != DigestSource.UNKNOWN
                self.scratch_rows[t] = row
                self.scratch_links[t] = [record.link_word(code, p), digest if known else 0]
                digest = signed(digest + record.mix(self.keys, code, p))

    def _digest(self, batch: ForwardBatch, b: int, row: int, context: int) -> tuple[int, int]:
        words = self.rows[row]
        if context == 0 and words[RowWord.SEED]:
            return words[RowWord.SEED], DigestSource.SEED
        if words[RowWord.HIGH] >= 0 and words[RowWord.LOW] <= context <= words[RowWord.HIGH]:
            return self.history[row][context % HISTORY], DigestSource.HISTORY
        for g, item in enumerate(batch.groups):
            if item is not None and item.table is not None:
                slot = self.slot(g, item, self.lookup(g, item, b, context - 1))[1]
                if slot >= 0:
                    link = self.link(g, slot)
                    if link[1] and position_of(link[0]) == context - 1:
                        return self.after(link), DigestSource.SLOTS
                break
        return 0, DigestSource.UNKNOWN

    def _judge_inputs(self, batch: ForwardBatch) -> None:
        g = next(g for g, item in enumerate(batch.groups) if item is not None)
        rewinds = [self.layout.groups[i].max_rewind for i, item in enumerate(batch.groups) if item is not None]
        for _, row, _, _, context in self.batch_rows(batch):
            high = self.rows[row][RowWord.HIGH]
            back = any(limit is not None and high - context > limit for limit in rewinds)
            if batch.linked and high >= 0 and (context > high or back):
                self.report(
                    Kind.INPUT_POSITION, Role.MARK, g, row, position_expected=high, position_found=context
                )
        for _, row, start, new, context in self.batch_rows(batch):
            for t in range(start, start + new):
                self._judge_token(batch, g, row, t, context + t - start)
        for b, row, _, _, context in self.batch_rows(batch):
            last = -1 if batch.last_ids is None else int(batch.last_ids[b])
            words = self.rows[row]
            if last >= 0 and context >= 1 and words[RowWord.LOW] <= context - 1 and context <= words[RowWord.HIGH]:
                code = record.token_code(last, context - 1)
                step = self.history[row][context % HISTORY] - self.history[row][(context - 1) % HISTORY]
                if signed(step) != record.mix(self.keys, code, context - 1):
                    self.report(
                        Kind.INPUT_TOKEN, Role.MARK, g, row, position_expected=context - 1, code_expected=code
                    )

    def _judge_token(self, batch: ForwardBatch, g: int, row: int, t: int, p: int) -> None:
        token, salt = int(batch.input_ids[t]), 0 if batch.token_salts is None else int(batch.token_salts[t])
        code = record.token_code(token, self._position(batch, t, p), salt)
        if batch.linked and batch.positions is not None and int(batch.positions[t]) != p:
            found = int(batch.positions[t])
            self.report(Kind.INPUT_POSITION, Role.MARK, g, row, position_expected=p, position_found=found)
        if token < 0:
            self.report(Kind.INPUT_PLACEHOLDER, Role.MARK, g, row, position_expected=p, code_found=code)
        expected = -1 if batch.expected_ids is None else int(batch.expected_ids[t])
        if expected >= 0 and expected != token:
            wanted = record.token_code(expected, p, salt)
            self.report(
                Kind.INPUT_TOKEN, Role.MARK, g, row, position_expected=p, code_expected=wanted, code_found=code
            )

    def _mark_group(self, batch: ForwardBatch, g: int, item: GroupBatch) -> None:
        group, space = self.layout.groups[g], self.layout.spaces[g]
        pending = []
        for b, row, start, new, context in self.batch_rows(batch):
            for t in range(start, start + new):
                p = context + t - start
                index = self.lookup(g, item, b, p) if item.slot_mapping is None else int(item.slot_mapping[t])
                index, slot = self.slot(g, item, index)
                if slot == OUTSIDE:
                    self.report(Kind.SLOT_RANGE, Role.MARK, g, row, slot=index, position_expected=p)
                overwritten = group.ring is not None and t - start < new - group.ring
                if slot >= 0 and not overwritten and self.state_of(g, slot).state != OWNER_TRASH:
                    self._judge_write(batch, g, item, b, row, t, p, slot)
                    pending.append((t, slot))
        for t, slot in pending:
            self.links[space][slot] = list(self.scratch_links[t])
            for seals in self.seals[space]:
                seals[slot] = [0, 0]
            self.scratch_slots[g][t] = slot

    def _judge_write(
        self, batch: ForwardBatch, g: int, item: GroupBatch, b: int, row: int, t: int, p: int, slot: int
    ) -> None:
        group, owner, tag = self.layout.groups[g], self.state_of(g, slot), self.rows[row][RowWord.TAG]
        old, new = self.link(g, slot), (self.scratch_links[t][0], self.scratch_links[t][1])
        if owner.state == record.OWNER_UNKNOWN:
            self.unverified(g, Reason.UNKNOWN_OWNER)
        else:
            self.verified(g, Check.WRITES)
        if old != new or new[1] == 0:
            foreign = owner.state == record.OWNER_HELD and tag not in (0, owner.tag)
            kind = None
            if owner.state == record.OWNER_FREED:
                kind = Kind.WRITE_FREED
            elif foreign or owner.state == OWNER_NULL:
                kind = Kind.WRITE_FOREIGN
            if kind is not None:
                self.report(
                    kind, Role.MARK, g, row, slot, position_expected=position_of(new[0]),
                    code_expected=new[0] & record.MASK32, digest_expected=new[1], **self.found(old),
                )  # fmt: skip
        wrong, named = False, NONE
        if item.slot_mapping is not None and item.table is not None and item.table.covers_new:
            named = self.slot(g, item, self.lookup(g, item, b, p))[1]
            wrong = named != slot
        if group.offset_follows_position:
            wrong |= (p % group.ring if group.ring else p) % group.page_size != slot % group.page_size
        if wrong:
            self.report(Kind.TABLE_MISMATCH, Role.MARK, g, row, slot, position_expected=p, position_found=named)

    def found(self, link: Link) -> dict[str, int]:
        if link == (0, 0):
            return {}
        return {
            "position_found": position_of(link[0]),
            "code_found": link[0] & record.MASK32,
            "digest_found": link[1],
        }

    # --- check ----------------------------------------------------------------------------------------------

    def check(self, batch: ForwardBatch, groups: Sequence[int]) -> None:
        if not self.launch(Role.CHECK):
            return
        rows = list(self.batch_rows(batch))
        for g in groups:
            item = batch.groups[g]
            for b, row, _, _, context in rows:
                if item is not None:
                    self._check_row(g, item, b, row, context, len(rows))
        for g in groups:
            if batch.groups[g] is not None and self.layout.groups[g].ring is None:
                self.conflicts(g, Role.CHECK)

    def conflicts(self, g: int, role: Role) -> None:
        for t in range(self.counters[Word.SCRATCH_TOKENS]):
            slot, wanted = self.scratch_slots[g][t], self.scratch_links[t]
            if slot >= 0 and list(self.link(g, slot)) != wanted:
                self.report(
                    Kind.WRITE_CONFLICT, role, g, self.scratch_rows[t], slot, position_expected=position_of(wanted[0]),
                    code_expected=wanted[0] & record.MASK32, digest_expected=wanted[1], **self.found(self.link(g, slot)),
                )  # fmt: skip

    def _check_row(self, g: int, item: GroupBatch, b: int, row: int, context: int, live: int) -> None:
        group, table = self.layout.groups[g], item.table
        low = 0
        if item.required_from is not None:
            low = int(item.required_from[b])
        else:
            if table is not None and table.first_position is not None:
                low = int(table.first_position[b])
            if group.window is not None:
                low = max(low, context - group.window + 1)
        if group.ring is not None:
            low = max(low, context - group.ring)
        low = min(max(low, 0), max(context, 0))
        self.unverified(g, Reason.OUT_OF_WINDOW, low)
        if table is None:
            self.unverified(g, Reason.NO_TABLE, max(context, 0) - low)
            return
        chosen = list(range(low, context))
        cap = max(64, self.limits.head_entries // live)
        if len(chosen) > cap:
            newest, rest = chosen[-(cap // 2) :], chosen[: -(cap // 2)]
            begin = self.forward * (cap - cap // 2) % len(rest)
            picked = rest[begin : begin + cap - cap // 2] + newest
            self.unverified(g, Reason.OVER_CAPACITY, len(chosen) - len(picked))
            chosen = picked
        missing = [p for p in chosen if not self._check_position(g, item, b, row, p, low)]
        if missing:
            self.report(Kind.WINDOW, Role.CHECK, g, row, position_expected=missing[0])
        if context > low:
            self._check_end(g, item, b, row, context)

    def _usable(self, g: int, item: GroupBatch, b: int, p: int) -> tuple[int, int]:
        index, slot = self.slot(g, item, self.lookup(g, item, b, p))
        if slot >= 0 and self.state_of(g, slot).state in (OWNER_TRASH, OWNER_NULL):
            return index, NONE
        return index, slot

    def _check_position(self, g: int, item: GroupBatch, b: int, row: int, p: int, low: int) -> bool:
        """False when nothing is mapped there."""
        index, slot = self._usable(g, item, b, p)
        if slot == NONE:
            return False
        if slot == OUTSIDE:
            self.report(Kind.SLOT_RANGE, Role.CHECK, g, row, slot=index, position_expected=p)
            return True
        link = self.link(g, slot)
        if link == (0, 0):
            if self.state_of(g, slot).state in (record.OWNER_HELD, record.OWNER_FREED):
                self.report(Kind.UNWRITTEN, Role.CHECK, g, row, slot, position_expected=p)
            else:
                self.unverified(g, Reason.UNKNOWN_RECORD)
            return True
        self.verified(g, Check.LINKS)
        if position_of(link[0]) != p:
            self.report(Kind.POSITION, Role.CHECK, g, row, slot, position_expected=p, **self.found(link))
            return True
        expected = None
        if p == 0:
            expected = self.rows[row][RowWord.SEED] or None
        elif p - 1 >= low:
            before = self._usable(g, item, b, p - 1)[1]
            if before >= 0:
                previous = self.link(g, before)
                if previous[1] and position_of(previous[0]) == p - 1:
                    expected = self.after(previous)
        if link[1] == 0:
            self.unverified(g, Reason.UNLINKED)
        elif expected is not None and link[1] != expected:
            self.report(
                Kind.DIGEST, Role.CHECK, g, row, slot, position_expected=p, digest_expected=expected, **self.found(link)
            )
        return True

    def _check_end(self, g: int, item: GroupBatch, b: int, row: int, context: int) -> None:
        slot = self._usable(g, item, b, context - 1)[1]
        if slot < 0:
            return
        link = self.link(g, slot)
        if link[1] == 0 or position_of(link[0]) != context - 1:
            return
        words, after = self.rows[row], self.after(link)
        if not (words[RowWord.HIGH] >= 0 and words[RowWord.LOW] <= context <= words[RowWord.HIGH]):
            self.unverified(g, Reason.UNARMED_ROW)
        elif after != self.history[row][context % HISTORY]:
            known = {**self.found(link), "digest_found": after, "digest_expected": self.history[row][context % HISTORY]}
            self.report(Kind.REQUEST_DIGEST, Role.CHECK, g, row, slot, position_expected=context - 1, **known)
        elif words[RowWord.FLAGS] & RowFlag.ARMED:
            self.verified(g, Check.ROW_ENDS)
        else:
            self.unverified(g, Reason.UNARMED_ROW)
