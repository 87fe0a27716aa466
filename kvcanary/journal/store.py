"""The file of one run, as it is written: transactions, the bound on its size, and what is let go to keep it."""

from __future__ import annotations

import contextlib
import re
import sqlite3
from collections.abc import Generator, Sequence
from pathlib import Path

from kvcanary._version import __version__
from kvcanary.events import SCHEMA_VERSION, RunStarted
from kvcanary.journal.format import APPLICATION_ID, FORMAT, SCHEMA, EventEncoder, Frame, Gap
from kvcanary.journal.recorder import Begin, End, Item
from kvcanary.text import encodable

PRUNED = "retention: the file reached its bound"
_INSERT_FRAME = "INSERT OR REPLACE INTO frames VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
_INSERT_FINDING = "INSERT OR REPLACE INTO findings VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
_INSERT_GAP = "INSERT OR REPLACE INTO gaps VALUES (?, ?, ?, ?)"
_BUSY_SECONDS = 5.0
_WAL_BYTES = 8 << 20


class Store:
    """Belongs to the thread that made it. An error leaves the file as it was before the transaction.

    Args:
        path: made if it is not there, continued if it holds this very run.
        begin: the run.
        notes: what else to keep of the run, such as its level.
        limit_bytes: bound of the file; the oldest segments are let go beyond it.
        max_pages: bound of SQLite's own, beyond which the file counts as full; 0: none.

    Raises:
        sqlite3.Error: the file cannot be made or written.
    """

    def __init__(
        self, path: Path, begin: Begin, notes: dict[str, object], *, limit_bytes: int, max_pages: int = 0
    ) -> None:
        self.path = path
        self._limit = limit_bytes
        self._db = sqlite3.connect(path, isolation_level=None, timeout=_BUSY_SECONDS)
        try:
            if max_pages:
                self._db.execute(f"PRAGMA max_page_count = {max_pages}")
            self._prepare(begin.started, notes)
        except BaseException:
            self._db.close()
            raise

    def _prepare(self, started: RunStarted, notes: dict[str, object]) -> None:
        run = self._db.execute
        run(f"PRAGMA application_id = {APPLICATION_ID}")
        run(f"PRAGMA user_version = {FORMAT}")
        # A process that is killed loses nothing that was committed; NORMAL spares the wait for the disk itself, which
        # only a machine that dies would need.
        run("PRAGMA journal_mode = WAL")
        run("PRAGMA synchronous = NORMAL")
        run(f"PRAGMA journal_size_limit = {_WAL_BYTES}")
        # The indices are small and read as a whole; a large cache would be the process's memory.
        run("PRAGMA cache_size = -2048")
        values = {
            "run": encodable(started.run),
            "kvcanary": __version__,
            "schema_version": SCHEMA_VERSION,
            "started": EventEncoder().whole(started),
            **notes,
        }
        with self._transaction():
            for statement in SCHEMA.split(";"):
                run(statement)
            self._db.executemany("INSERT OR IGNORE INTO meta VALUES (?, ?)", list(values.items()))

    def write(self, items: Sequence[Item]) -> None:
        """All of it, or nothing.

        Raises:
            sqlite3.Error: nothing was written.
        """
        frames = [item for item in items if isinstance(item, Frame)]
        gaps = [item for item in items if isinstance(item, Gap)]
        ends = [item.stopped for item in items if isinstance(item, End)]
        rows = [frame.row() for frame in frames]  # compresses; before the transaction, which holds up readers
        with self._transaction():
            self._db.executemany(_INSERT_FRAME, rows)
            self._db.executemany(_INSERT_FINDING, [encodable(found) for frame in frames for found in frame.findings])
            self._db.executemany(_INSERT_GAP, [encodable(gap) for gap in gaps])
            for frame in frames:
                self._db.execute(
                    "INSERT INTO segments VALUES (?, ?, ?, ?) "
                    "ON CONFLICT (segment) DO UPDATE SET last_seq = excluded.last_seq",
                    (frame.segment.number, frame.first_seq, frame.last_seq, frame.segment.opened_by),
                )
            for stopped in ends:
                self._db.execute("INSERT OR REPLACE INTO meta VALUES ('stopped', ?)", (EventEncoder().whole(stopped),))
        self._prune()

    @property
    def bytes_used(self) -> int:
        """Of the file, without the pages that wait to be used again."""
        return (self._number("page_count") - self._number("freelist_count")) * self._number("page_size")

    def _number(self, pragma: str) -> int:
        return int(self._db.execute(f"PRAGMA {pragma}").fetchone()[0])

    def _prune(self) -> None:
        """Let the oldest segments go while the file is too large; the present one stays."""
        while self.bytes_used > self._limit:
            query = "SELECT segment FROM segments ORDER BY segment LIMIT 2"
            numbers = [number for (number,) in self._db.execute(query)]
            if len(numbers) < 2:
                return
            number, following = numbers
            query = "SELECT min(first_seq) - 1 FROM frames WHERE segment = ?"
            (last,) = self._db.execute(query, (following,)).fetchone()
            query = "SELECT max(last_time_ns) FROM frames WHERE segment = ?"
            (moment,) = self._db.execute(query, (number,)).fetchone()
            with self._transaction():
                self._db.execute("DELETE FROM frames WHERE segment = ?", (number,))
                self._db.execute("DELETE FROM segments WHERE segment = ?", (number,))
                self._db.execute("DELETE FROM findings WHERE seq <= ?", (last,))
                self._db.execute("DELETE FROM gaps WHERE last_seq <= ?", (last,))
                self._db.execute(_INSERT_GAP, Gap(1, last, PRUNED, moment or 0))

    @contextlib.contextmanager
    def _transaction(self) -> Generator[None]:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._db.execute("COMMIT")
        except BaseException:
            with contextlib.suppress(sqlite3.Error):
                self._db.execute("ROLLBACK")
            raise

    def close(self) -> None:
        """Fold the write-ahead log into the file, so that it can be copied alone."""
        with contextlib.suppress(sqlite3.Error):
            self._db.close()


def file_of(directory: Path, run: str) -> Path:
    """A name for the file of a run that no file has yet."""
    stem = f"kvcanary-{re.sub(r'[^0-9A-Za-z._-]', '_', run)}"
    path, number = directory / f"{stem}.sqlite", 1
    while path.exists():
        number += 1
        path = directory / f"{stem}-{number}.sqlite"
    return path
