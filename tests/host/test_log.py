"""JSON lines that aggregators take as they are."""

from __future__ import annotations

import io
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import structlog

from kvcanary.errors import ConfigError
from kvcanary.events import (
    CanaryArmed,
    Event,
    GroupInfo,
    HealthChecked,
    IncidentOpened,
    KernelStalled,
    Origin,
    RequestsFinished,
    RunStarted,
    RunStopped,
    SnapshotTaken,
    StatsReported,
    SwaDivergenceObserved,
    ViolationDetected,
)
from kvcanary.mailbox import Mailbox
from kvcanary.observers.base import as_observer
from kvcanary.observers.log import LogSink
from kvcanary.observers.redact import redact
from kvcanary.observers.swa_divergence import parse
from kvcanary.observers.violations import ViolationsFold

TIME = 1_700_000_000_123_456_789
VIOLATION = ViolationDetected(
    seq=3,
    time_ns=TIME,
    forward=40,
    kind="INPUT_TOKEN",
    role="mark",
    group="full",
    request="a",
    tag=1,
    token_expected=31337,
    token_found=4711,
    digest_expected="feedfacefeedface",
    digest_found="cafebabecafebabe",
)
OBSERVED = SwaDivergenceObserved(
    seq=2**60,
    time_ns=TIME,
    monotonic_ns=2**54,
    forward=8,
    cause=5,
    by="swa_divergence",
    forward_ct=8,
    verify_full=2**55 + 1,
    verify_swa=5,
    swa_full_idx_divergence=1,
    swa_out_of_window_tokens=2,
)


def lines(*events: Event, **options: Any) -> list[dict[str, Any]]:
    stream = io.BytesIO()
    sink = LogSink(stream, **options)
    sink.open()
    sink.handle_batch(events)
    sink.close()
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def incident(violation: ViolationDetected = VIOLATION) -> IncidentOpened:
    (opened,) = ViolationsFold("log", Mailbox()).handle(violation)
    assert isinstance(opened, IncidentOpened)
    return opened


def test_a_line_is_one_flat_object_with_a_dotted_name_a_level_and_a_time() -> None:
    (line,) = lines(KernelStalled(time_ns=TIME, seq=4, forward=40, role="check", launches=3, expected=9))
    assert line == {
        "timestamp": "2023-11-14T22:13:20.123456789Z",
        "level": "error",
        "event": "kernel.stalled",
        "logger": "kvcanary",
        "run": "",
        "seq": 4,
        "monotonic_ns": 0,
        "forward": 40,
        "cause": 0,
        "by": "",
        "role": "check",
        "launches": 3,
        "expected": 9,
        "since_forward": 0,
        "detail": "",
    }


def test_nested_fields_become_dotted_names() -> None:
    started = RunStarted(
        run="r7",
        origin=Origin(host="node", pid=12),
        groups=(GroupInfo(name="full", kind="full", num_slots=64, page_size=16, token_bytes=256, sources=4),),
    )
    stats = StatsReported(protected_tokens=5, verified={"links": 3})
    first, second = lines(started, stats)
    assert (first["origin.host"], first["groups.full.num_slots"], first["groups.full.parts"]) == ("node", 64, [])
    assert second["verified.links"] == 3
    assert not [value for line in (first, second) for value in line.values() if isinstance(value, dict)]


def test_every_line_carries_its_run() -> None:
    found = lines(RunStarted(run="r7", origin=Origin()), CanaryArmed(), RunStopped())
    assert [line["run"] for line in found] == ["r7", "r7", "r7"]


def test_integers_that_doubles_cannot_hold_are_strings() -> None:
    (line,) = lines(OBSERVED)
    assert (line["verify_full"], line["verify_swa"]) == (str(2**55 + 1), 5)


@pytest.mark.parametrize("profile", ["default", "ecs", "datadog", "otel"])
def test_a_logged_observation_parses_back_to_the_same_object(profile: str) -> None:
    stream = io.BytesIO()
    LogSink(stream, profile=profile).handle_batch([OBSERVED])
    assert parse(stream.getvalue()) == OBSERVED


@pytest.mark.parametrize(
    ("profile", "names"),
    [
        ("ecs", {"@timestamp", "log.level", "message", "log.logger", "ecs.version", "kvcanary.role"}),
        ("datadog", {"timestamp", "status", "message", "logger.name", "service", "kvcanary.role"}),
        ("otel", {"timestamp", "severity_text", "body", "scope.name", "kvcanary.role"}),
    ],
)
def test_a_profile_renames_what_its_aggregator_knows(profile: str, names: set[str]) -> None:
    (line,) = lines(KernelStalled(role="check", launches=3, expected=9), profile=profile)
    assert names <= set(line)
    assert not {"level", "event", "logger"} & set(line)


def test_the_otel_level_is_in_capitals() -> None:
    (line,) = lines(KernelStalled(role="check", launches=3, expected=9), profile="otel")
    assert line["severity_text"] == "ERROR"


def test_healthy_checks_are_left_out_and_unhealthy_ones_warn() -> None:
    (line,) = lines(HealthChecked(healthy=True), HealthChecked(healthy=False, problems=("lag",)))
    assert (line["level"], line["problems"]) == ("warning", ["lag"])
    assert len(lines(HealthChecked(healthy=True), level="debug")) == 1


def test_an_unclean_end_is_an_error() -> None:
    assert [line["level"] for line in lines(RunStopped(), RunStopped(clean=False))] == ["info", "error"]


def test_facts_and_snapshots_are_not_logged_unless_asked_for() -> None:
    spec = as_observer(LogSink(io.BytesIO()))
    assert spec.wants(IncidentOpened)
    assert not spec.wants(SnapshotTaken)
    assert not spec.wants(ViolationDetected)
    assert as_observer(LogSink(io.BytesIO(), interests=(Event,))).wants(SnapshotTaken)


