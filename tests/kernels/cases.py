"""A tiny paged engine that knows the truth, for tests that compare kernels.

``World(seed)`` makes a random layout and random traffic (prefill in chunks, decode, forks of shared prefixes,
rewinds, padding, empty rows, window pages freed early). A step is::

    step = world.next_step()                    # facts and a ForwardBatch
    world.run(step, (kernels, state), ...)      # every contestant sees the same bytes

Without faults no contestant may report anything. ``world.disturb(step, rng)`` breaks one thing of a step.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from kvcanary.batch import ForwardBatch, PageTable
from kvcanary.kernels import DeviceFact, FactOp, Kernels
from kvcanary.layout import KVSource
from kvcanary.record import Keys, make_keys, prefix_digest
from kvcanary.state import DeviceState, Limits, Word
from tests.kernels.pools import GroupSpec, make_layout, random_specs, storage_bytes, write_tokens

LIMITS = Limits(max_tokens=512, max_batch_rows=16, max_rows=12, ring_capacity=4096, ring_quota=4096, snapshots=4)
Contestant = tuple[Kernels, DeviceState]


@dataclass(slots=True)
class Request:
    """One live request: its row, what was fed so far, and its pages per group (None: freed or never there)."""

    row: int
    tag: int
    tokens: list[int]
    salts: list[int]
    length: int
    pages: list[list[int | None]]
    pending_anchor: int | None = None


@dataclass(slots=True)
class Step:
    """What one forward brings. ``writes``: per group the slots that the model will write, in token order."""

    facts: list[DeviceFact]
    batch: ForwardBatch
    writes: list[list[int]]
    scheduled: list[tuple[Request, int, int]] = field(default_factory=list)
    spoil: list[tuple[KVSource, int, int]] = field(default_factory=list)
    """(source, byte address, length) set to all ones after the model's writes"""


def clone_state(state: DeviceState) -> DeviceState:
    """An independent copy over the same layout and bytes."""
    copy = DeviceState(state.layout, state.keys, state.limits)
    for name, tensor in state_tensors(state).items():
        state_tensors(copy)[name].copy_(tensor)
    return copy


def state_tensors(state: DeviceState) -> dict[str, torch.Tensor]:
    """Every tensor of a state by name; groups that share a space appear once."""
    tensors = {
        name: getattr(state, name)
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
            "violations",
            "outbox",
            "acked",
        ]
    }
    for space in sorted(set(state.layout.spaces)):
        for name in ("links", "seals", "owner"):
            tensors[f"{name}{space}"] = getattr(state.groups[space], name)
    return tensors | {f"arena.{name}": table for name, table in state.arenas.items()}


POISONED = "target"
"""Part of the sources that takes poison in worlds that place it."""


def entry(kernels: Kernels, state: DeviceState, batch: ForwardBatch) -> None:
    """Mark, then check; ring groups are checked before they are marked."""
    layout = state.layout
    poison = POISONED if state.limits.poison != "off" else ""
    part = [i for i, item in enumerate(batch.groups) if item is not None]
    rings = [i for i in part if layout.groups[i].ring is not None]
    plain = [i for i in part if layout.groups[i].ring is None]
    if plain:
        kernels.mark(state, batch, plain, first=True, poison=poison)
    kernels.check(state, batch, part)
    if rings:
        kernels.mark(state, batch, rings, first=not plain, poison=poison)


def leave(kernels: Kernels, state: DeviceState, scrub_bytes: int = 0, nonfinite: bool = True) -> None:
    """Seal every part; the last one scrubs and commits."""
    parts = list(dict.fromkeys(part for group in state.layout.groups for part in group.parts))
    for part in parts:
        last = part == parts[-1]
        poison = state.limits.poison if part == POISONED else "off"
        kernels.seal(state, part, scrub_bytes if last else 0, last=last, nonfinite=nonfinite, poison=poison)


