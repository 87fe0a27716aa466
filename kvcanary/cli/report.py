"""What the demo says: phases and verdicts as events of the stream, and the sum of them."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvcanary.cli.scoreboard import say
from kvcanary.errors import KVCanaryError
from kvcanary.events import Event, IncidentOpened, IncidentUpdated, KernelStalled, register_event
from kvcanary.faults.injectors import STALLED, Injection

POSITIONS = 100_000
"""Slot positions that the clean phases verify at least, over all models."""


class DemoError(KVCanaryError, RuntimeError):
    """The engine failed a request or stopped; says which and why."""


@register_event
class PhaseEnded(Event, frozen=True, kw_only=True, gc=False, tag="demo.phase_ended"):
    """A phase without faults is over."""

    model: str
    phase: str
    forwards: int
    requests: int
    positions: int
    """old slot positions compared with their records"""
    reread: int
    """slots whose bytes the scrub read again"""
    alarms: tuple[str, ...] = ()
    """everything that was reported, all of it false"""


@register_event
class FaultJudged(Event, frozen=True, kw_only=True, gc=False, tag="demo.fault_judged"):
    """What became of one planted fault."""

    model: str
    fault: str
    title: str
    passed: bool = False
    """named in time, with a right request where one is due, and nothing reported before"""
    planted: str = ""
    """what was done, in words"""
    kind: str = ""
    headline: str = ""
    """of the incident that named it, or why there is none"""
    after: int | None = None
    """forwards from the broken one to the one that named it"""
    request: str = ""
    """the request that the incident named, one of those that were hit"""


@dataclass(slots=True)
class Results:
    """Everything that was judged."""

    phases: list[PhaseEnded] = field(default_factory=list[PhaseEnded])
    verdicts: list[FaultJudged] = field(default_factory=list[FaultJudged])

    @property
    def positions(self) -> int:
        """Slot positions that the clean phases verified."""
        return sum(phase.positions for phase in self.phases)

    @property
    def problems(self) -> tuple[str, ...]:
        """Why the demo failed; empty when all is well."""
        loud = [f"{p.model}, {p.phase}: {len(p.alarms)} false alarms: {p.alarms[0]}" for p in self.phases if p.alarms]
        missed = [f"{v.model}, {v.fault}: {v.headline}" for v in self.verdicts if not v.passed]
        few = [] if self.positions >= POSITIONS else [f"only {self.positions:,} of {POSITIONS:,} positions verified"]
        return (*loud, *missed, *few)


def judge(model: str, injection: Injection, findings: tuple[Event, ...], before: tuple[str, ...]) -> FaultJudged:
    """Find the finding that names a fault.

    Args:
        model: for the report.
        injection: what was done.
        findings: what was reported from that forward on.
        before: what was reported before it, in words: nothing should be.
    """
    named = next((event for event in findings if _names(event, injection)), None)
    fault = injection.fault
    if named is None or before:
        others = [say(event) for event in findings if isinstance(event, (IncidentOpened, KernelStalled))]
        problem = f"not named; reported instead: {'; '.join(others)}" if others else "nothing was reported"
        if before:
            problem = f"reported before the fault was planted: {before[0]}"
        return FaultJudged(model=model, fault=fault.name, title=fault.title, planted=injection.detail, headline=problem)
    kind, headline, requests = _told(named, injection)
    right = [request for request in requests if request in injection.requests]
    return FaultJudged(
        model=model,
        fault=fault.name,
        title=fault.title,
        passed=True,
        planted=injection.detail,
        kind=kind,
        headline=headline,
        after=named.forward - injection.forward,
        request=right[0] if right else "",
    )


def _names(event: Event, injection: Injection) -> bool:
    if isinstance(event, KernelStalled):
        return injection.fault.stalls
    return isinstance(event, (IncidentOpened, IncidentUpdated)) and injection.named_by(event)


def _told(event: Event, injection: Injection) -> tuple[str, str, tuple[str, ...]]:
    """Kind, headline and requests of the finding that named a fault."""
    if isinstance(event, IncidentOpened):
        return event.kind, event.headline, event.requests
    if isinstance(event, IncidentUpdated):
        # Damage to a page that an open incident had been about: it grew by the kind that was waited for.
        kind = next(kind for kind in injection.fault.expects if kind in event.kinds)
        return kind, f"{kind}, joining incident {event.incident} of the same page: {event.headline}", event.requests
    return STALLED, say(event), ()
