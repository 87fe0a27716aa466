"""Log lines as aggregators read them: golden lines, published field rules, numbers, and what must not be in them."""

from __future__ import annotations

import base64
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvcanary.events import (
    Event,
    PagesQuarantined,
    QuarantineFailed,
    QuarantineRequested,
    RequestQuarantined,
    SnapshotsSkipped,
    register_event,
)
from kvcanary.observers.log import DEFAULT_INTERESTS
from kvcanary.observers.log_format import PROFILES, SAFE_INTEGER
from kvcanary.testing import DeterministicClock
from tests.host.samples import built_in_types, golden_path, incidents, make_event, story, written

LARGEST, SMALLEST = 2**63 - 1, -(2**63)
SECRET = re.compile(r"token_(expected|found|ids)|digest|^raw$")
SEVERITY_NUMBERS = {"DEBUG": 5, "INFO": 9, "WARN": 13, "ERROR": 17, "FATAL": 21}

# What ECS defines of what is used here, https://www.elastic.co/docs/reference/ecs; all else needs a namespace.
ECS_FIELDS = {
    "@timestamp", "log.level", "message", "ecs.version", "log.logger", "service.name", "event.action", "event.dataset",
    "trace.id", "span.id",
}  # fmt: skip
# Reserved and standard attributes of Datadog logs, https://docs.datadoghq.com/standard-attributes.
DATADOG_FIELDS = {
    "timestamp", "status", "message", "service", "ddsource", "evt.name", "logger.name", "trace_id", "span_id",
    "trace_flags",
}  # fmt: skip
# Names of the log data model in snake case, and of trace context in logs that are no OTLP.
OTEL_FIELDS = {
    "timestamp", "severity_text", "severity_number", "body", "event_name", "scope.name", "service.name", "trace_id",
    "span_id", "trace_flags",
}  # fmt: skip


def parsed(text: bytes) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def every_event(integer: int = 7, text: str = "x") -> list[Event]:
    return [make_event(kind, lambda _: integer, lambda _: text) for kind in built_in_types()]


def with_trace(_logger: Any, _method: str, fields: Any) -> Any:
    return fields | {"trace_id": "0af7651916cd43dd8448eb211c80319c", "span_id": "b7ad6b7169203331", "trace_flags": "01"}


@pytest.mark.parametrize("profile", PROFILES)
def test_the_lines_of_a_run_are_the_golden_ones(profile: str) -> None:
    golden = golden_path(profile).read_bytes()
    assert parsed(written(story(), profile=profile, service="chat")) == parsed(golden)
    assert written(story(), profile=profile, service="chat") == golden


def test_the_golden_story_has_what_is_logged_by_default() -> None:
    elsewhere = {
        QuarantineRequested, RequestQuarantined, PagesQuarantined, QuarantineFailed, SnapshotsSkipped
    }  # fmt: skip
    assert {type(event) for event in story()} | elsewhere == {*DEFAULT_INTERESTS}


# --- field rules --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("profile", "known"), [("ecs", ECS_FIELDS), ("datadog", DATADOG_FIELDS), ("otel", OTEL_FIELDS)]
)
def test_every_field_is_a_known_one_or_in_the_namespace(profile: str, known: set[str]) -> None:
    lines = parsed(written(every_event() + story(), profile=profile, processors=[with_trace]))
    names = {name for line in lines for name in line}
    assert {name for name in names if not name.startswith("kvcanary.")} <= known
    assert all(isinstance(value, (str, int)) for line in lines for name, value in line.items() if name in known)


def test_ecs_has_its_first_four_fields_in_order_in_every_line() -> None:
    for line in parsed(written(every_event(), profile="ecs")):
        assert list(line)[:4] == ["@timestamp", "log.level", "message", "ecs.version"]
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d+Z", line["@timestamp"])
        assert re.fullmatch(r"8\.\d+\.\d+", line["ecs.version"])


def test_datadog_has_its_reserved_attributes_in_every_line() -> None:
    for line in parsed(written(every_event(), profile="datadog", service="chat")):
        assert line["status"] in {"debug", "info", "warning", "error", "critical"}
        assert (line["service"], line["ddsource"]) == ("chat", "kvcanary")
        assert line["timestamp"]
        assert line["message"].startswith(line["evt.name"])


def test_opentelemetry_has_severity_as_text_and_number_and_a_name() -> None:
    for line in parsed(written(every_event(), profile="otel")):
        assert SEVERITY_NUMBERS[line["severity_text"]] == line["severity_number"]
        assert line["event_name"].startswith("kvcanary.")
        assert line["body"]


@pytest.mark.parametrize(
    ("profile", "names"),
    [
        ("default", ["trace_id", "span_id", "trace_flags"]),
        ("ecs", ["trace.id", "span.id"]),
        ("datadog", ["trace_id", "span_id", "trace_flags"]),
        ("otel", ["trace_id", "span_id", "trace_flags"]),
    ],
)
def test_a_trace_has_the_names_of_its_aggregator(profile: str, names: list[str]) -> None:
    (line,) = parsed(written(story()[:1], profile=profile, processors=[with_trace]))
    ids = ["0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331", "01"]
    assert [line[name] for name in names] == ids[: len(names)]
    assert [name for name in line if "trace" in name or "span" in name] == names


@pytest.mark.parametrize("profile", PROFILES)
def test_no_field_is_a_value_in_one_line_and_an_object_in_another(profile: str) -> None:
    events = [event for event in every_event() if isinstance(event, DEFAULT_INTERESTS)] + story()
    names = {name for line in parsed(written(events, profile=profile)) for name in line}
    parents = {name[:at] for name in names for at, letter in enumerate(name) if letter == "."}
    assert names & parents == set()


