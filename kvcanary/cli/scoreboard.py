"""What the demo sees: an observer of one run that counts and keeps what was reported."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import anyio

from kvcanary.events import (
    Event,
    FaultInjected,
    IncidentOpened,
    IncidentUpdated,
    KernelStalled,
    RequestsFinished,
    SnapshotTaken,
    ViolationDetected,
    event_name,
    register_event,
)

RECENT = 12
"""Findings that the live view can show."""


@register_event
class PhaseChanged(Event, frozen=True, kw_only=True, gc=False, tag="demo.phase_changed"):
    """The demo begins another phase; what comes later in the stream belongs to it."""

    number: int
    model: str
    phase: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """Numbers since the run began."""

    forward: int = 0
    tokens: int = 0
    finished: int = 0
    positions: int = 0
    """old slot positions compared with their records"""
    reread: int = 0
    """slots whose bytes the scrub read again"""
    violations: int = 0


class Scoreboard:
    """Follows the stream of one model's run. A view in another thread may read its attributes."""

    name = "demo.scoreboard"
    queue = 1 << 16
    interests: tuple[type[Event], ...] = (
        SnapshotTaken,
        RequestsFinished,
        FaultInjected,
        ViolationDetected,
        IncidentOpened,
        IncidentUpdated,
        KernelStalled,
        PhaseChanged,
    )

    def __init__(self) -> None:
        self._finished = 0
        self._findings: list[Event] = []
        self._changed = anyio.Event()
        self.totals = Totals()
        self.phase = PhaseChanged(number=0, model="", phase="starting")
        self.latest: tuple[Event, ...] = ()
        """The last few incidents, stalls and faults."""

    async def handle_batch(self, events: Sequence[Event]) -> None:
        """Take what has happened; runs on the loop that started the watch."""
        for event in events:
            if isinstance(event, SnapshotTaken):
                self.totals = self._count(event)
            elif isinstance(event, RequestsFinished):
                self._finished += len(event.requests)
            elif isinstance(event, PhaseChanged):
                self.phase = event
            else:
                self._note(event)
        self._changed.set()
        self._changed = anyio.Event()

    async def until(self, condition: Callable[[], bool], seconds: float) -> bool:
        """Wait until the stream made ``condition`` true; False after ``seconds``."""
        with anyio.move_on_after(seconds):
            while not condition():
                await self._changed.wait()
        return condition()

    def findings(self, since: int = 0) -> tuple[Event, ...]:
        """Violations, incidents, their updates, and stalls, from the ``since``-th on."""
        return tuple(self._findings[since:])

    def _note(self, event: Event) -> None:
        if not isinstance(event, FaultInjected):
            self._findings.append(event)
        if not isinstance(event, (ViolationDetected, IncidentUpdated)):
            self.latest = (*self.latest[1 - RECENT :], event)

    def _count(self, event: SnapshotTaken) -> Totals:
        return Totals(
            forward=event.forward,
            tokens=event.new_tokens,
            finished=self._finished,
            positions=sum(event.verified.get("links", {}).values()),
            reread=sum(event.verified.get("content", {}).values()),
            violations=sum(event.violations.values()),
        )


def say(event: Event) -> str:
    """One finding in a line."""
    if isinstance(event, (IncidentOpened, IncidentUpdated)):
        return event.headline
    if isinstance(event, KernelStalled):
        return event.detail
    if isinstance(event, FaultInjected):
        return f"planted {event.fault}: {event.description}"
    if isinstance(event, ViolationDetected):
        return f"{event.kind} in {event.group} slot {event.slot} of {event.request or 'nobody'}"
    return event_name(event)


def alarms(findings: Iterable[Event]) -> tuple[str, ...]:
    """Findings in words, incidents before single violations. Later updates of earlier incidents are no alarms."""
    counted = [event for event in findings if not isinstance(event, IncidentUpdated)]
    return tuple(say(event) for event in sorted(counted, key=lambda event: isinstance(event, ViolationDetected)))
