"""The file of the present run, and the bounds that it keeps within."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from kvcanary.journal.recorder import SEGMENT_BYTES, Begin, End, Item
from kvcanary.journal.retention import make_room
from kvcanary.journal.store import Store, file_of


class Bounds(NamedTuple):
    """Sizes in bytes.

    Attributes:
        file: of one run's file.
        directory: of all journals in the directory.
        queue: of encoded events that wait for the disk.
        ring: of encoded events that wait for a finding, at level ``incidents``.
        segment: at which a segment is long enough.
        pages: pages of SQLite at which a file counts as full; 0: the disk alone says so.
    """

    file: int = 256 << 20
    directory: int = 2 << 30
    queue: int = 32 << 20
    ring: int = 8 << 20
    segment: int = SEGMENT_BYTES
    pages: int = 0


class Writer:
    """The file of the present run. After an error it is closed, and opened again by the next try."""

    def __init__(self, directory: Path, bounds: Bounds, notes: dict[str, object]) -> None:
        self._directory = directory
        self._bounds = bounds
        self._notes = notes
        self._begin: Begin | None = None
        self._store: Store | None = None
        self.path: Path | None = None

    def write(self, items: Sequence[Item]) -> None:
        """Items of one run, all of them or none; the first may begin it, the last may end it."""
        first = items[0]
        if isinstance(first, Begin) and first is not self._begin:
            self._open(first)
        begin, path = self._begin, self.path
        if begin is None or path is None:
            raise ValueError("items of a journal must follow the Begin of their run")
        if self._store is not None and not path.exists():
            self.close()
            raise FileNotFoundError(f"somebody deleted {path}; it is begun anew if that is possible")
        if self._store is None:
            self._store = Store(path, begin, self._notes, limit_bytes=self._bounds.file, max_pages=self._bounds.pages)
        try:
            self._store.write(items)
        except sqlite3.Error:
            self.close()
            raise
        if isinstance(items[-1], End):
            self.close()

    def _open(self, begin: Begin) -> None:
        self.close()
        path = file_of(self._directory, begin.started.run)
        make_room(self._directory, self._bounds.directory - self._bounds.file, keep=path)
        self._begin, self.path = begin, path

    def close(self) -> None:
        """Close the file."""
        store, self._store = self._store, None
        if store is not None:
            store.close()
