"""Random clean traffic of a paged engine that knows the truth: nothing in it may ever be reported.

Requests come and go, are prefilled in chunks, decode, share prefixes, go back a few tokens (rejected drafts); rows
are shuffled, padded, sometimes empty. What a real model would do to the bytes is the caller's business.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch

from kvcanary.batch import ForwardBatch, GroupBatch, PageTable
from kvcanary.digests import digest_tokens
from kvcanary.kernels import DeviceFact, FactOp
from kvcanary.record import Keys, prefix_digest

MAX_REWIND = 4
HISTORY_MARGIN = 40
"""tokens that a request may fall behind its longest length, within what the device remembers"""
STALE = 999_999
"""what stands in tables beyond a row's end"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Addressing:
    """How one group's pages are named by the engine. Page 0 is never used.

    Attributes:
        page_size, pages: of the slot space.
        unit: what table entries name.
        flat: one list with row offsets instead of a grid.
        mapping: the batch brings a slot mapping too.
        dtype: of tables and mappings.
        window: old positions that are read; pages before them are given back.
        ring: positions wrap.
        index_stride, entry_stride: as in the layout.
        translated: indices go through a table.
        space: the group whose pages this one uses.
    """

    page_size: int
    pages: int
    unit: Literal["page", "slot"] = "page"
    flat: bool = False
    mapping: bool = True
    dtype: torch.dtype = torch.int32
    window: int | None = None
    ring: int | None = None
    index_stride: int = 0
    entry_stride: int = 1
    translated: bool = False
    space: int = 0

    @property
    def stride(self) -> int:
        """Engine indices from one page to the next."""
        return self.index_stride or self.page_size


@dataclass(slots=True, eq=False)
class Request:
    """One live request; ``pages`` per group, None where a page was given back."""

    row: int
    tag: int
    tokens: list[int] = field(default_factory=list[int])
    salts: list[int] = field(default_factory=list[int])
    length: int = 0
    floor: int = 0
    pages: list[list[int | None]] = field(default_factory=list[list[int | None]])


@dataclass(frozen=True, slots=True, eq=False)
class Forward:
    """What one forward brings. ``writes``: per group the slots that the model writes, in token order."""

    facts: list[DeviceFact]
    batch: ForwardBatch
    writes: tuple[list[int], ...]
    rows: tuple[Row, ...]

    @property
    def old_positions(self) -> int:
        """Old positions of all rows, before any window."""
        return sum(row.context for row in self.rows)


@dataclass(frozen=True, slots=True, eq=False)
class Row:
    """A request's part of a forward."""

    request: Request
    context: int
    new: int


