"""An adapter for the simulated engine: prefixes, chunks, preemption, forks, guesses, overlap; one group of pages."""

from contextlib import ExitStack

import torch

from kvcanary import AttentionGroup, ConfigError, ForwardBatch, GroupBatch, KVSource, PageTable, PoolLayout
from kvcanary.engines.base import FACTS, Patches, unarmed_checks
from kvcanary.kernels.queued import QueuedKernels


class SmallAdapter:
    name = "small"
    facts = FACTS - {"transfer"}
    quarantines = False

    def matches(self, engine):
        return type(engine).__qualname__ == "SimulatedEngine"

    def attach(self, engine, canary):
        if engine.style.sliding:
            raise ConfigError(f"style {engine.style.name!r} has a window group, which the small adapter does not watch")
        with ExitStack() as undo:
            patches, pool = Patches(), engine.pools["full"]
            undo.callback(canary.unbind)
            undo.callback(engine.device.run)
            undo.callback(patches.undo)
            patches.claim(engine)
            limits = {"max_tokens": 512, "max_batch_rows": 64, "max_rows": 64}
            canary.bind(self.layout(engine), engine=self.name, unarmed=unarmed_checks(self), **limits)
            canary.launch_through(lambda kernels: QueuedKernels(kernels, engine.device.launch))
            self.tell(engine, pool, canary, patches.after)
            patches.wrap(engine, "forward", lambda forward: lambda batch: self.forward(forward, batch, engine, canary))
            canary.arm()
            canary.free("full", pool.free)
            return undo.pop_all().close

    def layout(self, engine):
        memory, truths = engine.memory["full"], {"trash_pages": (0,), "offset_follows_position": True}
        parts = [(name, n, view) for name in ("kv", "scale") for n, view in enumerate(getattr(memory, name))]
        sources = tuple(KVSource.from_view(f"{part}{n}", view, layer=n, component=part) for part, n, view in parts)
        return PoolLayout((AttentionGroup("full", "full", memory.slots, memory.page_size, sources, **truths),))

    def tell(self, engine, pool, canary, after):
        after(engine, "begin", lambda _, r, start: canary.admit(r.name, tokens=r.tokens, start=start))
        after(engine, "preempt", lambda _, r: canary.preempt(r.name) if r.live else None)
        after(engine, "rewind", lambda _, r, length: canary.rewind(r.name, length, tokens=r.tokens))
        after(engine, "finish", lambda _, r: canary.finish(r.name, tokens=r.tokens))
        after(engine, "copy_pages", lambda _, r, group, old, new: canary.move(group, old, new, r.name))
        after(engine, "update_weights", lambda _: canary.weights_updated(engine.epoch))
        after(pool, "take", lambda pages, name, _: canary.alloc("full", name, pages))
        after(pool, "share", lambda _, name, pages, *__: canary.reuse("full", name, pages))
        after(pool, "give_back", lambda _, pages: canary.free("full", pages))
        after(pool, "publish", lambda _, name, __, pages, ___: canary.publish("full", pages, name))
        after(pool, "evict", lambda _, pages: canary.evict("full", pages))

    def forward(self, original, batch, engine, canary):
        with canary.step(), canary.forward(self.batch(batch, engine, canary)):
            original(batch)

    def batch(self, batch, engine, canary):
        dead, rows = [-1] * batch.padding, batch.rows
        last = [r.request.tokens[r.context - 1] if 0 < r.context <= len(r.request.tokens) else -1 for r in rows]
        table = PageTable(entries=batch.tables["full"], unit="slot" if engine.style.slot_tables else "page")
        return ForwardBatch(
            input_ids=batch.input_ids,
            positions=batch.positions,
            query_start_loc=batch.starts,
            context_lens=batch.context,
            request_rows=torch.tensor([canary.row_of(row.request.name) for row in rows] + dead),
            expected_ids=torch.tensor([token for row in rows for token in row.ids] + dead),
            last_ids=torch.tensor(last + dead),
            groups=(GroupBatch(slot_mapping=batch.mapping["full"], table=table),),
        )
