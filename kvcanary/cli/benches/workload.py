"""One forward over valid records: every slot of the pool sealed, rows at random slots, nothing left to report."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch

from kvcanary.batch import ForwardBatch, GroupBatch, PageTable
from kvcanary.cli.benches.pool import Pool
from kvcanary.cli.benches.rows import BenchError
from kvcanary.kernels import DeviceFact, FactOp, Kernels, load_kernels
from kvcanary.layout import DEFAULT_PART
from kvcanary.record import NUM_KINDS, Kind, make_keys
from kvcanary.state import KIND_COUNTS, VERIFIED, Check, DeviceState, Limits, Word, group_base

CHUNK = 16384
"""tokens of one forward while the records are built"""
VOCABULARY = 128_256
SCRUB_BYTES = 32 << 20
GROUP = (0,)


class Shape(NamedTuple):
    """A batch: ``rows`` requests with ``context`` old tokens and ``new`` ones each."""

    rows: int
    context: int
    new: int = 1
    page_size: int = 1


class Counts(NamedTuple):
    """What the device has counted so far."""

    forward: int
    links: int
    row_ends: int
    sealed: int
    content: int
    reported: int
    kinds: dict[str, int]


@dataclass(frozen=True, slots=True, eq=False)
class Workload:
    """A batch that may be run any number of times, and the state that it runs on."""

    kernels: Kernels
    state: DeviceState
    batch: ForwardBatch
    shape: Shape
    scrub_bytes: int = SCRUB_BYTES

    def enter(self) -> None:
        """What the canary launches before the model."""
        self.kernels.mark(self.state, self.batch, GROUP, first=True)
        self.check()

    def check(self) -> None:
        """The check of the old positions alone."""
        self.kernels.check(self.state, self.batch, GROUP)

    def leave(self) -> None:
        """What the canary launches after the model."""
        self.kernels.seal(self.state, DEFAULT_PART, self.scrub_bytes, last=True, nonfinite=True)

    def counts(self) -> Counts:
        """Read the counters; waits for the device."""
        return read_counts(self.state)

    def judge(self, before: Counts, *, checks: int | None = None) -> Counts:
        """What was counted since ``before``, if it is what clean data must give.

        Args:
            before: counts before the timed work.
            checks: how often the check ran, where it ran without whole forwards.

        Raises:
            BenchError: something was reported, or less was verified than the shape demands.
        """
        now = self.counts()
        forwards = now.forward - before.forward
        runs = forwards if checks is None else checks
        shape = self.shape
        expected = {
            "links": runs * shape.rows * shape.context,
            "row_ends": runs * shape.rows * (shape.context > 0),
            "sealed": forwards * shape.rows * shape.new,
            "content": forwards if self.scrub_bytes else 0,
        }
        if now.reported:
            raise BenchError(f"{now.reported} violations on clean data: {now.kinds}; the figure would mean nothing")
        if runs <= 0:
            raise BenchError("nothing ran between the two looks at the counters")
        for name, least in expected.items():
            found = getattr(now, name) - getattr(before, name)
            if found < least:
                raise BenchError(f"{name}: {found} counted in {runs} runs, expected at least {least}")
        return now


def read_counts(state: DeviceState) -> Counts:
    """The counters of a state with one group; waits for the device."""
    words = state.counters.tolist()
    base = group_base(0)
    verified = words[base + VERIFIED : base + VERIFIED + len(Check)]
    kinds = words[base + KIND_COUNTS : base + KIND_COUNTS + NUM_KINDS]
    return Counts(
        forward=words[Word.FORWARD],
        links=verified[Check.LINKS],
        row_ends=verified[Check.ROW_ENDS],
        sealed=verified[Check.SEALED],
        content=verified[Check.CONTENT],
        reported=sum(kinds),
        kinds={Kind(kind).name: count for kind, count in enumerate(kinds) if count},
    )


def make_workload(
    pool: Pool, shape: Shape, *, slots: int, scrub_bytes: int = SCRUB_BYTES, backend: str = "auto", chunk: int = CHUNK
) -> Workload:
    """Records for every slot of a pool, ``shape`` at random slots or pages among them, by the canary's own forwards.

    Raises:
        ConfigError: the pool is too small, or the backend cannot run here.
    """
    layout = pool.layout(slots, shape.page_size)
    device = layout.device
    limits = Limits(
        max_tokens=max(chunk, shape.rows * shape.new), max_batch_rows=max(shape.rows, 1), max_rows=shape.rows + 1
    )
    kernels = load_kernels(backend, device.type)
    state = DeviceState(layout, make_keys(0x5EED), limits)
    state.counters[Word.ARMED] = 1
    length = shape.context + shape.new
    tokens = torch.randint(VOCABULARY, (shape.rows, length), dtype=torch.int32, device=device)
    order = torch.randperm(layout.groups[0].num_pages, device=device)
    each = -(-length // shape.page_size)
    table = order[: shape.rows * each].view(shape.rows, each)
    rest = order[shape.rows * each :]
    kernels.facts(state, list(_facts(state, table, rest)))
    builder = _Builder(kernels, state, shape.page_size)
    builder.fill(rest.view(1, -1), _random_tokens(rest, shape.page_size), shape.rows, chunk)
    builder.fill(table, tokens[:, : shape.context], 0, chunk)
    return Workload(kernels, state, builder.batch(table, tokens, shape.context, shape.new, 0), shape, scrub_bytes)


def _facts(state: DeviceState, table: torch.Tensor, rest: torch.Tensor) -> Iterator[DeviceFact]:
    """Requests 1 to n in rows 0 to n - 1, and one more that holds the rest of the pool."""
    rows = [*table.unbind(0), rest]
    for row, pages in enumerate(rows):
        seed = state.keys.seed
        yield DeviceFact(FactOp.ADMIT, row=row, tag=row + 1, digest=seed, seed=seed, armed=True)
        if pages.numel():
            yield DeviceFact(FactOp.ALLOC, group=0, pages=pages, tag=row + 1)


def _random_tokens(pages: torch.Tensor, page_size: int) -> torch.Tensor:
    return torch.randint(VOCABULARY, (1, pages.numel() * page_size), dtype=torch.int32, device=pages.device)


class _Builder:
    """Prefills rows by forwards of the canary alone."""

    def __init__(self, kernels: Kernels, state: DeviceState, page_size: int) -> None:
        self._kernels, self._state, self._page_size = kernels, state, page_size

    def fill(self, table: torch.Tensor, tokens: torch.Tensor, first_row: int, chunk: int) -> None:
        """Write and seal all ``tokens [rows, length]`` of rows whose pages are ``table [rows, pages]``."""
        rows, length = tokens.shape
        step = max(1, chunk // max(rows, 1))
        for context in range(0, length, step):
            batch = self.batch(table, tokens, context, min(step, length - context), first_row)
            self._kernels.mark(self._state, batch, GROUP, first=True)
            self._kernels.seal(self._state, DEFAULT_PART, 0, last=True, nonfinite=True)

    def batch(self, table: torch.Tensor, tokens: torch.Tensor, context: int, new: int, first_row: int) -> ForwardBatch:
        """The forward that feeds positions ``context`` to ``context + new``, with all that a scheduler knows."""
        rows, device = tokens.shape[0], tokens.device
        size = self._page_size
        positions = torch.arange(context, context + new, device=device)
        slots = table[:, positions // size] * size + positions % size
        ids = tokens[:, context : context + new].reshape(-1).contiguous()
        last = tokens[:, context - 1].contiguous() if context else torch.full((rows,), -1, device=device)
        return ForwardBatch(
            input_ids=ids,
            query_start_loc=torch.arange(rows + 1, dtype=torch.int32, device=device) * new,
            context_lens=torch.full((rows,), context, dtype=torch.int32, device=device),
            request_rows=torch.arange(first_row, first_row + rows, dtype=torch.int32, device=device),
            groups=(
                GroupBatch(
                    slot_mapping=slots.reshape(-1).contiguous(),
                    table=PageTable(entries=table.to(torch.int32).contiguous(), unit="slot" if size == 1 else "page"),
                ),
            ),
            positions=positions.repeat(rows),
            expected_ids=ids.clone(),
            last_ids=last,
            num_requests=torch.full((1,), rows, dtype=torch.int32, device=device),
        )
