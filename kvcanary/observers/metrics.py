"""What there is to measure: one list for all exporters, their dashboards and their tests.

Counters only grow: rates are for whoever asks. No label holds a request, slot, page or run.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, NamedTuple

from kvcanary.observers.explain import KINDS
from kvcanary.observers.explain_ownership import LEDGER_KINDS

Labels = tuple[str, ...]
"""Values of a metric's labels, in their order."""
Kind = Literal["counter", "gauge", "histogram"]


class Metric(NamedTuple):
    """One family of series.

    Attributes:
        name: dotted, without the prefix ``kvcanary.``.
        unit: in UCUM: ``s``, ``1``, or what is counted, in braces.
        labels: their names.
        known: label values that are there from the start, as zero: a first increment from nothing is seen by no
            ``increase()``. A counter without labels is there in any case.
        buckets: upper bounds of a histogram.
    """

    name: str
    kind: Kind
    unit: str
    description: str
    labels: tuple[str, ...] = ()
    known: tuple[Labels, ...] = ()
    buckets: tuple[float, ...] = ()


def _each(values: Iterable[str]) -> tuple[Labels, ...]:
    return tuple((value,) for value in values)


_ALL_KINDS = dict.fromkeys((*KINDS, *LEDGER_KINDS))
_DEVICE_KINDS = tuple(kind for kind in KINDS if kind != "FINAL_DIGEST")
_FINDERS = (
    *((kind, "device") for kind in _DEVICE_KINDS),
    ("FINAL_DIGEST", "audit"),
    *((kind, "ledger") for kind in LEDGER_KINDS),
)
_ROLES = ("facts", "mark", "check", "seal", "scrub", "window")
_STEP_SECONDS = (5e-6, 1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2)
_LAG_SECONDS = (5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 0.1, 0.2, 0.5, 1.0, 5.0)

METRICS: dict[str, Metric] = {
    metric.name: metric
    for metric in (
        Metric("incidents", "counter", "{incident}", "Incidents opened.", ("kind",), _each(_ALL_KINDS)),
        Metric(
            "violations",
            "counter",
            "{violation}",
            "Violations found: by the device (also where their rows were dropped), the ledger, or the finish audit.",
            ("kind", "source"),
            _FINDERS,
        ),
        Metric("violation_rows.dropped", "counter", "{violation}", "Violations counted whose details were dropped."),
        Metric("affected_requests", "counter", "{request}", "Requests that an incident named, each once."),
        Metric("hazards", "counter", "{page}", "Pages used in a way that is legal but risky.", ("hazard",)),
        Metric(
            "requests",
            "counter",
            "{request}",
            "Requests that changed their state.",
            ("change",),
            _each(("admitted", "finished", "preempted", "rewound")),
        ),
        Metric("forwards", "counter", "{forward}", "Forwards that the canary saw to their end."),
        Metric("forwards.abandoned", "counter", "{forward}", "Forwards that raised; their tokens stay unsealed."),
        Metric("tokens", "counter", "{token}", "New tokens whose slots got a record."),
        Metric("verified", "counter", "{entry}", "Entries verified.", ("check", "group")),
        Metric("unverified", "counter", "{entry}", "Entries that could not be verified.", ("reason", "group")),
        Metric("scrub.passes", "counter", "{pass}", "Times that all sealed bytes of a group were read.", ("group",)),
        Metric(
            "scrub.pass.forwards",
            "gauge",
            "{forward}",
            "Forwards that the last complete pass took: within so many a changed byte is seen.",
            ("group",),
        ),
        Metric("kernel.launches", "counter", "{launch}", "Launches counted on the device.", ("role",)),
        Metric("kernel.launches.due", "counter", "{launch}", "Launches that the host asked for.", ("role",)),
        Metric("kernel.stalls", "counter", "{stall}", "Launch roles found not to run.", ("role",), _each(_ROLES)),
        Metric("window.samples", "counter", "{sample}", "Times that the sliding window was looked at."),
        Metric("window.diverging", "counter", "{entry}", "Sampled positions whose window slot differs from the full."),
        Metric("window.outside", "counter", "{entry}", "Sampled positions that have left the window."),
        Metric("quarantines.requested", "counter", "{request}", "Quarantines asked for."),
        Metric(
            "quarantines",
            "counter",
            "{request}",
            "Requests taken out of service, or not.",
            ("outcome",),
            _each(("healed", "aborted", "failed")),
        ),
        Metric("quarantined_tokens.leaked", "counter", "{token}", "Tokens clients had before quarantine."),
        Metric("facts.lost", "counter", "{fact}", "Facts lost: what depends on them is unverified."),
        Metric("facts.queued", "gauge", "{fact}", "Facts that wait for the drain."),
        Metric("snapshots.skipped", "counter", "{snapshot}", "Snapshots overwritten before they were read."),
        Metric("events.dropped", "counter", "{event}", "Events that an observer's full queue gave up.", ("observer",)),
        Metric("observer.failures", "counter", "{failure}", "Exceptions of observers.", ("observer", "action")),
        Metric("runs", "counter", "{run}", "Runs begun."),
        Metric("runs.failed", "counter", "{run}", "Runs that did not end cleanly."),
        Metric("healthy", "gauge", "1", "1 while the last health check found no problem, 0 otherwise."),
        Metric("check.unarmed", "gauge", "1", "1 for each check that cannot be made in this run.", ("check",)),
        Metric("uncovered", "gauge", "{part}", "Parts of the cache that no record covers."),
        Metric("last_snapshot.timestamp", "gauge", "s", "When the device was last heard of, since 1970."),
        Metric("run_start.timestamp", "gauge", "s", "When the run began, since 1970."),
        Metric(
            "info",
            "gauge",
            "1",
            "Always 1; what is watched, and how.",
            ("engine", "engine_version", "device", "backend", "mode", "version"),
        ),
        Metric(
            "step.host_time",
            "histogram",
            "s",
            "Time that the canary took from the engine's thread in one step.",
            buckets=_STEP_SECONDS,
        ),
        Metric(
            "snapshot.lag",
            "histogram",
            "s",
            "From the end of a step's launches to its snapshot being read; a slow forward is part of it.",
            buckets=_LAG_SECONDS,
        ),
    )
}
"""Every metric, by its name."""
