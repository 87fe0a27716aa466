"""What metrics say of a stream of events, and how Prometheus sees them."""

from __future__ import annotations

import re
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from kvcanary.config import CanaryConfig
from kvcanary.errors import ConfigError
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
    Origin,
    OwnershipViolated,
    PageRun,
    PagesAllocated,
    QuarantineFailed,
    QuarantineRequested,
    RequestQuarantined,
    RequestsAdmitted,
    RequestsFinished,
    RunStarted,
    RunStopped,
    ScrubCompleted,
    SnapshotTaken,
    SwaDivergenceObserved,
    Ticked,
    ViolationDetected,
)
from kvcanary.observers import default_sinks, load_observer
from kvcanary.observers.base import as_observer
from kvcanary.observers.metrics import METRICS
from kvcanary.observers.prometheus import DefaultRegistrySink, PrometheusSink, prometheus_name
from kvcanary.observers.tally import Tally
from kvcanary.record import Kind
from kvcanary.state import Role
from tests.host.samples import built_in_types, make_event

STARTED = RunStarted(
    run="r1",
    time_ns=1_700_000_000_500_000_000,
    origin=Origin(engine="transformers", engine_version="5.24.0", device="cpu"),
    backend="reference",
    mode="log",
    versions={"kvcanary": "0.1.0"},
    uncovered=("cross attention",),
    unarmed={"WRITE_MISSING": "no poison"},
)


