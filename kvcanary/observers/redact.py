"""What leaves the process without token ids and prefix digests."""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec.structs import force_setattr

from kvcanary.events import Event, IncidentOpened, UnknownEvent, ViolationDetected
from kvcanary.observers.explain import explain

_SECRET_FIELDS = frozenset({"token_expected", "token_found", "token_ids"})


def redact(event: Event) -> Event:
    """The same event with token ids and digests withheld: empty, or None, by their field names.

    Fingerprints stay: they are keyed sums over keys and values and say nothing about text. An incident's text is
    written anew from its redacted first violation, so folds derive the same from redacted events as is left of what
    they derived from whole ones. Of an event of unknown type only the envelope stays.
    """
    if isinstance(event, UnknownEvent):
        return _envelope(event)
    shown = event
    for name in _secrets(type(event)):
        value = getattr(event, name)
        if value not in (None, "", b"", ()):
            shown = _with(shown, event, name, _empty(value))
    if isinstance(event, IncidentOpened) and event.first is not None:
        shown = _with_words(shown, event, event.first)
    return shown


def _with_words(shown: Event, event: IncidentOpened, violation: ViolationDetected) -> Event:
    first = redact(violation)
    if not isinstance(first, ViolationDetected):
        return shown
    words = explain(first)
    # What follows a violation's own evidence is the ledger's: requests and forwards, nothing to withhold.
    history = event.evidence[len(words.evidence) :]
    for name, value in (("first", first), ("headline", words.headline), ("evidence", words.evidence + history)):
        shown = _with(shown, event, name, value)
    return shown


def _with(shown: Event, event: Event, name: str, value: object) -> Event:
    """``shown``, or its copy while it is still the event itself, with one field changed."""
    if shown is event:
        shown = copy.copy(event)
    force_setattr(shown, name, value)  # nobody else has seen the copy; a third of the price of replacing
    return shown


def redact_all(events: Sequence[Event]) -> list[Event]:
    """:func:`redact` for many; most have nothing to withhold, and cost next to nothing."""
    return [redact(event) if _has_secrets(type(event)) else event for event in events]


@functools.cache
def _has_secrets(event_type: type[Event]) -> bool:
    return bool(_secrets(event_type)) or issubclass(event_type, (IncidentOpened, UnknownEvent))


def _envelope(event: UnknownEvent) -> UnknownEvent:
    kept: dict[str, Any] = {name: getattr(event, name) for name in Event.__struct_fields__}
    raw = msgspec.msgpack.encode({"type": event.type_name, **kept, "withheld": True})
    return UnknownEvent(**kept, type_name=event.type_name, raw=raw)


@functools.cache
def _secrets(event_type: type[Event]) -> tuple[str, ...]:
    if issubclass(event_type, UnknownEvent):
        return ("raw",)  # whatever it holds
    return tuple(name for name in event_type.__struct_fields__ if name in _SECRET_FIELDS or "digest" in name)


def _empty(value: object) -> object:
    if isinstance(value, (str, bytes)):
        return type(value)()
    return () if isinstance(value, tuple) else None
