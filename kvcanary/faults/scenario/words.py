"""The words that events of a scenario are made of: names, numbers, places."""

from __future__ import annotations

import re
from collections.abc import Iterable

from kvcanary.errors import KVCanaryError
from kvcanary.faults.scenario.happenings import Places, Term

PADDING = "pad"
"""The request of padding rows."""
MOST = 1 << 16
"""Numbers that one range may have, and tokens of a request."""
_NAME = re.compile(r"[A-Za-z_][\w.\-]*")
_TERM = re.compile(
    r"(?:(?P<group>[A-Za-z][\w.]*):)?(?P<blocks>(?:block|page)\s+)?(?P<letter>[a-z]?)(?P<first>-?\d+)"
    r"(?:\.\.(?P<again>[a-z]?)(?P<last>\d+))?"
)


class NotationError(KVCanaryError, ValueError):
    """An event that is not written as the notation has it."""


def listed(names: Iterable[str]) -> str:
    """Names in a row."""
    return ", ".join(names)


def name_in(text: str, what: str = "a name") -> str:
    """A request, key, forward, copy or source."""
    if not _NAME.fullmatch(text.strip()):
        raise NotationError(f"expected {what}, got {text!r}")
    return text.strip()


def number_in(text: str, what: str = "a whole number") -> int:
    """A whole number."""
    if not re.fullmatch(r"-?\d+", text.strip()):
        raise NotationError(f"expected {what}, got {text!r}")
    return int(text)


def length_in(text: str) -> int:
    """A number of tokens."""
    number = number_in(text, "a number of tokens")
    if not 0 <= number <= MOST:
        raise NotationError(f"expected a number of tokens from 0 to {MOST}, got {number}")
    return number


def places_in(text: str) -> Places:
    """``0..7 12 swa:2..4 at 8``: places in one or more spaces, in the order of positions."""
    words = re.sub(r"\b(block|page)\s+(?=\d)", r"\1 ", text.replace(",", " ")).split()
    terms: list[Term] = []
    i = 0
    while i < len(words):
        word = words[i]
        if word == "at":
            if not terms or i + 1 == len(words):
                raise NotationError("'at' follows places and is followed by a position")
            terms[-1] = Term(terms[-1].space, terms[-1].numbers, number_in(words[i + 1]), terms[-1].blocks)
            i += 2
            continue
        if word == "-":
            space = terms[-1].space if terms else ""
            terms.append(Term(space, (-1,)))
            i += 1
            continue
        if re.fullmatch(r"(?:[A-Za-z][\w.]*:)?(?:block|page)", word) and i + 1 < len(words):
            word = f"{word} {words[i + 1]}"
            i += 1
        terms.append(term(word))
        i += 1
    return tuple(terms)


def term(word: str) -> Term:
    """One place, or one range of them."""
    found = _TERM.fullmatch(word)
    if found is None:
        raise NotationError(f"expected slots such as 4, 0..7, h0, r4..r11, swa:2 or block 0, got {word!r}")
    first = int(found["first"])
    last = int(found["last"]) if found["last"] is not None else first
    if last < first or last - first > MOST:
        raise NotationError(f"{word!r} is no range: it ends before it begins, or has more than {MOST} numbers")
    if found["again"] and found["again"] != found["letter"]:
        raise NotationError(f"{word!r} begins in one space and ends in another")
    if found["group"] and found["letter"]:
        raise NotationError(f"{word!r} names a group and a tier; choose one")
    return Term(found["group"] or found["letter"], tuple(range(first, last + 1)), blocks=bool(found["blocks"]))


def some(text: str) -> Places:
    """Places, at least one."""
    places = places_in(text)
    if not places:
        raise NotationError("expected slots, got none")
    return places


def arrow(text: str, *, maybe_empty: bool = False) -> tuple[Places, Places]:
    """``from -> to``."""
    before, arrow, after = text.partition("->")
    if not arrow:
        raise NotationError(f"expected 'from -> to', got {text!r}")
    return (places_in(before) if maybe_empty else some(before)), some(after)
