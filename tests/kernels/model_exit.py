"""The second half of the plain-Python model: seal, scrub, commit, facts and window."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvcanary import record
from kvcanary.batch import ForwardBatch
from kvcanary.kernels import DeviceFact
from kvcanary.layout import KVSource, Run
from kvcanary.record import MASK32, Kind, SealFlag, signed, writer_word
from kvcanary.state import (
    HISTORY,
    OUTBOX_ROWS,
    OWNER_NULL,
    OWNER_TRASH,
    SCRUB_CURSOR,
    SCRUB_PASS_FORWARD,
    SCRUB_PASSES,
    SUSPECT_ROWS,
    VERIFIED,
    Check,
    DigestSource,
    Reason,
    Role,
    RowFlag,
    RowWord,
    Word,
    group_base,
)
from tests.kernels.model import position_of
from tests.kernels.model_entry import EntryModel
from tests.kernels.pools import run_addresses, storage_bytes

SUSPECT, CONTENT = int(SealFlag.SUSPECT) << 56, int(SealFlag.CONTENT) << 56


class Model(EntryModel):
    """All operations of :class:`kvcanary.kernels.Kernels`, on lists."""

    def seal(self, part: str, scrub_bytes: int, *, last: bool, nonfinite: bool, poison: str = "off") -> None:
        armed = self.launch(Role.SEAL)
        if scrub_bytes > 0:
            self.counters[Word.LAUNCHES + Role.SCRUB] += 1
        if armed:
            if scrub_bytes > 0:  # first: the tokens of this forward have no seal yet
                self._scrub_queue()
                self._scrub_spaces(scrub_bytes)
            for g, space in enumerate(self.layout.spaces):
                parts = self.layout.groups[space].parts
                if part in parts:
                    self._seal_group(g, parts.index(part), part, nonfinite=nonfinite, poison=poison)
            if last:
                self._commit()
        if last:
            self._end()

    def abandon(self) -> None:
        self.counters[Word.ABANDONED] += 1
        self._end()

    def _end(self) -> None:
        n = self.forward
        self.headers[n % len(self.headers)] = [n, *self.counters[1:]]
        self.counters[Word.FORWARD] = n + 1
        self.counters[Word.SCRATCH_TOKENS] = 0

    def _seal_group(self, g: int, number: int, part: str, *, nonfinite: bool, poison: str) -> None:
        space = self.layout.spaces[g]
        if number == 0 and self.layout.groups[g].ring is not None:
            self.conflicts(g, Role.SEAL)
        found, sealed = [], []
        for t in range(self.counters[Word.SCRATCH_TOKENS]):
            slot = self.scratch_slots[g][t]
            if slot >= 0 and list(self.link(g, slot)) == self.scratch_links[t]:
                tag = self.rows[self.scratch_rows[t]][RowWord.TAG]
                self.seals[space][number][slot] = [self.fingerprint(g, part, slot), writer_word(self.forward, tag)]
                if number == 0:
                    self.verified(g, Check.SEALED)
                sealed.append((t, slot))
                if nonfinite and self.nonfinite(g, part, slot):
                    found.append((t, slot))
        for t, slot in found:
            p = position_of(self.scratch_links[t][0])
            self.report(Kind.NONFINITE, Role.SEAL, g, self.scratch_rows[t], slot, part=number, position_expected=p)
        if poison != "off":
            self._look_for_poison(g, number, part, sealed, full=poison == "full")

    def _look_for_poison(self, g: int, number: int, part: str, sealed: list[tuple[int, int]], *, full: bool) -> None:
        runs = self.poison_runs(g, part)
        for t, slot in sealed if runs else ():
            raw, place, pattern = self.poison_spot(g, runs, slot)
            bits = self.scratch_poison[g]
            bits[t] |= 2 if full and self._holds_filling(g, runs, slot) else 0
            missing = bits[t] & 2 or (bits[t] and bytes(raw[place : place + len(pattern)].tolist()) == pattern)
            if missing:
                word = self.scratch_links[t][0]
                self.report(
                    Kind.WRITE_MISSING, Role.SEAL, g, self.scratch_rows[t], slot, part=number,
                    position_expected=position_of(word), code_expected=word & MASK32,
                )  # fmt: skip
            elif bits[t]:
                self.verified(g, Check.WRITTEN)

    def fills(self, space: int) -> bool:
        users = [group for group, own in zip(self.layout.groups, self.layout.spaces, strict=True) if own == space]
        return not any(group.ring is not None or group.kind == "state" or group.zero_on_allot for group in users)

    def _holds_filling(self, g: int, runs: list[tuple[KVSource, Run]], slot: int) -> bool:
        space = self.layout.spaces[g]
        if not self.fills(space):
            return False
        pattern = record.poison(self.keys, 0, space).pattern
        for source, run in runs:
            first, size = dict(zip(source.runs, run_addresses(source, slot), strict=True))[run]
            data = bytes(storage_bytes(source)[first : first + size].tolist())
            wanted = (pattern * -(-size // 16))[:size]
            piece = min(size, 16)
            starts = {*range(0, size - piece + 1, 16), size - piece}
            if any(data[at : at + piece] == wanted[at : at + piece] for at in starts):
                return True
        return False

    def _fact_poison(self, fact: DeviceFact) -> None:
        space = self.layout.spaces[fact.group]
        pattern = record.poison(self.keys, 0, space).pattern
        for part in self.layout.groups[space].parts if self.fills(space) else ():
            for source, run in self.poison_runs(space, part):
                for slot in self._slots(fact):
                    first, size = dict(zip(source.runs, run_addresses(source, slot), strict=True))[run]
                    filling = (pattern * -(-size // 16))[:size]
                    storage_bytes(source)[first : first + size] = torch.tensor(list(filling), dtype=torch.uint8)

    # --- scrub ----------------------------------------------------------------------------------------------

    def _enqueue(self, space: int, part: int, slot: int) -> None:
        self.suspects[self.counters[Word.SUSPECTS] % SUSPECT_ROWS] = slot | space << 48 | part << 56
        self.counters[Word.SUSPECTS] += 1

    def _scrub_queue(self) -> None:
        end = self.counters[Word.SUSPECTS]
        start = max(self.counters[Word.SUSPECTS_DONE], end - SUSPECT_ROWS)
        stop = min(end, start + 1024)
        self.counters[Word.SUSPECTS_DONE] = stop
        taken = [self.suspects[k % SUSPECT_ROWS] for k in range(start, stop)]
        # In the order in which the reference goes through them, which the order of its own additions follows.
        for word in sorted(taken, key=lambda w: (w >> 48 & 0xFF, w >> 56)):
            self._look_again(word >> 48 & 0xFF, word >> 56, word & ((1 << 48) - 1), dict(self.suspected(taken)))

    def suspected(self, words: Sequence[int]) -> list[tuple[int, bool]]:
        """Which queue entries are suspects now, before any of them is looked at."""
        return [(w, bool(self.seals[w >> 48 & 0xFF][w >> 56][w & ((1 << 48) - 1)][1] & SUSPECT)) for w in words]

    def _look_again(self, space: int, part: int, slot: int, suspected: dict[int, bool]) -> None:
        seal = self.seals[space][part][slot]
        if seal[1] & MASK32 == 0:
            self.unverified(space, Reason.UNSEALED)
            return
        self.verified(space, Check.CONTENT)
        found = self.fingerprint(space, self.layout.groups[space].parts[part], slot)
        if found == seal[0]:
            seal[1] &= ~SUSPECT
        elif suspected[slot | space << 48 | part << 56]:
            self.report(
                Kind.CONTENT, Role.SEAL, space, slot=slot, flag_part=part, part=part, fingerprint_expected=seal[0],
                fingerprint_found=found, **self.found(self.link(space, slot)),
            )  # fmt: skip
        else:
            seal[1] |= SUSPECT
            self._enqueue(space, part, slot)

    def _scrub_spaces(self, budget: int) -> None:
        spaces = sorted(set(self.layout.spaces))
        sizes = {g: self.layout.groups[g].num_slots * self.layout.groups[g].token_bytes for g in spaces}
        for g in spaces:
            group, base = self.layout.groups[g], group_base(g)
            share = budget * sizes[g] // sum(sizes.values())
            count = min(max(share // group.token_bytes, 1), group.num_slots)
            cursor = self.counters[base + SCRUB_CURSOR]
            slots = [(cursor + i) % group.num_slots for i in range(count)]
            for number, part in enumerate(group.parts):
                for slot in slots:
                    self._scrub_slot(g, number, part, slot)
                for slot in slots:
                    self._scrub_null(g, number, part, slot)
            if cursor + count >= group.num_slots:
                self.counters[base + SCRUB_PASSES] += 1
                self.counters[base + SCRUB_PASS_FORWARD] = self.forward
            self.counters[base + SCRUB_CURSOR] = (cursor + count) % group.num_slots

    def _scrub_slot(self, g: int, number: int, part: str, slot: int) -> None:
        seal = self.seals[g][number][slot]
        if seal[1] & MASK32 and not seal[1] & (SUSPECT | CONTENT):
            self.verified(g, Check.CONTENT)
            if self.fingerprint(g, part, slot) != seal[0]:
                seal[1] |= SUSPECT
                self._enqueue(g, number, slot)

    def _scrub_null(self, g: int, number: int, part: str, slot: int) -> None:
        group = self.layout.groups[g]
        if self.state_of(g, slot).state != OWNER_NULL:
            return
        if group.null_is_zero:
            data = [b for source in self.sources(g, part) for run in self.token_bytes(source, slot) for b in run]
            dirty = any(data)
        else:
            dirty = self.nonfinite(g, part, slot)
        if dirty:
            self.report(Kind.NULL_DIRTY, Role.SEAL, g, slot=slot, flag_part=number, part=number)

    # --- commit ---------------------------------------------------------------------------------------------

    def _commit(self) -> None:
        total = self.counters[Word.DIGEST_SUM]
        for t in range(self.counters[Word.SCRATCH_TOKENS]):
            if self.scratch_rows[t] >= 0:
                word, _ = self.scratch_links[t]
                total += record.mix(self.keys, word & MASK32, position_of(word))
        self.counters[Word.DIGEST_SUM] = signed(total)
        if not self.counters[Word.SCRATCH_TOKENS]:
            return
        for row, start, new, context, digest, source in self.scratch_batch[: self.counters[Word.SCRATCH_ROWS]]:
            if row < 0 or new <= 0:
                continue
            words = self.rows[row]
            if source == DigestSource.UNKNOWN:
                words[RowWord.HIGH] = -1
                words[RowWord.FLAGS] &= ~RowFlag.ARMED
                words[RowWord.ANCHOR_POSITION], words[RowWord.ANCHOR_DIGEST] = context, 0
                continue
            high = context + new
            known = {context + j: self.scratch_links[start + j][1] for j in range(new)}
            word, before = self.scratch_links[start + new - 1]
            known[high] = self.after((word, before))
            for p, value in known.items():
                if p >= high - 63:
                    self.history[row][p % HISTORY] = value
            words[RowWord.HIGH] = high
            words[RowWord.LOW] = max(words[RowWord.LOW] if source == DigestSource.HISTORY else context, high - 63)
            if source == DigestSource.SEED:
                words[RowWord.FLAGS] |= RowFlag.ARMED
            if source == DigestSource.SLOTS:
                words[RowWord.FLAGS] &= ~RowFlag.ARMED
                words[RowWord.ANCHOR_POSITION], words[RowWord.ANCHOR_DIGEST] = context, digest

    # --- window ---------------------------------------------------------------------------------------------

    def window(self, batch: ForwardBatch, full: int, swa: int, *, every: int) -> None:
        if self.forward % every or not self.launch(Role.WINDOW):
            return
        full_item, swa_item = batch.groups[full], batch.groups[swa]
        if full_item is None or swa_item is None:
            return
        out = diverging = 0
        for b, _, _, _, context in self.batch_rows(batch):
            table = swa_item.table
            first = 0 if table is None or table.first_position is None else int(table.first_position[b])
            for p in range(context):
                slot = self._usable(swa, swa_item, b, p)[1]
                if p < first or slot < 0:
                    out += 1
                elif slot != self.slot(full, full_item, self.lookup(full, full_item, b, p))[1]:
                    diverging += 1
        self.counters[Word.SWA_OUT_OF_WINDOW], self.counters[Word.SWA_DIVERGENCE] = out, diverging
        self.counters[Word.SWA_FORWARD] = self.forward
        for word, g in ((Word.SWA_FULL, full), (Word.SWA_WINDOW, swa)):
            self.counters[word] = self.counters[group_base(g) + VERIFIED + Check.LINKS]

    # --- facts ----------------------------------------------------------------------------------------------

    def facts(self, facts: Sequence[DeviceFact]) -> None:
        self.launch(Role.FACTS)
        for fact in facts:
            getattr(self, f"_fact_{fact.op.name.lower()}")(fact)

    def _slots(self, fact: DeviceFact, pages: Sequence[int] | torch.Tensor | None = None) -> list[int]:
        size = self.layout.groups[fact.group].page_size
        return [int(page) * size + i for page in (fact.pages if pages is None else pages) for i in range(size)]

    def _own(self, fact: DeviceFact, state: int, *, keep_tag: bool = False) -> None:
        owner = self.owner[self.layout.spaces[fact.group]]
        for page in map(int, fact.pages):
            old = record.parse_owner(owner[page])
            if old.state not in (OWNER_TRASH, OWNER_NULL):
                owner[page] = record.owner_word(self.forward, old.tag if keep_tag else fact.tag, state)

    def _wipe(self, space: int, slots: Sequence[int]) -> None:
        for slot in slots:
            self.links[space][slot] = [0, 0]
            for seals in self.seals[space]:
                seals[slot] = [0, 0]

    def _fact_alloc(self, fact: DeviceFact) -> None:
        space = self.layout.spaces[fact.group]
        group = self.layout.groups[space]
        self._own(fact, record.OWNER_HELD)
        self._wipe(space, self._slots(fact))
        if group.arena is None:
            return
        holders = self.arenas[group.arena.name]
        for page in map(int, fact.pages):
            place = page // group.arena.pages_per_arena_page
            if holders[place] != space + 1:
                for g, other in enumerate(self.layout.groups):
                    if (
                        g != space
                        and self.layout.spaces[g] == g
                        and other.arena
                        and other.arena.name == group.arena.name
                    ):
                        per = other.arena.pages_per_arena_page
                        overlaid = [p for p in range(place * per, (place + 1) * per) if p < other.num_pages]
                        self._wipe(g, [p * other.page_size + i for p in overlaid for i in range(other.page_size)])
                holders[place] = space + 1

    def _fact_free(self, fact: DeviceFact) -> None:
        self._own(fact, record.OWNER_FREED, keep_tag=True)

    def _fact_own(self, fact: DeviceFact) -> None:
        self._own(fact, record.OWNER_HELD)

    def _fact_wipe(self, fact: DeviceFact) -> None:
        self._wipe(self.layout.spaces[fact.group], self._slots(fact))

    def _moved(self, seal: Sequence[int]) -> list[int]:
        if seal[1] & MASK32 == 0:
            return [0, 0]
        writer = record.parse_writer(seal[1])
        return [seal[0], writer_word(self.forward, writer.tag, 0)]

    def _fact_copy(self, fact: DeviceFact) -> None:
        space = self.layout.spaces[fact.group]
        links = [list(self.links[space][s]) for s in self._slots(fact)]
        seals = [[self._moved(part[s]) for s in self._slots(fact)] for part in self.seals[space]]
        for i, target in enumerate(self._slots(fact, fact.targets)):
            self.links[space][target] = links[i]
            for part, moved in zip(self.seals[space], seals, strict=True):
                part[target] = moved[i]

    def _fact_export(self, fact: DeviceFact) -> None:
        space = self.layout.spaces[fact.group]
        assert fact.records is not None
        for i, slot in enumerate(self._slots(fact)):
            words = [*self.links[space][slot], *(word for part in self.seals[space] for word in part[slot])]
            fact.records[i] = torch.tensor(words)

    def _fact_import(self, fact: DeviceFact) -> None:
        space = self.layout.spaces[fact.group]
        assert fact.records is not None
        for slot, words in zip(self._slots(fact), fact.records.tolist(), strict=True):
            self.links[space][slot] = words[:2]
            for k, part in enumerate(self.seals[space]):
                part[slot] = self._moved(words[2 + 2 * k : 4 + 2 * k])
        self._own(fact, record.OWNER_HELD)
        self._fact_queue(fact)

    def _fact_queue(self, fact: DeviceFact) -> None:
        space = self.layout.spaces[fact.group]
        for number, part in enumerate(self.seals[space]):
            for slot in self._slots(fact):
                if part[slot][1] & MASK32:
                    self._enqueue(space, number, slot)

    def _fact_restamp(self, fact: DeviceFact) -> None:
        space = self.layout.spaces[fact.group]
        for number, part in enumerate(self.layout.groups[space].parts):
            for slot in self._slots(fact):
                if self.links[space][slot] != [0, 0]:
                    tag = record.parse_writer(self.seals[space][number][slot][1]).tag
                    self.seals[space][number][slot] = [
                        self.fingerprint(space, part, slot),
                        writer_word(self.forward, tag),
                    ]

    def _base(self, fact: DeviceFact, digest: int) -> None:
        words = self.rows[fact.row]
        words[RowWord.LOW] = words[RowWord.HIGH] = fact.position
        words[RowWord.FLAGS] |= RowFlag.ARMED
        words[RowWord.ANCHOR_POSITION], words[RowWord.ANCHOR_DIGEST] = -1, 0
        self.history[fact.row][fact.position % HISTORY] = digest

    def _fact_admit(self, fact: DeviceFact) -> None:
        self.rows[fact.row] = [fact.tag, fact.seed, 0, -1, 0, 0, -1, 0]
        if fact.position == 0 and fact.seed:
            self._base(fact, fact.seed)
        elif fact.armed:
            self._base(fact, fact.digest)

    def _fact_anchor(self, fact: DeviceFact) -> None:
        words = self.rows[fact.row]
        if words[RowWord.TAG] != fact.tag:
            return
        assumed = words[RowWord.ANCHOR_DIGEST] if words[RowWord.ANCHOR_POSITION] == fact.position else 0
        if fact.armed or (words[RowWord.HIGH] < 0 and words[RowWord.ANCHOR_POSITION] < 0):
            self._base(fact, fact.digest)
        elif assumed and assumed == fact.digest:
            words[RowWord.FLAGS] |= RowFlag.ARMED
            words[RowWord.ANCHOR_POSITION], words[RowWord.ANCHOR_DIGEST] = -1, 0
        elif assumed:
            self.report(
                Kind.REQUEST_DIGEST, Role.FACTS, fact.group, fact.row, position_expected=fact.position,
                digest_expected=fact.digest, digest_found=words[RowWord.ANCHOR_DIGEST],
            )  # fmt: skip

    def _fact_finish(self, fact: DeviceFact) -> None:
        k = self.counters[Word.OUTBOX]
        self.counters[Word.OUTBOX] += 1
        held, digest = 0, 0
        if fact.row >= 0 and self.rows[fact.row][RowWord.TAG] == fact.tag:
            words = self.rows[fact.row]
            if words[RowWord.HIGH] >= 0 and words[RowWord.LOW] <= fact.position <= words[RowWord.HIGH]:
                held, digest = 1, self.history[fact.row][fact.position % HISTORY]
            words[RowWord.TAG], words[RowWord.HIGH] = 0, -1
        self.outbox[k % OUTBOX_ROWS] = [k + 1, fact.tag, fact.position, held, digest, self.forward]
