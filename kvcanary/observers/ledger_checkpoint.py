"""The books as plain values, from which a reader goes on that begins in the middle of a run or has lost facts."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec.structs import astuple

from kvcanary.observers.ledger import NOBODY, NOTHING, Entry, Flight, Ledger, Notes, Publication

# Arrays and no tuples, so that what is written and read back equals what was made.


class _Published(msgspec.Struct, frozen=True, gc=False, array_like=True):
    request: str
    forward: int
    updates: int


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
    published: _Published | None


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
    """Who holds what. Earlier owners and failed loads are left out: a reader claims less, never more."""
    pages: list[_Pages] = []
    spans: dict[str, list[_Span]] = {name: [] for name in ledger.flights}
    for group, first, count, entry in ledger.all_spans():
        holders = [life.name for life in entry.live()]
        pages.append(_Pages(group, first, count, entry.state, entry.since, entry.busy, holders, _published(entry)))
        for flight in entry.notes.flights + entry.notes.intruders:
            spans[flight.name].append(_Span(group, first, count))
    flights = [
        _Flight(one.name, one.request, one.inward, one.ordered, one.forward, spans[one.name])
        for one in ledger.flights.values()
    ]
    state: dict[str, Any] = msgspec.to_builtins(_State(ledger.epoch, ledger.updates, pages, flights))
    return state


def _published(entry: Entry) -> _Published | None:
    published = entry.notes.published
    return None if published is None else _Published(published.request, published.forward, published.updates)


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
        ledger.flights[one.name] = Flight(one.name, one.request, one.inward, one.ordered, one.forward, spans)
    for pages in given.pages:
        holders = tuple(ledger.life(name) if name else NOBODY for name in pages.holders)
        space = ledger.space(pages.group)
        space.spans(pages.first, pages.count)
        notes = NOTHING if pages.published is None else Notes(Publication(*astuple(pages.published)))
        entry = Entry(pages.state, pages.since, holders, busy=pages.busy, notes=notes)
        space.put(pages.first, pages.count, entry)
    for flight in ledger.flights.values():
        for group, start, length in flight.spans:
            space = ledger.space(group)
            for first, count, found in space.spans(start, length):
                if found is not None:
                    space.put(first, count, found.noting(flights=(*found.notes.flights, flight)))
