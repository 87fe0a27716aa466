"""What the device does in a forward: resolve ids, attend, write, sample. Attention is bookkeeping that knows better."""

from __future__ import annotations

import random

import torch

from kvcanary.engines.simulated.batch import LATER, Batch, Row
from kvcanary.engines.simulated.memory import DRAFT, TARGET, Memory
from kvcanary.engines.simulated.oracle import Oracle
from kvcanary.engines.simulated.requests import value_of
from kvcanary.engines.simulated.style import Style

VOCABULARY = 50_000


class Model:
    """Runs forwards on real memory, and has the oracle judge all that they read and write.

    Attributes:
        translation: int32 ``[slots]``, the window slot of each full slot, 0: none. Only in that style.
    """

    def __init__(self, style: Style, memory: dict[str, Memory], oracle: Oracle, rng: random.Random) -> None:
        self._style = style
        self._memory = memory
        self._oracle = oracle
        self._rng = rng
        self.translation = torch.zeros(memory["full"].slots, dtype=torch.int32, device=memory["full"].kv.device)

    def resolve(self, batch: Batch) -> None:
        """Fill in the ids that earlier forwards sampled."""
        for row in batch.rows:
            for number, token in enumerate(row.ids):
                if token == LATER:
                    batch.input_ids[row.first + number] = row.request.real[row.context + number]

    def forward(self, batch: Batch) -> None:
        """The layers of the model itself."""
        self._oracle.begin(batch.forward)
        batch.values = torch.tensor(self._values(batch), dtype=torch.int64, device=batch.input_ids.device)
        for group in self._style.groups:
            self._layers(batch, group, TARGET)
            if self._oracle.watchful and batch.rows:
                self._compare(batch, group)

    def draft(self, batch: Batch) -> None:
        """The layer of the draft model: the same tokens, into the same slots."""
        for group in self._style.groups:
            self._layers(batch, group, DRAFT)

    def sample(self, batch: Batch) -> None:
        """The end of a forward."""
        self._oracle.end()
        for row in batch.rows:
            if row.samples:
                self._sample(row)

    def _layers(self, batch: Batch, group: str, model: str) -> None:
        ring = group == "window" and self._style.ring is not None
        if ring:  # Layers over a ring read the old window before they overwrite it.
            self._read(batch, group, model, new=False)
        slots = self._targets(batch, group)
        if model == TARGET:
            self._judge_write(batch, group, slots)
        self._write(group, slots, batch.values, model)
        if not ring:
            self._read(batch, group, model, new=True)

    def _values(self, batch: Batch) -> list[int]:
        """What the tokens that were given come to, for each token of the batch."""
        ids, positions = batch.input_ids.tolist(), batch.positions.tolist()
        values: list[int] = []
        for row in batch.rows:
            request, real = row.request, row.request.real
            del request.fed[row.context :]
            given: list[tuple[int, int, bool]] = []
            for number, token in enumerate(row.ids, row.first):
                position = row.context + number - row.first
                before = request.fed[-1] if position else request.origin
                request.fed.append(value_of(before, ids[number], positions[number], request.salts.get(position, 0)))
                known = token != LATER
                if positions[number] != position:
                    given.append((position, positions[number], True))
                else:
                    given.append((token if known else real[position], ids[number], known))
            values += request.fed[row.context :]
            self._oracle.fed(batch.forward, request, row.context, given)
        return values + [self._rng.getrandbits(60) for _ in range(batch.padding)]

    def _targets(self, batch: Batch, group: str) -> torch.Tensor:
        if group in batch.mapping:
            return batch.mapping[group].to(torch.int64)
        return self.translation[batch.mapping["full"].to(torch.int64)].to(torch.int64)

    def _judge_write(self, batch: Batch, group: str, slots: torch.Tensor) -> None:
        given = slots.tolist()
        for row, wanted in zip(batch.rows, batch.wanted[group], strict=True):
            mine = given[row.first : row.first + len(row.ids)]
            self._oracle.wrote(
                batch.forward,
                row.request,
                group,
                row.context,
                list(zip(wanted, mine, row.request.fed[row.context :], strict=True)),
            )

    def _write(self, group: str, slots: torch.Tensor, values: torch.Tensor, model: str) -> None:
        memory = self._memory[group]
        kept = (slots >= 0) & (slots < memory.slots)
        if not bool(kept.all()):
            slots, values = slots[kept], values[kept]
        memory.write(slots, values, model)

    def _read(self, batch: Batch, group: str, model: str, *, new: bool) -> None:
        rows: list[int] = []
        positions: list[int] = []
        names: list[tuple[str, int]] = []
        values: list[int] = []
        window = self._style.window if group == "window" else None
        for number, row in enumerate(batch.rows):
            low = 0 if window is None else max(0, row.context - window + 1)
            high = row.end if new else row.context
            rows += [number] * (high - low)
            positions += range(low, high)
            names += [(row.request.name, position) for position in range(low, high)]
            values += self._right(row)[low:high]
        if positions:
            device = batch.input_ids.device
            where = torch.tensor(positions, device=device)
            slots = self._places(batch, group, torch.tensor(rows, device=device), where)
            self._oracle.read(batch.forward, group, names, slots, values, model=model)

    def _compare(self, batch: Batch, group: str) -> None:
        """Whether rows look for their new tokens where the scheduler means them to be."""
        owners = [number for number, row in enumerate(batch.rows) for _ in row.ids]
        positions = [position for row in batch.rows for position in range(row.context, row.end)]
        wanted = [slot for slots in batch.wanted[group] for slot in slots]
        device = batch.input_ids.device
        slots = self._places(
            batch, group, torch.tensor(owners, device=device), torch.tensor(positions, device=device)
        ).tolist()
        for number, position, right, slot in zip(owners, positions, wanted, slots, strict=True):
            if slot != right >= 0:
                self._oracle.misled(batch.forward, batch.rows[number].request.name, group, position, slot)

    def _right(self, row: Row) -> list[int]:
        """What a row's tokens should come to, guesses included."""
        request = row.request
        values = request.expected(min(row.end, len(request.real)))
        if row.end <= len(values):
            return values
        values = values[: row.end - row.drafts]
        for position, token in enumerate(row.ids[len(row.ids) - row.drafts :], len(values)):
            values.append(value_of(values[-1], token, position, 0))
        return values

    def _places(self, batch: Batch, group: str, rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Slots of positions, through the very tables of the batch."""
        size, ring = self._style.page_size, self._style.ring if group == "window" else None
        table = batch.tables[group if group in batch.tables else "full"]
        if ring is not None:
            positions = positions % ring
        if self._style.slot_tables:
            slots = table[rows, positions].to(torch.int64)
        else:
            slots = table[rows, positions // size].to(torch.int64) * size + positions % size
        if group not in batch.tables:
            slots = self.translation[slots.clamp(0, len(self.translation) - 1)].to(torch.int64)
        return slots

    def _sample(self, row: Row) -> None:
        """Accept some of the guesses, and draw what comes then: nothing follows from the prompt."""
        accepted = 0
        while accepted < row.drafts and self._rng.random() < 0.5:
            accepted += 1
        guesses = row.ids[len(row.ids) - row.drafts :]
        row.result = [*guesses[:accepted], self._rng.randrange(VOCABULARY)]
        request = row.request
        del request.real[row.end - row.drafts :]
        request.real += row.result
        del request.values[row.end - row.drafts :]
