"""Events as flat JSON objects: levels, field names and number formats that log aggregators take as they are."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, MutableMapping
from datetime import UTC, datetime
from typing import Any, NamedTuple, cast

import msgspec

from kvcanary.errors import ConfigError
from kvcanary.events import (
    Event,
    EventsDropped,
    FactsLost,
    HealthChecked,
    IncidentOpened,
    IncidentUpdated,
    KernelStalled,
    ObserverFailed,
    OwnershipViolated,
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
    FactsLost: "warning",
    EventsDropped: "warning",
    SnapshotsSkipped: "warning",
    QuarantineRequested: "warning",
    RequestQuarantined: "warning",
}


class Profile(NamedTuple):
    """How one aggregator names the fields that all lines share; its own fields get ``prefix``."""

    time: str = "timestamp"
    level: str = "level"
    event: str = "event"
    logger: str = "logger"
    prefix: str = ""
    constants: Mapping[str, Any] = {}
    upper_level: bool = False


PROFILES: dict[str, Profile] = {
    "default": Profile(),
    # Own fields in a namespace: `group`, `error` and `observer` are objects in ECS, and a string there is refused.
    "ecs": Profile("@timestamp", "log.level", "message", "log.logger", "kvcanary.", {"ecs.version": "8.11.0"}),
    "datadog": Profile("timestamp", "status", "message", "logger.name", "", {"service": "kvcanary"}),
    "otel": Profile("timestamp", "severity_text", "body", "scope.name", "kvcanary.", upper_level=True),
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

    Nested ones get dotted names, large integers become strings.
    """
    fields = msgspec.structs.asdict(event)
    del fields["time_ns"]
    for name, value in fields.items():
        if type(value) in _SCALARS:
            flat[name] = value if type(value) is not int or -SAFE_INTEGER <= value <= SAFE_INTEGER else str(value)
        else:
            _flatten(flat, name, msgspec.to_builtins(value))
    return flat


def rename(shape: Profile) -> Processor:
    """A structlog processor that gives a line the names of ``shape``."""
    shared = {"timestamp": shape.time, "level": shape.level, "event": shape.event, "logger": shape.logger}
    prefix, constants, upper = shape.prefix, shape.constants, shape.upper_level
    plain = shape == Profile()

    def process(_logger: Any, _method: str, fields: Fields) -> Fields:
        if plain:
            return fields
        line: dict[str, Any] = {new: fields.pop(old) for old, new in shared.items() if old in fields}
        line.update(constants)
        if upper:
            line[shape.level] = str(line[shape.level]).upper()
        line.update({prefix + name: value for name, value in fields.items()} if prefix else fields)
        return line

    return process


def describe(event: Event) -> str:
    """One line for people: the headline where there is one."""
    headline = getattr(event, "headline", "") or getattr(event, "detail", "")
    return f"{event_name(event)}: {headline}" if headline else event_name(event)


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