def test_token_ids_and_digests_leave_the_process_nowhere() -> None:
    digest = VIOLATION.__class__(
        **{name: getattr(VIOLATION, name) for name in VIOLATION.__struct_fields__} | {"kind": "REQUEST_DIGEST"}
    )
    finished = RequestsFinished(requests=("a",), tags=(1,), lengths=(9,), digests=("deadbeefdeadbeef",))
    events = [incident(), incident(digest), VIOLATION, finished]
    text = json.dumps(lines(*events, interests=(Event,)))
    for secret in ("31337", "4711", "feedface", "cafebabe", "deadbeef"):
        assert secret not in text
    assert "found another token, expected the token that the scheduler recorded" in text


def test_without_redaction_all_is_shown() -> None:
    (line,) = lines(incident(), redact=False)
    assert "found token 4711, expected token 31337" in line["headline"]
    assert line["first.digest_found"] == "cafebabecafebabe"


def test_redaction_keeps_all_that_is_no_secret() -> None:
    opened = incident()
    redacted = redact(opened)
    assert isinstance(redacted, IncidentOpened)
    assert (redacted.kind, redacted.requests, redacted.likely_cause) == (
        opened.kind,
        opened.requests,
        opened.likely_cause,
    )
    assert redact(OBSERVED) is OBSERVED


def test_a_file_is_appended_to(tmp_path: Path) -> None:
    path = tmp_path / "kv.jsonl"
    path.write_text('{"event": "before"}\n')
    sink = LogSink(path)
    sink.open()
    sink.handle_batch([CanaryArmed()])
    assert [json.loads(line)["event"] for line in path.read_text().splitlines()] == ["before", "canary.armed"]
    sink.close()
    sink.open()
    sink.handle_batch([CanaryArmed()])
    sink.close()
    assert len(path.read_text().splitlines()) == 3


def test_a_batch_is_written_and_flushed_once() -> None:
    class Counting(io.BytesIO):
        writes = flushes = 0

        def write(self, data: Any, /) -> int:
            self.writes += 1
            return super().write(data)

        def flush(self) -> None:
            self.flushes += 1

    stream = Counting()
    LogSink(stream).handle_batch([CanaryArmed()] * 50)
    assert (stream.writes, stream.flushes, stream.getvalue().count(b"\n")) == (1, 1, 50)


@pytest.mark.parametrize(("target", "name"), [("-", "err"), ("stderr", "err"), ("stdout", "out")])
def test_the_standard_streams_have_names(target: str, name: str, capfdbinary: Any) -> None:
    LogSink(target).handle_batch([CanaryArmed()])
    assert b"canary.armed" in getattr(capfdbinary.readouterr(), name)


def test_a_stream_of_the_user_stays_open() -> None:
    stream = io.BytesIO()
    sink = LogSink(stream)
    sink.open()
    sink.close()
    assert not stream.closed


def test_a_structlog_logger_of_the_host_gets_the_name_and_the_fields() -> None:
    with structlog.testing.capture_logs() as captured:
        LogSink(structlog.get_logger()).handle_batch(
            [KernelStalled(time_ns=TIME, role="check", launches=3, expected=9)]
        )
    (entry,) = captured
    assert (entry["event"], entry["log_level"], entry["role"]) == ("kernel.stalled", "error", "check")
    assert entry["event_time"] == "2023-11-14T22:13:20.123456789Z"


def test_a_standard_logger_of_the_host_gets_the_headline_and_the_fields(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="server"):
        LogSink(logging.getLogger("server")).handle_batch([incident(), CanaryArmed()])
    first, second = caplog.records
    assert first.getMessage().startswith("incident.opened: INPUT_TOKEN: request a")
    assert first.levelno == logging.ERROR
    assert first.kvcanary["kind"] == "INPUT_TOKEN"  # type: ignore[attr-defined]
    assert second.getMessage() == "canary.armed"


def test_the_host_may_add_processors() -> None:
    def add_node(_logger: Any, _method: str, fields: Any) -> Any:
        return {**fields, "node": "n1"}

    (line,) = lines(CanaryArmed(), processors=(add_node,))
    assert line["node"] == "n1"


def test_a_processor_may_drop_a_line() -> None:
    def drop_armed(_logger: Any, _method: str, fields: Any) -> Any:
        if fields["event"] == "canary.armed":
            raise structlog.DropEvent
        return fields

    (line,) = lines(CanaryArmed(), RunStopped(), processors=(drop_armed,))
    assert line["event"] == "run.stopped"


def test_structlog_as_the_host_configured_it_changes_nothing() -> None:
    structlog.configure(processors=[lambda *_: "taken over"])
    try:
        (line,) = lines(CanaryArmed())
    finally:
        structlog.reset_defaults()
    assert line["event"] == "canary.armed"


def test_the_sink_configures_nothing() -> None:
    lines(CanaryArmed())
    assert not structlog.is_configured()


@pytest.mark.parametrize(
    ("target", "options", "message"),
    [
        ("/no/such/directory/kv.jsonl", {}, "there is no directory '/no/such/directory'"),
        (io.StringIO(), {}, "expected a file path"),
        (None, {}, "expected a file path"),
        ("-", {"profile": "splunk"}, "log_profile is 'splunk'; expected one of default, ecs, datadog, otel"),
        ("-", {"level": "loud"}, "log level is 'loud'; expected one of debug"),
    ],
)
def test_a_wrong_target_profile_or_level_is_refused(target: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LogSink(target, **options)
