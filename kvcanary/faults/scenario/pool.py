"""The physical half of a scenario: real tensors, what lies in them, and the canary that watches them.

Nothing here knows what anybody believes. Bytes are random, so that no two tokens' bytes are alike by chance.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from kvcanary.canary import Canary
from kvcanary.config import CanaryConfig
from kvcanary.errors import KVCanaryError
from kvcanary.events import Event
from kvcanary.exported import Records
from kvcanary.faults.scenario.device import DeviceQueue
from kvcanary.faults.scenario.parse import Group, Source
from kvcanary.kernels.queued import QueuedKernels
from kvcanary.layout import Arena, AttentionGroup, KVSource, PoolLayout
from kvcanary.testing import EventRecorder

MAX_ROWS, MAX_TOKENS = 32, 4096
FLUSH_SECONDS = 30.0
_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "uint8": torch.uint8,
}
_WORDS = 4
"""bytes of one word"""


Backend = Literal["reference", "triton"]


class WorldError(KVCanaryError, ValueError):
    """An event that cannot happen in this world: places that do not exist, names that nobody has."""


@dataclass(slots=True)
class Block:
    """A page's bytes in a tier, by source, and the records that travelled with them."""

    data: dict[str, torch.Tensor] = field(default_factory=dict[str, torch.Tensor])
    records: Records | None = None


