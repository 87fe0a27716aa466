"""Events to log: one of every type with values of one's choice, and a short story for the golden files.

``python -m tests.host.samples`` writes the golden files anew.
"""

from __future__ import annotations

import io
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from msgspec import inspect

from kvcanary.events import (
    CanaryArmed,
    CanaryDisarmed,
    Event,
    EventsDropped,
    FactsLost,
    GroupInfo,
    HealthChecked,
    IncidentOpened,
    IncidentUpdated,
    KernelStalled,
    ObserverFailed,
    Origin,
    OwnershipViolated,
    RunStarted,
    RunStopped,
    StatsReported,
    SwaDivergenceObserved,
    Ticked,
    UnknownEvent,
    ViolationDetected,
    event_types,
)
from kvcanary.mailbox import Mailbox
from kvcanary.observers.explain import KINDS
from kvcanary.observers.log import LogSink
from kvcanary.observers.log_format import PROFILES
from kvcanary.observers.violations import ViolationsFold

GOLDEN = Path(__file__).parent / "golden"
TIME = 1_700_000_000_123_456_789

Value = Callable[[str], Any]
"""A value for a field of this name."""


def built_in_types() -> list[type[Event]]:
    """All event types of the package, and the one for types that it does not know."""
    return [kind for kind in event_types() if kind.__module__ == "kvcanary.events"] + [UnknownEvent]


def make_event(kind: type[Event], integer: Value, text: Value) -> Event:
    """An event with every field filled: integers and texts by the field's name."""
    event = _filled(inspect.type_info(kind), "", integer, text)
    assert isinstance(event, Event)
    return event


def _filled(info: inspect.Type, name: str, integer: Value, text: Value) -> Any:  # noqa: PLR0911 - a case a type
    def fill(part: inspect.Type) -> Any:
        return _filled(part, name, integer, text)

    match info:
        case inspect.StructType(cls=cls, fields=fields):
            return cls(**{field.name: _filled(field.type, field.name, integer, text) for field in fields})
        case inspect.IntType():
            return integer(name)
        case inspect.StrType():
            return text(name)
        case inspect.BytesType():
            return str(text(name)).encode()
        case inspect.FloatType():
            return 0.25
        case inspect.BoolType():
            return True
        case inspect.VarTupleType(item_type=item):
            return (fill(item), fill(item))
        case inspect.TupleType(item_types=items):
            return tuple(fill(item) for item in items)
        case inspect.DictType(value_type=value):
            return {"one": fill(value), "two": fill(value)}
        case inspect.AnyType():
            return [integer(name), text(name), {"deep": integer(name)}]
        case inspect.UnionType(types=types):
            return fill(next(part for part in types if not isinstance(part, inspect.NoneType)))
        case _:
            raise AssertionError(f"no value for {info}")


def started(run: str = "r", **fields: Any) -> RunStarted:
    """The beginning of a run of nobody."""
    return RunStarted(run=run, origin=Origin(), **fields)


def ticks(count: int) -> list[Event]:
    """Seconds."""
    return [Ticked() for _ in range(count)]


def incidents(**fields: Any) -> list[Event]:
    """What the fold says of a violation of each kind."""
    fold = ViolationsFold("log", Mailbox())
    found: list[Event] = []
    for number, kind in enumerate(KINDS):
        place: dict[str, Any] = {
            "role": "check",
            "group": "full",
            "slot": 16 * number,
            "page": number,
            "request": f"r{number}",
        }
        violation = ViolationDetected(**{**place, **fields, "kind": kind, "forward": 1000 * number})
        found += [event for _ in range(3) for event in fold.handle(violation)]
    return found


def story() -> list[Event]:
    """What a log holds by default: each type once, with the values of a run."""
    violation = ViolationDetected(
        seq=8, time_ns=TIME, forward=40, kind="INPUT_TOKEN", role="mark", group="full_attention.0", slot=57, page=3,
        row=2, tag=9, request="ask-17", position_expected=25, position_found=25, token_expected=31337, token_found=4711,
    )  # fmt: skip
    fold = ViolationsFold("log", Mailbox())
    opened, updated = (fold.handle(violation)[0] for _ in range(2))
    assert isinstance(opened, IncidentOpened)
    assert isinstance(updated, IncidentUpdated)
    group = GroupInfo(
        name="full_attention.0", kind="full", num_slots=64, page_size=16, token_bytes=256, sources=4, parts=("kv",)
    )
    envelope: dict[str, Any] = {"time_ns": TIME, "monotonic_ns": 77_000_000_123}
    events: list[Event] = [
        RunStarted(
            **envelope, seq=1, run="019a2e28457f-07647981", backend="triton", mode="log", groups=(group,),
            origin=Origin(host="gpu-7", pid=4711, device="cuda:0", engine="transformers", engine_version="5.24.0"),
            versions={"kvcanary": "0.1.0"}, config={"mode": "log", "key": None, "observers": []},
            layout_fingerprint="8f14e45fceea167a", roles=("facts", "mark"), unarmed={"WRITE_MISSING": "no poison"},
        ),
        CanaryArmed(**envelope, seq=2, forward=1),
        CanaryDisarmed(**envelope, seq=3, forward=5, reason="the engine warms up"),
        opened,
        msgspec.structs.replace(updated, seq=10, cause=9),
        OwnershipViolated(
            **envelope, seq=11, forward=41, cause=10, by="ownership", kind="DOUBLE_FREE", group="full_attention.0",
            page=3, request="ask-17", other="ask-2", detail="page 3: freed in forward 40 and again in forward 41",
        ),
        KernelStalled(**envelope, seq=12, forward=100, cause=11, by="health", role="check", launches=3, expected=9),
        HealthChecked(**envelope, seq=13, forward=100, by="health", healthy=False, problems=("check has stalled",)),
        StatsReported(
            **envelope, seq=14, forward=100, by="stats", protected_tokens=2**60 + 1, verified={"links": 9},
            scrub_passes={"full_attention.0": 2}, violations={"INPUT_TOKEN": 2}, lag_ms=0.5,
        ),
        SwaDivergenceObserved(
            **envelope, seq=15, forward=100, by="swa_divergence", forward_ct=100, verify_full=9, verify_swa=4,
            swa_full_idx_divergence=1, swa_out_of_window_tokens=2,
        ),
        FactsLost(**envelope, seq=16, count=3, first_forward=101, last_forward=102),
        EventsDropped(**envelope, seq=17, observer="archive", count=5, first_seq=3, last_seq=9),
        ObserverFailed(**envelope, seq=18, observer="archive", error="OSError: disk full", action="continued"),
        RunStopped(**envelope, seq=19, forward=102),
    ]  # fmt: skip
    return events


def written(events: list[Event], **options: Any) -> bytes:
    """The log of events."""
    stream = io.BytesIO()
    sink = LogSink(stream, **{"interests": (Event,), "level": "debug"} | options)
    sink.handle_batch(events)
    return stream.getvalue()


def golden_path(profile: str) -> Path:
    """Where the golden lines of a profile lie."""
    return GOLDEN / f"{profile}.jsonl"


if __name__ == "__main__":
    for each in typing.cast("list[str]", list(PROFILES)):
        golden_path(each).write_bytes(written(story(), profile=each, service="chat"))
