"""Rules of ownership that only the device can show to be broken: no fact says what a forward reads and writes.

Facts run ahead of the device. What it found in a forward is laid only to a generation that held in that forward.
"""

from __future__ import annotations

from msgspec.structs import replace

from kvcanary.events import ViolationDetected
from kvcanary.observers.findings import Findings, Pages
from kvcanary.observers.ledger import Entry, Ledger, Publication

_MISREAD = frozenset({"UNWRITTEN", "POSITION", "DIGEST", "CONTENT"})
"""Kinds in which a row needs a page and finds something else in it."""


class Evidence:
    """What a violation says about the page that it was found in, once for each page and generation."""

    def __init__(self, ledger: Ledger, findings: Findings) -> None:
        self._ledger = ledger
        self._findings = findings

    def detected(self, violation: ViolationDetected) -> None:
        """Lay a violation to the rule that was broken before it."""
        space = self._ledger.space(violation.group)
        entry = space.get(violation.page)
        if entry is None or entry.since > violation.forward:
            return
        if violation.kind == "WRITE_MISSING":
            space.put(violation.page, 1, self._write_missing(violation, entry))
        elif violation.role == "check" and violation.kind in _MISREAD:
            self._window(violation, entry)
            if violation.kind == "UNWRITTEN":
                space.put(violation.page, 1, self._unwritten(violation, self._failed(violation, entry)))

    def unwritten(self, pages: Pages, published: Publication, reader: str) -> Publication:
        """The prefix index names pages that were never written; the publication, marked as told."""
        what = f"published in forward {published.forward}, and a forward retired without the write"
        self._findings.violated("PUBLISHED_UNWRITTEN", pages, published.request, reader, what)
        return replace(published, told=True)

    def _write_missing(self, violation: ViolationDetected, entry: Entry) -> Entry:
        published = entry.notes.published
        if published is not None and not published.told:
            published = self.unwritten(_pages(violation), published, violation.request)
        return entry.noting(missing=violation.request or "?", published=published)

    def _unwritten(self, violation: ViolationDetected, entry: Entry) -> Entry:
        published = entry.notes.published
        if published is None or published.told or published.forward > violation.forward:
            return entry
        return entry.noting(published=self.unwritten(_pages(violation), published, violation.request))

    def _failed(self, violation: ViolationDetected, entry: Entry) -> Entry:
        failure = entry.notes.failure
        if failure is None or failure.forward > violation.forward:
            return entry
        what = f"read in forward {violation.forward}, though transfer {failure.transfer} failed in {failure.forward}"
        self._findings.violated("FAILED_LOAD_USED", _pages(violation), violation.request, failure.request, what)
        return entry.noting(failure=None)

    def _window(self, violation: ViolationDetected, entry: Entry) -> None:
        """A row of a window group still needs a page that was taken from it while it lived."""
        group, life = self._ledger.groups.get(violation.group), self._ledger.known(violation.request)
        owner = entry.past[0] if entry.past else None
        if group is None or group.window is None or life is None or owner is None or owner.life is not life:
            return
        if entry.holds(life.name):
            return
        holder = next((one.name for one in entry.live()), "")
        position = violation.position_expected
        what = f"freed in forward {owner.until}, but forward {violation.forward} still reads position {position} there"
        self._findings.violated("WINDOW_FREED_EARLY", _pages(violation), violation.request, holder, what)


def _pages(violation: ViolationDetected) -> Pages:
    return Pages(violation.group, violation.page, 1)