def snapshot(forward: int, **fields: Any) -> SnapshotTaken:
    return SnapshotTaken(
        forward=forward,
        time_ns=1_700_000_001_000_000_000,
        verified={"links": {"full": 10 * forward, "swa": forward}},
        unverified={"no_table": {"full": forward}},
        launches={"check": forward},
        due={"check": forward + 1},
        new_tokens=forward,
        scrub_passes={"full": forward // 4},
        **fields,
    )


def tally(*events: Event) -> Tally:
    made = Tally()
    made.handle_batch(events)
    return made


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def sink(registry: CollectorRegistry) -> Iterator[PrometheusSink]:
    made = PrometheusSink(registry)
    made.open()
    yield made
    made.close()


# --- what is counted ----------------------------------------------------------------------------------------


def test_totals_of_the_device_come_from_the_newest_snapshot() -> None:
    found = tally(STARTED, snapshot(3), snapshot(8, violations={"CONTENT": 2}, violations_dropped=1))
    assert found.values("forwards") == {(): 8}
    assert found.values("verified") == {("links", "full"): 80, ("links", "swa"): 8}
    assert found.values("unverified") == {("no_table", "full"): 8}
    assert found.values("kernel.launches.due") == {("check",): 9}
    assert found.values("violations")["CONTENT", "device"] == 2
    assert found.values("violation_rows.dropped") == {(): 1}


def test_a_tally_that_missed_snapshots_is_right_with_the_next() -> None:
    whole = tally(STARTED, *(snapshot(n) for n in range(1, 9)))
    assert tally(STARTED, snapshot(8)).values("verified") == whole.values("verified")


@pytest.mark.parametrize(("first", "second"), [(8, 2), (2, 8)])
def test_a_new_run_goes_on_counting_where_the_old_one_ended(first: int, second: int) -> None:
    found = tally(STARTED, snapshot(first), RunStopped(), STARTED, snapshot(second))
    assert found.values("forwards") == {(): 10}
    assert found.values("verified")["links", "full"] == 100
    assert found.values("runs") == {(): 2}


def test_a_run_whose_beginning_was_lost_is_counted_all_the_same() -> None:
    assert tally(STARTED, snapshot(8), snapshot(3), snapshot(4)).values("forwards") == {(): 12}


def test_violations_say_who_found_them_and_the_device_is_counted_once() -> None:
    on_device = ViolationDetected(kind="CONTENT", role="scrub", group="full")
    audited = ViolationDetected(kind="FINAL_DIGEST", role="facts", group="")
    found = tally(
        STARTED, on_device, audited, OwnershipViolated(kind="DOUBLE_FREE"), snapshot(1, violations={"CONTENT": 1})
    )
    counted = {labels: count for labels, count in found.values("violations").items() if count}
    assert counted == {("CONTENT", "device"): 1, ("FINAL_DIGEST", "audit"): 1, ("DOUBLE_FREE", "ledger"): 1}


def test_a_request_that_several_incidents_name_is_affected_once() -> None:
    opened = IncidentOpened(incident="r1#1", kind="CONTENT", headline="", requests=("a", "b"))
    updated = IncidentUpdated(incident="r1#1", kind="CONTENT", headline="", requests=("a", "b", "c"))
    again = IncidentOpened(incident="r1#2", kind="DIGEST", headline="", requests=("c",))
    found = tally(STARTED, opened, updated, again)
    assert found.values("affected_requests") == {(): 3}
    assert {labels: count for labels, count in found.values("incidents").items() if count} == {
        ("CONTENT",): 1,
        ("DIGEST",): 1,
    }


def test_requests_losses_stalls_and_quarantines_are_counted() -> None:
    found = tally(
        STARTED,
        RequestsAdmitted(requests=("a", "b"), rows=(0, 1), tags=(1, 2), starts=(0, 0)),
        RequestsFinished(requests=("a",), tags=(1,), lengths=(3,), digests=("",)),
        FactsLost(count=3),
        EventsDropped(observer="archive", count=5, first_seq=1, last_seq=9),
        ObserverFailed(observer="archive", error="E", action="continued"),
        KernelStalled(role="check", launches=1, expected=9),
        HazardCounted(hazard="freed_while_shared", count=2),
        HazardCounted(hazard="freed_while_shared", count=5),
        QuarantineRequested(incident="r1#1", requests=("a", "b")),
        RequestQuarantined(request="a", action="healed", tokens_left=7),
        QuarantineFailed(request="b", error="E"),
        SwaDivergenceObserved(
            forward_ct=1, verify_full=9, verify_swa=4, swa_full_idx_divergence=3, swa_out_of_window_tokens=2
        ),
        ScrubCompleted(group="full", passes=2, forwards=40),
        Ticked(queued_facts=4),
    )
    assert found.values("requests") == {("admitted",): 2, ("finished",): 1, ("preempted",): 0, ("rewound",): 0}
    assert found.values("facts.lost") == {(): 3}
    assert found.values("events.dropped") == {("archive",): 5}
    assert found.values("observer.failures") == {("archive", "continued"): 1}
    assert found.values("kernel.stalls") == {(role.name.lower(),): int(role is Role.CHECK) for role in Role}
    assert found.values("hazards") == {("freed_while_shared",): 5}
    assert found.values("quarantines.requested") == {(): 2}
    assert found.values("quarantines") == {("healed",): 1, ("aborted",): 0, ("failed",): 1}
    assert found.values("quarantined_tokens.leaked") == {(): 7}
    assert (found.values("window.samples"), found.values("window.diverging")) == ({(): 1}, {(): 3})
    assert found.values("scrub.pass.forwards") == {("full",): 40}
    assert found.values("facts.queued") == {(): 4}


def test_what_is_watched_is_told_while_it_is_watched() -> None:
    found = tally(STARTED, HealthChecked(healthy=False))
    assert found.values("info") == {("transformers", "5.24.0", "cpu", "reference", "log", "0.1.0"): 1}
    assert found.values("healthy") == {(): 0}
    assert found.values("check.unarmed") == {("WRITE_MISSING",): 1}
    assert found.values("run_start.timestamp") == {(): 1_700_000_000.5}
    found.handle_batch([RunStopped(clean=False)])
    assert found.values("info") == found.values("healthy") == {}
    assert found.values("runs.failed") == {(): 1}


def test_costs_are_observed_in_seconds() -> None:
    found = tally(STARTED, *(snapshot(n, host_us=us, lag_us=900.0) for n, us in enumerate((15.0, 18.0, 60_000.0), 1)))
    cost = found.histogram("step.host_time")
    assert cost.total == pytest.approx(0.060033)
    by_bound = dict(zip((*METRICS["step.host_time"].buckets, float("inf")), cost.counts, strict=True))
    assert (by_bound[1e-5], by_bound[2e-5], by_bound[1e-2], by_bound[float("inf")]) == (0, 2, 2, 3)


def test_every_kind_of_violation_is_there_from_the_start() -> None:
    kinds = {kind for (kind,) in Tally().values("incidents")}
    assert kinds >= {kind.name for kind in Kind} | {"EARLY_REUSE", "DOUBLE_FREE", "FAILED_LOAD_USED"}
    assert {kind for kind, _ in Tally().values("violations")} == kinds


def test_every_metric_of_the_list_can_get_a_value() -> None:
    found = tally(*(make_event(kind, lambda _: 3, lambda _: "x") for kind in built_in_types()))
    found.handle_batch(
        [STARTED, HealthChecked(healthy=True), Ticked(), ScrubCompleted(group="g", passes=1, forwards=1)]
    )
    found.handle_batch([snapshot(1)])
    for metric in METRICS.values():
        value = found.histogram(metric.name) if metric.kind == "histogram" else found.values(metric.name)
        assert value, metric.name


# --- how Prometheus sees it ---------------------------------------------------------------------------------


def series(registry: CollectorRegistry) -> dict[str, Any]:
    return {family.name: family for family in text_string_to_metric_families(generate_latest(registry).decode())}


def test_names_have_units_and_counters_end_in_total(sink: PrometheusSink, registry: CollectorRegistry) -> None:
    sink.handle_batch([STARTED, snapshot(8, host_us=18.0)])
    text = generate_latest(registry).decode()
    assert "kvcanary_forwards_total 8.0" in text
    assert 'kvcanary_verified_total{check="links",group="full"} 80.0' in text
    assert 'kvcanary_step_host_time_seconds_bucket{le="2e-05"} 1.0' in text
    assert "kvcanary_last_snapshot_timestamp_seconds 1.700000001e+09" in text


def test_every_metric_is_exposed_with_its_type_and_help(sink: PrometheusSink, registry: CollectorRegistry) -> None:
    found = series(registry)
    assert {name: found[name].type for name in found} == {
        prometheus_name(metric): metric.kind for metric in METRICS.values()
    }
    assert all(family.documentation for family in found.values())


def test_no_label_grows_with_requests_slots_or_runs(sink: PrometheusSink, registry: CollectorRegistry) -> None:
    def events(n: int) -> list[Event]:
        name = f"request-{n}"
        return [
            RunStarted(run=f"run-{n}", origin=Origin()),
            RequestsAdmitted(requests=(name,), rows=(n,), tags=(n,), starts=(0,)),
            PagesAllocated(group="full", requests=(name,), runs=(PageRun(0, n, 1),)),
            ViolationDetected(kind="FINAL_DIGEST", role="facts", group="full", slot=n, request=name),
            IncidentOpened(incident=f"r#{n}", kind="CONTENT", headline=name, requests=(name,), slot=n),
            snapshot(1),
        ]

    sink.handle_batch(events(0))
    before = len(generate_latest(registry).splitlines())
    for n in range(1, 50):
        sink.handle_batch(events(n))
    text = generate_latest(registry).decode()
    assert len(text.splitlines()) == before
    assert "request-" not in text
    assert "run-" not in text


def test_a_registry_is_free_again_after_the_watch(registry: CollectorRegistry) -> None:
    for _ in range(2):
        sink = PrometheusSink(registry)
        sink.open()
        assert b"kvcanary_runs_total" in generate_latest(registry)
        sink.close()
        assert generate_latest(registry) == b""


def test_two_canaries_on_one_registry_are_refused(sink: PrometheusSink, registry: CollectorRegistry) -> None:
    with pytest.raises(ConfigError, match="has kvcanary's metrics already; give each canary"):
        PrometheusSink(registry).open()


def test_it_serves_what_it_knows_when_asked_to(registry: CollectorRegistry) -> None:
    sink = PrometheusSink(registry, listen="127.0.0.1:0")
    assert sink.port == 0
    sink.open()
    try:
        sink.handle_batch([STARTED, snapshot(8)])
        with urllib.request.urlopen(f"http://127.0.0.1:{sink.port}/metrics", timeout=10) as answer:
            assert b"kvcanary_forwards_total 8.0" in answer.read()
        with pytest.raises(ConfigError, match=f"cannot be served on 127.0.0.1:{sink.port}: Address already in use"):
            PrometheusSink(CollectorRegistry(), listen=f"127.0.0.1:{sink.port}").open()
    finally:
        sink.close()
    assert sink.port == 0


@pytest.mark.parametrize("listen", ["", "http", "host:", "1:2:x", "70000", "-1", "127.0.0.1:-5"])
def test_what_is_no_address_is_refused(registry: CollectorRegistry, listen: str) -> None:
    with pytest.raises(ConfigError, match=r"expected a port, such as 9464, or address:port"):
        PrometheusSink(registry, listen=listen)


# --- by configuration ---------------------------------------------------------------------------------------


def test_the_environment_can_switch_metrics_on() -> None:
    config = CanaryConfig.from_env({"KVCANARY_MODE": "log", "KVCANARY_PROMETHEUS": "127.0.0.1:0"})
    (spec,) = default_sinks(config)
    assert (spec.name, spec.batch, spec.is_async) == ("prometheus", True, False)
    assert spec.open is not None
    assert spec.close is not None
    spec.open()
    spec.close()


@pytest.mark.parametrize(
    ("target", "name"),
    [
        ("kvcanary.observers.prometheus:DefaultRegistrySink", "prometheus"),
        ("kvcanary.observers.otel:OTelMetrics", "otel_metrics"),
        ("kvcanary.observers.otel:OTelLogs", "otel_logs"),
    ],
)
def test_exporters_can_be_named_in_the_configuration(target: str, name: str) -> None:
    assert load_observer(target).name == name


def test_the_default_registry_is_used_only_by_who_names_it() -> None:
    from prometheus_client import REGISTRY

    spec = as_observer(DefaultRegistrySink)
    assert b"kvcanary_" not in generate_latest(REGISTRY)
    assert spec.open is not None
    assert spec.close is not None
    spec.open()
    try:
        assert b"kvcanary_runs_total" in generate_latest(REGISTRY)
    finally:
        spec.close()
    assert b"kvcanary_" not in generate_latest(REGISTRY)


WITHOUT = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Absent())
from kvcanary.config import CanaryConfig
from kvcanary.errors import ConfigError
from kvcanary.observers import default_sinks
try:
    default_sinks(CanaryConfig(mode="log", {setting}))
