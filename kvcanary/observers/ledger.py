"""The books of ownership: who holds each page, since when, who had it before, and what is known against it.

A page's entry is immutable and shared by all pages that changed hands together, so a run of five hundred pages is one
object and its hand-over one slice. A new allotment is a new entry: whatever is noted of a page (published, load failed)
is of one generation and ends with it. Pages without an entry are unknown, and nothing is claimed of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any

import msgspec
from msgspec.structs import astuple, replace

from kvcanary.events import GroupInfo, PageRun

FREE, HELD, UNKNOWN = 0, 1, 2

MAX_LIVES = 1 << 16
"""Requests known at once; of more, the longest known are forgotten."""
MAX_HOLDERS = 16
"""Named holders of a page; of more, the rest is nobody in particular."""


class Life(msgspec.Struct, gc=False, eq=False):
    """A request from its first page to its end or preemption. A later request of the same name is another life."""

    name: str
    ended: int = 0
    """forward from which it holds nothing; 0 while it lives"""
    restarts: int = 0
    """times that it went on from another length, and so may have computed its pages anew"""


NOBODY = Life("")
"""Holds pages whose holder was not told. Lives for ever."""


class Owner(msgspec.Struct, frozen=True, gc=False, eq=False):
    """Who held a page, from forward ``since`` to before forward ``until`` (0: still does)."""

    life: Life
    since: int
    until: int = 0

    @property
    def request(self) -> str:
        """The holder's request id; "" when it was not told."""
        return self.life.name


class Publication(msgspec.Struct, frozen=True, gc=False, eq=False):
    """By which request, from which forward and after how many weight updates a page entered the prefix index."""

    request: str
    forward: int
    updates: int
    told: bool = False
    """reported as unwritten already"""


class Failure(msgspec.Struct, frozen=True, gc=False, eq=False):
    """A load that did not complete; what the page holds is nobody's until it is computed or loaded again."""

    transfer: str
    request: str
    forward: int
    life: Life | None
    restarts: int

    @property
    def stands(self) -> bool:
        """Whether its request did not start over since, by which it may have computed the page itself."""
        return self.life is not None and self.life.restarts == self.restarts


class Flight(msgspec.Struct, gc=False, eq=False):
    """A transfer under way, with the page runs that it touches: group, first, count."""

    name: str
    request: str
    inward: bool
    ordered: bool
    forward: int
    spans: list[tuple[str, int, int]] = []

    @property
    def key(self) -> tuple[str, bool]:
        """What it is known by: of one copy between two places of an engine, one end is entered and one is left."""
        return self.name, self.inward

    def __str__(self) -> str:
        order = "in stream order" if self.ordered else "which no stream orders"
        return f"transfer {self.name} ({'in' if self.inward else 'out'}, {order}, since forward {self.forward})"


class Notes(msgspec.Struct, frozen=True, gc=False, eq=False):
    """What is noted of a page's generation besides its owners."""

    published: Publication | None = None
    stale: Publication | None = None
    """the prefix index still names an earlier generation"""
    flights: tuple[Flight, ...] = ()
    intruders: tuple[Flight, ...] = ()
    """transfers under way that began before the page was freed"""
    failure: Failure | None = None
    missing: str = ""
    """request whose write into the page never came"""


NOTHING = Notes()


class Entry(msgspec.Struct, frozen=True, gc=False, eq=False):
    """One generation of a page."""

    state: int
    """``FREE``, ``HELD``, or ``UNKNOWN``: only what is noted is known"""
    since: int
    """forward from which it holds"""
    holders: tuple[Life, ...] = ()
    """some may have ended: the page then waits, cached, to be evicted"""
    past: tuple[Owner, ...] = ()
    """earlier owners, newest first, two at most"""
    busy: int = 0
    """last forward in which an earlier owner may touch the page"""
    notes: Notes = NOTHING
    """:data:`NOTHING` itself when nothing is noted, which is the common case and must stay cheap"""

    def noting(self, **changes: Any) -> Entry:
        """The entry with other notes."""
        notes = replace(self.notes, **changes)
        return replace(self, notes=notes if any(astuple(notes)) else NOTHING)

    @property
    def all_known(self) -> bool:
        """Whether nobody holds the page but its named holders."""
        return self.state != UNKNOWN and NOBODY not in self.holders

    def live(self) -> tuple[Life, ...]:
        """Holders that have not ended."""
        return tuple(life for life in self.holders if not life.ended)

    def holds(self, name: str) -> bool:
        """Whether a living request of this name is among the holders."""
        return any(life.name == name and not life.ended for life in self.holders)

    @property
    def last_owner(self) -> str:
        """The request that had the page before; "" when it is not known."""
        return self.past[0].life.name if self.past else ""

    def left(self, forward: int) -> tuple[tuple[Owner, ...], int]:
        """Its earlier owners once it is taken from its holders, and the last forward in which these may touch it."""
        holders = self.holders
        if not holders:
            return self.past, self.busy
        life = holders[0]
        last = forward
        if life.ended and life.ended < forward:
            last = max(one.ended or forward for one in holders)
        owner = Owner(life, self.since, forward)
        past = (owner, self.past[0]) if self.past else (owner,)
        return past, last - 1 if last > self.since else self.busy


Span = tuple[int, int, Entry | None]
"""First page, count, and the entry that these pages share."""


