"""The adapter of the simulated engine: all that a canary has to be told, in one file. A model for one's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kvcanary.batch import ForwardBatch, GroupBatch, PageTable
from kvcanary.canary import Canary
from kvcanary.engines.base import Patches
from kvcanary.kernels.queued import QueuedKernels
from kvcanary.layout import AttentionGroup, PoolLayout


def attach(engine: Any, canary: Canary, unarmed: dict[str, str]) -> Callable[[], None]:
    """Watch an engine; returns what undoes it. ``unarmed``: checks that lack facts, each with its reason."""
    watched = _Watched(engine, canary)
    try:
        watched.begin(unarmed)
    except BaseException:
        watched.end()
        raise
    return watched.end


class _Watched:
    def __init__(self, engine: Any, canary: Canary) -> None:
        self.engine, self.canary, self.patches = engine, canary, Patches()

    def begin(self, unarmed: dict[str, str]) -> None:
        engine, canary, after = self.engine, self.canary, self.patches.after
        self.patches.claim(engine)
        batch_rows = engine.style.rows + engine.style.padding + 1
        limits: dict[str, Any] = {"max_tokens": 512, "max_batch_rows": batch_rows, "max_rows": 64}
        canary.bind(self.layout(), engine="simulated", unarmed=unarmed, **limits)
        # What is launched on this device runs later, and so must what the canary launches.
        canary.launch_through(lambda kernels: QueuedKernels(kernels, engine.device.launch))
        after(engine, "begin", self.admit)
        after(engine, "preempt", lambda _, r: canary.preempt(r.name) if r.live else None)
        after(engine, "finish", lambda _, r: canary.finish(r.name, tokens=r.tokens))
        after(engine, "copy_pages", lambda _, r, group, old, new: canary.move(group, old, new, r.name))
        after(engine, "update_weights", lambda _: canary.weights_updated(engine.epoch))
        if engine.style.tells_rewinds:
            after(engine, "rewind", lambda _, r, length: canary.rewind(r.name, length, tokens=r.tokens))
        for group, pool in engine.pools.items():
            self.watch_pool(group, pool)
        for method in (self.store, self.stored, self.load, self.loaded):
            after(engine.tier, method.__name__, method)
        self.patches.wrap(engine, "forward", self.forward)
        canary.arm()
        for group, pool in engine.pools.items():
            canary.free(group, pool.free)  # so that what is read in them later is known to be nobody's

    def end(self) -> None:
        self.patches.undo()
        self.engine.device.run()
        self.canary.unbind()

    def layout(self) -> PoolLayout:
        style, groups = self.engine.style, []
        for name, memory in self.engine.memory.items():
            windowed = name == "window"
            null = windowed and style.sliding == "null"
            group = AttentionGroup(
                name,
                "swa" if windowed else "full",
                memory.slots,
                memory.page_size,
                memory.sources,
                window=style.window if windowed else None,
                ring=style.ring if windowed else None,
                max_rewind=style.drafts if windowed else None,
                offset_follows_position=True,
                null_pages=(0,) if null else (),
                trash_pages=() if null else (0,),
            )
            groups.append(group)
        return PoolLayout(tuple(groups))

    def admit(self, _: Any, request: Any, start: int) -> None:
        known = {"tokens": request.tokens, "salts": request.salt_list()}
        self.canary.admit(request.name, start=start, identity=request.identity, **known)

    def watch_pool(self, group: str, pool: Any) -> None:
        canary, after = self.canary, self.patches.after
        after(pool, "take", lambda pages, name, _: canary.alloc(group, name, pages))
        after(pool, "share", lambda _, name, pages, *__: canary.reuse(group, name, pages))
        after(pool, "give_back", lambda _, pages: canary.free(group, pages))
        after(pool, "publish", lambda _, name, __, pages, ___: canary.publish(group, pages, name))
        after(pool, "evict", lambda _, pages: canary.evict(group, pages))

    def store(self, _: Any, package: Any) -> None:
        package.luggage = {g: self.canary.export_records(g, package.held(g)) for g in package.pages}
        self.transfer(package, "out")

    def stored(self, _: Any, package: Any, to: Any) -> None:
        self.canary.transfer(package.name, "landed")
        if to is not self.engine:
            with self.canary.step():  # the records must be there before they go, and this engine may have no more to do
                self.canary.finish(package.request.name)
            self.engine.device.run()

    def load(self, _: Any, package: Any) -> None:
        self.transfer(package, "in")

    def loaded(self, _: Any, package: Any) -> None:
        if package.failed:
            self.canary.transfer(package.name, "failed", error="the link is down")
        for group, records in package.luggage.items():
            self.canary.import_records(group, package.held(group), records, package.request.name)
        self.canary.transfer(package.name, "landed")

    def transfer(self, package: Any, direction: str) -> None:
        for group in package.pages:
            pages, name = package.held(group), package.request.name
            self.canary.transfer(package.name, "start", group=group, pages=pages, direction=direction, request=name)

    def forward(self, original: Callable[[Any], None]) -> Callable[[Any], None]:
        def forward(batch: Any) -> None:
            with self.canary.step(), self.canary.forward(self.batch(batch)):
                original(batch)

        return forward

    def batch(self, batch: Any) -> ForwardBatch:
        rows, pages = batch.rows, not self.engine.style.slot_tables
        last = [r.request.tokens[r.context - 1] if 0 < r.context <= len(r.request.tokens) else -1 for r in rows]
        salted = [bool(r.context - 1 in r.request.salts) for r in rows]
        known = [-1 if salt else token for token, salt in zip(last, salted, strict=True)]
        numbers = [self.canary.row_of(row.request.name) for row in rows]
        device = batch.input_ids.device
        groups = []
        for group in self.engine.style.groups:
            own = group if group in batch.tables else "full"
            table = PageTable(entries=batch.tables[own], unit="page" if pages else "slot")
            translation = None if own == group else self.engine.model.translation
            groups.append(GroupBatch(slot_mapping=batch.mapping[own], table=table, translation=translation))
        return ForwardBatch(
            input_ids=batch.input_ids,
            positions=batch.positions,
            query_start_loc=batch.starts,
            context_lens=batch.context,
            request_rows=torch.tensor(numbers + [-1] * batch.padding, device=device),
            expected_ids=torch.tensor([i for r in rows for i in r.ids] + [-1] * batch.padding, device=device),
            last_ids=torch.tensor(known + [-1] * batch.padding, device=device),
            token_salts=self.salts(batch),
            groups=tuple(groups),
        )

    def salts(self, batch: Any) -> torch.Tensor | None:
        if not any(row.request.salts for row in batch.rows):
            return None
        salts = [row.request.salts.get(p, 0) for row in batch.rows for p in range(row.context, row.end)]
        return torch.tensor(salts + [0] * batch.padding, device=batch.input_ids.device)
