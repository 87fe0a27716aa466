"""The books as plain values, from which a reader goes on that begins in the middle of a run or has lost facts."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec.structs import astuple

from kvcanary.observers.ledger import NOTHING, Entry, Flight, Ledger, Life, Notes, Owner, Publication

# Arrays and no tuples, so that what is written and read back equals what was made.


class _Published(msgspec.Struct, frozen=True, gc=False, array_like=True):
    request: str
    forward: int
    updates: int
    told: bool = False


class _Owner(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """An earlier owner, or a holder that has ended. ``ended``: when its request did, 0 while it lives."""

    name: str
    ended: int
    since: int = 0
    until: int = 0


class _Span(msgspec.Struct, frozen=True, gc=False, array_like=True):
    group: str
    first: int
    count: int


class _Pages(msgspec.Struct, frozen=True, gc=False, array_like=True):
    group: str
    first: int
    count: int
    state: int
    since: int
    busy: int
    holders: list[str]
    """those that live"""
    published: _Published | None
    ended: list[_Owner] = []
    past: list[_Owner] = []
    stale: _Published | None = None
    missing: str = ""


class _Flight(msgspec.Struct, frozen=True, gc=False, array_like=True):
    name: str
    request: str
    inward: bool
    ordered: bool
    forward: int
    spans: list[_Span]


class _State(msgspec.Struct, frozen=True, gc=False):
    epoch: int | None
    updates: int
    pages: list[_Pages]
    flights: list[_Flight]


def state_of(ledger: Ledger) -> dict[str, Any]:
    """Who holds what, and who held it. Failed loads are left out: of them a reader claims less, never more."""
    pages: list[_Pages] = []
    spans: dict[tuple[str, bool], list[_Span]] = {key: [] for key in ledger.flights}
    for group, first, count, entry in ledger.all_spans():
        pages.append(_pages(group, first, count, entry))
        for flight in entry.notes.flights + entry.notes.intruders:
            spans[flight.key].append(_Span(group, first, count))
    flights = [
        _Flight(one.name, one.request, one.inward, one.ordered, one.forward, spans[one.key])
        for one in ledger.flights.values()
    ]
    state: dict[str, Any] = msgspec.to_builtins(_State(ledger.epoch, ledger.updates, pages, flights))
    return state


def _pages(group: str, first: int, count: int, entry: Entry) -> _Pages:
    notes = entry.notes
    return _Pages(
        group,
        first,
        count,
        entry.state,
        entry.since,
        entry.busy,
        [life.name for life in entry.holders if not life.ended],
        _published(notes.published),
        [_Owner(life.name, life.ended) for life in entry.holders if life.ended],
        [_Owner(owner.life.name, owner.life.ended, owner.since, owner.until) for owner in entry.past],
        _published(notes.stale),
        notes.missing,
    )


def _published(publication: Publication | None) -> _Published | None:
    return None if publication is None else _Published(*astuple(publication))


def _publication(published: _Published | None) -> Publication | None:
    return None if published is None else Publication(*astuple(published))


class _Lives:
    """Requests by name; one that has ended is another than one of its name that lives."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._ended: dict[tuple[str, int], Life] = {}

    def get(self, name: str, ended: int = 0) -> Life:
        if not ended:
            return self._ledger.life(name)
        return self._ended.setdefault((name, ended), Life(name, ended))


def restore(ledger: Ledger, state: dict[str, Any]) -> None:
    """Put the books in the state that :func:`state_of` gave.

    Raises:
        msgspec.ValidationError: it is no such state.
    """
    given = msgspec.convert(state, _State)
    ledger.forget()
    ledger.epoch, ledger.updates = given.epoch, given.updates
    for one in given.flights:
        spans = [(span.group, span.first, span.count) for span in one.spans]
        flight = Flight(one.name, one.request, one.inward, one.ordered, one.forward, spans)
        ledger.flights[flight.key] = flight
    lives = _Lives(ledger)
    for pages in given.pages:
        space = ledger.space(pages.group)
        space.spans(pages.first, pages.count)
        space.put(pages.first, pages.count, _entry(pages, lives))
    for flight in ledger.flights.values():
        for group, start, length in flight.spans:
            space = ledger.space(group)
            for first, count, found in space.spans(start, length):
                if found is not None:
                    space.put(first, count, found.noting(flights=(*found.notes.flights, flight)))


def _entry(pages: _Pages, lives: _Lives) -> Entry:
    ended = tuple(lives.get(owner.name, owner.ended) for owner in pages.ended)
    living = tuple(lives.get(name) for name in pages.holders)
    past = tuple(Owner(lives.get(owner.name, owner.ended), owner.since, owner.until) for owner in pages.past)
    notes = Notes(_publication(pages.published), _publication(pages.stale), missing=pages.missing)
    return Entry(pages.state, pages.since, ended + living, past, pages.busy, notes if any(astuple(notes)) else NOTHING)