class Space:
    """Entries of the pages of groups that lie in the same slots."""

    __slots__ = ("entries",)

    def __init__(self) -> None:
        self.entries: list[Entry | None] = []

    def spans(self, first: int, count: int) -> Sequence[Span]:
        """The pages, split where their entries differ. A number that no page has is skipped."""
        if first < 0:
            return ()
        entries = self.entries
        end = first + count
        if end > len(entries):
            entries.extend([None] * (end - len(entries)))
        if count == 1:
            return ((first, 1, entries[first]),)
        part = entries[first:end]
        entry = part[0]
        if part.count(entry) == count:
            return ((first, count, entry),)
        return _split(first, part)

    def walk(self, runs: Iterable[PageRun]) -> Iterator[tuple[int, int, int, Entry | None]]:
        """The spans of runs one after another, each behind its run's ``request``; each is read when it is its turn."""
        entries = self.entries
        for run in runs:
            first = run.first
            if run.count == 1 and 0 <= first < len(entries):
                yield run.request, first, 1, entries[first]
                continue
            for span, count, entry in self.spans(first, run.count):
                yield run.request, span, count, entry

    def put(self, first: int, count: int, entry: Entry | None) -> None:
        """Give pages an entry; they have been asked for by :meth:`spans`."""
        if count == 1:
            self.entries[first] = entry
        else:
            self.entries[first : first + count] = [entry] * count

    def get(self, page: int) -> Entry | None:
        """The entry of one page."""
        return self.entries[page] if 0 <= page < len(self.entries) else None


def _split(first: int, part: Sequence[Entry | None]) -> list[Span]:
    spans: list[Span] = []
    for _, same in groupby(zip(map(id, part), part, strict=True), key=itemgetter(0)):
        entries = [entry for _, entry in same]
        spans.append((first, len(entries), entries[0]))
        first += len(entries)
    return spans


class Ledger:
    """Spaces by group, living requests by name, transfers by id.

    Attributes:
        updates: how often the weights changed.
        epoch: the last epoch that was told.
        groups: what the run said of its groups.
        flights: transfers under way.
        failed: transfers that failed, the newest ones.
    """

    def __init__(self) -> None:
        self.begin(())

    def begin(self, groups: Iterable[GroupInfo]) -> None:
        """A new run."""
        self.groups = {group.name: group for group in groups}
        self.updates = 0
        self.epoch: int | None = None
        self.forget()

    def forget(self) -> None:
        """Facts are missing: every page is unknown from here on."""
        self._spaces: dict[str, Space] = {}
        self._lives: dict[str, Life] = {}
        self.flights: dict[tuple[str, bool], Flight] = {}
        self.failed: dict[tuple[str, bool], Flight] = {}

    def forget_before(self, forward: int | None) -> None:
        """Facts may be missing before ``forward`` (None: up to now): pages of older generations are unknown."""
        for space in self._spaces.values():
            space.entries = [
                entry if entry is not None and forward is not None and entry.since >= forward else None
                for entry in space.entries
            ]

    def space(self, group: str) -> Space:
        """The slots that a group lies in."""
        space = self._spaces.get(group)
        if space is None:
            info = self.groups.get(group)
            shared = info.shares if info is not None else None
            space = self._spaces[group] = Space() if shared is None else self.space(shared)
        return space

    def life(self, name: str) -> Life:
        """The living request of this name, begun now if there is none."""
        if not name:
            return NOBODY
        life = self._lives.get(name)
        if life is None:
            if len(self._lives) >= MAX_LIVES:
                self._lives.pop(next(iter(self._lives)))
            life = self._lives[name] = Life(name)
        return life

    def is_tier(self, group: str) -> bool:
        """Whether it is memory outside of the pool, which no forward touches."""
        return bool(self.groups) and group not in self.groups

    @property
    def names(self) -> Iterable[str]:
        """Living requests."""
        return self._lives.keys()

    def known(self, name: str) -> Life | None:
        """The living request of this name, if there is one."""
        return self._lives.get(name)

    def end(self, name: str, forward: int) -> None:
        """The request holds nothing from ``forward`` on."""
        life = self._lives.pop(name, None)
        if life is not None:
            life.ended = max(forward, 1)

    def all_spans(self) -> Iterator[tuple[str, int, int, Entry]]:
        """Every page that is not unknown: a group whose slots it lies in, first page, count, entry."""
        seen: set[int] = set()
        for group, space in self._spaces.items():
            if id(space) in seen or not space.entries:
                continue
            seen.add(id(space))
            for first, count, entry in space.spans(0, len(space.entries)):
                if entry is not None:
                    yield group, first, count, entry

    def owners(self, group: str, page: int, forward: int) -> tuple[Owner, ...]:
        """Who held a page up to ``forward``, newest first: its holders then, and up to two before them."""
        entry = self.space(group).get(page)
        if entry is None:
            return ()
        now = [Owner(life, entry.since, life.ended) for life in entry.holders if life.name]
        return tuple(owner for owner in (*now, *entry.past) if owner.since <= forward)


def with_holder(holders: tuple[Life, ...], life: Life) -> tuple[Life, ...]:
    """The holders and one more."""
    if life in holders:
        return holders
    if len(holders) > MAX_HOLDERS:
        holders = tuple(one for one in holders if not one.ended)
        if len(holders) > MAX_HOLDERS:
            return holders if NOBODY in holders else (*holders, NOBODY)
    return (*holders, life)
