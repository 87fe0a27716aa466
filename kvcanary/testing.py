"""A test kit for engines and observers: record events, assert on them, and a clock that does as it is told.

It imports neither torch nor pytest. The pytest fixture ``kv_events`` is in :mod:`kvcanary.testing_plugin`.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TypeVar

from kvcanary.endings import seconds_left
from kvcanary.events import (
    CanaryArmed,
    CanaryDisarmed,
    Event,
    IncidentOpened,
    KernelStalled,
    OwnershipViolated,
    SnapshotTaken,
    SwaDivergenceObserved,
    ViolationDetected,
    event_name,
)
from kvcanary.memory_canary import MemoryCanary
from kvcanary.observers import swa_divergence

__all__ = [
    "DeterministicClock",
    "EventRecorder",
    "MemoryCanary",
    "assert_no_violations",
    "assert_swa_divergence_observed",
    "assert_violation",
]

E = TypeVar("E", bound=Event)
Finding = ViolationDetected | OwnershipViolated
Source = str | os.PathLike[str] | Iterable[Event | str | bytes]

_FINDINGS = (ViolationDetected, OwnershipViolated)
_SHOWN = 5


class EventRecorder:
    """A sink that keeps what it gets, for ``observers=[recorder]``. Safe to read from any thread.

    Args:
        interests: event types to keep.
        limit: the most events kept; the oldest go first, and ``dropped`` counts them.
    """

    name = "recorder"

    def __init__(self, *interests: type[Event], limit: int = 100_000) -> None:
        self.interests: tuple[type[Event], ...] = interests or (Event,)
        self.dropped = 0
        self._events: deque[Event] = deque(maxlen=limit)
        self._changed = threading.Condition()

    def handle_batch(self, events: Iterable[Event]) -> None:
        """Keep events, in the order in which they came."""
        with self._changed:
            before = len(self._events)
            new = list(events)
            self._events.extend(new)
            self.dropped += before + len(new) - len(self._events)
            self._changed.notify_all()

    @property
    def events(self) -> list[Event]:
        """All events so far, as a copy."""
        with self._changed:
            return list(self._events)

    def of(self, kind: type[E]) -> list[E]:
        """The events of one type, subclasses included."""
        return [event for event in self.events if isinstance(event, kind)]

    def wait_for(self, kind: type[E], where: Callable[[E], bool] = lambda _: True, *, timeout: float = 10.0) -> E:
        """The first event of a type for which ``where`` holds; waits up to ``timeout`` seconds for it.

        Raises:
            AssertionError: none came in time; the message says what came instead.
        """
        deadline = time.monotonic() + timeout
        with self._changed:
            while True:
                for event in self._events:
                    if isinstance(event, kind) and where(event):
                        return event
                left = deadline - time.monotonic()
                if left <= 0:
                    break
                self._changed.wait(seconds_left(deadline))
        raise AssertionError(f"no fitting {event_name(kind)} within {timeout} s; {_summary(self.events)}")

    def clear(self) -> None:
        """Forget everything."""
        with self._changed:
            self._events.clear()
            self.dropped = 0

    def __iter__(self) -> Iterator[Event]:
        return iter(self.events)

    def __len__(self) -> int:
        return len(self._events)


class DeterministicClock:
    """Wall and monotonic time that move only when read (by ``step_ns``) or told to (:meth:`advance`).

    ``time_ns`` and ``monotonic_ns`` take the place of the functions in :mod:`time`. Each read moves both.
    """

    def __init__(self, start_ns: int = 1_700_000_000_000_000_000, step_ns: int = 1_000_000_000) -> None:
        self._wall_offset = start_ns
        self._now = 0
        self._step = step_ns
        self._lock = threading.Lock()

    def advance(self, seconds: float) -> None:
        """Move on."""
        with self._lock:
            self._now += round(seconds * 1_000_000_000)

    def monotonic_ns(self) -> int:
        """Nanoseconds since the clock was made."""
        with self._lock:
            now = self._now
            self._now += self._step
            return now

    def time_ns(self) -> int:
        """Nanoseconds since 1970."""
        return self._wall_offset + self.monotonic_ns()


def assert_no_violations(events: Iterable[Event], *, checks: Iterable[str] = ()) -> None:
    """Nothing was found, and something was verified: silence of a canary that did not run proves nothing.

    Args:
        events: a recorder, or any events of one run with its ``SnapshotTaken``.
        checks: checks that must have verified something (``links``, ``row_ends``, ``writes``, ``sealed``,
            ``content``); none given: any of them will do.

    Raises:
        AssertionError: a violation, a stalled kernel, nothing verified, or a canary that was disarmed and left so.
    """
    seen = list(events)
    _refuse(seen, (*_FINDINGS, IncidentOpened), "violations")
    _refuse(seen, (KernelStalled,), "stalled kernels, so checks are missing")
    _refuse(_unarmed(seen), (CanaryDisarmed,), "checks that were stopped and not taken up again")
    snapshots = [event for event in seen if isinstance(event, SnapshotTaken)]
    counted = {kind: count for snapshot in snapshots for kind, count in snapshot.violations.items()}
    if any(counted.values()):
        raise AssertionError(f"the device counted violations: {counted}; {_summary(seen)}")
    verified = _verified(snapshots)
    missing = [check for check in checks if not verified.get(check)]
    if missing or not any(verified.values()):
        what = f"by {', '.join(missing)}" if missing else "by any check"
        raise AssertionError(
            f"no violations, but nothing was verified {what}, so this proves nothing (was the canary armed, and did "
            f"forwards run in it?); verified: {verified or 'no snapshot at all'}; {_summary(seen)}"
        )


def assert_violation(
    events: Iterable[Event],
    *,
    kind: str,
    request: str | None = None,
    group: str | None = None,
    slot: int | None = None,
) -> Finding:
    """A violation of ``kind`` was found, by the device or the ledger; the first one that fits is returned.

    Raises:
        AssertionError: none fits; the message names those that were found.
    """
    seen = list(events)
    found = [event for event in seen if isinstance(event, _FINDINGS)]
    wanted = {"kind": kind, "request": request, "group": group, "slot": slot}
    asked = {name: value for name, value in wanted.items() if value is not None}
    for event in found:
        if all(getattr(event, name, None) == value for name, value in asked.items()):
            return event
    others = _listed([_words(event) for event in found]) if found else "none at all"
    raise AssertionError(f"no violation with {_pairs(asked)}; found: {others}; {_summary(seen)}")


def assert_swa_divergence_observed(
    source: Source,
    *,
    timeout: float = 30.0,
    interval: float = 0.05,
) -> SwaDivergenceObserved:
    """The sliding-window path really ran.

    One observation has at least one token out of the window, at least one diverging index, and fewer entries verified
    in the window group than in the full one.

    Args:
        source: path of a log file (it may not exist yet), a recorder, or events or log lines. A file, a recorder or a
            list is looked at again until ``timeout``.
        timeout: seconds; 0 looks once.
        interval: seconds between two looks.

    Returns:
        The first observation that fits.

    Raises:
        AssertionError: none fits in time; the message names what the last one lacks.
    """
    look = _looker(source)
    deadline = time.monotonic() + timeout
    while True:
        observed = look()
        for one in observed:
            if not _lacks(one):
                return one
        left = deadline - time.monotonic()
        if left <= 0:
            break
        time.sleep(min(interval, left))
    if not observed:
        raise AssertionError(
            f"no {swa_divergence.NAME} within {timeout} s; is swa_divergence_every set, and does the model have window "
            f"layers?"
        )
    raise AssertionError(
        f"{len(observed)} observations within {timeout} s, but the last one lacks: {', '.join(_lacks(observed[-1]))}; "
        f"it is {observed[-1]}"
    )


def _looker(source: Source) -> Callable[[], list[SwaDivergenceObserved]]:
    if isinstance(source, (str, os.PathLike)):
        path = Path(source)
        return lambda: swa_divergence.find_all(path.read_bytes()) if path.exists() else []
    items = list(source) if isinstance(source, Iterator) else source
    return lambda: [found for item in items if (found := _observation(item)) is not None]


def _observation(item: Event | str | bytes) -> SwaDivergenceObserved | None:
    if isinstance(item, (str, bytes)):
        return swa_divergence.parse(item)
    return item if isinstance(item, SwaDivergenceObserved) else None


def _lacks(observed: SwaDivergenceObserved) -> list[str]:
    outside, diverging = observed.swa_out_of_window_tokens, observed.swa_full_idx_divergence
    window, full = observed.verify_swa, observed.verify_full
    wanted = (
        (outside >= 1, f"swa_out_of_window_tokens >= 1 (is {outside})"),
        (diverging >= 1, f"swa_full_idx_divergence >= 1 (is {diverging})"),
        (window < full, f"verify_swa < verify_full (is {window} and {full})"),
    )
    return [condition for holds, condition in wanted if not holds]


def _refuse(seen: list[Event], kinds: tuple[type[Event], ...], what: str) -> None:
    found = [event for event in seen if isinstance(event, kinds)]
    if found:
        raise AssertionError(f"{len(found)} {what}: {_listed([_words(event) for event in found])}; {_summary(seen)}")


def _unarmed(seen: list[Event]) -> list[Event]:
    """From the last disarming on, if no arming follows."""
    for at in reversed(range(len(seen))):
        if isinstance(seen[at], (CanaryArmed, CanaryDisarmed)):
            return seen[at:] if isinstance(seen[at], CanaryDisarmed) else []
    return []


def _verified(snapshots: list[SnapshotTaken]) -> dict[str, int]:
    """The most that any snapshot counted, per check."""
    most: dict[str, int] = {}
    for snapshot in snapshots:
        for check, groups in snapshot.verified.items():
            most[check] = max(most.get(check, 0), sum(groups.values()))
    return most


def _words(event: Event) -> str:
    match event:
        case IncidentOpened():
            return event.headline
        case KernelStalled():
            return f"{event.role} ({event.detail})" if event.detail else event.role
        case CanaryDisarmed():
            return f"since forward {event.forward}: {event.reason}"
        case ViolationDetected():
            where = f"group={event.group!r} slot={event.slot} forward={event.forward}"
            return f"{event.kind} request={event.request!r} {where}"
        case OwnershipViolated():
            return f"{event.kind} request={event.request!r} group={event.group!r} page={event.page}"
        case _:
            return event_name(event)


def _pairs(fields: Mapping[str, object]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in fields.items())


def _listed(items: list[str]) -> str:
    more = f" and {len(items) - _SHOWN} more" if len(items) > _SHOWN else ""
    return "; ".join(items[:_SHOWN]) + more


def _summary(events: list[Event]) -> str:
    counts: dict[str, int] = {}
    for event in events:
        counts[event_name(event)] = counts.get(event_name(event), 0) + 1
    return f"events: {counts}" if counts else "there were no events"