class Traffic:
    """All randomness comes from ``rng``.

    Args:
        groups: how each group is addressed.
        keys: of the state that will judge.
        rows: requests that are live at the same time, at most.
        longest: tokens of a request, at most.
        chunk: most new tokens of a row.
        salted: give some tokens a salt.
        device: of the batches.
    """

    def __init__(
        self,
        groups: Sequence[Addressing],
        keys: Keys,
        rng: random.Random,
        *,
        rows: int = 5,
        longest: int = 120,
        chunk: int = 40,
        salted: bool = False,
        device: str = "cpu",
    ) -> None:
        self._groups, self._keys, self._rng = tuple(groups), keys, rng
        self._longest, self._chunk, self._salted, self._device = longest, chunk, salted, device
        self._live: list[Request] = []
        self._tags = itertools.count(1)
        self._rows = list(range(rows))
        self._shares = all(group.ring is None and group.window is None for group in groups)
        self._users: Counter[tuple[int, int]] = Counter()
        self._free: dict[int, list[int]] = {group.space: self._shuffled(group.pages) for group in reversed(groups)}
        self._names = [self._shuffled(group.pages) if group.translated else None for group in groups]

    @property
    def live(self) -> Sequence[Request]:
        """Requests that have a row."""
        return self._live

    def next(self) -> Forward:
        """The next forward, with the facts that come before it."""
        rng, facts = self._rng, list[DeviceFact]()
        for request in list(self._live):
            if request.length >= self._longest or rng.random() < 0.03:
                facts += self._finish(request)
        while self._rows and (not self._live or rng.random() < 0.7):
            facts.append(self._admit())
        chosen = [request for request in self._live if rng.random() < 0.92] or list(self._live)
        rng.shuffle(chosen)
        rows = [self._row(request) for request in chosen]
        for row in rows:
            facts += self._feed(row)
        return self._forward(facts, rows)

    def slot(self, group: int, request: Request, position: int) -> int:
        """The slot that holds a position; -1 once its page was given back."""
        how = self._groups[group]
        place = position % how.ring if how.ring else position
        page = request.pages[group][place // how.page_size]
        return -1 if page is None else page * how.page_size + place % how.page_size

    # --- requests -----------------------------------------------------------------------------------------

    def _shuffled(self, pages: int) -> list[int]:
        order = list(range(1, pages))
        self._rng.shuffle(order)
        return order

    def _admit(self) -> DeviceFact:
        seed = self._keys.seed
        request = Request(self._rows.pop(), next(self._tags), pages=[[] for _ in self._groups])
        size = max(group.page_size for group in self._groups)
        parents = [old for old in self._live if old.length > size + 2 * MAX_REWIND] if self._shares else []
        digest = seed
        if parents and self._rng.random() < 0.4:
            self._share(request, self._rng.choice(parents), size)
            digest = self._digest(request)
        self._live.append(request)
        return DeviceFact(
            FactOp.ADMIT,
            row=request.row,
            tag=request.tag,
            position=request.length,
            digest=digest,
            seed=seed,
            armed=True,
        )

    def _share(self, request: Request, parent: Request, size: int) -> None:
        start = size * self._rng.randint(1, (parent.length - 2 * MAX_REWIND) // size)
        request.tokens, request.salts = parent.tokens[:start], parent.salts[:start]
        request.length = request.floor = start
        parent.floor = max(parent.floor, start)
        for g, how in enumerate(self._groups):
            request.pages[g] = parent.pages[g][: start // how.page_size]
            self._users.update((how.space, page) for page in request.pages[g] if page is not None)

    def _digest(self, request: Request) -> int:
        if any(request.salts):
            return prefix_digest(self._keys, self._keys.seed, request.tokens, request.salts)
        return digest_tokens(self._keys, self._keys.seed, request.tokens)

    def _finish(self, request: Request) -> Iterator[DeviceFact]:
        self._live.remove(request)
        self._rows.append(request.row)
        yield DeviceFact(FactOp.FINISH, row=request.row, tag=request.tag, position=request.length)
        for g in range(len(self._groups)):
            yield from self._release(g, request.pages[g])

    def _release(self, g: int, pages: Sequence[int | None]) -> Iterator[DeviceFact]:
        space = self._groups[g].space
        held = [page for page in pages if page is not None]
        self._users.subtract((space, page) for page in held)
        free = [page for page in held if self._users[space, page] == 0]
        self._free[space] += free
        if free:
            yield DeviceFact(FactOp.FREE, group=g, pages=free)

    # --- rows ---------------------------------------------------------------------------------------------

    def _row(self, request: Request) -> Row:
        rng = self._rng
        new = rng.choice((1, 1, 1, 1, 1, 2, 0))
        if request.length == 0 or rng.random() < 0.3:
            new = rng.randint(1, self._chunk)
        request.floor = max(request.floor, request.length - HISTORY_MARGIN)
        # A row without new tokens commits nothing, so going back in it would add up with the next time.
        back = rng.randint(0, MAX_REWIND - 1) if new and rng.random() < 0.15 else 0
        return Row(request, request.length - (back if request.length - back > request.floor else 0), new)

    def _feed(self, row: Row) -> Iterator[DeviceFact]:
        request, end = row.request, row.context + row.new
        del request.tokens[row.context :], request.salts[row.context :]
        request.tokens += [self._rng.randrange(1 << 17) for _ in range(row.new)]
        request.salts += [self._rng.choice((0, 0, 77, -(1 << 40))) if self._salted else 0 for _ in range(row.new)]
        for g, how in enumerate(self._groups):
            if how.window is not None and how.ring is None:
                yield from self._forget(g, how.window, request, row.context)
            places = min(end, how.ring) if how.ring else end
            missing = max(0, -(-places // how.page_size) - len(request.pages[g]))
            if missing:
                fresh = [self._free[how.space].pop(0) for _ in range(missing)]
                self._users.update((how.space, page) for page in fresh)
                request.pages[g] += fresh
                yield DeviceFact(FactOp.ALLOC, group=g, pages=fresh, tag=request.tag)
        request.length = end

    def _forget(self, g: int, window: int, request: Request, context: int) -> Iterator[DeviceFact]:
        gone = max(0, (context - window + 1 - 2 * MAX_REWIND) // self._groups[g].page_size)
        pages = request.pages[g]
        dropped = [page for page in pages[:gone] if page is not None]
        if dropped:
            pages[:gone] = [None] * gone
            request.floor = max(request.floor, context - MAX_REWIND)
            yield from self._release(g, dropped)

    # --- the batch ----------------------------------------------------------------------------------------

    def _forward(self, facts: list[DeviceFact], rows: list[Row]) -> Forward:
        padded: list[Row | None] = [*rows]
        counted = self._rng.random() < 0.3
        for _ in range(self._rng.choice((0, 1, 2))):
            padded.insert(len(padded) if counted else self._rng.randint(0, len(padded)), None)
        lengths = [self._rng.choice((0, 1)) if row is None else row.new for row in padded]
        starts = [0, *itertools.accumulate(lengths)]
        spans = [(row, start) for row, start in zip(padded, starts, strict=False) if row is not None]
        ids, salts, positions = [0] * starts[-1], [0] * starts[-1], [0] * starts[-1]
        for row, start in spans:
            end = row.context + row.new
            ids[start : start + row.new] = row.request.tokens[row.context : end]
            salts[start : start + row.new] = row.request.salts[row.context : end]
            positions[start : start + row.new] = range(row.context, end)
        # A forged id would be reported; what the scheduler knows of a salted token is not its code.
        known = [row.request.tokens[row.context - 1] if row and row.context else -1 for row in padded]
        bare = [row is not None and row.context > 0 and row.request.salts[row.context - 1] == 0 for row in padded]
        batch = ForwardBatch(
            input_ids=self._tensor(ids),
            query_start_loc=self._tensor(starts),
            context_lens=self._tensor([row.context if row else 0 for row in padded]),
            request_rows=self._tensor([row.request.row if row else 0 if counted else -1 for row in padded]),
            groups=tuple(self._group(g, padded, spans, starts[-1]) for g in range(len(self._groups))),
            positions=self._tensor(positions) if self._rng.random() < 0.8 else None,
            token_salts=self._tensor(salts, torch.int64) if any(salts) else None,
            expected_ids=self._tensor(ids) if self._rng.random() < 0.5 else None,
            last_ids=self._tensor([k if b else -1 for k, b in zip(known, bare, strict=True)]),
            num_requests=self._tensor([len(rows)]) if counted else None,
        )
        writes = tuple(list(self._writes(g, rows)) for g in range(len(self._groups)))
        return Forward(facts, batch, writes, tuple(rows))

    def _writes(self, g: int, rows: Sequence[Row]) -> Iterator[int]:
        ring = self._groups[g].ring
        for row in rows:
            end = row.context + row.new
            first = max(row.context, end - ring) if ring else row.context
            yield from (self.slot(g, row.request, p) for p in range(first, end))

    def _group(self, g: int, rows: Sequence[Row | None], spans: Sequence[tuple[Row, int]], tokens: int) -> GroupBatch:
        how = self._groups[g]
        mapping = None
        if how.mapping:
            values = [-1] * tokens
            for row, start in spans:
                for j in range(row.new):
                    values[start + j] = self._index(g, self.slot(g, row.request, row.context + j))
            mapping = self._tensor(values, how.dtype)
        return GroupBatch(slot_mapping=mapping, table=self._table(g, rows), translation=self._translation(g))

    def _table(self, g: int, rows: Sequence[Row | None]) -> PageTable:
        how = self._groups[g]
        lists = [[] if row is None else self._entries(g, row) for row in rows]
        if how.flat:
            offsets = [0, *itertools.accumulate(map(len, lists))]
            entries = [*itertools.chain.from_iterable(lists), STALE]
            return PageTable(
                entries=self._tensor(entries, how.dtype), unit=how.unit, row_offsets=self._tensor(offsets, how.dtype)
            )
        width = max(map(len, lists)) + 2
        grid = [[*entries, *([STALE] * (width - len(entries)))] for entries in lists]
        return PageTable(entries=self._tensor(grid, how.dtype), unit=how.unit)

    def _entries(self, g: int, row: Row) -> list[int]:
        how = self._groups[g]
        end = row.context + row.new
        end = min(end, how.ring) if how.ring else end
        if how.unit == "slot":
            return [self._index(g, self.slot(g, row.request, p)) for p in range(end)]
        pages = row.request.pages[g][: -(-end // how.page_size)]
        return [-1 if page is None else self._page_name(g, page) * how.entry_stride for page in pages]

    def _page_name(self, g: int, page: int) -> int:
        names = self._names[g]
        return page if names is None else names[page - 1]

    def _index(self, g: int, slot: int) -> int:
        how = self._groups[g]
        if slot < 0:
            return -1
        return self._page_name(g, slot // how.page_size) * how.stride + slot % how.page_size

    def _translation(self, g: int) -> torch.Tensor | None:
        names, how = self._names[g], self._groups[g]
        if names is None:
            return None
        values = [-1] * (how.pages * how.stride)
        for page, name in enumerate(names, 1):
            values[name * how.stride : name * how.stride + how.page_size] = range(
                page * how.stride, page * how.stride + how.page_size
            )
        return self._tensor(values, how.dtype)

    def _tensor(
        self, values: Sequence[int] | Sequence[Sequence[int]], dtype: torch.dtype = torch.int32
    ) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=self._device)
