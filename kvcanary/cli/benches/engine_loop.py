"""A small serving loop around a real :class:`~kvcanary.canary.Canary`: 64 rows decode, pages come and go."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from kvcanary.batch import ForwardBatch, GroupBatch, PageTable
from kvcanary.canary import Canary
from kvcanary.cli.benches.pool import make_pool, slots_of
from kvcanary.cli.benches.rows import POOL_GIB, BenchError
from kvcanary.cli.benches.running import Setting
from kvcanary.cli.benches.timing import replayable, synchronize
from kvcanary.cli.benches.workload import VOCABULARY, read_counts
from kvcanary.config import CanaryConfig
from kvcanary.events import Event, IncidentOpened, KernelStalled
from kvcanary.observers.base import Observer

PAGE = 16
ROWS = 64
CONTEXT = 1024
FINISH_EVERY = 16
"""steps between two requests that end; 64 rows of about 1,024 tokens"""
GROUP = "full"


@dataclass(slots=True)
class _Live:
    name: str
    tokens: list[int]
    pages: list[int] = field(default_factory=list[int])
    published: list[int] = field(default_factory=list[int])


class _Alarms:
    """Everything that is reported, all of it false."""

    name = "bench.alarms"
    interests: tuple[type[Event], ...] = (IncidentOpened, KernelStalled)

    def __init__(self) -> None:
        self.headlines: list[str] = []

    def handle(self, event: Event) -> None:
        """Keep one event in words."""
        self.headlines.append(event.headline if isinstance(event, IncidentOpened) else str(event))


class EngineLoop:
    """Decode steps over growing contexts; the next step's facts are ready before it is timed.

    Attributes:
        canary: bound, started and armed.
        graph: the captured forward (entry and exit), or the eager calls where nothing can be captured.
    """

    def __init__(self, setting: Setting, *, observers: Sequence[Observer] = (), steps: int = 600) -> None:
        self._setting = setting
        self._rows = setting.size(ROWS, 4)
        context = setting.size(CONTEXT, 32)
        width = (context + steps) // PAGE + 3
        pool = make_pool(POOL_GIB, setting)
        slots = slots_of(POOL_GIB, setting)
        config = CanaryConfig(mode="log", scrub_mib_per_step=0.01 if setting.rehearse else 32)
        self._alarms = _Alarms()
        self.canary = Canary(config, observers=[self._alarms, *observers])
        layout = pool.layout(slots, PAGE)
        self.canary.bind(layout, max_tokens=self._rows * context, max_batch_rows=self._rows, max_rows=self._rows)
        self.canary.start()
        self._free = torch.randperm(layout.groups[0].num_pages).tolist()
        self._random = torch.Generator().manual_seed(1)
        self._device = pool.device
        self._tables = torch.zeros(self._rows, width, dtype=torch.int32, device=self._device)
        self._ids = torch.zeros(self._rows, dtype=torch.int32, device=self._device)
        self._last = torch.full((self._rows,), -1, dtype=torch.int32, device=self._device)
        self._contexts = torch.zeros(self._rows, dtype=torch.int32, device=self._device)
        self._row_numbers = torch.zeros(self._rows, dtype=torch.int32, device=self._device)
        self._starts = torch.arange(self._rows + 1, dtype=torch.int32, device=self._device)
        self._finished = self._steps = 0
        self._live: list[_Live] = []
        with self.canary.step():
            self.graph = replayable(self.eager, setting.device)
        synchronize(setting.device)
        self.canary.arm()
        self._admit_all(context)

    def eager(self) -> None:
        """Entry and exit of one decode forward as plain calls."""
        self.canary.enter(self._batch())
        self.canary.leave()

    def prepare(self) -> list[Callable[[], object]]:
        """The engine's own work before a step: tokens, tables, contexts. Returns the facts to tell the canary."""
        facts: list[Callable[[], object]] = []
        self._steps += 1
        if self._steps % FINISH_EVERY == 0:
            facts += self._replace(self._steps // FINISH_EVERY % self._rows)
        ids = torch.randint(VOCABULARY, (self._rows,), generator=self._random, dtype=torch.int32)
        contexts = [len(request.tokens) for request in self._live]
        last = [request.tokens[-1] if request.tokens else -1 for request in self._live]
        changed: list[tuple[int, int, int]] = []
        for row, (request, token) in enumerate(zip(self._live, ids.tolist(), strict=True)):
            if len(request.tokens) % PAGE == 0:
                page = self._free.pop()
                changed.append((row, len(request.pages), page))
                facts.append(_call(self.canary.alloc, GROUP, request.name, [page]))
                if request.pages:
                    request.published.append(request.pages[-1])
                    facts.append(_call(self.canary.publish, GROUP, [request.pages[-1]], request.name))
                request.pages.append(page)
            request.tokens.append(token)
        self._upload(ids, contexts, last, changed)
        return facts

    def step(self, facts: Sequence[Callable[[], object]]) -> None:
        """A whole step without timing."""
        for fact in facts:
            fact()
        with self.canary.step():
            self.replay()

    def replay(self) -> None:
        """The forward itself, inside a ``canary.step()``."""
        self.graph()
        if self._setting.device == "cuda":
            self.canary.replayed()

    def close(self) -> None:
        """Stop the canary; raises when it reported anything on this clean traffic.

        Raises:
            BenchError: a violation was counted, or nothing was verified.
        """
        synchronize(self._setting.device)
        counts = read_counts(self.canary.state)
        self.canary.stop()
        if self._alarms.headlines:
            raise BenchError(
                f"{len(self._alarms.headlines)} reports on clean data, the first: {self._alarms.headlines[0]}"
            )
        if counts.reported or counts.links == 0:
            raise BenchError(
                f"{counts.reported} violations on clean data ({counts.kinds}), {counts.links} links verified"
            )

    # --- the engine's own ---------------------------------------------------------------------------------

    def _admit_all(self, context: int) -> None:
        for row in range(self._rows):
            request = _Live(f"r{row}", [])
            self._live.append(request)
            self.canary.admit(request.name)
            # Rows end at different places in their pages, so that each step brings as many new pages as the next.
            length = context - row % PAGE
            request.tokens = torch.randint(VOCABULARY, (length,), generator=self._random).tolist()
            request.pages = [self._free.pop() for _ in range(-(-length // PAGE))]
            self.canary.alloc(GROUP, request.name, request.pages)
        self._write_tables()
        self._prefill()

    def _prefill(self) -> None:
        lengths = [len(request.tokens) for request in self._live]
        tokens = torch.tensor([t for request in self._live for t in request.tokens], dtype=torch.int32)
        starts = [0]
        for length in lengths:
            starts.append(starts[-1] + length)
        batch = ForwardBatch(
            input_ids=tokens.to(self._device),
            query_start_loc=torch.tensor(starts, dtype=torch.int32, device=self._device),
            context_lens=torch.zeros(self._rows, dtype=torch.int32, device=self._device),
            request_rows=self._row_numbers,
            groups=(GroupBatch(table=PageTable(entries=self._tables)),),
        )
        with self.canary.step(), self.canary.forward(batch):
            pass

    def _batch(self) -> ForwardBatch:
        table = PageTable(entries=self._tables)
        return ForwardBatch(
            input_ids=self._ids,
            query_start_loc=self._starts,
            context_lens=self._contexts,
            request_rows=self._row_numbers,
            groups=(GroupBatch(table=table),),
            last_ids=self._last,
        )

    def _replace(self, row: int) -> list[Callable[[], object]]:
        """One request ends, another begins in its place with an empty cache."""
        old = self._live[row]
        self._finished += 1
        new = self._live[row] = _Live(f"{old.name.partition('.')[0]}.{self._finished}", [])
        self._free[:0] = old.pages
        evict = [_call(self.canary.evict, GROUP, old.published)] if old.published else []
        return [
            *evict,
            _call(self.canary.finish, old.name, tokens=old.tokens, length=len(old.tokens)),
            _call(self.canary.free, GROUP, old.pages, old.name),
            # The row that just became free is the only one, so the newcomer takes it.
            _call(self.canary.admit, new.name),
        ]

    def _upload(
        self, ids: torch.Tensor, contexts: list[int], last: list[int], changed: list[tuple[int, int, int]]
    ) -> None:
        self._ids.copy_(ids)
        self._contexts.copy_(torch.tensor(contexts, dtype=torch.int32))
        self._last.copy_(torch.tensor(last, dtype=torch.int32))
        if changed:
            rows, columns, pages = torch.tensor(changed, device=self._device).unbind(1)
            self._tables[rows, columns] = pages.to(torch.int32)

    def _write_tables(self) -> None:
        rows = [self.canary.row_of(request.name) for request in self._live]
        self._row_numbers.copy_(torch.tensor(rows, dtype=torch.int32))
        table = torch.zeros_like(self._tables, device="cpu")
        for row, request in enumerate(self._live):
            table[row, : len(request.pages)] = torch.tensor(request.pages, dtype=torch.int32)
        self._tables.copy_(table)


def _call(function: Callable[..., object], *args: object, **kwargs: object) -> Callable[[], object]:
    return lambda: function(*args, **kwargs)
