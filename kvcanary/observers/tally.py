"""A tally that follows events and knows the value of every metric.

Device totals come from snapshots, which are cumulative: a tally that missed some is right again with the next. What was
counted in one run goes on in the next, so counters never fall.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

from kvcanary.events import (
    Event,
    EventsDropped,
    FactsLost,
    HazardCounted,
    HealthChecked,
    IncidentOpened,
    IncidentUpdated,
    KernelStalled,
    ObserverFailed,
    OwnershipViolated,
    QuarantineFailed,
    QuarantineRequested,
    RequestQuarantined,
    RequestsAdmitted,
    RequestsFinished,
    RequestsPreempted,
    RequestsRewound,
    RunStarted,
    RunStopped,
    ScrubCompleted,
    SnapshotsSkipped,
    SnapshotTaken,
    SwaDivergenceObserved,
    Ticked,
    ViolationDetected,
)
from kvcanary.observers.metrics import METRICS, Labels

MOST_REQUESTS = 1 << 16
"""Names kept to count a request once; beyond it the one that was named longest ago is forgotten."""


class Histogram(NamedTuple):
    """Observations of one histogram; ``counts`` are cumulative, the last one over all."""

    counts: tuple[int, ...]
    total: float


class Tally:
    """Follows the events of one canary and knows the value of every metric. Any thread.

    Args:
        observe: told of each observation of a histogram, by its name; for exporters that keep their own.
    """

    interests: tuple[type[Event], ...]

    def __init__(self, observe: Callable[[str, float], None] | None = None) -> None:
        self._observe = observe
        self._lock = threading.Lock()
        self._counts: dict[str, dict[Labels, float]] = {
            metric.name: dict.fromkeys(metric.known if metric.labels else ((),), 0)
            for metric in METRICS.values()
            if metric.kind == "counter"
        }
        self._gauges: dict[str, dict[Labels, float]] = {}
        self._buckets = {
            metric.name: [0] * (len(metric.buckets) + 1) for metric in METRICS.values() if metric.kind == "histogram"
        }
        self._sums = dict.fromkeys(self._buckets, 0.0)
        self._measured: list[tuple[str, float]] = []
        self._newest: SnapshotTaken | None = None
        self._run_totals: dict[tuple[str, Labels], float] = {}
        self._requests: OrderedDict[str, None] = OrderedDict()
        self._rules: dict[type[Event], Callable[[Any], None]] = {
            RunStarted: self._begun,
            RunStopped: self._stopped,
            Ticked: self._ticked,
            SnapshotTaken: self._taken,
            ScrubCompleted: lambda e: self._gauge("scrub.pass.forwards", e.forwards, e.group),
            SwaDivergenceObserved: self._window,
            ViolationDetected: self._found,
            OwnershipViolated: lambda e: self._add("violations", 1, e.kind, "ledger"),
            IncidentOpened: self._opened,
            IncidentUpdated: lambda e: self._affected(e.requests),
            HazardCounted: lambda e: self._total("hazards", e.count, e.hazard),
            HealthChecked: lambda e: self._gauge("healthy", int(e.healthy)),
            KernelStalled: lambda e: self._add("kernel.stalls", 1, e.role),
            RequestsAdmitted: lambda e: self._add("requests", len(e.requests), "admitted"),
            RequestsFinished: lambda e: self._add("requests", len(e.requests), "finished"),
            RequestsPreempted: lambda e: self._add("requests", len(e.requests), "preempted"),
            RequestsRewound: lambda e: self._add("requests", len(e.requests), "rewound"),
            QuarantineRequested: lambda e: self._add("quarantines.requested", len(e.requests)),
            RequestQuarantined: self._quarantined,
            QuarantineFailed: lambda _: self._add("quarantines", 1, "failed"),
            FactsLost: lambda e: self._add("facts.lost", e.count),
            SnapshotsSkipped: lambda e: self._add("snapshots.skipped", e.count),
            EventsDropped: lambda e: self._add("events.dropped", e.count, e.observer),
            ObserverFailed: lambda e: self._add("observer.failures", 1, e.observer, e.action),
        }
        self.interests = tuple(self._rules)

    def handle_batch(self, events: Sequence[Event]) -> None:
        """Count what the events tell."""
        with self._lock:
            for event in events:
                rule = self._rules.get(type(event))
                if rule is not None:
                    rule(event)
            measured, self._measured = self._measured, []
        if self._observe is not None:  # an exporter may hold locks of its own while it asks for values
            for name, value in measured:
                self._observe(name, value)

    def values(self, name: str) -> dict[Labels, float]:
        """The present values of a counter or gauge, by its labels' values."""
        with self._lock:
            self._settle()
            found = self._counts[name] if METRICS[name].kind == "counter" else self._gauges.get(name, {})
            return dict(found)

    def histogram(self, name: str) -> Histogram:
        """The observations of a histogram so far."""
        with self._lock:
            return Histogram(tuple(accumulate(self._buckets[name])), self._sums[name])

    # --- how to count -------------------------------------------------------------------------------------

    def _add(self, name: str, count: float, *labels: str) -> None:
        series = self._counts[name]
        series[labels] = series.get(labels, 0) + count

    def _total(self, name: str, total: float, *labels: str) -> None:
        """A count since the run began becomes one since the tally was made.

        One that fell belongs to a new run, whose beginning a full queue gave up.
        """
        before = self._run_totals.get((name, labels), 0)
        self._run_totals[name, labels] = total
        self._add(name, total - before if total >= before else total, *labels)

    def _settle(self) -> None:
        newest, self._newest = self._newest, None
        if newest is not None:
            for name, labels, total in _totals(newest):
                self._total(name, total, *labels)

    def _gauge(self, name: str, value: float, *labels: str) -> None:
        self._gauges.setdefault(name, {})[labels] = value

    def _measure(self, name: str, value: float) -> None:
        self._buckets[name][bisect_left(METRICS[name].buckets, value)] += 1
        self._sums[name] += value
        self._measured.append((name, value))

    # --- what events say ----------------------------------------------------------------------------------

    def _begun(self, event: RunStarted) -> None:
        origin = event.origin
        version = event.versions.get("kvcanary", "")
        self._settle()
        self._run_totals.clear()
        self._gauges.clear()
        self._gauge("info", 1, origin.engine, origin.engine_version, origin.device, event.backend, event.mode, version)
        self._gauge("run_start.timestamp", event.time_ns / 1e9)
        self._gauge("uncovered", len(event.uncovered))
        for check in event.unarmed:
            self._gauge("check.unarmed", 1, check)
        self._add("runs", 1)

    def _stopped(self, event: RunStopped) -> None:
        self._add("runs.failed", int(not event.clean))
        self._gauges.clear()

    def _ticked(self, event: Ticked) -> None:
        self._gauge("facts.queued", event.queued_facts)

    def _taken(self, event: SnapshotTaken) -> None:
        # There is one a forward, and only the newest of a run counts: it is taken apart when somebody asks.
        if self._newest is not None and event.forward < self._newest.forward:
            self._settle()
        self._newest = event
        self._gauge("last_snapshot.timestamp", event.time_ns / 1e9)
        self._measure("step.host_time", event.host_us / 1e6)
        self._measure("snapshot.lag", event.lag_us / 1e6)

    def _window(self, event: SwaDivergenceObserved) -> None:
        self._add("window.samples", 1)
        self._add("window.diverging", event.swa_full_idx_divergence)
        self._add("window.outside", event.swa_out_of_window_tokens)

    def _found(self, event: ViolationDetected) -> None:
        if event.kind == "FINAL_DIGEST":  # all others are in the device's own counts
            self._add("violations", 1, event.kind, "audit")

    def _opened(self, event: IncidentOpened) -> None:
        self._add("incidents", 1, event.kind)
        self._affected(event.requests)

    def _affected(self, requests: Iterable[str]) -> None:
        for request in requests:
            if request not in self._requests:
                self._add("affected_requests", 1)
            self._requests[request] = None
            self._requests.move_to_end(request)
        while len(self._requests) > MOST_REQUESTS:
            self._requests.popitem(last=False)

    def _quarantined(self, event: RequestQuarantined) -> None:
        self._add("quarantines", 1, event.action)
        self._add("quarantined_tokens.leaked", event.tokens_left)


def _totals(event: SnapshotTaken) -> Iterator[tuple[str, Labels, int]]:
    """What a snapshot counts since its run began."""
    yield "forwards", (), event.forward
    yield "forwards.abandoned", (), event.abandoned
    yield "tokens", (), event.new_tokens
    yield "violation_rows.dropped", (), event.violations_dropped
    yield from _flat("verified", event.verified)
    yield from _flat("unverified", event.unverified)
    for name, columns in (("kernel.launches", event.launches), ("kernel.launches.due", event.due)):
        yield from ((name, (role,), count) for role, count in columns.items())
    yield from (("scrub.passes", (group,), passes) for group, passes in event.scrub_passes.items())
    yield from (("violations", (kind, "device"), count) for kind, count in event.violations.items())


def _flat(name: str, table: Mapping[str, Mapping[str, int]]) -> Iterator[tuple[str, Labels, int]]:
    for what, groups in table.items():
        yield from ((name, (what, group), count) for group, count in groups.items())
