"""Events as flat JSON objects: levels, field names and number formats that log aggregators take as they are."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, MutableMapping
from datetime import UTC, datetime
from typing import Any, NamedTuple, cast

import msgspec

from kvcanary.errors import ConfigError
from kvcanary.events import (
    CanaryDisarmed,
    Event,
    EventsDropped,
    FactsLost,
    HealthChecked,
    IncidentOpened,
    IncidentUpdated,
    KernelStalled,
    ObserverFailed,
    OwnershipViolated,
    PagesQuarantined,
    QuarantineFailed,
    QuarantineRequested,
    RequestQuarantined,
    RunStopped,
    SnapshotsSkipped,
    ViolationDetected,
    event_name,
)

_SCALARS = frozenset({int, str, float, bool, type(None)})
SAFE_INTEGER = 1 << 53
"""Readers that keep numbers as doubles lose digits above this."""

Fields = MutableMapping[str, Any]
Processor = Callable[[Any, str, Fields], Fields]

_LEVELS: dict[type[Event], str] = {
    IncidentOpened: "error",
    IncidentUpdated: "error",
    ViolationDetected: "error",
    OwnershipViolated: "error",
    KernelStalled: "error",
    ObserverFailed: "error",
    QuarantineFailed: "error",
    CanaryDisarmed: "warning",
    FactsLost: "warning",
    EventsDropped: "warning",
    SnapshotsSkipped: "warning",
    QuarantineRequested: "warning",
    RequestQuarantined: "warning",
    PagesQuarantined: "warning",
}


class Profile(NamedTuple):
    """How one aggregator names the fields that all lines share. Empty: it has no such field.

    Attributes:
        text: a sentence for people; without it the event's name is all there is.
        prefix: of the event's own fields, so that none of them takes the place of one that the aggregator knows.
        levels: its words for levels, where they differ; ``severity``: its numbers for them.
    """

    time: str = "timestamp"
    level: str = "level"
    text: str = ""
    event: str = "event"
    logger: str = "logger"
    service: str = ""
    trace_id: str = "trace_id"
    span_id: str = "span_id"
    trace_flags: str = "trace_flags"
    prefix: str = ""
    event_prefix: str = ""
    levels: Mapping[str, str] = {}
    severity: str = ""
    constants: Mapping[str, Any] = {}


PREFIX = "kvcanary."
_SHARED = frozenset({"timestamp", "level", "event", "logger"})
_TRACE = ("trace_id", "span_id", "trace_flags")
_TAKEN = _SHARED.union(_TRACE)
_SEVERITY = {"debug": 5, "info": 9, "warning": 13, "error": 17, "critical": 21}

PROFILES: dict[str, Profile] = {
    "default": Profile(),
    # Time, level, message and ecs.version come first, in this order. There are no trace flags in ECS.
    "ecs": Profile(
        time="@timestamp",
        level="log.level",
        text="message",
        event="event.action",
        logger="log.logger",
        service="service.name",
        trace_id="trace.id",
        span_id="span.id",
        trace_flags="",
        prefix=PREFIX,
        constants={"ecs.version": "8.11.0", "event.dataset": "kvcanary"},
    ),
    "datadog": Profile(
        level="status",
        text="message",
        event="evt.name",
        logger="logger.name",
        service="service",
        prefix=PREFIX,
        constants={"ddsource": "kvcanary"},
    ),
    "otel": Profile(
        level="severity_text",
        text="body",
        event="event_name",
        logger="scope.name",
        service="service.name",
        prefix=PREFIX,
        event_prefix=PREFIX,
        levels={"debug": "DEBUG", "info": "INFO", "warning": "WARN", "error": "ERROR", "critical": "FATAL"},
        severity="severity_number",
    ),
}


def profile(name: str) -> Profile:
    """The profile called ``name``.

    Raises:
        ConfigError: there is none.
    """
    if name not in PROFILES:
        raise ConfigError(f"log_profile is {name!r}; expected one of {', '.join(PROFILES)}")
    return PROFILES[name]


def level_of(event: Event) -> str:
    """``debug`` to ``error``: of an event's type, and of what it says."""
    level = _LEVELS.get(type(event))
    if level is not None:
        return level
    if isinstance(event, HealthChecked):
        return "debug" if event.healthy else "warning"
    return "error" if isinstance(event, RunStopped) and not event.clean else "info"


