"""Scenario files: what they hold, and errors with the file's name, the line and the nearest right word."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

import msgspec
from msgspec import Meta, Struct

from kvcanary.config import CanaryConfig
from kvcanary.errors import ConfigError, KVCanaryError
from kvcanary.faults.scenario.happenings import Happening
from kvcanary.faults.scenario.lines import Lines
from kvcanary.faults.scenario.notation import parse_event
from kvcanary.faults.scenario.words import NotationError
from kvcanary.observers.explain_ownership import LEDGER_KINDS
from kvcanary.record import Kind
from kvcanary.text import near_to

Positive = Annotated[int, Meta(ge=1, le=1 << 20)]
Number = Annotated[int, Meta(ge=0, le=1 << 20)]
Dtype = Literal["float32", "bfloat16", "float16", "uint8"]

REFUSALS = ("LayoutError", "BatchError")
"""Errors that a canary raises when it is called with what cannot be right; expected like kinds of violation."""
DECIDED = ("mode", "backend", "key")
"""Settings that a scenario does not choose."""
KINDS = (*(kind.name for kind in Kind), *LEDGER_KINDS, *REFUSALS)


class ScenarioError(KVCanaryError, ValueError):
    """A scenario file that does not say what a scenario needs: file, line, what was found, what is expected."""


class Source(Struct, frozen=True, forbid_unknown_fields=True):
    """One buffer of a group."""

    dtype: Dtype = "float32"
    width: Positive = 4
    """numbers of one token"""
    part: str = "target"
    head: Number = 0
    """global number of its first head"""


class Group(Struct, frozen=True, forbid_unknown_fields=True):
    """Slots of one kind of layer."""

    slots: Positive
    name: str = "full"
    page: Positive = 1
    kind: Literal["full", "swa", "state"] = "full"
    window: Positive | None = None
    ring: Positive | None = None
    max_rewind: Number | None = None
    sources: tuple[str, ...] | dict[str, Source] = ("k", "v")
    trash: tuple[int, ...] = ()
    """pages that may hold anything"""
    null: tuple[int, ...] = ()
    """pages that attention may fetch and nobody owns"""
    translated: bool = False
    """its indices are full slots, which a table on the device translates"""
    arena: str = ""
    """groups of one arena lie in the same bytes"""


class Request(Struct, frozen=True, forbid_unknown_fields=True):
    """A request's text. Tokens are made up from its name, unless it is like another's."""

    like: str = ""
    until: Number | None = None
    """tokens that are like the other's; all if it is not said"""
    shift: int = 0
    """its token at ``p`` is the other's at ``p + shift``, as a draft model's stream"""
    prompt: Number | None = None
    """tokens that the scheduler knows at launch; all if it is not said"""
    identity: str = ""
    """what the engine separates cached prefixes by"""
    media: dict[str, str] = {}
    """positions of placeholders (``"0..7"``), and what they stand for"""


class Expected(Struct, frozen=True, forbid_unknown_fields=True):
    """A finding that must come."""

    kind: str
    at: str
    """the event, or how its text begins"""
    nth: Positive = 1
    """of several events with that text"""
    request: str = ""
    other: str = ""
    """second party: whom it hurts, whose page it is, or who wrote the record"""
    group: str = ""


class Twin(Struct, frozen=True, forbid_unknown_fields=True):
    """The same without the fault: nothing may be reported. What it does not say is as in the scenario."""

    events: tuple[str, ...]
    requests: dict[str, Request] | None = None
    remote: tuple[Group, ...] | None = None


class Document(Struct, frozen=True, forbid_unknown_fields=True):
    """A file as it is written."""

    summary: str
    groups: Annotated[tuple[Group, ...], Meta(min_length=1)]
    events: Annotated[tuple[str, ...], Meta(min_length=1)]
    expect: Literal["nothing"] | tuple[Expected, ...]
    case: str = ""
    """public reports of the fault: ``owner/repository#number``, separated by commas; "" if it is made up"""
    kind: Annotated[int, Meta(ge=0, le=12)] = 0
    """kind of fault, as the catalogue of public cases numbers them; 0: none of the twelve"""
    why: str = ""
    """why nothing can be reported although something is wrong"""
    also: tuple[str, ...] = ()
    """kinds that may follow from the fault, as often as they like"""
    remote: tuple[Group, ...] = ()
    """groups of a second pool"""
    tiers: dict[str, Positive] = {}
    """blocks outside of the pool, by the letter they are written with"""
    requests: dict[str, Request] = {}
    settings: dict[str, Any] = {}
    """settings of the canary, as in :class:`kvcanary.CanaryConfig`"""
    twin: Twin | None = None


class Want(Struct, frozen=True):
    """An expectation and the number of its event, from 0."""

    expected: Expected
    event: int


class Play(Struct, frozen=True):
    """Events to play, and what they need."""

    groups: tuple[Group, ...]
    remote: tuple[Group, ...]
    tiers: dict[str, int]
    requests: dict[str, Request]
    settings: dict[str, Any]
    events: tuple[Happening, ...]
    lines: tuple[int, ...]