@pytest.mark.parametrize("profile", PROFILES)
def test_every_line_is_one_flat_object(profile: str) -> None:
    for line in parsed(written(every_event(), profile=profile)):
        for value in line.values():
            assert not isinstance(value, dict)
            assert not isinstance(value, list) or not any(isinstance(item, (dict, list)) for item in value)


@register_event
class Deployed(Event, frozen=True, kw_only=True, gc=False, tag="tests.deployed"):
    """A user's event whose fields have the names of those that all lines share."""

    event: str = "own event"
    level: str = "own level"
    text: str = "own text"
    status: str = "own status"
    message: str = "own message"


@pytest.mark.parametrize("profile", PROFILES)
def test_a_users_event_cannot_take_the_place_of_a_shared_field(profile: str) -> None:
    (line,) = parsed(written([Deployed()], profile=profile))
    assert sorted(value for value in line.values() if str(value).startswith("own")) == [
        "own event",
        "own level",
        "own message",
        "own status",
        "own text",
    ]
    shape = PROFILES[profile]
    assert (line[shape.event], line[shape.level].lower()) == (f"{shape.event_prefix}tests.deployed", "info")


# --- numbers ------------------------------------------------------------------------------------------------


def numbers(value: Any) -> Iterator[int]:
    for item in value if isinstance(value, list) else [value]:
        if isinstance(item, int):
            yield item


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("integer", [LARGEST, SMALLEST, SAFE_INTEGER + 1, -SAFE_INTEGER - 1])
def test_no_integer_is_emitted_that_a_double_rounds(profile: str, integer: int) -> None:
    lines = parsed(written(every_event(integer), profile=profile))
    assert not [n for line in lines for value in line.values() for n in numbers(value) if abs(n) > SAFE_INTEGER]
    assert sum(str(integer) in line.values() for line in lines) == len(built_in_types())


def test_a_reader_with_the_precision_of_javascript_reads_what_was_written(tmp_path: Path) -> None:
    node = shutil.which("node", path=os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"])))
    if node is None:
        pytest.skip("there is no Node.js: neither `node` nor the wheel that pyright[nodejs] brings")
    text = b"".join(
        written(every_event(integer), profile=profile)
        for integer, profile in itertools.product((LARGEST, SMALLEST, SAFE_INTEGER, 12345), PROFILES)
    )
    program = """
        const lines = require("fs").readFileSync(0, "utf8").trimEnd().split("\\n");
        process.stdout.write(lines.map(line => JSON.stringify(JSON.parse(line)) + "\\n").join(""));
    """
    done = subprocess.run([node, "-e", program], input=text, capture_output=True, check=True, timeout=60)
    assert len(parsed(text)) > 500
    assert parsed(done.stdout) == parsed(text)


# --- secrets ------------------------------------------------------------------------------------------------


class Marks:
    """Values that occur nowhere else, for fields that must not be seen."""

    def __init__(self) -> None:
        self.used: list[str] = []
        self.clock = DeterministicClock(start_ns=7_770_000_000, step_ns=13)

    def integer(self, name: str) -> int:
        return int(self._mark()) if SECRET.search(name) else 7

    def text(self, name: str) -> str:
        if name == "raw":  # bytes are written in base64: three of them are four letters
            self.used.append(base64.b64encode(b"5ec4e7").decode())
            return "5ec4e7"
        return f"5ec4e7{self._mark()}" if SECRET.search(name) else "x"

    def _mark(self) -> str:
        self.used.append(str(self.clock.time_ns()))
        return self.used[-1]


@pytest.mark.parametrize("profile", PROFILES)
def test_no_token_id_and_no_digest_is_in_any_line(profile: str) -> None:
    marks = Marks()
    events = [make_event(kind, marks.integer, marks.text) for kind in built_in_types()]
    events += incidents(
        **{
            name: mark(name)
            for mark, names in (
                (marks.integer, ("token_expected", "token_found")),
                (marks.text, ("digest_expected", "digest_found")),
            )
            for name in names
        }
    )
    shown, hidden = (written(events, profile=profile, redact=redact).decode() for redact in (False, True))
    assert len(marks.used) > 15
    assert [mark for mark in marks.used if mark not in shown] == [], "what is never shown proves nothing"
    assert [mark for mark in marks.used if mark in hidden] == []


# --- nothing is set up --------------------------------------------------------------------------------------

PROGRAM = """
import logging, sys
import opentelemetry.metrics, opentelemetry._logs, prometheus_client, structlog

def picture():
    root = logging.getLogger()
    return (
        list(root.handlers), root.level, root.filters, sorted(logging.Logger.manager.loggerDict),
        structlog.is_configured(), sorted(prometheus_client.REGISTRY._names_to_collectors),
        opentelemetry.metrics.get_meter_provider(), opentelemetry._logs.get_logger_provider(),
    )

before = picture()
import io
from kvcanary.events import CanaryArmed, Origin, RunStarted
from kvcanary.observers.log import LogSink
from kvcanary.observers.otel import OTelLogs, OTelMetrics
from kvcanary.observers.prometheus import PrometheusSink, served

for sink in (LogSink(io.BytesIO()), OTelLogs(), OTelMetrics(), served("0"),
             PrometheusSink(prometheus_client.CollectorRegistry())):
    getattr(sink, "open", int)()
    sink.handle_batch([RunStarted(run="r", origin=Origin()), CanaryArmed()])
    getattr(sink, "close", int)()
after = picture()
sys.exit(0 if before == after else f"{before}\\n{after}")
"""


def test_using_every_sink_configures_nothing_globally() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", PROGRAM], check=False, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