def iso_time(time_ns: int) -> str:
    """ISO 8601 in UTC with nanoseconds."""
    seconds, nanoseconds = divmod(time_ns, 1_000_000_000)
    return f"{_iso_second(seconds)}.{nanoseconds:09d}Z"


@functools.lru_cache(maxsize=16)
def _iso_second(seconds: int) -> str:
    return f"{datetime.fromtimestamp(seconds, tz=UTC):%Y-%m-%dT%H:%M:%S}"


def flat_fields(event: Event, flat: dict[str, Any]) -> dict[str, Any]:
    """Add the event's own fields to ``flat``, without its type and time.

    Nested ones get dotted names, large integers become strings. A field of a user's event that has the name of one that
    all lines share becomes ``field.`` and its name.
    """
    fields = msgspec.structs.asdict(event)
    del fields["time_ns"]
    if not fields.keys().isdisjoint(_TAKEN):
        fields = {name if name not in _TAKEN else f"field.{name}": value for name, value in fields.items()}
    if _is_flat(fields.values()):
        flat.update(fields)
        return flat
    for name, value in fields.items():
        _flatten(flat, name, value if type(value) in _SCALARS else msgspec.to_builtins(value))
    return flat


def _is_flat(values: Collection[Any]) -> bool:
    """Whether all can be written as they are: most events, and those that come in floods."""
    for value in values:
        kind = type(value)  # pyright: ignore[reportUnknownVariableType] - of whatever an event holds
        if kind is str or value is None:
            continue
        if kind is int:
            if value > SAFE_INTEGER or value < -SAFE_INTEGER:
                return False
        elif kind not in _SCALARS:
            return False
    return True


def rename(shape: Profile, service: str = "") -> tuple[Processor, ...]:
    """The structlog processor that gives a line the names of ``shape``, if it is not named so already.

    ``service``: for aggregators that know such.
    """
    if shape == Profile():
        return ()
    constants = dict(shape.constants) | ({shape.service: service} if shape.service else {})
    trace = {name: getattr(shape, name) for name in _TRACE}

    def process(_logger: Any, _method: str, fields: Fields) -> Fields:
        level, event = fields.pop("level"), fields.pop("event")
        line: dict[str, Any] = {
            shape.time: fields.pop("timestamp"),
            shape.level: shape.levels.get(level, level),
        }
        if shape.severity:
            line[shape.severity] = severity_number(level)
        if shape.text:
            line[shape.text] = sentence(event, fields.get("headline") or fields.get("detail"))
        line.update(constants)
        line[shape.event] = shape.event_prefix + event
        line[shape.logger] = fields.pop("logger")
        for name, known_as in trace.items():
            value = fields.pop(name, None)
            if value is not None and known_as:
                line[known_as] = value
        line.update({shape.prefix + name: value for name, value in fields.items()} if shape.prefix else fields)
        return line

    return (process,)


def severity_number(level: str) -> int:
    """The number that OpenTelemetry gives a level."""
    return _SEVERITY[level]


def describe(event: Event) -> str:
    """One line for people: the headline where there is one."""
    return sentence(event_name(event), getattr(event, "headline", "") or getattr(event, "detail", ""))


def sentence(name: str, headline: object) -> str:
    """An event's name, and its headline where there is one."""
    return f"{name}: {headline}" if headline else name


def _flatten(flat: dict[str, Any], name: str, value: Any) -> None:
    if name.endswith(".time_ns"):
        flat[f"{name.removesuffix('time_ns')}timestamp"] = iso_time(value)
    elif isinstance(value, dict):
        for key, item in cast("Mapping[str, Any]", value).items():
            _flatten(flat, f"{name}.{key}", item)
    elif isinstance(value, (list, tuple)):
        items = cast("list[Any]", value)
        if all(type(item) in _SCALARS for item in items):
            flat[name] = [_number(item) for item in items]
        elif all(isinstance(item, (list, tuple)) for item in items):
            # Under one name, empty or not: an aggregator takes a name for a value or for an object, not for both.
            flat[name] = [":".join(str(number) for number in cast("list[Any]", item)) for item in items]
        else:
            for index, item in enumerate(items):
                _flatten(flat, f"{name}.{_label(item, index)}", item)
    else:
        flat[name] = _number(value)


def _label(item: Any, index: int) -> object:
    """What an item of a list goes by: its name, if it has one."""
    return cast("dict[str, Any]", item).get("name", index) if isinstance(item, dict) else index


def _number(value: Any) -> Any:
    return str(value) if isinstance(value, int) and abs(value) > SAFE_INTEGER else value
