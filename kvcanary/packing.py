"""Packs recorded calls into facts: columns per kind, pages as runs of consecutive numbers.

Order is kept where it matters. A call joins an earlier fact of its kind and group only across facts that it
commutes with: those that share neither bytes nor, where a request's own life is concerned, the request. The end of
a life, which may hold any page, commutes with nothing about pages. So a step's thousand interleaved calls become a
handful of facts, and page 5 freed and handed out again stays in order.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, repeat
from operator import sub
from typing import Any

import msgspec
from msgspec.structs import replace

from kvcanary.events import Event, Fact, PageRun, RequestsFinished, RequestsPreempted


class Call(msgspec.Struct, gc=False):
    """One recorded call. ``retired``: the last finished forward when it was made."""

    kind: type[Event]
    retired: int


class PagesCall(Call, gc=False):
    """About pages of a group. ``request``: one name for all of them, or one for each."""

    group: str
    request: str | tuple[str, ...]
    pages: tuple[int, ...]


class RequestCall(Call, gc=False):
    """About a request's own life. ``row`` has a value for each of the fact's own columns, the name first."""

    row: tuple[Any, ...]
    group: str = ""


class EventCall(Call, gc=False):
    """A whole event. Nothing is moved across it."""

    event: Event
    group: str = ""


class Stamp(msgspec.Struct, frozen=True, gc=False):
    """The forward from which the calls before it hold, and when they were recorded."""

    forward: int
    time_ns: int
    monotonic_ns: int


_ENDS: tuple[type[Event], ...] = (RequestsFinished, RequestsPreempted)
"""The ends of lives. A page may be held by any of them."""

Spaces = Mapping[str, tuple[str, int]]
"""For groups that share bytes: the memory that a group lies in, and how many of its pages make one page of that."""


def pack(calls: Sequence[PagesCall | RequestCall | EventCall], stamp: Stamp, spaces: Spaces) -> list[Event]:
    """The facts of calls that have one stamp."""
    columns: list[list[Any]] = []
    places: dict[tuple[type[Event], int, str], int] = {}
    order = _Order(calls, spaces)
    last: tuple[type[Event], int, str] | None = None
    place = 0
    for call in calls:
        key = (call.kind, call.retired, call.group)
        if key != last or place != len(columns) - 1 or isinstance(call, EventCall):
            last, place = key, places.get(key, -1)
            if place < 0 or isinstance(call, EventCall) or not order.allows(call, place):
                place = places[key] = len(columns)
                columns.append([])
        columns[place].append(call)
        order.places.append(place)
    return [_fact(joined, stamp) for joined in columns]


class _Order:
    """What touched which page and request last. Kept up only once somebody asks: most steps never do."""

    def __init__(self, calls: Sequence[PagesCall | RequestCall | EventCall], spaces: Spaces) -> None:
        self.places: list[int] = []
        """the fact that each call went to"""
        self._calls = calls
        self._spaces = spaces
        self._noted = 0
        self._wall = self._ended = self._paged = -1
        self._last: dict[str, dict[int, int]] = {}
        self._lives: dict[str, int] = {}
        self._owners: dict[str, int] = {}

    def allows(self, call: PagesCall | RequestCall, place: int) -> bool:
        """Whether ``call`` may be moved forward to the fact at ``place``."""
        for noted in range(self._noted, len(self.places)):
            self._note(self._calls[noted], self.places[noted])
        self._noted = len(self.places)
        if self._wall > place:
            return False
        if isinstance(call, RequestCall):
            name = call.row[0]
            # Whose pages a life holds nobody looks up here, so its end stays where it is among what happens to pages.
            ended = self._paged if call.kind in _ENDS else -1
            return max(ended, self._lives.get(name, -1), self._owners.get(name, -1)) <= place
        if self._ended > place:
            return False
        last, pages = self._touched(call)
        if not last.keys().isdisjoint(pages) and any(last.get(page, -1) > place for page in pages):
            return False
        return not self._lives or all(self._lives.get(name, -1) <= place for name in _names(call))

    def _note(self, call: PagesCall | RequestCall | EventCall, place: int) -> None:
        if isinstance(call, PagesCall):
            self._paged = max(self._paged, place)
            last, pages = self._touched(call)
            last.update(dict.fromkeys(pages, place))
            owners = self._owners
            for request in _names(call):
                # A call that joined an earlier fact must not make the request's last one look earlier than it is.
                if owners.get(request, -1) < place:
                    owners[request] = place
        elif isinstance(call, RequestCall):
            self._lives[call.row[0]] = place
            if call.kind in _ENDS:
                self._ended = max(self._ended, place)
        else:
            self._wall = place

    def _touched(self, call: PagesCall) -> tuple[dict[int, int], Iterable[int]]:
        """The last fact that touched each page of the memory that the call's pages lie in, and which those are."""
        space, per_page = self._spaces.get(call.group) or (call.group, 1)
        last = self._last.get(space)
        if last is None:
            last = self._last[space] = {}
        return last, call.pages if per_page == 1 else [page // per_page for page in call.pages]


def _fact(calls: list[Any], stamp: Stamp) -> Event:
    first = calls[0]
    if isinstance(first, EventCall):
        return _filled(first.event, first.retired, stamp)
    columns = _page_columns(calls) if isinstance(first, PagesCall) else _request_columns(calls)
    kind: Any = first.kind
    fact: Event = kind(
        time_ns=stamp.time_ns,
        monotonic_ns=stamp.monotonic_ns,
        forward=stamp.forward,
        retired=first.retired,
        **columns,
    )
    return fact


def _filled(event: Event, retired: int, stamp: Stamp) -> Event:
    """The event with its envelope filled where it is empty."""
    missing: dict[str, int] = {}
    if not event.time_ns:
        missing.update(time_ns=stamp.time_ns, monotonic_ns=stamp.monotonic_ns)
    if not event.forward:
        missing.update(forward=stamp.forward)
    if isinstance(event, Fact) and not event.retired:
        missing.update(retired=retired)
    return replace(event, **missing) if missing else event


def _request_columns(calls: list[RequestCall]) -> dict[str, Any]:
    names = calls[0].kind.__struct_fields__[len(Fact.__struct_fields__) :]
    return dict(zip(names, zip(*(call.row for call in calls), strict=True), strict=True))


def _page_columns(calls: list[PagesCall]) -> dict[str, Any]:
    index: dict[str, int] = {}
    runs: list[PageRun] = []
    for call in _with_single_pages_joined(calls):
        if isinstance(call.request, tuple):
            numbers = [index.setdefault(name, len(index)) for name in call.request]
            runs += map(PageRun, numbers, map(int, call.pages), repeat(1))
        else:
            runs += page_runs(index.setdefault(call.request, len(index)), call.pages)
    return {"group": calls[0].group, "requests": tuple(index), "runs": tuple(runs)}


def _with_single_pages_joined(calls: list[PagesCall]) -> list[PagesCall]:
    """One call instead of many for the case that happens each step: a page each for many requests."""
    pages = [call.pages for call in calls]
    requests = [call.request for call in calls if isinstance(call.request, str)]
    if len(calls) == 1 or set(map(len, pages)) != {1} or len(requests) < len(calls):
        return calls
    first = calls[0]
    return [PagesCall(first.kind, first.retired, first.group, tuple(requests), tuple(chain.from_iterable(pages)))]


def page_runs(request: int, pages: tuple[int, ...]) -> list[PageRun]:
    """Pages as runs of consecutive numbers, in their order; ``request`` is the index that each run carries."""
    if not pages:
        return []
    first, count = int(pages[0]), len(pages)
    if pages[-1] - first == count - 1 and pages == tuple(range(first, first + count)):
        return [PageRun(request, first, count)]
    if 1 not in map(sub, pages[1:], pages):  # none follows another, as in a pool that has been in use for a while
        return list(map(PageRun, repeat(request), map(int, pages), repeat(1)))
    runs: list[PageRun] = []
    start = expected = first
    for page in pages:
        if page != expected:
            runs.append(PageRun(request, start, expected - start))
            start = int(page)
        expected = int(page) + 1
    runs.append(PageRun(request, start, expected - start))
    return runs


def _names(call: PagesCall) -> tuple[str, ...]:
    return call.request if isinstance(call.request, tuple) else (call.request,)
