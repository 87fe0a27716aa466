"""A hand-driven paged cache on the CPU: the smallest engine a canary can watch.

It writes real bytes into a real pool through a real page table, one forward at a time, and lets a test spoil
any of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kvcanary.batch import ForwardBatch, GroupBatch, PageTable
from kvcanary.canary import Canary
from kvcanary.layout import AttentionGroup, KVSource, PoolLayout

PAGE = 4
HEADS, DIM, LAYERS = 2, 8, 2
Spoil = Callable[["HandEngine"], None]


class HandEngine:
    """One full-attention group; requests with their own pages; one row each, in order of admission."""

    def __init__(
        self,
        canary: Canary,
        pages: int = 64,
        seed: int = 0,
        *,
        dtype: torch.dtype = torch.float32,
        **said: Any,
    ) -> None:
        self.canary = canary
        self.random = torch.Generator().manual_seed(seed)
        self.pool = self._values(LAYERS, 2, pages, PAGE, HEADS, DIM, dtype=dtype)
        self.dropped: set[int] = set()
        """slots whose writes get lost"""
        sources = tuple(
            KVSource.from_view(f"{part}{layer}", self.pool[layer, i], layer=layer, component=part)
            for layer in range(LAYERS)
            for i, part in enumerate("kv")
        )
        group = AttentionGroup(
            "full", "full", pages * PAGE, PAGE, sources, trash_pages=(0,), offset_follows_position=True
        )
        self.layout = PoolLayout((group,))
        self.free_pages = list(range(1, pages))
        self.pages: dict[str, list[int]] = {}
        self.tokens: dict[str, list[int]] = {}
        self.cached: dict[str, int] = {}
        canary.bind(self.layout, max_tokens=512, max_batch_rows=16, max_rows=32, engine="hand", **said)
        canary.arm()

    def admit(self, name: str, length: int, *, pages: list[int] | None = None, tokens: list[int] | None = None) -> None:
        """Admit a request of ``length`` prompt tokens; ``pages`` and ``tokens``: a prefix it finds in the cache."""
        self.tokens[name] = tokens if tokens is not None else self.new_tokens(length)
        self.pages[name] = list(pages or [])
        start = len(self.pages[name]) * PAGE
        self.cached[name] = start
        self.canary.admit(name, tokens=self.tokens[name], start=start)
        if pages:
            self.canary.reuse("full", name, pages)

    def new_tokens(self, count: int) -> list[int]:
        """Random token ids."""
        tokens: list[int] = torch.randint(0, 1000, (count,), generator=self.random).tolist()
        return tokens

    def step(self, names: list[str] | None = None, *, before: Spoil | None = None, fail: bool = False) -> None:
        """One forward over all live requests (or ``names``): prefill what is missing, then one token each."""
        names = list(self.tokens) if names is None else names
        for name in names:
            if self.cached[name] == len(self.tokens[name]):
                self.tokens[name] += self.new_tokens(1)
            self._grow(name)
        with self.canary.step():
            self.batch = self._batch(names)
            if before is not None:
                before(self)
            with self.canary.forward(self.batch):
                if fail:
                    raise RuntimeError("the model raised")
                self._model()
        for name in names:
            self.cached[name] = len(self.tokens[name])

    def finish(self, name: str) -> None:
        """End a request and give its pages back."""
        tokens = self.tokens.pop(name)
        length = self.cached.pop(name)
        self.canary.finish(name, tokens=tokens, length=length)
        pages = self.pages.pop(name)
        self.canary.free("full", pages, name)
        self.free_pages += pages

    def slot(self, name: str, position: int) -> int:
        """Where a request's token lies."""
        return self.pages[name][position // PAGE] * PAGE + position % PAGE

    def flip_bit(self, name: str, position: int, layer: int = 1) -> None:
        """Flip one bit in a V row of a cached token."""
        page, offset = divmod(self.slot(name, position), PAGE)
        self.pool[layer, 1, page, offset, 1, 3:4].view(torch.int32).bitwise_xor_(1 << 7)

    def _grow(self, name: str) -> None:
        missing = -(-len(self.tokens[name]) // PAGE) - len(self.pages[name])
        if missing > 0:
            pages, self.free_pages = self.free_pages[:missing], self.free_pages[missing:]
            self.pages[name] += pages
            self.canary.alloc("full", name, pages)

    def _batch(self, names: list[str]) -> ForwardBatch:
        new = [self.tokens[name][self.cached[name] :] for name in names]
        starts = [0]
        for tokens in new:
            starts.append(starts[-1] + len(tokens))
        slots = [self.slot(name, p) for name in names for p in range(self.cached[name], len(self.tokens[name]))]
        width = max(len(self.pages[name]) for name in names)
        table = torch.full((len(names), width), -1, dtype=torch.int32)
        for row, name in enumerate(names):
            table[row, : len(self.pages[name])] = torch.tensor(self.pages[name], dtype=torch.int32)
        last = [self.tokens[name][self.cached[name] - 1] if self.cached[name] else -1 for name in names]
        return ForwardBatch(
            input_ids=torch.tensor([t for tokens in new for t in tokens]),
            query_start_loc=torch.tensor(starts, dtype=torch.int32),
            context_lens=torch.tensor([self.cached[name] for name in names], dtype=torch.int32),
            request_rows=torch.tensor([self.canary.row_of(name) for name in names], dtype=torch.int32),
            last_ids=torch.tensor(last, dtype=torch.int32),
            groups=(GroupBatch(slot_mapping=torch.tensor(slots), table=PageTable(entries=table)),),
        )

    def _model(self) -> None:
        item = self.batch.groups[0]
        assert item is not None
        assert item.slot_mapping is not None
        kept = [slot for slot in item.slot_mapping.tolist() if slot not in self.dropped]
        slots = torch.tensor(kept, dtype=torch.int64)
        pages, offsets = slots // PAGE, slots % PAGE
        self.pool[:, :, pages, offsets] = self._values(LAYERS, 2, len(pages), HEADS, DIM, dtype=self.pool.dtype)

    def _values(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        if not dtype.is_floating_point:
            return torch.randint(0, 100, shape, generator=self.random).to(dtype)
        return torch.randn(shape, generator=self.random).to(dtype)