class World:
    """The engine. All randomness comes from ``seed``. ``plain`` batches have no padding, salts or optional fields."""

    def __init__(
        self,
        seed: int = 0,
        specs: tuple[GroupSpec, ...] | None = None,
        device: str = "cpu",
        limits: Limits = LIMITS,
        keys: Keys | None = None,
        *,
        plain: bool = False,
    ) -> None:
        self.rng = random.Random(seed)
        self.plain = plain
        self.generator = torch.Generator().manual_seed(seed)
        self.specs = specs or random_specs(self.rng)
        self.device = device
        self.layout = make_layout(self.specs, device, seed)
        self.keys = keys or make_keys(seed + 1)
        self.limits = limits
        self.requests: list[Request] = []
        self.tags = 0
        self.free_rows = list(range(limits.max_rows))
        self.references: dict[tuple[int, int], int] = {}
        self.free_pages = {space: self._fresh_pages(space) for space in set(self.layout.spaces)}
        self.permutations = [self._permutation(spec) for spec in self.specs]

    def new_state(self, *, armed: bool = True) -> DeviceState:
        state = DeviceState(self.layout, self.keys, self.limits)
        state.counters[Word.ARMED] = int(armed)
        return state

    def run(self, step: Step, *contestants: Contestant, scrub_bytes: int = 0, nonfinite: bool = True) -> None:
        """One whole forward for every contestant, over the same bytes."""
        for kernels, state in contestants:
            if step.facts:
                kernels.facts(state, step.facts)
            entry(kernels, state, step.batch)
        self.write(step)
        for kernels, state in contestants:
            leave(kernels, state, scrub_bytes, nonfinite)

    def write(self, step: Step) -> None:
        """The model's own work: new bytes into the slots of the new tokens."""
        for group, slots in zip(self.layout.groups, step.writes, strict=True):
            write_tokens(self.layout.groups[self._space(group.name)].sources, slots, self.generator)
        for source, address, size in step.spoil:
            storage_bytes(source)[address : address + size] = 0xFF

    # --- traffic --------------------------------------------------------------------------------------------

    def next_step(self, max_new: int = 40, rows: int = 5, *, linked: bool = True) -> Step:
        """Random traffic: some requests end, some begin, most go on."""
        facts: list[DeviceFact] = []
        for request in list(self.requests):
            if self.rng.random() < 0.08 or self._is_short_of_pages(max_new, rows):
                facts += self.finish(request)
        while len(self.requests) < rows and (not self.requests or self.rng.random() < 0.5):
            facts += self.fork() if self.rng.random() < 0.4 else self.admit()[1]
        facts += self._late_anchors()
        plan = [(r, self._context(r), self._new(max_new)) for r in self.requests if self.rng.random() < 0.9]
        self.rng.shuffle(plan)
        return self.plan(plan, facts)

    def plan(self, plan: Sequence[tuple[Request, int, int]], facts: Sequence[DeviceFact] = (), **extra: object) -> Step:
        """A step that feeds each request ``new`` tokens from ``context`` on."""
        facts = list(facts)
        for request, context, new in plan:
            del request.tokens[context + new :], request.salts[context + new :]
            while len(request.tokens) < context + new:
                request.tokens.append(self.rng.randrange(1 << 17))
                request.salts.append(self.pick((0, 0, 0, 0, 77, -(1 << 40))))
            facts += self._grow(request, context, context + new)
            request.length = context + new
        batch, writes = self._batch(plan, extra)
        return Step(facts, batch, writes, list(plan))

    def admit(self, length: int = 0) -> tuple[Request, list[DeviceFact]]:
        """A new request with an empty cache."""
        self.tags += 1
        request = Request(self.free_rows.pop(0), self.tags, [], [], length, [[] for _ in self.specs])
        self.requests.append(request)
        return request, [DeviceFact(FactOp.ADMIT, row=request.row, tag=request.tag, seed=self.keys.seed)]

    def fork(self) -> list[DeviceFact]:
        """A new request on the whole pages of another one's prefix; sometimes its base arrives late."""
        size = max(spec.page_size for spec in self.specs)
        parents = [r for r in self.requests if r.length >= size + 8 and all(None not in pages for pages in r.pages)]
        if not parents or any(spec.ring for spec in self.specs):
            return self.admit()[1]
        parent = self.rng.choice(parents)
        start = size * self.rng.randint(1, (parent.length - 8) // size)
        child, _ = self.admit(start)
        child.tokens, child.salts = parent.tokens[:start], parent.salts[:start]
        for g, spec in enumerate(self.specs):
            child.pages[g] = parent.pages[g][: start // spec.page_size]
            for page in child.pages[g]:
                self.references[self.layout.spaces[g], page or 0] += 1
        armed = self.rng.random() < 0.5
        if not armed:
            child.pending_anchor = start
        return [
            DeviceFact(
                FactOp.ADMIT,
                row=child.row,
                tag=child.tag,
                position=start,
                digest=self.digest(child, start) if armed else 0,
                seed=self.keys.seed,
                armed=armed,
            )
        ]

    def finish(self, request: Request) -> list[DeviceFact]:
        """End a request: audit its end, free its pages."""
        facts = [DeviceFact(FactOp.FINISH, row=request.row, tag=request.tag, position=request.length)]
        for g in range(len(self.specs)):
            facts += self._release(g, [page for page in request.pages[g] if page is not None])
        self.requests.remove(request)
        self.free_rows.append(request.row)
        return facts

    def digest(self, request: Request, length: int) -> int:
        """The true digest before position ``length``."""
        return prefix_digest(self.keys, self.keys.seed, request.tokens[:length], request.salts[:length])

    def slot(self, request: Request, group: int, position: int) -> int:
        """The slot that holds a position; -1 when its page is gone."""
        spec = self.specs[group]
        place = position % spec.ring if spec.ring else position
        page = request.pages[group][place // spec.page_size]
        return -1 if page is None else page * spec.page_size + place % spec.page_size

    def disturb(self, step: Step, states: Sequence[DeviceState], rng: random.Random) -> str:
        """Break one thing of a step, or of the records and bytes before it. Returns what was broken."""
        from tests.kernels.faults import FAULTS

        name = rng.choice(sorted(FAULTS))
        FAULTS[name](self, step, states, rng)
        return name

    # --- pages ----------------------------------------------------------------------------------------------

    def _is_short_of_pages(self, max_new: int, rows: int) -> bool:
        """Whether the next step could run out of pages, were every row to take as many tokens as it may."""
        return any(
            len(pages) < rows * (-(-max_new // self.specs[space].page_size) + 1)
            for space, pages in self.free_pages.items()
        )

    def _space(self, name: str) -> int:
        return self.layout.spaces[self.layout.index(name)]

    def _fresh_pages(self, space: int) -> list[int]:
        spec = self.specs[space]
        # Page 0 stays out of use: a translation table cannot name index 0.
        pages = list(range(2 if spec.null else 1, spec.pages))
        self.rng.shuffle(pages)
        return pages

    def _permutation(self, spec: GroupSpec) -> list[int] | None:
        if not spec.translated:
            return None
        order = list(range(spec.pages))
        self.rng.shuffle(order)
        return order

    def _grow(self, request: Request, context: int, end: int) -> list[DeviceFact]:
        facts = []
        for g, spec in enumerate(self.specs):
            if spec.window and not spec.ring:
                facts += self._drop_window(g, request, context)
            places = min(end, spec.ring) if spec.ring else end
            fresh = []
            while len(request.pages[g]) * spec.page_size < places:
                page = self.free_pages[self.layout.spaces[g]].pop(0)
                self.references[self.layout.spaces[g], page] = 1
                request.pages[g].append(page)
                fresh.append(page)
            if fresh:
                # Some engines hand out pages without saying to whom.
                named = self.plain or fresh[0] % 4
                facts.append(DeviceFact(FactOp.ALLOC, group=g, pages=fresh, tag=request.tag if named else 0))
                if self.limits.poison == "full":
                    facts.append(DeviceFact(FactOp.POISON, group=g, pages=fresh))
        return facts

    def _drop_window(self, g: int, request: Request, context: int) -> list[DeviceFact]:
        spec = self.specs[g]
        keep = (context - (spec.window or 0) + 1 - 8) // spec.page_size
        gone = []
        for k in range(max(0, min(keep, len(request.pages[g])))):
            page = request.pages[g][k]
            if page is not None:
                gone.append(page)
                request.pages[g][k] = None
        return self._release(g, gone)

    def _release(self, g: int, pages: list[int]) -> list[DeviceFact]:
        space, free = self.layout.spaces[g], []
        for page in pages:
            self.references[space, page] -= 1
            if self.references[space, page] == 0:
                free.append(page)
        self.free_pages[space] += free
        return [DeviceFact(FactOp.FREE, group=g, pages=free)] if free else []

    # --- rows -----------------------------------------------------------------------------------------------

    def _context(self, request: Request) -> int:
        """Where the next forward starts: mostly the end, sometimes a few tokens back (rejected drafts)."""
        limits = [spec.max_rewind for spec in self.specs if spec.max_rewind is not None]
        back = min([3, request.length, *limits])
        floor = 8 if request.pending_anchor is None else request.pending_anchor + 8
        if self.rng.random() < 0.15 and request.length - back > floor:
            return request.length - self.rng.randint(0, back)
        return request.length

    def _new(self, max_new: int) -> int:
        return self.rng.choice((1, 1, 1, 1, 2, 0, self.rng.randint(1, max_new)))

    def _late_anchors(self) -> list[DeviceFact]:
        facts = []
        for request in self.requests:
            if request.pending_anchor is not None and self.rng.random() < 0.3:
                at = request.pending_anchor
                request.pending_anchor = None
                facts.append(
                    DeviceFact(
                        FactOp.ANCHOR, row=request.row, tag=request.tag, position=at, digest=self.digest(request, at)
                    )
                )
        return facts

    def _batch(
        self, plan: Sequence[tuple[Request, int, int]], extra: dict[str, object]
    ) -> tuple[ForwardBatch, list[list[int]]]:
        from tests.kernels.tables import build_groups

        rows: list[tuple[Request, int, int] | None] = list(plan)
        counted = self.chance(0.3)
        for _ in range(self.pick((0, 1, 2))):
            rows.insert(len(rows) if counted else self.rng.randint(0, len(rows)), None)
        starts, ids, salts, positions, expected = [0], [], [], [], []
        for row in rows:
            request, context, new = row or (None, 0, self.rng.choice((0, 1, 2)))
            for j in range(new):
                p = context + j
                ids.append(request.tokens[p] if request else 0)
                salts.append(request.salts[p] if request else 0)
                positions.append(p if request else 0)
                expected.append(ids[-1] if request and self.rng.random() < 0.5 else -1)
            starts.append(len(ids))
        tail = self.pick((0, 0, 3))
        for column, filler in ((ids, 9), (salts, 0), (positions, 0), (expected, -1)):
            column.extend([filler] * tail)
        request_rows = [row[0].row if row else -1 for row in rows]
        if counted:
            request_rows = [max(value, 0) for value in request_rows]
        last = [self._last_id(row) for row in rows]
        groups, writes = build_groups(self, rows, starts, len(ids))
        wide = self.pick((torch.int32, torch.int64))
        fields: dict[str, object] = {
            "input_ids": self.tensor(ids, wide),
            "query_start_loc": self.tensor(starts, wide),
            "context_lens": self.tensor([row[1] if row else 0 for row in rows], wide),
            "request_rows": self.tensor(request_rows, wide),
            "groups": groups,
            "positions": self.tensor(positions) if self.chance(0.7) else None,
            "token_salts": self.tensor(salts),
            "expected_ids": self.tensor(expected) if self.chance(0.5) else None,
            "last_ids": self.tensor(last) if self.chance(0.5) else None,
            "num_requests": self.tensor([len(plan)], wide) if counted else None,
        }
        return ForwardBatch(**{**fields, **extra}), writes  # type: ignore[arg-type]

    def _last_id(self, row: tuple[Request, int, int] | None) -> int:
        if row is None or row[1] == 0 or row[0].salts[row[1] - 1]:
            return -1
        return row[0].tokens[row[1] - 1]

    def chance(self, probability: float) -> bool:
        """Whether something happens that plain batches do without."""
        return not self.plain and self.rng.random() < probability

    def pick(self, options: Sequence[Any]) -> Any:
        """One of the options; the first one in plain batches."""
        return options[0] if self.plain else self.rng.choice(options)

    def tensor(self, values: Sequence[int], dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=self.device)


def with_group(batch: ForwardBatch, group: int, **changes: object) -> ForwardBatch:
    """The batch with other fields in one group's item."""
    item = batch.groups[group]
    assert item is not None
    changed = replace(item, **changes)  # type: ignore[arg-type]
    return replace(batch, groups=tuple(changed if i == group else old for i, old in enumerate(batch.groups)))


def table_of(batch: ForwardBatch, group: int) -> PageTable:
    """The table of one group, which must have one."""
    item = batch.groups[group]
    assert item is not None
    assert item.table is not None
    return item.table
