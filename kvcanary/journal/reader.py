"""Reading journals: the file of a run that is over, that goes on, or whose process was killed.

What is missing is never passed over: in its place :meth:`JournalFile.read` gives a
:class:`~kvcanary.journal.format.Gap`, with the reason that was written down, or that none was.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Callable, Generator, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, Self, TypeVar

import msgspec
from msgspec.structs import force_setattr

from kvcanary.errors import KVCanaryError
from kvcanary.events import SCHEMA_VERSION, Event, RunStarted, RunStopped, UnknownEvent, msgpack_codec
from kvcanary.journal.format import (
    APPLICATION_ID,
    FILE_PATTERN,
    FORMAT,
    Finding,
    Gap,
    Segment,
    check,
    names_page,
    names_request,
    unpack,
)

T = TypeVar("T")

UNEXPLAINED = "missing, and nothing says why"
DAMAGED = "damaged in the file"


class JournalError(KVCanaryError, ValueError):
    """A file that is no journal, is damaged beyond reading, or was written by a newer version."""


class Query(NamedTuple):
    """What to look for; what is given must fit together. ``page``: group and number."""

    first_seq: int = 0
    last_seq: int = 1 << 62
    first_forward: int = 0
    last_forward: int = 1 << 62
    request: str = ""
    page: tuple[str, int] | None = None


EVERYTHING = Query()


class _Row(NamedTuple):
    """What chooses a frame."""

    first_seq: int
    last_seq: int
    first_forward: int
    last_forward: int
    requests: str
    pages: bytes


class _Span(NamedTuple):
    first_seq: int
    last_seq: int


# The names are those of the class above, never a caller's text.
_ROWS = f"SELECT {', '.join(_Row._fields)} FROM frames WHERE first_seq > ? AND last_seq >= ? AND first_seq <= ?"  # noqa: S608
_FRAMES = f"{_ROWS} ORDER BY first_seq LIMIT 256"
_FRAMES_BACKWARDS = f"{_ROWS} ORDER BY first_seq DESC"


class JournalFile:
    """One run's file, opened to be read. The run may go on.

    Attributes:
        path: the file.
        started: first event of the run.
        stopped: last event, or None: the run goes on, or its process was killed.
        level: ``incidents`` or ``all``.
        redacted: token ids and digests were withheld.
        schema_version: of the events. Older ones are read as they were; of newer ones, what this version does not know
            stays in :class:`~kvcanary.events.UnknownEvent`, byte for byte, or in fields that are passed over.
        damage: what was found to be broken so far, in words; what can be read is read all the same.

    Raises:
        JournalError: there is no such file, or it is no journal that can be read.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = path = Path(path)
        self.damage = ""
        self._torn = False  # some frames cannot be found at all
        if not path.is_file():
            raise JournalError(f"there is no journal {str(path)!r}; give a file that a run wrote, or its directory")
        try:
            self._db = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)
        except sqlite3.Error as error:
            raise self._unreadable(error) from error
        self._db.text_factory = _text
        try:
            self._admit_lost_tail()
            self._check_header()
            meta: dict[str, Any] = dict(self._db.execute("SELECT key, value FROM meta"))
            self.started = msgspec.msgpack.decode(meta["started"], type=RunStarted)
            stopped = meta.get("stopped")
            self.stopped = msgspec.msgpack.decode(stopped, type=RunStopped) if stopped is not None else None
        except sqlite3.Error as error:
            self._db.close()
            raise self._unreadable(error) from error
        except (msgspec.MsgspecError, KeyError) as error:
            self._db.close()
            raise JournalError(f"{path} does not say which run it holds ({error}); it is damaged") from error
        except JournalError:
            self._db.close()
            raise
        self.level = str(meta.get("level", "all"))
        self.redacted = bool(meta.get("redacted", 0))
        self.schema_version = int(meta.get("schema_version", SCHEMA_VERSION))
        self._codec = msgpack_codec()

    def _admit_lost_tail(self) -> None:
        """SQLite refuses a file that is shorter than it should be; with this it reads what is there."""
        try:
            self._db.execute("PRAGMA user_version").fetchone()
        except sqlite3.DatabaseError as error:
            if "malformed" not in str(error):
                raise
            self._db.execute("PRAGMA writable_schema = ON")

    def _check_header(self) -> None:
        (application,) = self._db.execute("PRAGMA application_id").fetchone()
        (version,) = self._db.execute("PRAGMA user_version").fetchone()
        if application != APPLICATION_ID:
            raise JournalError(f"{self.path} is a database of something else, no journal of kvcanary")
        if version > FORMAT:
            raise JournalError(
                f"{self.path} has format {version}, this version reads up to {FORMAT}; use a newer kvcanary"
            )

    def _unreadable(self, error: sqlite3.Error) -> JournalError:
        hint = "it is no journal of kvcanary, or damaged"
        if "unable to open" in str(error) or "readonly" in str(error):
            hint = (
                "a journal whose process was killed needs a directory that can be written: copy it, with its -wal file"
            )
        return JournalError(f"{self.path} cannot be read ({error}): {hint}")

    @property
    def notice(self) -> str:
        """What a reader should be told before the rest, or ""."""
        if self.schema_version <= SCHEMA_VERSION:
            return ""
        return (
            f"{self.path.name} has events of schema {self.schema_version}, this version knows {SCHEMA_VERSION}: "
            f"what is new in them is passed over"
        )

    # --- the whole ----------------------------------------------------------------------------------------

    @property
    def last_seq(self) -> int:
        """Number of the run's last event, as far as the file knows."""
        if self.stopped is not None:
            return self.stopped.seq
        spans = (span for table in ("frames", "gaps", "segments") for span in self._spans(table))
        return max((span.last_seq for span in spans), default=0)

    @property
    def count(self) -> int:
        """Events in the file."""
        return sum(span.last_seq - span.first_seq + 1 for span in self._spans("frames"))

    @property
    def last_time_ns(self) -> int:
        """Wall clock of the last event in the file."""
        times = (moment for (moment,) in self._rows("SELECT last_time_ns FROM frames", (), tuple[int]))
        return max(times, default=self.started.time_ns)

    def segments(self) -> list[Segment]:
        """Where a replay may begin, in order."""
        return self._rows("SELECT segment, first_seq, opened_by FROM segments ORDER BY first_seq", (), Segment)

    def findings(self, **equal: Any) -> list[Finding]:
        """The index of findings, in order; only those whose columns equal what is given."""
        known = {name: value for name, value in equal.items() if name in Finding._fields}
        if known != equal:
            raise KeyError(f"findings have no column {', '.join(sorted(equal.keys() - known.keys()))}")
        where = " AND ".join(f'"{name}" = ?' for name in known) or "1"
        # The names are those of the class above, never a caller's text.
        query = f"SELECT * FROM findings WHERE {where} ORDER BY seq"  # noqa: S608
        return self._rows(query, tuple(known.values()), Finding)

    def gaps(self) -> list[Gap]:
        """All that is missing, in order, with the reasons that were written down. Reads the whole file."""
        return [item for item in self._walk(EVERYTHING, events=False) if isinstance(item, Gap)]

    # --- events -------------------------------------------------------------------------------------------

    def read(self, query: Query = EVERYTHING) -> Iterator[Event | Gap]:
        """Events of the frames that may hold what fits, in order; gaps in their places.

        Only numbers are looked at event by event: requests, pages and forwards choose frames.
        """
        return self._walk(query, events=True)

    def events(self, query: Query = EVERYTHING) -> Iterator[Event]:
        """Events alone."""
        return (item for item in self._walk(query, events=True) if isinstance(item, Event))

    def _walk(self, query: Query, *, events: bool) -> Iterator[Event | Gap]:
        end = min(query.last_seq, self.last_seq)  # first: a run that goes on writes on behind it
        expected = max(1, query.first_seq)
        whole = query[2:] == EVERYTHING[2:]
        for row in self._frames(query):
            if row.first_seq > expected and (whole or self._torn):
                yield from self._missing(expected, row.first_seq - 1)
            if _may_fit(row, query):
                yield from self._open(row, query, events=events)
            expected = max(expected, row.last_seq + 1)
        if end >= expected and (whole or self._torn):
            yield from self._missing(expected, end)
        elif self._torn and self.stopped is None and query.last_seq >= expected:
            yield Gap(expected, expected, f"{self.damage}; what came from here on, nobody can tell")

    def _frames(self, query: Query) -> Iterator[_Row]:
        """Rows of frames, without their events. A few at a time: a reader must not hold up a run that goes on."""
        after, torn = -1, False
        while not torn:
            rows, torn = self._some(_FRAMES, (after, query.first_seq, query.last_seq), _Row)
            for row in rows:
                if row.first_seq <= after:  # a damaged index leads back to what was read
                    torn = self._note_damage("frames out of order")
                    break
                yield row
                after = row.first_seq
            if not rows:
                break
        if torn:  # from the other end, up to what is broken
            self._torn = True
            behind: list[_Row] = []
            for row in self._rows(_FRAMES_BACKWARDS, (after, query.first_seq, query.last_seq), _Row):
                if not after < row.first_seq < (behind[-1].first_seq if behind else row.first_seq + 1):
                    break
                behind.append(row)
            yield from reversed(behind)

    def _missing(self, first: int, last: int) -> Iterator[Gap]:
        """Numbers that no frame has, split by the reasons that were told."""
        told = self._rows("SELECT * FROM gaps WHERE last_seq >= ? AND first_seq <= ? ORDER BY 1", (first, last), Gap)
        unexplained = self.damage or UNEXPLAINED
        for gap in told:
            if gap.first_seq > first:
                yield Gap(first, gap.first_seq - 1, unexplained)
            upto = min(last, gap.last_seq)
            yield Gap(max(first, gap.first_seq), upto, gap.reason, gap.time_ns)
            first = upto + 1
        if first <= last:
            yield Gap(first, last, unexplained)

    def _open(self, row: _Row, query: Query, *, events: bool) -> Iterator[Event | Gap]:
        first = row.first_seq
        try:
            ((crc, data),) = self._db.execute("SELECT crc, events FROM frames WHERE first_seq = ?", (first,))
            if not events:
                check(data, crc)
                return
            found = [self._decode(bytes(raw), first + at) for at, raw in enumerate(unpack(data, crc))]
        except (sqlite3.DatabaseError, ValueError, TypeError, msgspec.MsgspecError) as error:
            self._note_damage(error)
            yield Gap(first, row.last_seq, self.damage)
            return
        for event in found:
            if query.first_seq <= event.seq <= query.last_seq:
                yield event

    def _decode(self, raw: bytes, seq: int) -> Event:
        try:
            event = self._codec.decode(raw)
        except msgspec.ValidationError:  # a known type in a shape that is not known: of another version, or not written
            envelope = msgspec.msgpack.decode(raw, type=dict[str, Any])
            event = UnknownEvent(
                **{name: envelope.get(name, 0) for name in Event.__struct_fields__},
                type_name=str(envelope.get("type", "")),
                raw=raw,
            )
        if event.seq != seq:  # one that was unknown to the writer too keeps its bytes, with the number it came with
            force_setattr(event, "seq", seq)
        return event

    def _spans(self, table: str) -> list[_Span]:
        return self._rows(f"SELECT first_seq, last_seq FROM {table}", (), _Span)  # noqa: S608 - names of this module

    def _rows(self, query: str, values: Sequence[Any], shape: type[T]) -> list[T]:
        return self._some(query, values, shape)[0]

    def _some(self, query: str, values: Sequence[Any], shape: type[T]) -> tuple[list[T], bool]:
        """The rows up to the first one that is broken, and whether there is one.

        Raises:
            JournalError: nothing can be read any more.
        """
        found: list[T] = []
        try:
            rows = self._db.execute(query, values)
            found.extend(msgspec.convert(row, shape) for row in islice(rows, self._most_rows()))
            if next(rows, None) is not None:
                return found, self._note_damage("more rows than it has bytes")
        except sqlite3.OperationalError as error:
            raise self._unreadable(error) from error
        except (sqlite3.DatabaseError, msgspec.ValidationError) as error:
            return found, self._note_damage(error)
        return found, False

    def _most_rows(self) -> int:
        """More than any table can have: a damaged one may lead in a circle."""
        ((pages,),) = self._db.execute("PRAGMA page_count")
        ((size,),) = self._db.execute("PRAGMA page_size")
        return int(pages) * int(size)

    def _note_damage(self, what: object) -> bool:
        self.damage = f"{DAMAGED} ({what})"
        return True

    def close(self) -> None:
        """Close the file."""
        self._db.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _text(raw: bytes) -> str:
    return raw.decode(errors="replace")


