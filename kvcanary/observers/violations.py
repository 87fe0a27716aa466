"""The violations fold: violations become incidents, and the mailbox hears of them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from kvcanary.errors import KVCorruptionError
from kvcanary.events import (
    Event,
    IncidentOpened,
    IncidentUpdated,
    OwnershipViolated,
    QuarantineRequested,
    RunStarted,
    Ticked,
    ViolationDetected,
)
from kvcanary.mailbox import Mailbox, Quarantine, Raise
from kvcanary.observers.base import stamp
from kvcanary.observers.explain import Explanation, docs_link, explain
from kvcanary.observers.explain_ownership import explain_ownership
from kvcanary.observers.ledger import Owner

RECENT_FORWARDS = 256
"""A violation joins an incident whose last one is at most so many forwards older."""
MAX_KEYS = 8192
MAX_REQUESTS = 64
MAX_PAGES = 1024

_FAMILIES = {
    "inputs": ("INPUT_TOKEN", "INPUT_POSITION", "INPUT_PLACEHOLDER", "FINAL_DIGEST"),
    "addressing": ("TABLE_MISMATCH", "SLOT_RANGE", "POSITION", "DIGEST", "REQUEST_DIGEST", "UNWRITTEN", "WINDOW"),
    "writes": ("WRITE_CONFLICT", "WRITE_FOREIGN", "WRITE_FREED"),
    "bytes": ("CONTENT", "NONFINITE", "WRITE_MISSING", "NULL_DIRTY"),
}
_FAMILY_OF = {kind: family for family, kinds in _FAMILIES.items() for kind in kinds}
_CONSEQUENCES = frozenset({"REQUEST_DIGEST", "FINAL_DIGEST"})
"""Kinds that say a request went wrong, whatever did it."""

Finding = ViolationDetected | OwnershipViolated

OwnersOf = Callable[[str, int, int], Sequence[Owner]]
"""Who held a page of a group up to a forward, newest first."""


def _nobody_knows(_group: str, _page: int, _forward: int) -> Sequence[Owner]:
    return ()


@dataclass(slots=True)
class _Incident:
    """An incident while it may grow."""

    name: str
    kind: str
    last_forward: int
    count: int = 0
    told: int = 0
    kinds: dict[str, int] = field(default_factory=dict[str, int])
    requests: dict[str, None] = field(default_factory=dict[str, None])
    told_requests: int = 0
    told_kinds: int = 0
    quarantined: set[tuple[str, Hashable]] = field(default_factory=set[tuple[str, Hashable]])

    def add(self, finding: Finding, requests: tuple[str, ...]) -> None:
        self.count += 1
        self.last_forward = max(self.last_forward, finding.forward)
        self.kinds[finding.kind] = self.kinds.get(finding.kind, 0) + 1
        for request in requests:
            if len(self.requests) < MAX_REQUESTS:
                self.requests[request] = None

    @property
    def worth_telling(self) -> bool:
        """A new kind, a new request, or twice as many as were told: floods must not flood whoever listens."""
        return (
            len(self.kinds) > self.told_kinds
            or len(self.requests) > self.told_requests
            or self.count >= 2 * max(1, self.told)
        )

    def mark_told(self) -> None:
        self.told, self.told_kinds, self.told_requests = self.count, len(self.kinds), len(self.requests)


class ViolationsFold:
    """Groups violations by cause and posts to ``mailbox`` as ``mode`` says. ``owners`` is asked for a page's history.

    Two findings have one cause when, within :data:`RECENT_FORWARDS`, they concern the same slot or page of a group,
    or the same request in the same family of kinds; a tainted row's findings, and a wrong digest, belong to whatever
    happened to the request before. Memory is bounded: of very many open incidents, the longest untouched are closed.

    Attributes:
        incidents: how many were opened, over all runs.
    """

    name = "violations"
    interests: tuple[type[Event], ...] = (RunStarted, ViolationDetected, OwnershipViolated, Ticked)
    emits: tuple[type[Event], ...] = (IncidentOpened, IncidentUpdated, QuarantineRequested)
    guard = True

    def __init__(self, mode: str, mailbox: Mailbox, owners: OwnersOf = _nobody_knows) -> None:
        self._mode = mode
        self._mailbox = mailbox
        self._owners = owners
        self.incidents = 0
        self._reset("")

    def handle(self, event: Event) -> list[Event]:
        """Incidents opened and updated, and quarantines asked for."""
        match event:
            case ViolationDetected() | OwnershipViolated():
                return list(self._found(event))
            case Ticked():
                return [self._update(event, incident) for incident in self._take_grown()]
            case RunStarted():
                self._reset(event.run)
            case _:
                pass
        return []

    def _reset(self, run: str) -> None:
        self._run = run
        self._opened = 0
        self._raised = False
        self._by_key: OrderedDict[Hashable, _Incident] = OrderedDict()
        self._grown: dict[str, _Incident] = {}

    def _found(self, finding: Finding) -> Iterator[Event]:
        requests = _requests(finding)
        keys = list(_keys(finding))
        incident = self._recent(keys, finding)
        if incident is None:
            self._opened += 1
            self.incidents += 1
            incident = _Incident(f"{self._run}#{self._opened}", finding.kind, finding.forward)
        self._remember(keys + _request_keys(finding, requests), incident)
        incident.add(finding, requests)
        if incident.count == 1:
            yield self._open(finding, incident)
        elif incident.worth_telling:
            yield self._update(finding, incident)
        else:
            self._grown[incident.name] = incident
        if self._mode == "quarantine":
            yield from self._quarantine(finding, incident, requests)

    def _recent(self, keys: list[Hashable], finding: Finding) -> _Incident | None:
        for key in keys:
            incident = self._by_key.get(key)
            if incident is None or abs(finding.forward - incident.last_forward) > RECENT_FORWARDS:
                continue
            if incident.last_forward >= _handed_out(finding):
                return incident
        return None

    def _remember(self, keys: list[Hashable], incident: _Incident) -> None:
        for key in keys:
            self._by_key[key] = incident
            self._by_key.move_to_end(key)
        while len(self._by_key) > MAX_KEYS:
            self._by_key.popitem(last=False)

    def _open(self, finding: Finding, incident: _Incident) -> IncidentOpened:
        violation = finding if isinstance(finding, ViolationDetected) else None
        words = self._words(finding)
        incident.mark_told()
        opened = IncidentOpened(
            **stamp(finding, self.name),
            incident=incident.name,
            kind=finding.kind,
            headline=words.headline,
            likely_cause=words.cause,
            evidence=words.evidence,
            requests=tuple(incident.requests),
            group=finding.group,
            slot=violation.slot if violation is not None else -1,
            page=finding.page,
            first=violation,
            docs=docs_link(finding.kind),
        )
        if self._mode == "raise" and not self._raised:
            self._raised = True
            self._mailbox.post(Raise(_error(finding, words, opened)))
        return opened

    def _words(self, finding: Finding) -> Explanation:
        owners = self._owners(finding.group, finding.page, finding.forward)
        if isinstance(finding, OwnershipViolated):
            return explain_ownership(finding, owners)
        return explain(finding, owners)

    def _update(self, source: Event, incident: _Incident) -> IncidentUpdated:
        incident.mark_told()
        self._grown.pop(incident.name, None)
        kinds = ", ".join(f"{kind} x{count}" for kind, count in incident.kinds.items())
        return IncidentUpdated(
            **stamp(source, self.name),
            incident=incident.name,
            kind=incident.kind,
            headline=f"{incident.kind}: {incident.count} findings so far ({kinds}), {len(incident.requests)} requests",
            requests=tuple(incident.requests),
            kinds=dict(incident.kinds),
            count=incident.count,
        )

    def _take_grown(self) -> list[_Incident]:
        grown = list(self._grown.values())
        self._grown.clear()
        return grown

    def _quarantine(self, finding: Finding, incident: _Incident, requests: tuple[str, ...]) -> Iterator[Event]:
        """Ask for what was not asked for yet. Live requests that share a page are the adapter's to find."""
        seen = incident.quarantined
        new = tuple(request for request in requests if ("request", request) not in seen)
        pages = tuple(page for page in _pages(finding) if (finding.group, page) not in seen)
        if not new and not pages:
            return
        if len(seen) < MAX_PAGES:
            seen.update(("request", request) for request in new)
            seen.update((finding.group, page) for page in pages)
        self._mailbox.post(Quarantine(incident.name, new, finding.group, pages, finding.forward))
        yield QuarantineRequested(
            **stamp(finding, self.name), incident=incident.name, requests=new, group=finding.group, pages=pages
        )


