"""From the text of an event to what happens: ``launch F1(A reads 0..7, writes 8)``.

Errors say what was found, how the event is written, and the nearest word that would be right.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from kvcanary.faults.scenario import happenings as happen
from kvcanary.faults.scenario.happenings import Fault, Happening, Places, Row
from kvcanary.faults.scenario.words import (
    PADDING,
    NotationError,
    arrow,
    length_in,
    listed,
    name_in,
    number_in,
    places_in,
    some,
    term,
)
from kvcanary.text import near_to

_EVENT = re.compile(r"(?P<word>[A-Za-z_]+)\s*(?P<name>[A-Za-z_][\w.\-]*)?\s*(?:\((?P<body>.*)\))?\s*(?P<tail>[^()]*)")
_OF_COPIES = ("for", "ordered", "relaid", "only", "taking")
_CLAUSES = ("reads", "writes", "at", "tok", "lost", "lands", "only", "nan")
_OF_WRITES = ("tok", "lost", "lands", "only", "nan", "at")


class Form(NamedTuple):
    """How one word is written."""

    example: str
    read: Callable[[Parts], Happening]


class Parts(NamedTuple):
    """An event taken apart: ``word name(body) tail``."""

    text: str
    word: str
    name: str
    body: str | None
    tail: str

    @property
    def arguments(self) -> list[str]:
        """What stands between the commas."""
        return [part.strip() for part in (self.body or "").split(",")] if (self.body or "").strip() else []


def parse_event(text: str) -> Happening:
    """What an event says.

    Raises:
        NotationError: unknown words or wrong arguments.
    """
    found = _EVENT.fullmatch(text.strip())
    if found is None:
        raise NotationError(f"{text!r} is no event; events look like {FORMS['alloc'].example}")
    parts = Parts(text, found["word"], found["name"] or "", found["body"], (found["tail"] or "").strip())
    form = FORMS.get(parts.word)
    if form is None:
        raise NotationError(
            f"no event is called {parts.word!r}{near_to(parts.word, FORMS)}; events are {listed(FORMS)}"
        )
    try:
        return form.read(parts)
    except NotationError as error:
        raise NotationError(f"{text!r}: {error}; it is written {form.example}") from None


# --- plain calls --------------------------------------------------------------------------------------------


def _plain(parts: Parts, least: int, most: int) -> list[str]:
    if parts.name or (parts.body is None and least):
        raise NotationError("its arguments stand in brackets")
    if parts.tail:
        raise NotationError(f"nothing may follow the brackets, got {parts.tail!r}")
    found = parts.arguments
    if not least <= len(found) <= most:
        wanted = str(least) if least == most else f"{least} to {most}"
        raise NotationError(f"expected {wanted} arguments, got {len(found)}")
    return found


def _admit(parts: Parts) -> Happening:
    request, *rest = _plain(parts, 1, 2)
    return happen.Admit(text=parts.text, request=name_in(request), length=length_in(rest[0]) if rest else 0)


def _alloc(parts: Parts) -> Happening:
    request, places = _plain(parts, 2, 2)
    return happen.Alloc(text=parts.text, request=name_in(request), places=some(places))


def _free(parts: Parts) -> Happening:
    *request, places = _plain(parts, 1, 2)
    return happen.Free(text=parts.text, places=some(places), request=name_in(request[0]) if request else "")


def _publish(parts: Parts) -> Happening:
    *request, places, key = _plain(parts, 2, 3)
    who = name_in(request[0]) if request else ""
    return happen.Publish(text=parts.text, places=some(places), key=name_in(key, "a key"), request=who)


def _hit(parts: Parts) -> Happening:
    request, key = _plain(parts, 2, 2)
    return happen.Hit(text=parts.text, request=name_in(request), key=name_in(key, "a key"))


def _evict(parts: Parts) -> Happening:
    return happen.Evict(text=parts.text, key=name_in(_plain(parts, 1, 1)[0], "a key"))


def _rewind(parts: Parts) -> Happening:
    request, length = _plain(parts, 2, 2)
    return happen.Rewind(text=parts.text, request=name_in(request), length=length_in(length))


def _preempt(parts: Parts) -> Happening:
    return happen.Preempt(text=parts.text, request=name_in(_plain(parts, 1, 1)[0]))


def _finish(parts: Parts) -> Happening:
    return happen.Finish(text=parts.text, request=name_in(_plain(parts, 1, 1)[0]))


def _move(parts: Parts) -> Happening:
    sources, targets = arrow(_plain(parts, 1, 1)[0])
    return happen.Move(text=parts.text, sources=sources, targets=targets)


def _translate(parts: Parts) -> Happening:
    sources, targets = arrow(_plain(parts, 1, 1)[0])
    return happen.Translate(text=parts.text, sources=sources, targets=targets)


def _restamp(parts: Parts) -> Happening:
    return happen.Restamp(text=parts.text, places=some(_plain(parts, 1, 1)[0]))


def _verify(parts: Parts) -> Happening:
    return happen.Verify(text=parts.text, places=some(_plain(parts, 1, 1)[0]))


def _nonfinite(parts: Parts) -> Happening:
    return happen.Nonfinite(text=parts.text, places=some(_plain(parts, 1, 1)[0]))


def _weights(parts: Parts) -> Happening:
    return happen.WeightsUpdated(text=parts.text, epoch=number_in(_plain(parts, 1, 1)[0]))


def _write(parts: Parts) -> Happening:
    request, places, *numbers = _plain(parts, 2, 4)
    told = tuple(number_in(number) for number in numbers)
    return happen.Write(text=parts.text, request=name_in(request), places=some(places), numbers=told)


def _change(parts: Parts) -> Happening:
    places, *source = _plain(parts, 1, 2)
    named = name_in(source[0], "a source") if source else ""
    return happen.Change(text=parts.text, how=parts.word, places=some(places), source=named)


def _table(parts: Parts) -> Happening:
    request, places = _plain(parts, 2, 2)
    return happen.Table(text=parts.text, request=name_in(request), places=some(places))


def _idle(parts: Parts) -> Happening:
    if parts.name or parts.body or parts.tail:
        raise NotationError("it takes no arguments")
    return happen.Idle(text=parts.text)


# --- forwards -----------------------------------------------------------------------------------------------


def _launch(parts: Parts) -> Happening:
    if not parts.name or not (parts.body or "").strip():
        raise NotationError("a forward has a name, and its rows in brackets")
    part, unlinked = "target", False
    words = parts.tail.split()
    while words:
        word = words.pop(0)
        if word == "part" and words:
            part = name_in(words.pop(0), "a part")
        elif word == "unlinked":
            unlinked = True
        else:
            raise NotationError(f"expected 'part NAME' or 'unlinked', got {word!r}")
    rows = tuple(_row(row) for row in (parts.body or "").split(";"))
    names = [row.request for row in rows if row.request != PADDING]
    twice = next((name for i, name in enumerate(names) if name in names[:i]), None)
    if twice is not None:
        raise NotationError(f"a request has one row in a forward, and {twice} has two")
    return happen.Launch(text=parts.text, name=parts.name, rows=rows, part=part, unlinked=unlinked)


def _row(text: str) -> Row:
    request, _, rest = text.strip().partition(" ")
    reads: Places | None = None
    writes: Places | None = None
    fault = Fault()
    for clause in filter(None, (part.strip() for part in rest.split(","))):
        word, _, what = clause.partition(" ")
        if word == "reads":
            _refuse_words(what.split(), ("nothing", "at"))
            reads = () if what.strip() == "nothing" else some(what)
        elif word == "writes":
            writes, fault = _writes(what)
        else:
            following = (
                "; a semicolon goes before the next row" if word[:1].isupper() else near_to(word, ("reads", "writes"))
            )
            raise NotationError(f"a row reads and writes, got {word!r}{following}")
    return Row(name_in(request, "a request"), reads, writes, fault)


def _refuse_words(words: Iterable[str], known: tuple[str, ...]) -> None:
    """Where places are expected: a word that is none, with what was probably meant."""
    for word in words:
        if word in {"reads", "writes"}:
            raise NotationError(f"a comma goes before {word!r}")
        if re.fullmatch("[A-Za-z]+", word) and word not in {*known, "block", "page"}:
            raise NotationError(f"expected slots or one of {listed(known)}, got {word!r}{near_to(word, known)}")


def _writes(text: str) -> tuple[Places, Fault]:
    words = text.split()
    end = next((i for i, word in enumerate(words) if word in _OF_WRITES and word != "at"), len(words))
    _refuse_words(words[:end], _OF_WRITES)
    places = places_in(" ".join(words[:end]))
    at = next((term.at for term in places if term.at is not None), None)
    fault: dict[str, Any] = {"at": at}
    rest = words[end:]
    while rest:
        word = rest.pop(0)
        following = next((i for i, other in enumerate(rest) if other in _CLAUSES), len(rest))
        value, rest = rest[:following], rest[following:]
        if word in {"lost", "nan"} and not value:
            fault[word] = True
        elif word == "tok" and len(value) == 1 and (value[0] == "guess" or value[0].lstrip("-").isdigit()):
            fault["token"] = value[0]
        elif word == "lands":
            fault["lands"] = some(" ".join(value))
        elif word == "only" and value:
            fault["only"] = tuple(name_in(name, "a source") for name in value)
        else:
            found = " ".join([word, *value])
            raise NotationError(
                f"expected tok NUMBER, tok guess, lost, nan, lands SLOTS or only SOURCES, got {found!r}"
            )
    return places, Fault(**fault)


def _run(parts: Parts) -> Happening:
    if not parts.name or parts.body is not None or parts.tail:
        raise NotationError("it is followed by the name of a forward, and nothing else")
    return happen.Run(text=parts.text, name=parts.name)


# --- copies -------------------------------------------------------------------------------------------------


def _copy_start(parts: Parts) -> Happening:
    if not parts.name or parts.body is None:
        raise NotationError("a copy has a name, and its places in brackets")
    sources, targets = arrow(parts.body, maybe_empty=True)
    fields: dict[str, Any] = {}
    words = parts.tail.split()
    while words:
        word = words.pop(0)
        end = next((i for i, other in enumerate(words) if other in _OF_COPIES), len(words))
        value, words = words[:end], words[end:]
        if word == "for" and len(value) == 1:
            fields["request"] = name_in(value[0])
        elif word in {"ordered", "relaid"} and not value:
            fields[word] = True
        elif word == "only" and value:
            fields["only"] = tuple(name_in(name, "a source") for name in value)
        elif word == "taking" and value:
            fields["taking"] = some(" ".join(value))
        else:
            raise NotationError(
                f"{' '.join([word, *value])!r} is none of {listed(_OF_COPIES)}{near_to(word, _OF_COPIES)}"
            )
    return happen.CopyStart(text=parts.text, name=parts.name, sources=sources, targets=targets, **fields)


def _copy_land(parts: Parts) -> Happening:
    if not parts.name or parts.tail:
        raise NotationError("it is followed by the name of a copy")
    words = (parts.body or "").replace(",", " ").split()
    items = [word for word in words if word[0].isdigit()]
    if items and len(items) < len(words):
        raise NotationError("what lands is named by sources or by numbers, not by both")
    numbers = tuple(number for word in items for number in term(word).numbers)
    only = () if items else tuple(name_in(word, "a source") for word in words)
    return happen.CopyLand(text=parts.text, name=parts.name, only=only, items=numbers)


def _copy_told(parts: Parts) -> Happening:
    if not parts.name or parts.body is not None or parts.tail:
        raise NotationError("it is followed by the name of a copy, and nothing else")
    return happen.CopyTold(text=parts.text, name=parts.name, failed=parts.word == "copy_fail")


FORMS: dict[str, Form] = {
    "admit": Form("admit(A) or admit(A, 8)", _admit),
    "alloc": Form("alloc(A, 3..5)", _alloc),
    "free": Form("free(A, 3..5) or free(3..5)", _free),
    "launch": Form("launch F1(A reads 0..7, writes 8; B writes 9)", _launch),
    "run": Form("run F1", _run),
    "retire": Form("retire F1", _run),
    "idle": Form("idle", _idle),
    "publish": Form("publish(0..7, key) or publish(A, 0..7, key)", _publish),
    "hit": Form("hit(B, key)", _hit),
    "evict": Form("evict(key)", _evict),
    "rewind": Form("rewind(A, 5)", _rewind),
    "preempt": Form("preempt(A)", _preempt),
    "finish": Form("finish(A)", _finish),
    "move": Form("move(3 -> 9)", _move),
    "restamp": Form("restamp(4)", _restamp),
    "weights_updated": Form("weights_updated(2)", _weights),
    "copy_start": Form("copy_start X(4 -> h0) for A", _copy_start),
    "copy_land": Form("copy_land X or copy_land X(k) or copy_land X(0..1)", _copy_land),
    "copy_done": Form("copy_done X", _copy_told),
    "copy_fail": Form("copy_fail X", _copy_told),
    "write": Form("write(A, 8) or write(A, 8, 77, 3)", _write),
    "flip": Form("flip(7) or flip(7, k)", _change),
    "spoil": Form("spoil(7) or spoil(7, k)", _change),
    "scramble": Form("scramble(h0..h3)", _change),
    "roll": Form("roll(0..7)", _change),
    "table": Form("table(A, 8..11)", _table),
    "translate": Form("translate(5 -> swa:2)", _translate),
    "verify": Form("verify(4)", _verify),
    "nonfinite": Form("nonfinite(0..15)", _nonfinite),
}
"""Every event, in the order of the documentation."""
