"""On which line of a TOML file a value stands. All but :meth:`Lines.without_comma` take its syntax for right."""

from __future__ import annotations

import re

_HEADER = re.compile(r"^\s*\[+\s*([^\]]+?)\s*\]+\s*(?:#.*)?$")
_KEY = re.compile(r"^\s*([\w.\-\"']+)\s*=")
_STRING = re.compile(r"#[^\n]*|\"(?:[^\"\\\n]|\\.)*\"|'[^'\n]*'|\{|\}")
Path = tuple[str | int, ...]


class Lines:
    """Where keys, and the items of lists, begin. Lines count from 1."""

    def __init__(self, text: str) -> None:
        self._lines = text.splitlines()
        self._keys = self._find()

    def of(self, path: Path) -> int:
        """The line of a value, or of the nearest one around it that has a line of its own."""
        names = tuple(part for part in path if isinstance(part, str))
        while names:
            line = self._keys.get(names)
            if line is not None:
                item = next((part for part in path if isinstance(part, int)), None)
                return line if item is None else self._item(line, item)
            names = names[:-1]
        return 1

    def without_comma(self, line: int) -> int | None:
        """The line before ``line`` if a list's items stand on both and no comma between them; else None."""
        item = self._code(line)
        before = next((n for n in range(line - 1, 0, -1) if self._code(n)), 0)
        if not item.startswith(('"', "'", "{")) or not before or self._code(before)[-1] not in "\"'}":
            return None
        return before

    def _code(self, line: int) -> str:
        """A line without its comment."""
        text = self._lines[line - 1] if line <= len(self._lines) else ""
        comment = next((found.start() for found in _STRING.finditer(text) if found[0].startswith("#")), len(text))
        return text[:comment].strip()

    def _find(self) -> dict[tuple[str, ...], int]:
        """The first line of every key and table, and of the tables that dotted keys imply."""
        found: dict[tuple[str, ...], int] = {}
        table: tuple[str, ...] = ()
        for number, line in enumerate(self._lines, 1):
            header = _HEADER.match(line)
            key = _KEY.match(line)
            if header is not None:
                names = table = _parts(header[1])
            elif key is not None:
                names = table + _parts(key[1])
            else:
                continue
            for end in range(1, len(names) + 1):
                found.setdefault(names[:end], number)
        return found

    def _item(self, line: int, item: int) -> int:
        """The line of the n-th string, or inline table, of the list that begins on ``line``."""
        count = 0
        depth = 0
        for number in range(line, len(self._lines) + 1):
            text = self._lines[number - 1]
            start = text.index("=") + 1 if number == line else 0
            for piece in _STRING.findall(text[start:]):
                if piece.startswith("#"):
                    break
                if piece == "}":
                    depth -= 1
                elif depth == 0:
                    if count == item:
                        return number
                    count += 1
                depth += piece == "{"
        return line


def _parts(dotted: str) -> tuple[str, ...]:
    return tuple(part.strip(" \"'") for part in dotted.split("."))
