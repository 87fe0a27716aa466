"""Names as clients choose them: request ids may hold newlines, terminal commands, and halves of characters."""

from __future__ import annotations

from collections.abc import Mapping
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