class Pool:
    """One engine's cache and its canary.

    Attributes:
        name: "" or "r".
        groups: as the file describes them.
        views: per group and source a view ``[pages, page size, width]`` of the pool's bytes.
    """

    def __init__(
        self,
        name: str,
        groups: Sequence[Group],
        settings: dict[str, Any],
        *,
        backend: Backend,
        held: Sequence[str],
        seed: int,
    ) -> None:
        self.name = name
        self.groups = {group.name: group for group in groups}
        self.first = groups[0].name
        self.random = torch.Generator().manual_seed(seed)
        self.device = "cuda" if backend == "triton" and torch.cuda.is_available() else "cpu"
        self.views = self._make_views(groups)
        self.recorder = EventRecorder(Event)
        # Peers share a key; health and statistics are about runs longer than this one.
        quiet: dict[str, Any] = {"mode": "log", "key": 1, "health_every": 0, "stats_every": 0}
        config = CanaryConfig(backend=backend, **{**quiet, **settings})
        self.canary = Canary(config, observers=[self.recorder]).start()
        self.canary.bind(
            self._layout(groups),
            max_tokens=MAX_TOKENS,
            max_batch_rows=MAX_ROWS,
            max_rows=MAX_ROWS,
            engine="scenario",
        )
        self.queue = DeviceQueue(held)
        self.canary.launch_through(lambda kernels: QueuedKernels(kernels, self.queue.put))
        self.canary.arm()

    @property
    def parts(self) -> set[str]:
        """Parts that forwards write."""
        return {source.part for group in self.groups.values() for source in sources_of(group).values()}

    def close(self) -> None:
        """Stop the canary."""
        self.queue.begin("")
        self.canary.stop(FLUSH_SECONDS)

    # --- what it looks like -------------------------------------------------------------------------------

    def _make_views(self, groups: Sequence[Group]) -> dict[str, dict[str, torch.Tensor]]:
        arenas: dict[str, torch.Tensor] = {}
        for name in {group.arena for group in groups if group.arena}:
            members = [group for group in groups if group.arena == name]
            pages = max(group.slots // group.page for group in members)
            arenas[name] = self._random_bytes(pages, max(map(_page_bytes, members)))
        views: dict[str, dict[str, torch.Tensor]] = {}
        for group in groups:
            if group.slots % group.page:
                raise WorldError(f"group {group.name!r}: {group.slots} slots fill no whole pages of {group.page}")
            pages = group.slots // group.page
            memory = arenas.get(group.arena)
            if memory is None:
                memory = self._random_bytes(pages, _page_bytes(group))
            views[group.name] = _views(group, memory[:pages])
        return views

    def _random_bytes(self, pages: int, size: int) -> torch.Tensor:
        """Memory as it is found: bytes that are finite numbers, whatever dtype reads them."""
        return torch.randint(0, 64, (pages, size), generator=self.random, dtype=torch.uint8).to(self.device)

    def _layout(self, groups: Sequence[Group]) -> PoolLayout:
        return PoolLayout(tuple(self._attention_group(group) for group in groups))

    def _attention_group(self, group: Group) -> AttentionGroup:
        sources = tuple(
            KVSource.from_view(
                name,
                self.views[group.name][name],
                component=name,
                first_head=source.head,
                part=source.part,
                dtype=_DTYPES[source.dtype],
            )
            for name, source in sources_of(group).items()
        )
        return AttentionGroup(
            group.name,
            group.kind,
            group.slots,
            group.page,
            sources,
            window=group.window,
            ring=group.ring,
            max_rewind=group.max_rewind,
            trash_pages=group.trash,
            null_pages=group.null,
            arena=Arena(group.arena, 1) if group.arena else None,
        )

    # --- what happens to bytes ----------------------------------------------------------------------------

    def write_token(
        self, group: str, slot: int, *, only: Sequence[str] = (), part: str | None = None, nan: bool = False
    ) -> None:
        """New bytes of one token."""
        for name in only:
            self._view(group, name)
        for name, source in sources_of(self.groups[group]).items():
            if (only and name not in only) or (part is not None and source.part != part):
                continue
            row = self.row(group, name, slot)
            row.copy_(self.fresh(row))
            if nan and row.dtype.is_floating_point:
                row[0] = float("nan")

    def fresh(self, like: torch.Tensor) -> torch.Tensor:
        """Random finite numbers."""
        if like.dtype.is_floating_point:
            return torch.randn(like.shape, generator=self.random).to(like.dtype)
        return torch.randint(0, 256, like.shape, generator=self.random).to(like.dtype)

    def row(self, group: str, source: str, slot: int) -> torch.Tensor:
        """The numbers of one token in one source. A negative slot counts from the end, as in careless kernels."""
        item = self.groups[group]
        if not -item.slots <= slot < item.slots:
            raise WorldError(f"slot {slot} lies outside of group {group!r} with its {item.slots} slots")
        page, offset = divmod(slot % item.slots, item.page)
        return self._view(group, source)[page, offset]

    def _view(self, group: str, source: str) -> torch.Tensor:
        view = self.views[group].get(source)
        if view is None:
            raise WorldError(f"group {group!r} has no source {source!r}; it has {', '.join(self.views[group])}")
        return view

    def page(self, group: str, source: str, page: int) -> torch.Tensor:
        """The numbers of one page in one source."""
        view = self._view(group, source)
        if not 0 <= page < view.shape[0]:
            raise WorldError(f"page {page} lies outside of group {group!r} with its {view.shape[0]} pages")
        return view[page]

    # --- what was found -----------------------------------------------------------------------------------

    def settle(self) -> list[Event]:
        """Let the device do what it may, and return all events since the last call."""
        self.queue.advance()
        flushed = self.canary.flush(FLUSH_SECONDS)
        if not (flushed and self.canary.bus.flush(time.monotonic() + FLUSH_SECONDS)):
            raise WorldError(f"the canary did not deliver its findings within {FLUSH_SECONDS:g} s")
        events = self.recorder.events
        self.recorder.clear()
        return events


def sources_of(group: Group) -> dict[str, Source]:
    """The sources of a group, by name."""
    if isinstance(group.sources, dict):
        return group.sources
    return {name: Source() for name in group.sources}


def _token_bytes(source: Source) -> int:
    return source.width * _DTYPES[source.dtype].itemsize


def _page_bytes(group: Group) -> int:
    # Each source begins at a whole word.
    return sum(-(-_token_bytes(source) * group.page // _WORDS) * _WORDS for source in sources_of(group).values())


def _views(group: Group, memory: torch.Tensor) -> dict[str, torch.Tensor]:
    """Views ``[pages, page size, width]`` on ``memory`` ``[pages, bytes]``, one source after the other in each page."""
    views: dict[str, torch.Tensor] = {}
    begin = 0
    for name, source in sources_of(group).items():
        size = _token_bytes(source) * group.page
        numbers = memory[:, begin : begin + size].view(_DTYPES[source.dtype])
        views[name] = numbers.unflatten(1, (group.page, source.width))
        begin += -(-size // _WORDS) * _WORDS
    return views
