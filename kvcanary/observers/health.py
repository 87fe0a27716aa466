"""The health fold: a canary that stopped singing must not pass for a healthy cache.

Every launch role counts its launches on the device, and the host counts how often it asked for them (``due``). A role
that is due and does not run has stalled: its kernel was left out of a graph, was suppressed, or fails in silence.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from kvcanary.errors import CanaryStalledError
from kvcanary.events import (
    CanaryArmed,
    CanaryDisarmed,
    Event,
    ForwardLaunched,
    HealthChecked,
    KernelStalled,
    RunStarted,
    SnapshotTaken,
    Ticked,
)
from kvcanary.mailbox import Mailbox, Raise
from kvcanary.observers.base import stamp

_GAPS = ("unknown_record", "no_table", "over_capacity")
"""reasons for which an old position was not verified; the others are counted in other units"""
_MIN_ENTRIES = 1024
"""a share of fewer entries says nothing"""


@dataclass(frozen=True, slots=True)
class HealthLimits:
    """What is still healthy.

    Attributes:
        silence_s: seconds without a snapshot while forwards are launched.
        lag_ms: from the end of a step's launches to its snapshot being read; a slow forward is part of it.
        unverified_share: share of old positions that could not be verified in a period, 0 to 1.
    """

    silence_s: float = 30.0
    lag_ms: float = 5000.0
    unverified_share: float = 0.5


class _Progress(NamedTuple):
    """When a role's launch counter was last seen to grow: how many launches, how many were due, in which forward."""

    launches: int
    due: int
    forward: int


