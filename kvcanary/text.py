"""Names as others choose them: request ids hold newlines, terminal commands, half characters; words are misspelt."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast


def printable(text: str) -> str:
    r"""The text for a line that people read: what is no printable character becomes ``\n``, ``\x1b``, ``\ud800``."""
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)


def encodable(value: Any) -> Any:
    r"""A plain value whose strings UTF-8 can hold: lone surrogates, which JSON lets clients send, become ``\ud800``."""
    if isinstance(value, str):
        return value if value.isascii() else value.encode(errors="backslashreplace").decode()
    if isinstance(value, Mapping):
        plain: Mapping[Any, Any] = value
        return {encodable(name): encodable(item) for name, item in plain.items()}
    if isinstance(value, (list, tuple)):
        return [encodable(item) for item in cast("list[Any]", value)]
    return value


def encoded(encode: Callable[[Any], bytes], value: Any) -> bytes:
    """What ``encode`` makes of a plain value; of :func:`encodable` where it cannot."""
    try:
        return encode(value)
    except UnicodeEncodeError:
        return encode(encodable(value))


def near_to(word: str, known: Iterable[str]) -> str:
    """A hint at the word that was probably meant, to be put behind the one that was found; "" if none is near."""
    near = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f" (did you mean {near[0]!r}?)" if near else ""