def _handed_out(finding: Finding) -> int:
    """The forward since which the page has its owner: what was found in it before is another matter."""
    return finding.owner_as_of if isinstance(finding, ViolationDetected) else 0


def _requests(finding: Finding) -> tuple[str, ...]:
    """Who is concerned: the request itself, and whose page a write went into."""
    if isinstance(finding, OwnershipViolated):
        named = [finding.request, finding.other]
    else:
        named = [finding.request]
        if finding.kind.startswith("WRITE_") and finding.owner_state == "held":
            named.append(finding.owner_request)
    return tuple(dict.fromkeys(name for name in named if name))


def _pages(finding: Finding) -> Iterator[int]:
    """The pages that it concerns."""
    if isinstance(finding, OwnershipViolated) and finding.page_runs:
        for first, count in finding.page_runs:
            yield from range(first, first + count)
    elif finding.page >= 0:
        yield finding.page


def _family(kind: str) -> str:
    return _FAMILY_OF.get(kind, "ownership")


def _keys(finding: Finding) -> Iterator[Hashable]:
    """By what an incident of the same cause is found, the most certain first."""
    slot = finding.slot if isinstance(finding, ViolationDetected) else -1
    if slot >= 0:
        yield "slot", finding.group, slot
    if finding.page >= 0:
        yield "page", finding.group, finding.page
    if finding.request:
        yield "request", finding.request, _family(finding.kind)
        if finding.kind in _CONSEQUENCES or (isinstance(finding, ViolationDetected) and finding.tainted):
            yield "request", finding.request


def _request_keys(finding: Finding, requests: tuple[str, ...]) -> list[Hashable]:
    keys: list[Hashable] = []
    for request in requests:
        keys += [("request", request), ("request", request, _family(finding.kind))]
    return keys


def _error(finding: Finding, words: Explanation, opened: IncidentOpened) -> KVCorruptionError:
    details: dict[str, Any] = msgspec.to_builtins(finding)
    details |= {
        "incident": opened.incident,
        "likely_cause": opened.likely_cause,
        "evidence": list(opened.evidence),
        "docs": opened.docs,
    }
    violation = finding if isinstance(finding, ViolationDetected) else None
    return KVCorruptionError(
        f"{words.headline}; likely {words.cause}",
        kind=finding.kind,
        request=finding.request or None,
        group=finding.group or None,
        slot=violation.slot if violation is not None and violation.slot >= 0 else None,
        position=violation.position_expected if violation is not None and violation.position_expected >= 0 else None,
        found=words.found,
        expected=words.expected,
        forward=finding.forward,
        details=details,
    )
