"""The ownership fold: who may hold, hand on and find pages.

It judges by the stamps of facts. To free pages and hand them on while forwards still run is legal, because the
forwards' own stream orders the old user and the new one; only a transfer that no stream orders makes it early.

What the facts mean here: a freed page is overwritten by whoever gets it next, so one that stays cached is not freed; a
free that names one of several holders ends that one's hold only; an allotment to a request that holds the page already
is a restore. A page of which no fact was seen is unknown, and nothing is claimed of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from kvcanary.events import (
    CanaryArmed,
    Event,
    FactsLost,
    HazardCounted,
    OwnershipCheckpointed,
    OwnershipViolated,
    PagesAllocated,
    PagesFreed,
    PagesMoved,
    PrefixEvicted,
    PrefixPublished,
    PrefixReused,
    RecordsRestamped,
    RequestsAdmitted,
    RequestsFinished,
    RequestsPreempted,
    RequestsRewound,
    RunStarted,
    Ticked,
    TransferFailed,
    TransferLanded,
    TransferStarted,
    ViolationDetected,
    WeightsUpdated,
)
from kvcanary.observers.findings import Findings, Pages
from kvcanary.observers.ledger import (
    FREE,
    HELD,
    NOBODY,
    NOTHING,
    UNKNOWN,
    Entry,
    Ledger,
    Life,
    Notes,
    Owner,
    Publication,
    with_holder,
)
from kvcanary.observers.ledger_checkpoint import restore, state_of
from kvcanary.observers.ownership_evidence import Evidence
from kvcanary.observers.ownership_transfers import Transfers

_NONE_YET = Entry(UNKNOWN, 0)
"""An entry that no page has."""


class OwnershipFold:
    """The ledger of a run, at page granularity, with generations.

    Tells broken rules as :class:`~kvcanary.events.OwnershipViolated` and, each second, totals of what is legal but
    risky as :class:`~kvcanary.events.HazardCounted`. After lost facts every page is unknown until it is allotted anew,
    or until an :class:`~kvcanary.events.OwnershipCheckpointed` says what is held.

    ``WINDOW_FREED_EARLY`` and ``PUBLISHED_UNWRITTEN`` depend on what a forward read and wrote, which no fact says. They
    follow from what the device found.

    Args:
        checkpoint_due: asked each second; when it says so, the books are put into the stream, for whoever reads from
            there on.
    """

    name = "ownership"
    interests: tuple[type[Event], ...]
    # Checkpoints too, but those it reads are never its own: they come from a recording.
    emits: tuple[type[Event], ...] = (OwnershipViolated, HazardCounted)
    guard = True

    def __init__(self, checkpoint_due: Callable[[], bool] | None = None) -> None:
        self._checkpoint_due = checkpoint_due
        self._ledger = Ledger()
        self._findings = Findings(self.name)
        self._transfers = transfers = Transfers(self._ledger, self._findings)
        self._evidence = Evidence(self._ledger, self._findings)
        self._was_armed = False
        self._rules: dict[type[Event], Callable[[Any], None]] = {
            RunStarted: self._begin,
            CanaryArmed: self._armed,
            FactsLost: self._lost,
            OwnershipCheckpointed: self._checkpointed,
            PagesAllocated: self._allocated,
            PagesFreed: self._freed,
            PrefixPublished: self._published,
            PrefixReused: self._reused,
            PrefixEvicted: self._evicted,
            RecordsRestamped: self._restamped,
            RequestsAdmitted: self._went_on,
            RequestsRewound: self._went_on,
            RequestsFinished: self._ended,
            RequestsPreempted: self._ended,
            WeightsUpdated: self._weights,
            PagesMoved: transfers.moved,
            TransferStarted: transfers.started,
            TransferLanded: transfers.landed,
            TransferFailed: transfers.failed,
            ViolationDetected: self._evidence.detected,
        }
        self.interests = (*self._rules, Ticked)

    def handle(self, event: Event) -> list[Event]:
        """Rules that the event shows to be broken."""
        if isinstance(event, Ticked):
            due = self._checkpoint_due is not None and self._checkpoint_due()
            return self._findings.take_hazards(event) + ([self.checkpoint(event)] if due else [])
        rule = self._rules.get(type(event))
        if rule is not None:
            rule(event)
        return self._findings.take(event)

    def owners(self, group: str, page: int, forward: int) -> tuple[Owner, ...]:
        """Who held a page up to ``forward``, newest first: its holders then, and up to two before them."""
        return self._ledger.owners(group, page, forward)

    def checkpoint(self, source: Event) -> OwnershipCheckpointed:
        """All that is held, as of ``source``, for a reader that begins in the middle of a run."""
        return OwnershipCheckpointed(
            time_ns=source.time_ns,
            monotonic_ns=source.monotonic_ns,
            forward=source.forward,
            state=state_of(self._ledger),
        )

    # --- the run ------------------------------------------------------------------------------------------

    def _begin(self, event: RunStarted) -> None:
        self._ledger.begin(event.groups)
        self._findings.clear()
        self._was_armed = False

    def _armed(self, event: CanaryArmed) -> None:
        # While disarmed the engine does as it likes and tells nobody. Armed anew it begins with other pages, though no
        # forward lies between; before it is armed first, what it tells for the next forward is told in earnest.
        self._ledger.forget_before(event.forward if not self._was_armed else None)
        self._was_armed = True

    def _lost(self, _: FactsLost) -> None:
        self._ledger.forget()

    def _checkpointed(self, event: OwnershipCheckpointed) -> None:
        restore(self._ledger, event.state)
        self._was_armed = True  # it stands in the middle of a run

    # --- requests -----------------------------------------------------------------------------------------

    def _went_on(self, fact: RequestsAdmitted | RequestsRewound) -> None:
        for name in fact.requests:
            self._ledger.life(name).restarts += 1

    def _ended(self, fact: RequestsFinished | RequestsPreempted) -> None:
        for name in fact.requests:
            self._ledger.end(name, fact.forward)

    def _weights(self, fact: WeightsUpdated) -> None:
        # Every rank may tell of the same update.
        if fact.epoch != self._ledger.epoch:
            self._ledger.epoch = fact.epoch
            self._ledger.updates += 1

    # --- allotment ----------------------------------------------------------------------------------------

    def _allocated(self, fact: PagesAllocated) -> None:
        ledger, forward = self._ledger, fact.forward
        space = ledger.space(fact.group)
        holders = [(ledger.life(name),) for name in fact.requests]
        # What changed hands together mostly does so again: pages that share an entry go on to share the next one.
        before: Entry | None = _NONE_YET
        request, after = -1, _NONE_YET
        for number, first, count, entry in space.walk(fact.runs):
            if entry is not before or number != request:
                before, request, new = entry, number, holders[number]
                if entry is None:
                    after = Entry(HELD, forward, new)
                elif entry.state == FREE and entry.notes is NOTHING:
                    after = Entry(HELD, forward, new, entry.past, entry.busy)
                else:
                    after = self._allot(fact, new[0], Pages(fact.group, first, count), entry)
                    before = _NONE_YET  # each page is judged by itself
            space.put(first, count, after)

    def _allot(self, fact: PagesAllocated, life: Life, pages: Pages, entry: Entry) -> Entry:
        if entry.state != FREE:
            held = self._restored(life, pages, entry)
            if held is not None:
                return held
            self._handed_out_unfreed(fact, life, pages, entry)
        own = self._transfers.handed_out(fact.forward, life.name, pages, entry)
        # What goes on with a page that is not its own meets every later holder, until it lands or fails.
        touching = entry.notes.intruders + entry.notes.flights
        others = tuple(one for one in touching if one not in own and not one.ordered)
        past, busy = entry.left(fact.forward)
        notes = Notes(stale=entry.notes.published or entry.notes.stale, flights=own, intruders=others)
        return Entry(HELD, fact.forward, (life,), past, busy, notes)

    def _restored(self, life: Life, pages: Pages, entry: Entry) -> Entry | None:
        """The entry that goes on when the page stays with whom it is; None when it does not."""
        if entry.holds(life.name) and all(holder.name == life.name for holder in entry.live()):
            return self._transfers.used(pages, life.name, entry, "taken for loaded")
        if life is NOBODY:
            return entry
        if NOBODY in entry.holders:
            named = tuple(holder for holder in entry.holders if holder is not NOBODY)
            return replace(entry, holders=(*named, life))
        if entry.state == UNKNOWN and (entry.holders or entry.notes.published is not None):
            # In use since before the watch, perhaps by this very request.
            return replace(entry, holders=with_holder(entry.holders, life))
        return None

    def _handed_out_unfreed(self, fact: PagesAllocated, life: Life, pages: Pages, entry: Entry) -> None:
        live, published = entry.live(), entry.notes.published
        if live:
            what = f"held since forward {entry.since} and never freed, handed out again in forward {fact.forward}"
            # A fork shares its parent's pages: what it is given as new may be one of them.
            other = next((holder.name for holder in live if holder.name != life.name), live[0].name)
            self._findings.violated("DOUBLE_ALLOC", pages, life.name, other, what)
        elif published is not None:
            what = f"handed out in forward {fact.forward}, though {_in_index(published)}"
            self._findings.violated("FREED_WHILE_PUBLISHED", pages, life.name, published.request, what)
        elif entry.state == HELD:
            self._findings.hazard("allotted_without_free", pages.size)

    # --- giving back --------------------------------------------------------------------------------------

    def _freed(self, fact: PagesFreed) -> None:
        space, forward = self._ledger.space(fact.group), fact.forward
        before: Entry | None = _NONE_YET
        after: Entry | None = None
        request = -1
        for number, first, count, entry in space.walk(fact.runs):
            if entry is not before or number != request:
                before, request, name = entry, number, fact.requests[number]
                if entry is not None and entry.notes is NOTHING and _is_simply_held(entry, name):
                    past, busy = entry.left(forward)
                    after = Entry(FREE, forward, (), past, busy)
                else:
                    after = self._give_back(fact, name, Pages(fact.group, first, count), entry)
                    before = _NONE_YET  # each page is judged by itself
            space.put(first, count, after)

    def _give_back(self, fact: PagesFreed, name: str, pages: Pages, entry: Entry | None) -> Entry | None:
        if entry is None:
            # Of an unknown page's holders one has gone, or all of them.
            return None if name else Entry(FREE, fact.forward)
        if entry.state == FREE:
            what = f"freed in forward {entry.since} and again in forward {fact.forward}"
            self._findings.violated("DOUBLE_FREE", pages, name or entry.last_owner, entry.last_owner, what)
            return entry
        live = entry.live()
        if name and any(life.name == name for life in entry.holders):
            # One that has ended may still give its hold back: two sharers end in one step, then both free.
            others = tuple(life for life in entry.holders if life.name != name)
            if others or not entry.all_known:
                return replace(entry, holders=others)
        elif name and not entry.all_known:
            return entry
        elif name and live:
            self._findings.hazard("freed_by_a_stranger", pages.size)
            return None
        elif len(live) > 1:
            self._findings.hazard("freed_while_shared", pages.size)
        return self._free(fact.forward, name, pages, entry)

    def _free(self, forward: int, name: str, pages: Pages, entry: Entry) -> Entry:
        published = entry.notes.published
        if published is not None:
            by = name or next((life.name for life in entry.holders if life.name), "")
            what = f"freed in forward {forward}, though {_in_index(published)}"
            self._findings.violated("FREED_WHILE_PUBLISHED", pages, by, published.request, what)
        flights = entry.notes.intruders + entry.notes.flights
        if any(not flight.ordered for flight in flights):
            self._findings.hazard("freed_during_transfer", pages.size)
        past, busy = entry.left(forward)
        stale = published or entry.notes.stale
        notes = Notes(stale=stale, intruders=flights) if stale or flights else NOTHING
        return Entry(FREE, forward, (), past, busy, notes)

    # --- the prefix index ---------------------------------------------------------------------------------

    def _published(self, fact: PrefixPublished) -> None:
        space, updates = self._ledger.space(fact.group), self._ledger.updates
        for run in fact.runs:
            published = Publication(fact.requests[run.request], fact.forward, updates)
            for first, count, entry in space.spans(run.first, run.count):
                if entry is None:
                    after = Entry(UNKNOWN, 0, notes=Notes(published))
                else:
                    after = self._publish(published, Pages(fact.group, first, count), entry)
                space.put(first, count, after)

    def _publish(self, published: Publication, pages: Pages, entry: Entry) -> Entry:
        name, live = published.request, entry.live()
        if entry.state == FREE:
            self._unowned(published.forward, pages, name, entry, "published")
            return entry.noting(stale=published)
        if name and live and entry.all_known and not entry.holds(name):
            self._unowned(published.forward, pages, name, entry, "published")
        after = self._transfers.used(pages, name, entry, "published")
        if after.notes.missing:
            published = self._evidence.unwritten(pages, published, after.notes.missing)
        return after.noting(published=published, stale=None)

    def _reused(self, fact: PrefixReused) -> None:
        ledger = self._ledger
        space = ledger.space(fact.group)
        for run in fact.runs:
            life = ledger.life(fact.requests[run.request])
            for first, count, entry in space.spans(run.first, run.count):
                if entry is not None:
                    space.put(first, count, self._reuse(fact.forward, life, Pages(fact.group, first, count), entry))

    def _reuse(self, forward: int, life: Life, pages: Pages, entry: Entry) -> Entry:
        name, notes, published = life.name, entry.notes, entry.notes.published
        if entry.state == FREE or (published is None and notes.stale is not None):
            self._unowned(forward, pages, name, entry, "found by its prefix")
        elif published is not None and published.updates != self._ledger.updates:
            what = (
                f"published in forward {published.forward}, {self._ledger.updates - published.updates} weight updates "
                f"before the present epoch {self._ledger.epoch}"
            )
            self._findings.violated("STALE_EPOCH", pages, name, published.request, what)
        if any(flight.inward and not flight.ordered and flight.request != name for flight in notes.flights):
            self._findings.hazard("reused_during_load", pages.size)
        after = self._transfers.used(pages, name, entry, "taken from the prefix index")
        if entry.state == FREE:
            return replace(after, state=HELD, since=forward, holders=(life,))
        return replace(after, holders=with_holder(after.holders, life))

    def _unowned(self, forward: int, pages: Pages, name: str, entry: Entry, what: str) -> None:
        holder = next((life.name for life in entry.live()), "") or entry.last_owner
        state = "free" if entry.state == FREE else "another's"
        detail = f"{what} in forward {forward}, but {state} since forward {entry.since}"
        self._findings.violated("PUBLISHED_UNOWNED", pages, name, holder, detail)

    def _evicted(self, fact: PrefixEvicted) -> None:
        space = self._ledger.space(fact.group)
        for run in fact.runs:
            for first, count, entry in space.spans(run.first, run.count):
                if entry is not None and (entry.notes.published is not None or entry.notes.stale is not None):
                    space.put(first, count, entry.noting(published=None, stale=None))

    def _restamped(self, fact: RecordsRestamped) -> None:
        space = self._ledger.space(fact.group)
        for run in fact.runs:
            for first, count, entry in space.spans(run.first, run.count):
                if entry is not None and (entry.notes.failure is not None or entry.notes.missing):
                    space.put(first, count, entry.noting(failure=None, missing=""))


def _is_simply_held(entry: Entry, name: str) -> bool:
    """Whether the page is with one holder, who gives it back; or with one, and the engine does not say who does."""
    holders = entry.holders
    return len(holders) == 1 and (not name or (holders[0].name == name and entry.state == HELD))


def _in_index(published: Publication) -> str:
    by = f" by request {published.request}" if published.request else ""
    return f"it was published{by} in forward {published.forward} and never evicted"
