"""The books as plain values, from which a reader goes on that begins in the middle of a run or has lost facts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec.structs import astuple

from kvcanary.observers.ledger import NOTHING, Entry, Failure, Flight, Ledger, Life, Notes, Owner, Publication

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


class _Failure(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """A load that did not complete. ``ended`` of its request, as above; None: nobody's."""

    transfer: str
    request: str
    forward: int
    ended: int | None
    behind: int
    """how often its request started over since"""


class _Pages(msgspec.Struct, frozen=True, gc=False, array_like=True):
    group: str
    first: int
    count: int
    state: int
    since: int
    busy: int
    holders: list[str | _Owner]
    """in their order; a name alone: it lives"""
    published: _Published | None
    past: list[_Owner] = []
    stale: _Published | None = None
    missing: str = ""
    failure: _Failure | None = None
    flights: list[int] = []
    """places in the list of flights"""
    intruders: list[int] = []


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
    failed: list[_Flight] = []
    """those whose pages nobody has used since"""
    living: list[str] = []
    """requests that hold no page"""


def state_of(ledger: Ledger) -> dict[str, Any]:
    """Who holds what, who held it, and what is known against it: all that later verdicts can depend on."""
    pages: list[_Pages] = []
    places = {key: place for place, key in enumerate(ledger.flights)}
    holding: set[str] = set()
    failures: set[str] = set()
    for group, first, count, entry in ledger.all_spans():
        pages.append(_pages(group, first, count, entry, places))
        holding.update(life.name for life in entry.holders if not life.ended)
        if entry.notes.failure is not None:
            failures.add(entry.notes.failure.transfer)
    flights = [_flight(one) for one in ledger.flights.values()]
    failed = [_flight(one) for one in ledger.failed.values() if one.name in failures]
    living = sorted(name for name in ledger.names if name not in holding)
    state: dict[str, Any] = msgspec.to_builtins(_State(ledger.epoch, ledger.updates, pages, flights, failed, living))
    return state


def _flight(flight: Flight) -> _Flight:
    """With its pages in order, each once."""
    pages = {(group, first + at) for group, first, count in flight.spans for at in range(count)}
    spans: list[_Span] = []
    for group, page in sorted(pages):
        last = spans[-1] if spans else None
        if last is not None and (last.group, last.first + last.count) == (group, page):
            spans[-1] = _Span(group, last.first, last.count + 1)
        else:
            spans.append(_Span(group, page, 1))
    return _Flight(flight.name, flight.request, flight.inward, flight.ordered, flight.forward, spans)


def _pages(group: str, first: int, count: int, entry: Entry, places: dict[tuple[str, bool], int]) -> _Pages:
    notes = entry.notes
    return _Pages(
        group,
        first,
        count,
        entry.state,
        entry.since,
        entry.busy,
        [_Owner(life.name, life.ended) if life.ended else life.name for life in entry.holders],
        _published(notes.published),
        [_Owner(owner.life.name, owner.life.ended, owner.since, owner.until) for owner in entry.past],
        _published(notes.stale),
        notes.missing,
        _failure(notes.failure),
        [places[flight.key] for flight in notes.flights],
        [places[flight.key] for flight in notes.intruders],
    )


def _failure(failure: Failure | None) -> _Failure | None:
    if failure is None:
        return None
    life = failure.life
    ended, behind = (None, 0) if life is None else (life.ended, life.restarts - failure.restarts)
    return _Failure(failure.transfer, failure.request, failure.forward, ended, behind)


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
    lives = _Lives(ledger)
    for name in given.living:
        ledger.life(name)
    flights = [_take_off(one) for one in given.flights]
    ledger.flights = {flight.key: flight for flight in flights}
    ledger.failed = {flight.key: flight for flight in map(_take_off, given.failed)}
    for pages in given.pages:
        space = ledger.space(pages.group)
        space.spans(pages.first, pages.count)
        space.put(pages.first, pages.count, _entry(pages, lives, flights))


def _take_off(one: _Flight) -> Flight:
    spans = [(span.group, span.first, span.count) for span in one.spans]
    return Flight(one.name, one.request, one.inward, one.ordered, one.forward, spans)


def _failed(given: _Failure | None, lives: _Lives) -> Failure | None:
    if given is None:
        return None
    life = None if given.ended is None else lives.get(given.request, given.ended)
    restarts = 0 if life is None else life.restarts - given.behind
    return Failure(given.transfer, given.request, given.forward, life, restarts)


def _entry(pages: _Pages, lives: _Lives, flights: Sequence[Flight]) -> Entry:
    holders = tuple(lives.get(one) if isinstance(one, str) else lives.get(one.name, one.ended) for one in pages.holders)
    past = tuple(Owner(lives.get(owner.name, owner.ended), owner.since, owner.until) for owner in pages.past)
    notes = Notes(
        _publication(pages.published),
        _publication(pages.stale),
        tuple(flights[place] for place in pages.flights),
        tuple(flights[place] for place in pages.intruders),
        failure=_failed(pages.failure, lives),
        missing=pages.missing,
    )
    return Entry(pages.state, pages.since, holders, past, pages.busy, notes if any(astuple(notes)) else NOTHING)
