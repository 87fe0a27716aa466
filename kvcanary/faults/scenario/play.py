"""Play a scenario: let its events happen one by one, and note what is reported at which."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch

from kvcanary.errors import BatchError, ConfigError, LayoutError
from kvcanary.events import Event, IncidentOpened, OwnershipViolated, ViolationDetected
from kvcanary.faults.scenario import happenings as happen
from kvcanary.faults.scenario.copies import Copies
from kvcanary.faults.scenario.device import QueueError
from kvcanary.faults.scenario.engine import Engine
from kvcanary.faults.scenario.forward import Forward
from kvcanary.faults.scenario.happenings import Happening, Places
from kvcanary.faults.scenario.parse import Play, Scenario
from kvcanary.faults.scenario.pool import Backend, Pool, WorldError
from kvcanary.faults.scenario.texts import Texts
from kvcanary.faults.scenario.words import PADDING, listed
from kvcanary.text import near_to


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that was reported.

    Attributes:
        event: number of the event at which it came, from 0.
        kind: of violation; or the name of the error that a call to the canary raised.
        request, others: whom it names first, and whom it names besides.
        place: where, in words.
        detail: the incident's headline, or the ledger's or the error's own words.
    """

    event: int
    kind: str
    request: str = ""
    others: tuple[str, ...] = ()
    group: str = ""
    place: str = ""
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Report:
    """What came of it: findings, and all events by the number of the scenario's event."""

    findings: tuple[Finding, ...]
    trace: tuple[tuple[Event, ...], ...]


def play(scenario: Scenario, events: Play, *, backend: Backend = "reference") -> Report:
    """Play ``events`` of a scenario in a new world.

    Raises:
        ScenarioError: an event cannot happen, with its line.
        ConfigError: the backend or a setting does not work.
    """
    with ExitStack() as cleanup:
        try:
            world = World(events, backend, cleanup)
        except (ConfigError, LayoutError, WorldError) as error:
            raise scenario.world_error(error) from error
        findings: list[Finding] = []
        trace: list[tuple[Event, ...]] = []
        for number, event in enumerate(events.events):
            try:
                found, seen = world.happens(number, event)
            except (WorldError, QueueError) as error:
                raise scenario.error(events, number, error) from error
            findings += found
            trace.append(tuple(seen))
        return Report(tuple(findings), tuple(trace))


