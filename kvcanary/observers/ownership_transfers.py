"""Rules of transfers: who else touches the pages of one that is under way, and who uses those of one that failed."""

from __future__ import annotations

from kvcanary.events import PagesMoved, TransferFailed, TransferLanded, TransferStarted
from kvcanary.observers.findings import Findings, Pages
from kvcanary.observers.ledger import FREE, HELD, NOBODY, NOTHING, UNKNOWN, Entry, Failure, Flight, Ledger

MAX_FAILED = 1024
"""Failed transfers that are remembered, in case somebody calls them landed."""


class Transfers:
    """Transfers under way are noted in the entries of their pages."""

    def __init__(self, ledger: Ledger, findings: Findings) -> None:
        self._ledger = ledger
        self._findings = findings

    def started(self, fact: TransferStarted) -> None:
        """Bytes are about to enter or leave pages. The same id again adds pages to a transfer."""
        ledger, key = self._ledger, (fact.transfer, fact.direction == "in")
        ledger.failed.pop(key, None)
        flight = ledger.flights.get(key)
        if flight is None:
            request = next(iter(fact.requests), "")
            flight = Flight(fact.transfer, request, fact.direction == "in", fact.ordered, fact.forward)
            ledger.flights[key] = flight
        space = ledger.space(fact.group)
        # Whatever forward is still running, it touches nothing outside of the pool.
        retired = fact.forward if ledger.is_tier(fact.group) else fact.retired
        for run in fact.runs:
            flight.spans.append((fact.group, run.first, run.count))
            for first, count, entry in space.spans(run.first, run.count):
                known = entry if entry is not None else Entry(UNKNOWN, 0)
                if flight not in known.notes.flights:
                    space.put(first, count, self._start(retired, flight, Pages(fact.group, first, count), known))

    def _start(self, retired: int, flight: Flight, pages: Pages, entry: Entry) -> Entry:
        for other in entry.notes.flights + entry.notes.intruders:
            if (flight.inward or other.inward) and not (flight.ordered and other.ordered):
                self._overlap(pages, flight.request, other.request, f"{flight} meets {other}")
        if flight.inward:
            self._enter(retired, flight, pages, entry)
        if entry.state == FREE and not flight.ordered:
            self._findings.hazard("transfer_of_free_page", pages.size)
        failure = None if flight.inward else entry.notes.failure
        return entry.noting(flights=(*entry.notes.flights, flight), failure=failure)

    def _enter(self, retired: int, flight: Flight, pages: Pages, entry: Entry) -> None:
        live = entry.live()
        stranger = self._ledger.known(flight.request) is not None and not entry.holds(flight.request)
        if stranger and live and entry.all_known:
            self._overlap(pages, flight.request, live[0].name, f"{flight} enters what another request holds")
        elif not flight.ordered and retired < entry.busy:
            request = flight.request or next((life.name for life in live), "")
            what = (
                f"{flight} enters what forward {entry.busy} may still use for an earlier owner; the last forward that "
                f"had retired was {retired}"
            )
            self._findings.violated("EARLY_REUSE", pages, request, entry.last_owner, what)

    def handed_out(self, forward: int, name: str, pages: Pages, entry: Entry) -> tuple[Flight, ...]:
        """Pages that transfers touch are handed out to ``name``: those transfers that are for this very allotment.

        Any other one, of an earlier generation or for another request, goes on with pages that are not its own.
        """
        # An engine that starts a load before it tells of the allotment does so while the page is free.
        own = tuple(one for one in entry.notes.flights if entry.state != HELD and one.request in {"", name})
        for flight in entry.notes.intruders + entry.notes.flights:
            if flight not in own and not flight.ordered:
                what = f"handed out in forward {forward}, while {flight} had neither landed nor failed"
                self._findings.violated("EARLY_REUSE", pages, name, flight.request or entry.last_owner, what)
        return own

    def landed(self, fact: TransferLanded) -> None:
        """The bytes are there."""
        for key in _ends(fact.transfer):
            flight = self._ledger.flights.pop(key, None)
            if flight is not None:
                self._end(flight, failed=0)
                continue
            flight = self._ledger.failed.pop(key, None)
            if flight is not None:
                self._landed_after_all(flight)

    def failed(self, fact: TransferFailed) -> None:
        """What the pages of a load hold is nobody's."""
        ledger = self._ledger
        for key in _ends(fact.transfer):
            flight = ledger.flights.pop(key, None)
            if flight is None:
                continue
            self._end(flight, failed=max(fact.forward, 1) if flight.inward else 0)
            if flight.inward:
                if len(ledger.failed) >= MAX_FAILED:
                    ledger.failed.pop(next(iter(ledger.failed)))
                ledger.failed[key] = flight

    def _end(self, flight: Flight, *, failed: int) -> None:
        for group, start, length in flight.spans:
            space = self._ledger.space(group)
            for first, count, entry in space.spans(start, length):
                if entry is None:
                    continue
                notes = entry.notes
                own, intrudes = flight in notes.flights, flight in notes.intruders
                if own or intrudes:  # both, where one that intrudes was started once more for the page's new owner
                    flights = tuple(one for one in notes.flights if one is not flight)
                    intruders = tuple(one for one in notes.intruders if one is not flight)
                    failure = self._failure(flight, failed, entry) if failed and own else notes.failure
                    space.put(first, count, entry.noting(flights=flights, intruders=intruders, failure=failure))

    def _failure(self, flight: Flight, forward: int, entry: Entry) -> Failure:
        life, live = self._ledger.known(flight.request), entry.live()
        if life is None and len(live) == 1 and live[0] is not NOBODY:
            life = live[0]
        if life is None:
            return Failure(flight.name, flight.request, forward, None, 0)
        return Failure(flight.name, life.name, forward, life, life.restarts)

    def _landed_after_all(self, flight: Flight) -> None:
        for group, start, length in sorted(flight.spans):  # in the order that a checkpoint keeps
            space = self._ledger.space(group)
            for first, count, entry in space.spans(start, length):
                failure = entry.notes.failure if entry is not None else None
                if entry is not None and failure is not None and failure.transfer == flight.name:
                    pages = Pages(group, first, count)
                    space.put(first, count, self.used(pages, failure.request, entry, "called landed"))

    def used(self, pages: Pages, request: str, entry: Entry, how: str) -> Entry:
        """Pages are used as if they held what they should; returns the entry that goes on."""
        failure = entry.notes.failure
        if failure is None or not failure.stands:
            return entry
        what = f"{how}, though transfer {failure.transfer} failed in forward {failure.forward}"
        self._findings.violated("FAILED_LOAD_USED", pages, request, failure.request, what)
        return entry.noting(failure=None)

    def moved(self, fact: PagesMoved) -> None:
        """Pages were copied in stream order, with whatever is known against them."""
        space = self._ledger.space(fact.group)
        for source, target in zip(fact.sources, fact.targets, strict=True):
            origin, entry = space.get(source), space.get(target)
            self._copied(fact, source, origin, reads=True)
            self._copied(fact, target, entry, reads=False)
            known = origin.notes if origin is not None else NOTHING
            if entry is not None and (known.failure is not entry.notes.failure or known.missing != entry.notes.missing):
                space.put(target, 1, entry.noting(failure=known.failure, missing=known.missing))

    def _copied(self, fact: PagesMoved, page: int, entry: Entry | None, *, reads: bool) -> None:
        if entry is None:
            return
        holder = next((life.name for life in entry.live()), "")
        for flight in entry.notes.flights:
            if not flight.ordered and (flight.inward or not reads):
                what = f"copied {'from' if reads else 'over'} in forward {fact.forward}, while {flight} was under way"
                self._overlap(Pages(fact.group, page, 1), holder, flight.request, what)

    def _overlap(self, pages: Pages, request: str, other: str, detail: str) -> None:
        self._findings.violated("TRANSFER_OVERLAP", pages, request, other, detail)


def _ends(transfer: str) -> tuple[tuple[str, bool], tuple[str, bool]]:
    """A copy that leaves one place of the engine for another touches both."""
    return (transfer, True), (transfer, False)
