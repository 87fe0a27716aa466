"""What leaves the process without token ids and prefix digests."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec.structs import force_setattr, replace

from kvcanary.events import Event, IncidentOpened, UnknownEvent, ViolationDetected
from kvcanary.observers.explain import explain

_SECRET_FIELDS = frozenset({"token_expected", "token_found", "token_ids"})
_NOTHING: dict[type, object] = {str: "", bytes: b"", tuple: ()}
"""What stands for a withheld value of a type; None for others."""


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
        value: object = getattr(event, name)
        nothing = _NOTHING.get(type(value))
        if value != nothing:
            if shown is event:
                shown = replace(event)
            force_setattr(shown, name, nothing)  # nobody else has seen it, and most types have one
    if isinstance(shown, IncidentOpened) and shown.first is not None:
        return _with_words(shown, shown.first)
    return shown


def _with_words(event: IncidentOpened, violation: ViolationDetected) -> IncidentOpened:
    first = redact(violation)
    if not isinstance(first, ViolationDetected):
        return event
    words = explain(first)
    # What follows a violation's own evidence is the ledger's: requests and forwards, nothing to withhold.
    history = event.evidence[len(words.evidence) :]
    return replace(event, first=first, headline=words.headline, evidence=words.evidence + history)


def redact_all(events: Sequence[Event]) -> list[Event]:
    """:func:`redact` for many; most have nothing to withhold, and cost next to nothing."""
    return [redact(event) if _HAS_SECRETS[type(event)] else event for event in events]


class _HasSecrets(dict[type[Event], bool]):
    """Whether events of a type may have something to withhold; remembers the answers."""

    def __missing__(self, event_type: type[Event]) -> bool:
        self[event_type] = has = bool(_secrets(event_type)) or issubclass(event_type, (IncidentOpened, UnknownEvent))
        return has


_HAS_SECRETS = _HasSecrets()


def _envelope(event: UnknownEvent) -> UnknownEvent:
    kept: dict[str, Any] = {name: getattr(event, name) for name in Event.__struct_fields__}
    raw = msgspec.msgpack.encode({"type": event.type_name, **kept, "withheld": True})
    return UnknownEvent(**kept, type_name=event.type_name, raw=raw)


@functools.cache
def _secrets(event_type: type[Event]) -> tuple[str, ...]:
    if issubclass(event_type, UnknownEvent):
        return ("raw",)  # whatever it holds
    return tuple(name for name in event_type.__struct_fields__ if name in _SECRET_FIELDS or "digest" in name)