class Scenario(Struct, frozen=True):
    """A file that was understood. ``groups_line``: where it says what the pool looks like."""

    path: str
    groups_line: int
    document: Document
    play: Play
    wants: tuple[Want, ...]
    twin: Play | None

    def world_error(self, problem: object) -> ScenarioError:
        """An error at the line of the groups."""
        return ScenarioError(f"{self.path}:{self.groups_line}: there is no such world: {problem}")

    def error(self, play: Play, event: int, problem: object) -> ScenarioError:
        """An error at the line of an event."""
        return ScenarioError(f"{self.path}:{play.lines[event]}: {play.events[event].text!r}: {problem}")


def load(path: Path) -> Scenario:
    """Read one file.

    Raises:
        ScenarioError: it cannot be read, or does not say what a scenario needs.
    """
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ScenarioError(f"{path}: cannot be read: {error}") from error
    return _Reader(str(path), text).scenario()


class _Reader:
    def __init__(self, path: str, text: str) -> None:
        self.path = path
        self.lines = Lines(text)
        self.text = text

    def scenario(self) -> Scenario:
        try:
            raw = tomllib.loads(self.text)
        except tomllib.TOMLDecodeError as error:
            where = re.search(r"at line (\d+)", str(error))
            line = int(where[1]) if where is not None else len(self.text.splitlines())
            before = self.lines.without_comma(line)
            line, hint = (line, "") if before is None else (before, "a comma is missing at the end of this line; ")
            raise ScenarioError(f"{self.path}:{line}: no valid TOML: {hint}{error}") from error
        try:
            document = msgspec.convert(raw, Document)
        except msgspec.ValidationError as error:
            self._invalid(raw, error)
        self._check(document)
        play = self._play(document, ("events",), document.events)
        twin = None
        if document.twin is not None:
            twin = self._play(document, ("twin", "events"), document.twin.events, document.twin)
        return Scenario(self.path, self.lines.of(("groups",)), document, play, self._wants(document), twin)

    def fail(self, path: tuple[str | int, ...], problem: str) -> NoReturn:
        raise ScenarioError(f"{self.path}:{self.lines.of(path)}: {problem}")

    def _invalid(self, raw: Any, error: msgspec.ValidationError) -> NoReturn:
        message, _, where = str(error).partition(" - at `$")
        path = tuple(int(i) if i else name for name, i in re.findall(r"([A-Za-z_]\w*)|\[(\d+)\]", where))
        unknown = re.search(r"unknown field `(\w+)`", message)
        if unknown is not None:
            known = _fields_at(path)
            message = f"no field is called {unknown[1]!r}{near_to(unknown[1], known)}; fields are {', '.join(known)}"
            path = (*path, unknown[1])
        elif path[:1] == ("expect",) and "missing" not in message and all(isinstance(part, int) for part in path[1:]):
            found = _value_at(raw, path)
            hint = near_to(found, ("nothing",)) if path == ("expect",) and isinstance(found, str) else ""
            wanted = """"nothing", or a list of findings such as { kind = "DOUBLE_FREE", at = "free(3)" }"""
            message = f"{'.'.join(map(str, path))}: expected {wanted}, got {found!r}{hint}"
        elif path and isinstance(path[-1], str):
            message = f"{path[-1]}: {message}, got {_value_at(raw, path)!r}"
        elif path:
            message = f"{'.'.join(map(str, path))}: {message}, got {_value_at(raw, path)!r}"
        self.fail(path, message)

    def _check(self, document: Document) -> None:
        self._check_world(document)
        self._check_settings(document.settings)
        self._check_requests(document, ("requests",), document.requests)
        if document.twin is not None and document.twin.requests is not None:
            self._check_requests(document, ("twin", "requests"), document.twin.requests)
        if document.why and document.expect != "nothing":
            self.fail(("why",), 'why = "..." says why nothing is found, so it needs expect = "nothing"')
        for i, kind in enumerate(document.also):
            if kind not in KINDS:
                self.fail(("also", i), f"no finding is called {kind!r}{near_to(kind, KINDS)}")

    def _check_requests(self, document: Document, path: tuple[str, ...], requests: dict[str, Request]) -> None:
        others = {request.like for request in requests.values()}
        for name, request in requests.items():
            where = (*path, name)
            if request.like and request.like not in {*requests, *self._named(document)}:
                near = near_to(request.like, self._named(document))
                self.fail(where, f"like = {request.like!r}: no event has such a request{near}")
            if name not in others and not _names(self._texts(document), name):
                self.fail(where, f"no event names the request {name!r}{near_to(name, self._named(document))}")
            for span in request.media:
                if not re.fullmatch(r"\d+(\.\.\d+)?", span):
                    self.fail(where, f"media stands at positions such as '3' or '0..7', got {span!r}")
            seen = [name]
            while seen[-1] in requests and requests[seen[-1]].like:
                seen.append(requests[seen[-1]].like)
                if seen[-1] in seen[:-1]:
                    self.fail(where, f"requests are like one another in a circle: {' -> '.join(seen)}")

    def _check_settings(self, settings: dict[str, Any]) -> None:
        known = [name for name in CanaryConfig.__struct_fields__ if name not in DECIDED]
        for name in settings:
            if name in DECIDED:
                self.fail(("settings", name), f"a scenario does not choose {name!r}")
            if name not in known:
                self.fail(("settings", name), f"no setting is called {name!r}{near_to(name, known)}")
        try:
            CanaryConfig(mode="log", **settings)
        except ConfigError as error:
            self.fail(("settings",), str(error))

    def _check_world(self, document: Document) -> None:
        for name, groups in (("groups", document.groups), ("remote", document.remote)):
            names = [group.name for group in groups]
            for i, group in enumerate(groups):
                if names.index(group.name) != i:
                    self.fail((name, i), f"two groups are called {group.name!r}; give each a name")
                if len(group.name) == 1 or group.name.startswith("r."):
                    self.fail((name, i), f"a group cannot be called {group.name!r}; such names are tiers and pools")
        for letter in document.tiers:
            if not re.fullmatch("[a-qs-z]", letter):
                self.fail(
                    ("tiers", letter), f"a tier is one small letter other than r (the remote pool), got {letter!r}"
                )

    def _texts(self, document: Document) -> tuple[str, ...]:
        return (*document.events, *(document.twin.events if document.twin is not None else ()))

    def _named(self, document: Document) -> list[str]:
        return sorted({name for text in document.events for name in re.findall(r"\b[A-Z][\w.\-]*", text)})

    def _play(self, document: Document, path: tuple[str, ...], texts: Sequence[str], twin: Twin | None = None) -> Play:
        events: list[Happening] = []
        lines: list[int] = []
        for i, text in enumerate(texts):
            try:
                events.append(parse_event(text))
            except NotationError as error:
                self.fail((*path, i), str(error))
            lines.append(self.lines.of((*path, i)))
        requests, remote = document.requests, document.remote
        if twin is not None:
            requests = requests if twin.requests is None else twin.requests
            remote = remote if twin.remote is None else twin.remote
        return Play(
            groups=document.groups,
            remote=remote,
            tiers=document.tiers,
            requests=requests,
            settings=document.settings,
            events=tuple(events),
            lines=tuple(lines),
        )

    def _wants(self, document: Document) -> tuple[Want, ...]:
        if isinstance(document.expect, str):
            return ()
        for i, expected in enumerate(document.expect):
            self._check_parties(document, i, expected)
        return tuple(self._want(document.events, i, expected) for i, expected in enumerate(document.expect))

    def _check_parties(self, document: Document, number: int, expected: Expected) -> None:
        for name in (expected.request, expected.other):
            if name and not _names(document.events, name):
                near = near_to(name, self._named(document))
                self.fail(("expect", number), f"no event names the request {name!r}{near}")
        places = [*(group.name for group in (*document.groups, *document.remote)), *document.tiers]
        if expected.group and expected.group not in places:
            near = near_to(expected.group, places)
            self.fail(("expect", number), f"no group or tier is called {expected.group!r}{near}")

    def _want(self, events: Sequence[str], number: int, expected: Expected) -> Want:
        where = ("expect", number)
        if expected.kind not in KINDS:
            self.fail(where, f"no finding is called {expected.kind!r}{near_to(expected.kind, KINDS)}")
        found = [i for i, text in enumerate(events) if text == expected.at]
        found = found or [i for i, text in enumerate(events) if text.startswith(expected.at)]
        if not found:
            self.fail(where, f"no event begins with {expected.at!r}{near_to(expected.at, events)}")
        if len({events[i] for i in found}) > 1:
            alike = ", ".join(repr(events[i]) for i in found)
            self.fail(
                where, f"several events begin with {expected.at!r} ({alike}); write more of the one that is meant"
            )
        if expected.nth > len(found):
            self.fail(where, f"nth = {expected.nth}, but there are {len(found)} events {events[found[0]]!r}")
        return Want(expected, found[expected.nth - 1])


def _names(texts: Sequence[str], request: str) -> bool:
    """Whether an event names a request."""
    word = re.compile(rf"(?<![\w\-]){re.escape(request)}(?![\w\-])")
    return any(word.search(text) for text in texts)


_BY_KEY: dict[str, type[Struct]] = {
    "groups": Group,
    "remote": Group,
    "requests": Request,
    "expect": Expected,
    "twin": Twin,
    "sources": Source,
}


def _fields_at(path: Sequence[str | int]) -> tuple[str, ...]:
    named = [part for part in path if isinstance(part, str) and part in _BY_KEY]
    return (_BY_KEY[named[-1]] if named else Document).__struct_fields__


def _value_at(raw: Any, path: Sequence[str | int]) -> Any:
    for part in path:
        try:
            raw = raw[part]
        except (KeyError, IndexError, TypeError):
            return None
    return raw