class World:
    """One or two engines, their pools, and the tiers between them."""

    def __init__(self, events: Play, backend: Backend, cleanup: ExitStack) -> None:
        held = [event.name for event in events.events if isinstance(event, happen.Run)]
        texts = Texts(events.requests)
        self.engines: dict[str, Engine] = {}
        for name, groups in (("", events.groups), ("r", events.remote)):
            if groups:
                pool = Pool(name, groups, events.settings, backend=backend, held=held, seed=len(self.engines))
                cleanup.callback(pool.close)
                self.engines[name] = Engine(pool, texts)
        self.copies = Copies(self.engines, events.tiers)
        self._tiers = events.tiers
        self._forwards: dict[str, Forward] = {}
        self._order: list[str] = []
        self._translation = {
            name: {
                group.name: torch.zeros(pool_slots(engine), dtype=torch.int64, device=engine.pool.device)
                for group in engine.pool.groups.values()
                if group.translated
            }
            for name, engine in self.engines.items()
        }
        self._idle = 0
        self._verified: list[Finding] = []
        self._rules: dict[type[Happening], Callable[[Any], None]] = {
            happen.Admit: self._admit,
            happen.Alloc: self._alloc,
            happen.Free: self._free,
            happen.Publish: self._publish,
            happen.Hit: self._hit,
            happen.Evict: self._evict,
            happen.Rewind: self._rewind,
            happen.Preempt: self._preempt,
            happen.Finish: self._finish,
            happen.Move: self._move,
            happen.Restamp: self._restamp,
            happen.WeightsUpdated: self._weights,
            happen.Write: self._write,
            happen.Change: self._change,
            happen.Table: self._table,
            happen.Translate: self._translate,
            happen.Verify: self._verify,
            happen.Nonfinite: self._nonfinite,
            happen.Idle: self._idles,
            happen.Launch: self._launch,
            happen.Run: self._run,
            happen.CopyStart: self.copies.start,
            happen.CopyLand: self.copies.land,
            happen.CopyTold: lambda event: self.copies.tell(event.name, failed=event.failed),
        }

    def happens(self, number: int, event: Happening) -> tuple[list[Finding], list[Event]]:
        """Let one event happen; returns what was reported, and all events of the canaries.

        Raises:
            WorldError, QueueError: it cannot happen.
        """
        self._verified = []
        findings: list[Finding] = []
        try:
            self._rules[type(event)](event)
        except (LayoutError, BatchError) as error:
            findings.append(Finding(number, type(error).__name__, detail=str(error)))
        seen = [one for engine in self.engines.values() for one in engine.pool.settle()]
        findings += self._verified
        findings += [found for one in seen if (found := finding_of(one, seen)) is not None]
        return [replace(finding, event=number) for finding in findings], seen

    # --- requests and slots -------------------------------------------------------------------------------

    def _engine(self, *places: Places) -> Engine:
        """Whose pool the places lie in."""
        spaces = {term.space for some in places for term in some}
        pools = {"r" if space == "r" or space.startswith("r.") else "" for space in spaces}
        if len(pools) > 1:
            raise WorldError("these places lie in two pools")
        name = next(iter(pools), "")
        if name not in self.engines:
            raise WorldError("the file has no `remote` groups, so there is no place r")
        return self.engines[name]

    def _holding(self, request: str) -> tuple[Engine, str]:
        """The engine in whose books a request is, and its name there: ``r.A`` is the remote pool's A."""
        name = request.removeprefix("r.")
        remote = self.engines.get("r")
        if request != name and remote is None:
            raise WorldError(f"the file has no `remote` groups, so there is no request {request!r}")
        if remote is not None and (
            request != name or (name in remote.requests and name not in self.engines[""].requests)
        ):
            return remote, name
        return self.engines[""], name

    def _tier(self, places: Places) -> tuple[str, list[int]] | None:
        """The tier and its blocks, where places lie in one."""
        tiers = {term.space for term in places if term.space in self._tiers}
        if not tiers:
            return None
        if len(tiers) > 1 or len(tiers) < len({term.space for term in places}):
            raise WorldError("blocks of a tier and other places do not go together")
        return tiers.pop(), [end.number for end in self.copies.ends(places)]

    def _admit(self, event: happen.Admit) -> None:
        engine, name = self._holding(event.request)
        engine.admit(name, event.length)

    def _alloc(self, event: happen.Alloc) -> None:
        blocks = self._tier(event.places)
        if blocks is not None:
            self.engines[""].canary.alloc_blocks(blocks[0], event.request, blocks[1])
            return
        engine = self._engine(event.places)
        for group, slots in engine.slots(event.places).items():
            engine.alloc(event.request, group, slots)

    def _free(self, event: happen.Free) -> None:
        blocks = self._tier(event.places)
        if blocks is not None:
            self.engines[""].canary.free_blocks(blocks[0], blocks[1], event.request or None)
            return
        engine = self._engine(event.places)
        for group, slots in engine.slots(event.places).items():
            engine.free(event.request, group, slots)

    def _publish(self, event: happen.Publish) -> None:
        engine = self._engine(event.places)
        engine.publish(event.request, engine.slots(event.places), event.key)

    def _hit(self, event: happen.Hit) -> None:
        self._with_key(event.key).hit(event.request, event.key)

    def _evict(self, event: happen.Evict) -> None:
        self._with_key(event.key).evict(event.key)

    def _with_key(self, key: str) -> Engine:
        return next((engine for engine in self.engines.values() if key in engine.index), self.engines[""])

    def _rewind(self, event: happen.Rewind) -> None:
        engine, name = self._holding(event.request)
        engine.go_back(name, event.length)

    def _preempt(self, event: happen.Preempt) -> None:
        engine, name = self._holding(event.request)
        engine.preempt(name)

    def _finish(self, event: happen.Finish) -> None:
        engine, name = self._holding(event.request)
        engine.finish(name)

    def _move(self, event: happen.Move) -> None:
        engine = self._engine(event.sources, event.targets)
        sources, targets = self.copies.ends(event.sources), self.copies.ends(event.targets)
        if len(sources) != len(targets) or any(a.group != b.group for a, b in zip(sources, targets, strict=False)):
            raise WorldError("a move needs as many targets as sources, in the same group")
        for source, target in zip(sources, targets, strict=True):
            engine.canary.move(source.group, [source.number], [target.number])
            pool = engine.pool
            for name in pool.views[source.group]:
                pool.queue.put(_mover(pool, source.group, name, source.number, target.number))

    def _restamp(self, event: happen.Restamp) -> None:
        engine = self._engine(event.places)
        for group, slots in engine.slots(event.places).items():
            engine.canary.restamp(group, engine.pages(group, slots))

    def _weights(self, event: happen.WeightsUpdated) -> None:
        for engine in self.engines.values():
            engine.canary.weights_updated(event.epoch)

    # --- bytes --------------------------------------------------------------------------------------------

    def _write(self, event: happen.Write) -> None:
        engine = self._engine(event.places)
        for group, slots in engine.slots(event.places).items():
            for slot in slots:
                engine.pool.write_token(group, slot)

    def _change(self, event: happen.Change) -> None:
        rows = self._rows(event.places, event.source)
        if event.how == "roll":
            kept = [row.clone() for row in rows]
            for row, following in zip(rows, [*kept[1:], kept[0]], strict=True):
                row.copy_(following)
            return
        for row in rows:
            data = row.view(torch.uint8).flatten()
            if event.how == "flip":
                data[0] ^= 1 << 3
            elif event.how == "spoil":
                row.fill_(float("nan") if row.dtype.is_floating_point else 255)
            else:
                row.copy_(row.flip(-1))

    def _rows(self, places: Places, source: str) -> list[torch.Tensor]:
        """The numbers of each token, or of each block of a tier, in one source or in all."""
        tier = self._tier(places)
        rows: list[torch.Tensor] = []
        if tier is not None:
            for end in self.copies.ends(places):
                names = [source] if source else self.copies.stored(end)
                rows += [self.copies.bytes_of(end, name) for name in names]
            return rows
        engine = self._engine(places)
        for group, slots in engine.slots(places).items():
            for name in [source] if source else list(engine.pool.views[group]):
                rows += [engine.pool.row(group, name, slot) for slot in slots]
        return rows

    def _table(self, event: happen.Table) -> None:
        waiting = [self._forwards[name] for name in self._order]
        slots = self._engine(event.places).numbers(event.places)
        if not [forward for forward in waiting if forward.rewrite(event.request, slots)]:
            raise WorldError(f"no launched forward has a row of request {event.request!r}")

    def _translate(self, event: happen.Translate) -> None:
        engine = self._engine(event.targets)
        (group, targets), *more = engine.slots(event.targets).items()
        table = self._translation[engine.pool.name].get(group)
        sources = [slot for slots in engine.slots(event.sources).values() for slot in slots]
        if table is None or more or len(sources) != len(targets):
            raise WorldError("translate takes full slots, and as many slots of one group that is translated")
        for source, target in zip(sources, targets, strict=True):
            table[source] = target

    def _verify(self, event: happen.Verify) -> None:
        engine = self._engine(event.places)
        for group, slots in engine.slots(event.places).items():
            for one in engine.canary.verify(group, engine.pages(group, slots)).mismatches:
                detail = f"part {one.part}: found {one.fingerprint_found}, sealed was {one.fingerprint_expected}"
                place = f"slot {one.slot}"
                self._verified.append(Finding(0, "CONTENT", one.writer, (), one.group, place, f"on demand: {detail}"))

    def _nonfinite(self, event: happen.Nonfinite) -> None:
        engine = self._engine(event.places)
        for group, slots in engine.slots(event.places).items():
            for slot in engine.canary.nonfinite(group, engine.pages(group, slots)):
                holder = engine.holder(group, slot)
                self._verified.append(Finding(0, "NONFINITE", holder, (), group, f"slot {slot}", "on demand"))

    # --- forwards -----------------------------------------------------------------------------------------

    def _launch(self, event: happen.Launch) -> None:
        if event.name in self._forwards:
            raise WorldError(f"there is a forward {event.name} already")
        places = [some for row in event.rows for some in (row.reads, row.writes) if some]
        engine = self._engine(*places) if places else self._holding(event.rows[0].request)[0]
        pool = engine.pool
        if event.part not in pool.parts:
            near_one, known = near_to(event.part, pool.parts), listed(sorted(pool.parts))
            raise WorldError(f"no source is of part {event.part!r}{near_one}; there is {known}")
        forward = Forward(engine, event, self._translation[pool.name])
        self._forwards[event.name] = forward
        self._order.append(event.name)
        pool.queue.begin(event.name)
        try:
            with pool.canary.step():
                pool.canary.enter(forward.batch, part=event.part)
                pool.queue.put(forward.model)
                pool.canary.leave()
                # Within the step, as on any CPU: the drain takes a step that is over and left no header for lost.
                pool.queue.advance()
        finally:
            pool.queue.begin("")
        forward.finish()

    def _run(self, event: happen.Run) -> None:
        if event.name not in self._forwards:
            raise WorldError(f"no forward {event.name} was launched; launched were {', '.join(self._order) or 'none'}")
        pool = self._forwards[event.name].pool
        with pool.canary.step():
            pool.queue.release(event.name)

    def _idles(self, event: happen.Idle) -> None:
        for name in self.engines:
            self._idle += 1
            row = happen.Row(PADDING, None, ())
            launch = happen.Launch(text=event.text, name=f"idle {self._idle}", rows=(row,))
            engine = self.engines[name]
            forward = Forward(engine, launch, self._translation[name])
            with engine.pool.canary.step():
                engine.pool.canary.enter(forward.batch)
                engine.pool.canary.leave()
                engine.pool.queue.advance()


def pool_slots(engine: Engine) -> int:
    """Slots of a pool's first group."""
    return engine.pool.groups[engine.pool.first].slots


def finding_of(event: Event, seen: Sequence[Event]) -> Finding | None:
    """The finding that an event is, with the words of the incident that it opened."""
    if not isinstance(event, ViolationDetected | OwnershipViolated):
        return None
    words = next((one for one in seen if isinstance(one, IncidentOpened) and one.cause == event.seq), None)
    detail = f"{words.headline}; likely {words.likely_cause}" if words is not None else ""
    if isinstance(event, OwnershipViolated):
        second = (event.other,) if event.other else ()
        page = f"page {event.page}" if event.page >= 0 else ""
        return Finding(0, event.kind, event.request, second, event.group, page, event.detail)
    others = tuple(dict.fromkeys(name for name in (event.owner_request, event.writer_request) if name))
    place = f"slot {event.slot}" if event.slot >= 0 else f"position {event.position_expected}"
    return Finding(0, event.kind, event.request, others, event.group, place, detail)


def _mover(pool: Pool, group: str, source: str, origin: int, target: int) -> Callable[[], None]:
    def move() -> None:
        pool.page(group, source, target).copy_(pool.page(group, source, origin))

    return move
