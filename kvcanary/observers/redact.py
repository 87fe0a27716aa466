"""What leaves the process without token ids and prefix digests."""

from __future__ import annotations

import functools
from typing import Any

import msgspec

from kvcanary.events import Event, IncidentOpened, UnknownEvent, ViolationDetected
from kvcanary.observers.explain import explain

_SECRET_FIELDS = frozenset({"token_expected", "token_found", "token_ids"})


def redact(event: Event) -> Event:
    """The same event with token ids and digests withheld: empty, or None, by their field names.

    Fingerprints stay: they are keyed sums over keys and values and say nothing about text. An incident's text is
    written anew from its redacted first violation.
    """
    present = {name: getattr(event, name) for name in _secrets(type(event))}
    masked: dict[str, Any] = {
        name: _empty(value) for name, value in present.items() if value not in (None, "", b"", ())
    }
    if isinstance(event, IncidentOpened) and event.first is not None:
        first = redact(event.first)
        if isinstance(first, ViolationDetected):
            words = explain(first)
            masked |= {"first": first, "headline": words.headline, "evidence": words.evidence}
    return msgspec.structs.replace(event, **masked) if masked else event


@functools.cache
def _secrets(event_type: type[Event]) -> tuple[str, ...]:
    if issubclass(event_type, UnknownEvent):
        return ("raw",)  # whatever it holds
    return tuple(name for name in event_type.__struct_fields__ if name in _SECRET_FIELDS or "digest" in name)


def _empty(value: object) -> object:
    if isinstance(value, (str, bytes)):
        return type(value)()
    return () if isinstance(value, tuple) else None