class HealthFold:
    """Checks every ``every`` forwards (0 = off), after ``warmup`` of them.

    A role has stalled when it was due in a period and did not run once, or missed a quarter of a period's launches in
    a row: so a stall is named within one period, wherever in it the stall begins. It is named once, and again after a
    recovery. Roles that are off, or not due, are quiet. A canary that was disarmed is unhealthy from there until it is
    armed again, both said at once, since no forward may follow. In ``raise`` mode a stall is posted to ``mailbox`` as a
    :class:`~kvcanary.errors.CanaryStalledError`.
    """

    name = "health"
    interests: tuple[type[Event], ...] = (
        RunStarted,
        CanaryArmed,
        CanaryDisarmed,
        ForwardLaunched,
        SnapshotTaken,
        Ticked,
    )
    emits: tuple[type[Event], ...] = (HealthChecked, KernelStalled)
    guard = True

    def __init__(
        self, every: int, warmup: int, mode: str, mailbox: Mailbox, limits: HealthLimits | None = None
    ) -> None:
        self._every = every
        self._warmup = warmup
        self._mode = mode
        self._mailbox = mailbox
        self._limits = limits or HealthLimits()
        self._patience = max(1, every // 4)
        self._reset(())

    def _reset(self, roles: tuple[str, ...]) -> None:
        self._roles = frozenset(roles)
        self._first_forward = 0
        self._launched = 0
        self._last_snapshot = 0
        self._next_check = 0
        self._progress: dict[str, _Progress] = {}
        self._stalled: dict[str, str] = {}
        self._drifts = 0
        self._lag_us = 0.0
        self._base = SnapshotTaken()

    def handle(self, event: Event) -> list[Event]:
        """Stalls when they are seen, and a check each period."""
        if isinstance(event, RunStarted):
            self._reset(event.roles)
            return []
        if self._every == 0:
            return []
        match event:
            case SnapshotTaken():
                return list(self._snapshot(event))
            case ForwardLaunched():
                self._first_forward = self._first_forward or event.forward
                self._launched = max(self._launched, event.forward + event.forwards - 1)
            case Ticked():
                return list(self._tick(event))
            case CanaryArmed() | CanaryDisarmed():
                return list(self._arm(event))
            case _:
                pass
        return []

    # --- snapshots ------------------------------------------------------------------------------------------

    def _snapshot(self, snapshot: SnapshotTaken) -> Iterator[Event]:
        # When kernels are left out the device's number stands still, and only the host's goes on.
        now = max(snapshot.forward, snapshot.host_forward)
        self._first_forward = self._first_forward or now
        self._last_snapshot = max(self._last_snapshot, now)
        self._stalled.pop("snapshot", None)
        self._lag_us = max(self._lag_us, snapshot.lag_us)
        self._drifts = self._drifts + 1 if snapshot.host_forward not in (0, snapshot.forward) else 0
        self._follow(snapshot, now)
        if now < self._first_forward - 1 + self._warmup:
            return
        if self._next_check == 0:
            self._begin_period(snapshot, now)
            return
        yield from self._stalls(snapshot, now, end=now >= self._next_check)
        if now >= self._next_check:
            yield self._check(snapshot)
            self._begin_period(snapshot, now)

    def _begin_period(self, snapshot: SnapshotTaken, now: int) -> None:
        self._base = snapshot
        self._next_check = now + self._every
        self._lag_us = 0.0

    def _follow(self, snapshot: SnapshotTaken, now: int) -> None:
        for role, due in snapshot.due.items():
            launches = snapshot.launches.get(role, 0)
            before = self._progress.get(role)
            if before is None:
                self._progress[role] = _Progress(launches, due if launches else 0, now if launches else 0)
            elif launches > before.launches:
                self._progress[role] = _Progress(launches, due, now)
                self._stalled.pop(role, None)

    def _stalls(self, snapshot: SnapshotTaken, now: int, *, end: bool) -> Iterator[Event]:
        for role, progress in self._progress.items():
            if role in self._stalled or (self._roles and role not in self._roles):
                continue
            due = snapshot.due.get(role, 0)
            missed = due - progress.due
            idle = progress.launches <= self._base.launches.get(role, 0) and due > self._base.due.get(role, 0)
            if missed >= self._patience or (end and idle):
                yield self._stall(
                    snapshot,
                    role,
                    launches=progress.launches,
                    expected=progress.launches + missed,
                    since=progress.forward + 1,
                    detail=f"{role} was due {missed} more times and did not run since forward {progress.forward}",
                )
        yield from self._drift(snapshot, now)

    def _drift(self, snapshot: SnapshotTaken, now: int) -> Iterator[Event]:
        if self._drifts == 0:
            self._stalled.pop("forward", None)
        elif self._drifts > 1 and "forward" not in self._stalled:
            yield self._stall(
                snapshot,
                "forward",
                launches=snapshot.forward,
                expected=snapshot.host_forward,
                since=now,
                detail=f"the device is at forward {snapshot.forward}, the host at {snapshot.host_forward}: "
                f"a graph was captured without the canary, or forwards run outside step()",
            )

    def _check(self, snapshot: SnapshotTaken) -> HealthChecked:
        share = _unverified_share(self._base, snapshot)
        lag_ms = self._lag_us / 1000
        return self._checked(snapshot, tuple(self._problems(share, lag_ms)), snapshot.launches, share, lag_ms)

    def _problems(self, share: float, lag_ms: float) -> Iterator[str]:
        yield from self._stalled.values()
        if lag_ms > self._limits.lag_ms:
            yield f"a snapshot was read {lag_ms:.0f} ms after its step; the limit is {self._limits.lag_ms:.0f} ms"
        if share > self._limits.unverified_share:
            limit = self._limits.unverified_share
            yield f"{share:.0%} of old positions could not be verified; the limit is {limit:.0%}"

    def _arm(self, event: CanaryArmed | CanaryDisarmed) -> Iterator[Event]:
        before = self._stalled.pop("armed", None)
        if isinstance(event, CanaryDisarmed):
            self._stalled["armed"] = f"nothing is checked since forward {event.forward}: {event.reason}"
        elif before is None:
            return
        yield self._checked(event, tuple(self._stalled.values()), {}, 0.0, 0.0)

    # --- silence ----------------------------------------------------------------------------------------------

    def _tick(self, tick: Ticked) -> Iterator[Event]:
        waited = self._launched > max(self._last_snapshot, self._first_forward - 1 + self._warmup)
        if not waited or tick.seconds_since_snapshot < self._limits.silence_s or "snapshot" in self._stalled:
            return
        seconds = f"{tick.seconds_since_snapshot:.0f} s"
        if tick.in_flight:
            # The device itself is not done: slow or hung, and no kernel of ours to blame.
            self._stalled["snapshot"] = f"no forward finished on the device for {seconds}"
        else:
            yield self._stall(
                tick,
                "snapshot",
                launches=self._last_snapshot,
                expected=self._launched,
                since=self._last_snapshot + 1,
                detail=f"no snapshot for {seconds} while forwards up to {self._launched} were launched",
            )
        yield self._checked(tick, tuple(self._stalled.values()), {}, 0.0, tick.seconds_since_snapshot * 1000)

    # --- words ------------------------------------------------------------------------------------------------

    def _stall(
        self, source: Event, role: str, *, launches: int, expected: int, since: int, detail: str
    ) -> KernelStalled:
        self._stalled[role] = detail
        if self._mode == "raise":
            self._mailbox.post(Raise(CanaryStalledError(f"KernelStalled: {detail}; checks are missing since then")))
        return KernelStalled(
            **stamp(source, self.name),
            role=role,
            launches=launches,
            expected=expected,
            since_forward=since,
            detail=detail,
        )

    def _checked(
        self, source: Event, problems: tuple[str, ...], launches: Mapping[str, int], share: float, lag_ms: float
    ) -> HealthChecked:
        active = tuple(role for role, count in launches.items() if count > self._base.launches.get(role, 0))
        return HealthChecked(
            **stamp(source, self.name),
            healthy=not problems,
            problems=problems,
            active_roles=active,
            unverified_share=share,
            lag_ms=lag_ms,
        )


def _unverified_share(before: SnapshotTaken, after: SnapshotTaken) -> float:
    """Share of the old positions of a period that were not verified; 0 when there were too few to tell."""
    verified = _total(after.verified, ("links",)) - _total(before.verified, ("links",))
    missing = _total(after.unverified, _GAPS) - _total(before.unverified, _GAPS)
    entries = verified + missing
    return missing / entries if entries >= _MIN_ENTRIES else 0.0


def _total(counts: Mapping[str, Mapping[str, int]], names: tuple[str, ...]) -> int:
    return sum(sum(counts[name].values()) for name in names if name in counts)
