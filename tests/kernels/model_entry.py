"""The plain-Python model of mark and check."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvcanary import record
from kvcanary.batch import ForwardBatch, GroupBatch
from kvcanary.record import Kind, signed
from kvcanary.state import (
    HISTORY,
    OWNER_NULL,
    OWNER_TRASH,
    Check,
    DigestSource,
    Reason,
    Role,
    RowFlag,
    RowWord,
    Word,
)
from tests.kernels.model import NONE, OUTSIDE, Link, ModelBase, position_of


class EntryModel(ModelBase):
    """Mark and check."""

    def mark(self, batch: ForwardBatch, groups: Sequence[int], *, first: bool, poison: str = "") -> None:
        if not self.launch(Role.MARK):
            return
        if first:
            self._open(batch)
            self._judge_inputs(batch)
        for g in groups:
            item = batch.groups[g]
            if item is not None:
                self._mark_group(batch, g, item, poison)

    def _position(self, batch: ForwardBatch, t: int, p: int) -> int:
        return int(batch.positions[t]) if not batch.linked and batch.positions is not None else p

    def _open(self, batch: ForwardBatch) -> None:
        tokens = batch.num_tokens
        self.counters[Word.SCRATCH_TOKENS], self.counters[Word.SCRATCH_ROWS] = tokens, batch.num_rows
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
                self.report(Kind.INPUT_POSITION, Role.MARK, g, row, position_expected=high, position_found=context)
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
                    self.report(Kind.INPUT_TOKEN, Role.MARK, g, row, position_expected=context - 1, code_expected=code)

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
            self.report(Kind.INPUT_TOKEN, Role.MARK, g, row, position_expected=p, code_expected=wanted, code_found=code)

    def _mark_group(self, batch: ForwardBatch, g: int, item: GroupBatch, poison: str) -> None:
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
                    pending.append((t, slot, self.rows[row][RowWord.TAG]))
        runs = self.poison_runs(g, poison)
        for t, slot, _ in pending if runs else ():
            owner, tag = self.state_of(g, slot), self.rows[self.scratch_rows[t]][RowWord.TAG]
            mine = owner.state == record.OWNER_HELD and owner.tag == tag != 0
            placed = mine and list(self.link(g, slot)) != self.scratch_links[t]
            self.scratch_poison[g][t] = int(placed)
            if placed:
                raw, place, pattern = self.poison_spot(g, runs, slot)
                raw[place : place + len(pattern)] = torch.tensor(list(pattern), dtype=torch.uint8)
        for t, slot, tag in pending:
            owner = self.state_of(g, slot)
            if owner.state == record.OWNER_HELD and owner.tag == 0:
                self.owner[space][slot // group.page_size] = record.owner_word(owner.as_of, tag, owner.state)
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
            foreign = owner.state == record.OWNER_HELD and tag not in (0, owner.tag) and owner.tag != 0
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
                    code_expected=wanted[0] & record.MASK32, digest_expected=wanted[1],
                    **self.found(self.link(g, slot)),
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
