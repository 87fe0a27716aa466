"""Copies that no stream orders: what the engine tells of them, and when bytes really arrive."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from kvcanary.errors import LayoutError
from kvcanary.exported import Records
from kvcanary.faults.scenario.engine import Engine
from kvcanary.faults.scenario.happenings import CopyLand, CopyStart, Places
from kvcanary.faults.scenario.pool import Block, WorldError


class End(NamedTuple):
    """One page of a pool, or one block of a tier."""

    engine: Engine | None
    group: str
    number: int
    tier: str = ""

    def __str__(self) -> str:
        return f"{self.tier}{self.number}" if self.engine is None else f"page {self.number} of group {self.group!r}"


@dataclass(slots=True)
class Copy:
    """A copy under way: pairs of ends (no source: bytes from nowhere), and what has not arrived yet."""

    name: str
    pairs: list[tuple[End | None, End]]
    request: str
    missing: set[tuple[int, str]]
    records: dict[int, Records] = field(default_factory=dict[int, Records])
    taking: Places = ()
    relaid: bool = False
    told: bool = False


def _turn(engine: Engine) -> None:
    """An engine's loop goes on turning, and with it goes what was queued for its next step."""
    with engine.canary.step():
        engine.pool.queue.advance()


class Copies:
    """All copies of a scenario, and the tiers that they fill."""

    def __init__(self, engines: dict[str, Engine], tiers: dict[str, int]) -> None:
        self._engines = engines
        self._tiers = tiers
        self.blocks: dict[tuple[str, int], Block] = {}
        self._copies: dict[str, Copy] = {}

    # --- what the engine does -----------------------------------------------------------------------------

    def start(self, event: CopyStart) -> None:
        """The engine queues a copy, and tells of it; records are taken along in stream order."""
        old = self._copies.get(event.name)
        if old is not None and (old.missing or not old.told):
            raise WorldError(f"copy {event.name!r} is still under way; give this one another name")
        targets = self.ends(event.targets)
        sources: list[End | None] = list(self.ends(event.sources)) or [None] * len(targets)
        if len(sources) != len(targets):
            raise WorldError(f"{len(sources)} pages or blocks go to {len(targets)}; name one each")
        pairs = list(zip(sources, targets, strict=True))
        request = event.request or self._request_of(targets, sources)
        copy = Copy(event.name, pairs, request, set(), taking=event.taking, relaid=event.relaid)
        for number, pair in enumerate(pairs):
            there = self._sources(pair)
            unknown = [source for source in event.only if source not in there]
            if unknown:
                raise WorldError(f"there is no source {unknown[0]!r} to copy; there are {', '.join(there)}")
            copy.missing |= {(number, source) for source in event.only or there}
        self._copies[event.name] = copy
        self._tell_start(copy, ordered=event.ordered)
        for number, (source, _) in enumerate(pairs):
            if source is not None and source.engine is not None:
                copy.records[number] = source.engine.canary.export_records(source.group, [source.number])
            elif source is not None:
                records = self._block(source).records
                if records is not None:
                    copy.records[number] = records

    def tell(self, name: str, *, failed: bool) -> None:
        """The engine takes a copy for done, or hears that it failed."""
        copy = self._named(name)
        copy.told = True
        for engine in self._parties(copy):
            engine.canary.transfer(copy.name, "failed" if failed else "landed", error="reported by the copy engine")
        if failed:
            return
        for number, (source, target) in enumerate(copy.pairs):
            records = copy.records.get(number)
            if source is not None and source.engine is not None:
                _turn(source.engine)
            if target.engine is None:
                self._block(target).records = records
            elif records is not None:
                canary, request = target.engine.canary, copy.request or None
                canary.import_records(target.group, [target.number], records, request, relaid=copy.relaid)
        for engine in self._parties(copy):
            _turn(engine)

    def _tell_start(self, copy: Copy, *, ordered: bool) -> None:
        """One call for each canary, group, tier and direction that the copy concerns."""
        calls: dict[tuple[str, str, str, str], tuple[list[int], list[int]]] = {}
        for source, target in copy.pairs:
            for end, other, direction in ((source, target, "out"), (target, source, "in")):
                if end is not None and end.engine is not None:
                    tier = other.tier if other is not None else ""
                    key = (end.engine.pool.name, end.group, direction, tier)
                    pages, blocks = calls.setdefault(key, ([], []))
                    pages.append(end.number)
                    blocks += [other.number] if other is not None and tier else []
            if target.engine is None and (source is None or source.engine is None):
                calls.setdefault(("", "", "out", target.tier), ([], []))[1].append(target.number)
        for (pool, group, direction, tier), (pages, blocks) in calls.items():
            engine = self._engines[pool]
            engine.canary.transfer(
                copy.name,
                "start",
                group=group or engine.pool.first,
                pages=pages,
                direction=direction,
                ordered=ordered,
                request=copy.request or None,
                tier=tier,
                blocks=blocks,
            )

    def _parties(self, copy: Copy) -> list[Engine]:
        found = {
            end.engine.pool.name: end.engine
            for pair in copy.pairs
            for end in pair
            if end is not None and end.engine is not None
        }
        return list(found.values()) or [self._engines[""]]

    # --- what happens to bytes ----------------------------------------------------------------------------

    def land(self, event: CopyLand) -> None:
        """Bytes become visible; once all have, an engine that was not told sees that the copy is done."""
        copy = self._named(event.name)
        origins = self._origins(copy)
        items = event.items or range(len(copy.pairs))
        due = {(n, s) for n, s in copy.missing if n in items and (not event.only or s in event.only)}
        if not due:
            raise WorldError(f"nothing of copy {event.name!r} is left to land there")
        for number, source in sorted(due):
            self._carry(origins[number], copy.pairs[number][1], source)
        copy.missing -= due
        if not copy.missing and not copy.told and not self._forgotten(copy):
            self.tell(copy.name, failed=False)

    def _forgotten(self, copy: Copy) -> bool:
        """Whether a load's request has ended: its engine waits for it no longer, whoever still sends."""
        entered = [target.engine for _, target in copy.pairs if target.engine is not None]
        held = [engine.requests.get(copy.request) for engine in entered]
        return any(one is not None and not one.live for one in held)

    def _origins(self, copy: Copy) -> list[End | None]:
        """Where the bytes really come from."""
        if not copy.taking:
            return [source for source, _ in copy.pairs]
        taken = self.ends(copy.taking)
        if len(taken) != len(copy.pairs):
            raise WorldError(f"copy {copy.name!r} takes {len(taken)} pages for {len(copy.pairs)}")
        return list(taken)

    def _carry(self, origin: End | None, target: End, source: str) -> None:
        data = self.bytes_of(origin, source) if origin is not None else None
        if target.engine is None:
            block = self._block(target)
            block.data[source] = data.clone() if data is not None else torch.zeros(1)
            return
        there = target.engine.pool.page(target.group, source, target.number)
        if data is None:
            there.copy_(target.engine.pool.fresh(there))
        elif data.shape != there.shape or data.dtype != there.dtype:
            raise LayoutError(f"{origin} has {source!r} as {data.dtype} {tuple(data.shape)}, {target} as {there.dtype}")
        else:
            there.copy_(data)

    def bytes_of(self, end: End, source: str) -> torch.Tensor:
        """The numbers that lie at an end now."""
        if end.engine is not None:
            return end.engine.pool.page(end.group, source, end.number)
        data = self._block(end).data.get(source)
        if data is None:
            raise WorldError(f"nothing was ever stored in {end} for source {source!r}")
        return data

    def stored(self, end: End) -> list[str]:
        """The sources that lie in a block of a tier."""
        names = list(self._block(end).data)
        if not names:
            raise WorldError(f"nothing was ever stored in {end}")
        return names

    def _sources(self, pair: tuple[End | None, End]) -> list[str]:
        """Names of the buffers that a copy between two ends moves: what there is at its source."""
        source, target = pair
        if source is not None and source.engine is None and self._block(source).data:
            return list(self._block(source).data)
        for end in (source, target):
            if end is not None and end.engine is not None:
                return list(end.engine.pool.views[end.group])
        return ["data"]

    # --- places -------------------------------------------------------------------------------------------

    def ends(self, places: Places) -> list[End]:
        """Pages and blocks, in order.

        Raises:
            WorldError: a block that its tier does not have, or slots that fill no pages.
        """
        found: list[End] = []
        for term in places:
            if term.space in self._tiers:
                blocks = [End(None, "", number, term.space) for number in term.numbers]
                for block in blocks:
                    self._block(block)
                found += blocks
            else:
                engine = self._engine_of(term.space)
                for group, slots in engine.slots((term,)).items():
                    found += [End(engine, group, page) for page in engine.whole_pages(group, slots)]
        return found

    def _engine_of(self, space: str) -> Engine:
        pool = "r" if space == "r" or space.startswith("r.") else ""
        engine = self._engines.get(pool)
        if engine is None:
            raise WorldError(f"{space!r} is a place in a remote pool, and the file has no `remote` groups")
        return engine

    def _block(self, end: End) -> Block:
        if not 0 <= end.number < self._tiers[end.tier]:
            raise WorldError(f"tier {end.tier!r} has {self._tiers[end.tier]} blocks, and no {end}")
        return self.blocks.setdefault((end.tier, end.number), Block())

    def _named(self, name: str) -> Copy:
        copy = self._copies.get(name)
        if copy is None:
            raise WorldError(f"no copy {name!r} was started; started were {', '.join(self._copies) or 'none'}")
        return copy

    def _request_of(self, targets: list[End], sources: list[End | None]) -> str:
        """Whom a copy is for, when it is not said: whoever holds its pages, those that it enters first."""
        for end in (*targets, *sources):
            if end is not None and end.engine is not None:
                page = end.engine.pool.groups[end.group].page
                holder = end.engine.holder(end.group, end.number * page)
                if holder:
                    return holder
        return ""