except ConfigError as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("module", "setting", "says"),
    [
        ("prometheus_client", "prometheus='0'", "needs prometheus_client.*pip install 'kvcanary.prometheus.'"),
        (
            "opentelemetry",
            "observers=('kvcanary.observers.otel:OTelMetrics',)",
            r"needs opentelemetry.metrics.*pip install 'kvcanary.otel.'",
        ),
        (
            "opentelemetry",
            "observers=('kvcanary.observers.otel:OTelLogs',)",
            r"needs opentelemetry._logs.*pip install 'kvcanary.otel.'",
        ),
    ],
)
def test_without_the_extra_it_is_named(module: str, setting: str, says: str) -> None:
    program = WITHOUT.format(blocked={module}, setting=setting)
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program], check=True, capture_output=True, text=True, timeout=60
    )
    assert re.search(says, done.stdout), done.stdout


def test_without_the_extras_the_log_works_as_it_did(tmp_path: Any) -> None:
    program = WITHOUT.format(blocked={"prometheus_client", "opentelemetry"}, setting="log='stdout'") + (
        "\nfrom kvcanary.events import CanaryArmed"
        "\ndefault_sinks(CanaryConfig(mode='log', log='stdout'))[0].call([CanaryArmed()])"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program], check=True, capture_output=True, text=True, timeout=60
    )
    assert '"event":"canary.armed"' in done.stdout
