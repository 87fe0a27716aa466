"""The window's divergence: proof that the sliding-window path really ran, and a reader for its log lines."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any

import msgspec

from kvcanary.events import Event, RunStarted, SnapshotTaken, SwaDivergenceObserved, event_name
from kvcanary.observers.base import stamp

NAME = event_name(SwaDivergenceObserved)
_NAME_FIELDS = ("type", "event", "event.action", "evt.name", "event_name")
_TIME_FIELDS = ("timestamp", "@timestamp")
_PREFIX = "kvcanary."


class SwaDivergenceFold:
    """Reports the window counters once for each time that a forward took them."""

    name = "swa_divergence"
    interests: tuple[type[Event], ...] = (RunStarted, SnapshotTaken)
    emits: tuple[type[Event], ...] = (SwaDivergenceObserved,)
    guard = False

    def __init__(self) -> None:
        self._seen = 0

    def handle(self, event: Event) -> tuple[SwaDivergenceObserved, ...]:
        """One observation when the snapshot carries a new sample."""
        if isinstance(event, RunStarted):
            self._seen = 0
        if not isinstance(event, SnapshotTaken) or not event.swa:
            return ()
        counters = event.swa
        forward_ct = counters.get("forward_ct", event.forward)
        if forward_ct <= self._seen:
            return ()
        self._seen = forward_ct
        observed = SwaDivergenceObserved(
            **stamp(event, self.name),
            forward_ct=forward_ct,
            verify_full=counters.get("verify_full", 0),
            verify_swa=counters.get("verify_swa", 0),
            swa_full_idx_divergence=counters.get("swa_full_idx_divergence", 0),
            swa_out_of_window_tokens=counters.get("swa_out_of_window_tokens", 0),
        )
        return (observed,)


def parse(line: str | bytes) -> SwaDivergenceObserved | None:
    """The observation in a line of a log (any profile) or of encoded events; None when it holds none.

    Text before the JSON object is skipped. Half a line, such as the last one of a file that is being written, is
    None as well.
    """
    text = line.decode(errors="replace") if isinstance(line, bytes) else line
    start = text.find("{")
    if NAME not in text or start < 0:
        return None
    try:
        found = msgspec.json.decode(text[start:].strip(), type=dict[str, Any])
        if NAME not in (str(found.get(field)).removeprefix(_PREFIX) for field in _NAME_FIELDS):
            return None
        return msgspec.convert(_as_event(found), SwaDivergenceObserved, strict=False)
    except (msgspec.MsgspecError, ValueError):
        return None


def find_all(source: str | bytes | Iterable[str | bytes]) -> list[SwaDivergenceObserved]:
    """All observations in a text, or in lines, in their order."""
    return [found for found in map(parse, _lines(source)) if found is not None]


def find_last(source: str | bytes | Iterable[str | bytes]) -> SwaDivergenceObserved | None:
    """The last observation in a text, or in lines; None when there is none."""
    found = find_all(source)
    return found[-1] if found else None


def _lines(source: str | bytes | Iterable[str | bytes]) -> Iterable[str | bytes]:
    # Not splitlines(): JSON strings may hold U+2028 and the like.
    if isinstance(source, str):
        return source.split("\n")
    return source.split(b"\n") if isinstance(source, bytes) else source


def _as_event(line: dict[str, Any]) -> dict[str, Any]:
    """Undo what the log's profiles renamed."""
    plain = {key.removeprefix(_PREFIX): value for key, value in line.items()}
    for field in _TIME_FIELDS:
        if field in plain and "time_ns" not in plain:
            plain["time_ns"] = _nanoseconds(str(plain[field]))
    fields = {key: value for key, value in plain.items() if key in SwaDivergenceObserved.__struct_fields__}
    return {**fields, "type": NAME}


def _nanoseconds(text: str) -> int:
    """Nanoseconds since 1970 of an ISO 8601 time in UTC. ``datetime`` keeps microseconds only."""
    whole, _, fraction = text.removesuffix("Z").partition(".")
    seconds = int(datetime.fromisoformat(whole).replace(tzinfo=UTC).timestamp())
    return seconds * 1_000_000_000 + int(fraction.ljust(9, "0")[:9] or 0)
