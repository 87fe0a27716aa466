"""The ownership fold: rules of who may hold, hand on and find pages, judged by the stamps of facts."""

from __future__ import annotations

from kvcanary.events import (
    Event,
    FactsLost,
    HazardCounted,
    OwnershipViolated,
    PagesAllocated,
    PagesFreed,
    RequestsFinished,
    RequestsPreempted,
    RunStarted,
)
from kvcanary.observers.base import stamp
from kvcanary.observers.ledger import FREE, HELD, NOBODY, Entry, Ledger, Owner


class OwnershipFold:
    """The ledger of a run."""

    name = "ownership"
    interests: tuple[type[Event], ...] = (
        RunStarted,
        FactsLost,
        PagesAllocated,
        PagesFreed,
        RequestsFinished,
        RequestsPreempted,
    )
    emits: tuple[type[Event], ...] = (OwnershipViolated, HazardCounted)
    guard = True

    def __init__(self) -> None:
        self.ledger = Ledger()

    def handle(self, event: Event) -> list[Event]:
        """Rules that the event shows to be broken."""
        match event:
            case PagesAllocated():
                return self._allocated(event)
            case PagesFreed():
                return self._freed(event)
            case RequestsFinished() | RequestsPreempted():
                for request in event.requests:
                    self.ledger.end(request, event.forward)
            case RunStarted():
                self.ledger = Ledger.of_run(event)
            case FactsLost():
                self.ledger.forget()
            case _:
                pass
        return []

    def _allocated(self, fact: PagesAllocated) -> list[Event]:
        found: list[Event] = []
        space = self.ledger.space(fact.group)
        for run in fact.runs:
            life = self.ledger.life(fact.requests[run.request])
            for first, count, entry in space.spans(run.first, run.count):
                past: tuple[Owner, ...] = entry.past if entry is not None else ()
                if entry is not None and entry.state == HELD:
                    if life is NOBODY or entry.holds(life.name) or entry.holds(""):
                        continue
                    for other in entry.live()[:1]:
                        found.append(_violated(fact, "DOUBLE_ALLOC", first, life.name, other.name))
                space.put(first, count, Entry(HELD, fact.forward, (life,), past))
        return found

    def _freed(self, fact: PagesFreed) -> list[Event]:
        found: list[Event] = []
        space = self.ledger.space(fact.group)
        for run in fact.runs:
            name = fact.requests[run.request]
            for first, count, entry in space.spans(run.first, run.count):
                if entry is None:
                    if not name:
                        space.put(first, count, Entry(FREE, fact.forward))
                elif entry.state == FREE:
                    found.append(_violated(fact, "DOUBLE_FREE", first, name or entry.last_owner, entry.last_owner))
                else:
                    others = tuple(life for life in entry.live() if name and life.name != name)
                    if others:
                        space.put(first, count, Entry(HELD, entry.since, others, entry.past))
                    else:
                        past = tuple(Owner(life, entry.since, fact.forward) for life in entry.holders[:1])
                        space.put(first, count, Entry(FREE, fact.forward, (), (*past, *entry.past[:1])))
        return found


def _violated(fact: PagesAllocated | PagesFreed, kind: str, page: int, request: str, other: str) -> OwnershipViolated:
    return OwnershipViolated(
        **stamp(fact, "ownership"),
        kind=kind,
        group=fact.group,
        page=page,
        request=request,
        other="" if other == request else other,
    )
