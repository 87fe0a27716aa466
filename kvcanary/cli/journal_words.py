"""What the journal's commands say of an event, in one line, and which events concern a page, a slot or a request."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import msgspec

from kvcanary.errors import ConfigError
from kvcanary.events import (
    Event,
    ForwardLaunched,
    Origin,
    PagesFact,
    PagesMoved,
    RunStarted,
    UnknownEvent,
    ViolationDetected,
    event_name,
    event_types,
)
from kvcanary.observers.explain import KINDS, explain
from kvcanary.observers.explain_ownership import LEDGER_KINDS

Concerns = Callable[[Event], bool]

_REQUEST_FIELDS = ("request", "other", "writer_request", "owner_request")
_NAMED_FIELDS = ("requests", "joined", "left")
_MOST_RUNS = 6
_MOST = 1 << 62
_ENVELOPE = frozenset({*Event.__struct_fields__, "retired", "cause", "by"})


def say(event: Event) -> str:
    """What an event says beyond its type."""
    match event:
        case ViolationDetected():
            return explain(event).headline
        case PagesFact():
            extra = [text for name in ("transfer", "direction") if (text := getattr(event, name, ""))]
            return ", ".join([f"{event.group}: {_runs(event)}", *extra])
        case PagesMoved():
            moves = [f"{source} to {target}" for source, target in zip(event.sources, event.targets, strict=True)]
            return f"{event.group}: {_some(moves)}"
        case _:
            return _say_other(event)


def _say_other(event: Event) -> str:
    match event:
        case ForwardLaunched():
            return f"{event.rows} rows, {event.tokens} tokens"
        case RunStarted():
            return f"{event.origin.engine or 'no engine'} on {event.origin.device or event.origin.host}, {event.mode}"
        case UnknownEvent():
            return "of a type that this version does not know"
        case _:
            return str(getattr(event, "headline", "")) or _fields(event)


def _runs(event: PagesFact) -> str:
    parts: list[str] = []
    for run in event.runs:
        request = event.requests[run.request] if run.request < len(event.requests) else ""
        pages = f"page {run.first}" if run.count == 1 else f"pages {run.first}..{run.first + run.count - 1}"
        parts.append(f"{pages} ({request})" if request else pages)
    return _some(parts)


def _fields(event: Event) -> str:
    plain = cast("dict[str, Any]", msgspec.to_builtins(event))
    del plain["type"]
    return _some(
        [f"{k} {_short(v)}" for k, v in plain.items() if k not in _ENVELOPE and v not in ("", [], {}, (), None, -1)]
    )


def _short(value: object) -> str:
    if isinstance(value, list):
        return _some([str(item) for item in cast("list[object]", value)])
    if isinstance(value, dict):
        return _some([f"{name}={item}" for name, item in cast("dict[str, object]", value).items()])
    return str(value)


def _some(parts: Sequence[str]) -> str:
    rest = len(parts) - _MOST_RUNS
    return ", ".join(parts[:_MOST_RUNS]) + (f" and {rest} more" if rest > 0 else "")


def rank_of(origin: Origin) -> str:
    """Who speaks, where several do."""
    ranks = (("dp", origin.dp_rank), ("tp", origin.tp_rank), ("pp", origin.pp_rank))
    named = "".join(f" {name}{rank}" for name, rank in ranks if rank)
    return f"{origin.host or '?'}:{origin.pid}{named}"


# --- what concerns what -------------------------------------------------------------------------------------


def concerns_request(request: str) -> Concerns:
    """Events that name a request."""

    def concerns(event: Event) -> bool:
        if any(getattr(event, name, "") == request for name in _REQUEST_FIELDS):
            return True
        return any(request in getattr(event, name, ()) for name in _NAMED_FIELDS)

    return concerns


def concerns_page(group: str, page: int) -> Concerns:
    """Events in which a page changes hands, or in which something was found on it."""

    def concerns(event: Event) -> bool:
        if getattr(event, "group", None) != group:
            return False
        return page in _pages(event)

    return concerns


def concerns_slot(group: str, page: int, slot: int) -> Concerns:
    """Events of a slot's page, without findings on other slots of it."""
    on_page = concerns_page(group, page)

    def concerns(event: Event) -> bool:
        return on_page(event) and getattr(event, "slot", -1) in {-1, slot}

    return concerns


def _pages(event: Event) -> Iterator[int]:
    if isinstance(event, PagesFact):
        for run in event.runs:
            yield from range(run.first, run.first + run.count)
    elif isinstance(event, PagesMoved):
        yield from event.sources
        yield from event.targets
    else:
        yield getattr(event, "page", -1)


# --- what is written on the command line --------------------------------------------------------------------


def place(text: str, option: str) -> tuple[str, int]:
    """``group:number``, where the group's own name may hold colons.

    Raises:
        ConfigError: it is something else.
    """
    group, _, number = text.rpartition(":")
    if not group or not number.isdecimal():
        raise ConfigError(f"{option} is {text!r}; expected GROUP:NUMBER, such as full_attention:57")
    return group, int(number)


def span(text: str, option: str) -> tuple[int, int]:
    """``first:last``, either of which may be left out, or one number.

    Raises:
        ConfigError: it is something else, or runs backwards.
    """
    first, colon, last = text.partition(":")
    if not all(part.isdecimal() or not part for part in (first, last)) or not (first or last):
        raise ConfigError(f"{option} is {text!r}; expected FIRST:LAST, FIRST:, :LAST, or one number")
    low = int(first or 0)
    high = int(last or _MOST) if colon else low
    if not low <= high <= _MOST:
        raise ConfigError(f"{option} is {text!r}; expected FIRST:LAST with FIRST at most LAST, and LAST at most 2**62")
    return low, high


def not_negative(number: int, option: str) -> int:
    """The number.

    Raises:
        ConfigError: it is negative.
    """
    if number < 0:
        raise ConfigError(f"{option} is {number}; expected 0 or more")
    return number


def fits_kind(wanted: str) -> Concerns:
    """Events of a type (``incident.opened``) or a kind (``CONTENT``)."""
    lower = wanted.lower()

    def fits(event: Event) -> bool:
        return lower in {event_name(event), str(getattr(event, "kind", "")).lower()}

    return fits


def nothing_fits(wanted: str) -> None:
    """No event is ``wanted``, a kind or a type: is there such a one at all?

    Asked afterwards, since a journal may hold types of another version, or of somebody's own.

    Raises:
        ConfigError: this version knows none.
    """
    by_lower = {word.lower(): word for word in (*KINDS, *LEDGER_KINDS, *map(event_name, event_types()))}
    if wanted.lower() in by_lower:
        return
    near = difflib.get_close_matches(wanted.lower(), by_lower, n=1)
    hint = f"did you mean {by_lower[near[0]]}?" if near else f"known are {', '.join(by_lower.values())}"
    raise ConfigError(f"--where is {wanted!r}: no event fits, and none is known by that kind or type; {hint}")
