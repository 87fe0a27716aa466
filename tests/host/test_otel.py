"""Metrics, log records and traces through the API of OpenTelemetry, with a real SDK behind it."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from typing import Any

import pytest
from opentelemetry.sdk._logs import LoggerProvider
from opentelemetry.sdk._logs.export import InMemoryLogRecordExporter, SimpleLogRecordProcessor
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.trace import SpanContext, TraceFlags, Tracer, use_span

from kvcanary.config import CanaryConfig
from kvcanary.events import (
    Event,
    HealthChecked,
    IncidentOpened,
    KernelStalled,
    Origin,
    RunStarted,
    SnapshotTaken,
    ViolationDetected,
)
from kvcanary.observers import default_sinks
from kvcanary.observers.log import LogSink
from kvcanary.observers.metrics import METRICS
from kvcanary.observers.otel import OTelLogs, OTelMetrics
from kvcanary.observers.trace_context import TraceContext
from tests.host.samples import TIME, incidents
from tests.host.test_metrics import STARTED, snapshot

SPAN = SpanContext(0x0AF7651916CD43DD8448EB211C80319C, 0xB7AD6B7169203331, is_remote=True, trace_flags=TraceFlags(1))
STALLED = KernelStalled(time_ns=TIME, forward=9, role="check", launches=3, expected=9, detail="check stands still")
OPENED = IncidentOpened(incident="r#1", kind="CONTENT", headline="CONTENT: request a", requests=("b", "a"))


class Metrics:
    """A meter provider whose metrics can be read."""

    def __init__(self) -> None:
        self.reader = InMemoryMetricReader()
        self.provider = MeterProvider([self.reader], shutdown_on_exit=False)

    def read(self) -> dict[str, Any]:
        data = self.reader.get_metrics_data()
        scopes = [scope for resource in data.resource_metrics for scope in resource.scope_metrics] if data else []
        return {metric.name: metric for scope in scopes for metric in scope.metrics}

    def values(self, name: str) -> dict[tuple[Any, ...], Any]:
        return {tuple(sorted(point.attributes.items())): point.value for point in self.read()[name].data.data_points}


@pytest.fixture
def metrics() -> Iterator[Metrics]:
    made = Metrics()
    yield made
    made.provider.shutdown()


@pytest.fixture
def tracer() -> Iterator[Tracer]:
    provider = TracerProvider(shutdown_on_exit=False)
    yield provider.get_tracer("server")
    provider.shutdown()


class Records:
    """A logger provider whose records can be read."""

    def __init__(self) -> None:
        self.exporter = InMemoryLogRecordExporter()  # type: ignore[no-untyped-call]
        self.provider = LoggerProvider(shutdown_on_exit=False)
        self.provider.add_log_record_processor(SimpleLogRecordProcessor(self.exporter))

    def read(self) -> list[Any]:
        return [found.log_record for found in self.exporter.get_finished_logs()]


@pytest.fixture
def records() -> Iterator[Records]:
    made = Records()
    yield made
    made.provider.shutdown()


# --- metrics ------------------------------------------------------------------------------------------------


def test_instruments_carry_names_units_and_attributes_in_the_namespace(metrics: Metrics) -> None:
    sink = OTelMetrics(metrics.provider)
    sink.open()
    sink.handle_batch([STARTED, snapshot(8, host_us=18.0)])
    found = metrics.read()
    assert found["kvcanary.forwards"].unit == "{forward}"
    assert found["kvcanary.forwards"].data.is_monotonic
    assert metrics.values("kvcanary.verified")[("kvcanary.check", "links"), ("kvcanary.group", "full")] == 80
    cost = found["kvcanary.step.host_time"]
    (point,) = cost.data.data_points
    assert (cost.unit, point.count, point.sum) == ("s", 1, pytest.approx(18e-6))
    assert tuple(point.explicit_bounds) == METRICS["step.host_time"].buckets


def test_every_metric_has_its_instrument(metrics: Metrics) -> None:
    sink = OTelMetrics(metrics.provider)
    sink.open()
    sink.handle_batch([STARTED, HealthChecked(healthy=True), snapshot(8)])
    sometimes = {"hazards", "events.dropped", "observer.failures", "facts.queued"}
    sometimes |= {"scrub.pass.forwards"}
    assert set(metrics.read()) == {f"kvcanary.{name}" for name in METRICS.keys() - sometimes}


def test_after_the_watch_nothing_is_reported_and_a_second_one_counts_on(metrics: Metrics) -> None:
    sink = OTelMetrics(metrics.provider)
    for expected in (8, 16):
        sink.open()
        sink.handle_batch([STARTED, snapshot(8)])
        assert metrics.values("kvcanary.forwards") == {(): expected}
        sink.close()
    assert "kvcanary.forwards" not in metrics.read()


def test_two_watches_with_sinks_of_their_own_do_not_add_up(metrics: Metrics) -> None:
    for _ in range(2):
        sink = OTelMetrics(metrics.provider)
        sink.open()
        sink.handle_batch([STARTED, snapshot(8)])
        assert metrics.values("kvcanary.forwards") == {(): 8}
        sink.close()


# --- log records --------------------------------------------------------------------------------------------


def test_a_record_has_a_name_a_severity_a_sentence_and_the_fields(records: Records) -> None:
    OTelLogs(records.provider).handle_batch([RunStarted(run="r7", origin=Origin()), STALLED])
    record = records.read()[1]
    assert record.event_name == "kvcanary.kernel.stalled"
    assert (record.severity_text, record.severity_number.value) == ("ERROR", 17)
    assert record.body == "kernel.stalled: check stands still"
    assert record.timestamp == TIME <= record.observed_timestamp
    assert (record.attributes["kvcanary.role"], record.attributes["kvcanary.run"]) == ("check", "r7")
    assert all(name.startswith("kvcanary.") for name in record.attributes)
    assert not record.trace_id


def test_healthy_checks_are_left_out(records: Records) -> None:
    OTelLogs(records.provider).handle_batch([HealthChecked(healthy=True), HealthChecked(healthy=False)])
    (record,) = records.read()
    assert (record.severity_text, record.severity_number.value) == ("WARNING", 13)


def test_records_hold_no_token_ids_and_no_digests(records: Records) -> None:
    secrets: dict[str, Any] = {"token_expected": 31337, "token_found": 4711, "digest_found": "feedfacefeedface"}
    found = [*incidents(**secrets), ViolationDetected(kind="DIGEST", role="check", group="full", **secrets)]
    OTelLogs(records.provider, interests=(Event,)).handle_batch(found)
    text = "".join(f"{record.body} {record.attributes}" for record in records.read())
    assert "DIGEST" in text
    for secret in ("31337", "4711", "feedface"):
        assert secret not in text


def test_a_record_belongs_to_the_trace_of_the_request_that_it_names(records: Records) -> None:
    sink = OTelLogs(records.provider, span_of={"a": SPAN}.get)
    sink.handle_batch([OPENED, STALLED])
    first, second = records.read()
    assert (first.trace_id, first.span_id, first.trace_flags) == (SPAN.trace_id, SPAN.span_id, 1)
    assert not second.trace_id
    assert "kvcanary.trace_id" not in first.attributes


# --- traces in log lines ------------------------------------------------------------------------------------


def lines(*events: Event, **options: Any) -> list[dict[str, Any]]:
    stream = io.BytesIO()
    LogSink(stream, **options).handle_batch(events)
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_a_line_belongs_to_the_trace_of_the_request_that_it_names() -> None:
    first, second = lines(OPENED, STALLED, profile="otel", processors=[TraceContext({"a": SPAN}.get)])
    assert (first["trace_id"], first["span_id"]) == ("0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331")
    assert first["trace_flags"] == "01"
    assert "trace_id" not in second


def test_other_lines_belong_to_the_span_in_which_the_watch_began(tracer: Tracer) -> None:
    span = tracer.start_span("evaluation")
    with use_span(span):
        trace = TraceContext({"a": SPAN}.get)
    first, second = lines(OPENED, STALLED, processors=[trace])
    assert first["span_id"] == f"{SPAN.span_id:016x}"
    assert second["span_id"] == f"{span.get_span_context().span_id:016x}"


def test_a_look_up_that_raises_costs_no_line() -> None:
    def broken(request: str) -> SpanContext | None:
        raise LookupError(request)

    (line,) = lines(OPENED, processors=[TraceContext(broken)])
    assert line["event"] == "incident.opened"
    assert line["trace_error"] == "LookupError: b"


def test_the_configured_log_takes_the_span_that_is_active_when_the_watch_begins(tracer: Tracer, tmp_path: Any) -> None:
    def logged(name: str) -> dict[str, Any]:
        path = tmp_path / name
        (spec,) = default_sinks(CanaryConfig(mode="log", log=str(path)))
        spec.call([STALLED])
        assert spec.close is not None
        spec.close()
        found: dict[str, Any] = json.loads(path.read_text())
        return found

    span = tracer.start_span("evaluation")
    with use_span(span):
        within = logged("within")
    assert within["trace_id"] == f"{span.get_span_context().trace_id:032x}"
    assert "trace_id" not in logged("outside")


def test_snapshots_may_come_while_metrics_are_read(metrics: Metrics) -> None:
    sink = OTelMetrics(metrics.provider)
    sink.open()
    for forward in range(1, 200):
        sink.handle_batch([SnapshotTaken(forward=forward)] if forward > 1 else [STARTED, snapshot(1)])
        assert metrics.values("kvcanary.forwards") == {(): forward}