def _may_fit(row: _Row, query: Query) -> bool:
    if row.last_forward < query.first_forward or row.first_forward > query.last_forward:
        return False
    if query.request and not names_request(row.requests, query.request):
        return False
    try:
        return query.page is None or names_page(row.pages, *query.page)
    except msgspec.MsgspecError:  # damaged: its events will tell
        return True


def find_files(target: str | Path) -> list[Path]:
    """The journals of a directory, oldest run first, or the one file.

    Raises:
        JournalError: there is none.
    """
    path = Path(target)
    if path.is_dir():
        found = sorted(path.glob(FILE_PATTERN))
        if not found:
            raise JournalError(f"{str(path)!r} holds no journal ({FILE_PATTERN}); is it the directory of `journal=`?")
        return found
    if not path.exists():
        raise JournalError(f"there is no {str(path)!r}; give a journal or a directory of journals")
    return [path]


@contextlib.contextmanager
def open_files(
    target: str | Path, on_error: Callable[[JournalError], None] | None = None
) -> Generator[list[JournalFile]]:
    """The journals of a directory, or one file, opened.

    ``on_error`` is told of those of a directory that cannot be read, as long as another one can.

    Raises:
        JournalError: there is none, or one cannot be read.
    """
    with contextlib.ExitStack() as stack:
        files: list[JournalFile] = []
        errors: list[JournalError] = []
        for path in find_files(target):
            try:
                files.append(stack.enter_context(JournalFile(path)))
            except JournalError as error:
                errors.append(error)
        if errors and (on_error is None or not files):
            raise errors[0]
        for unread in errors:
            if on_error is not None:
                on_error(unread)
        yield files
