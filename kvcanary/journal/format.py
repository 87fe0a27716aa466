"""How a run lies in its file: tables, frames of events, and what is noted of a frame so that queries need not open it.

A frame is a piece of the stream without a gap: chunks of events, each a length and a MessagePack array, compressed.
Frames belong to segments. A segment begins where the books of ownership are known: at the run's beginning, or at an
``OwnershipCheckpointed``; so a replay may begin there. ``RunStarted``, which every segment needs first, is kept once.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from kvcanary.events import Event, PageRun, UnknownEvent
from kvcanary.text import encodable, encoded

APPLICATION_ID = 0x6B764A31
"""In the header of every journal, so that no other SQLite file is taken for one (or deleted as one)."""
FORMAT = 1
"""Of tables and frames; that of events is ``SCHEMA_VERSION``."""
FILE_PATTERN = "kvcanary-*.sqlite"

SCHEMA = """
CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS segments (
    segment INTEGER PRIMARY KEY, first_seq INTEGER NOT NULL, last_seq INTEGER NOT NULL, opened_by TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS frames (
    first_seq INTEGER PRIMARY KEY, last_seq INTEGER NOT NULL, segment INTEGER NOT NULL,
    first_forward INTEGER NOT NULL, last_forward INTEGER NOT NULL,
    first_time_ns INTEGER NOT NULL, last_time_ns INTEGER NOT NULL,
    crc INTEGER NOT NULL, requests TEXT NOT NULL, pages BLOB NOT NULL, events BLOB NOT NULL);
CREATE INDEX IF NOT EXISTS frames_of_segment ON frames (segment);
CREATE TABLE IF NOT EXISTS findings (
    seq INTEGER PRIMARY KEY, type TEXT NOT NULL, kind TEXT NOT NULL, incident TEXT NOT NULL, "group" TEXT NOT NULL,
    slot INTEGER NOT NULL, page INTEGER NOT NULL, request TEXT NOT NULL, forward INTEGER NOT NULL,
    time_ns INTEGER NOT NULL, text TEXT NOT NULL);
CREATE INDEX IF NOT EXISTS findings_by_kind ON findings (kind);
CREATE INDEX IF NOT EXISTS findings_by_slot ON findings ("group", slot);
CREATE TABLE IF NOT EXISTS gaps (
    first_seq INTEGER PRIMARY KEY, last_seq INTEGER NOT NULL, reason TEXT NOT NULL, time_ns INTEGER NOT NULL);
"""

_LENGTH = struct.Struct("<I")
_SEPARATOR = "\x1f"
_FAST = 1


class Segment(NamedTuple):
    """A piece of a run that a replay may begin with."""

    number: int
    first_seq: int
    opened_by: str
    """event at which it begins; ``gap`` or ``size`` where no checkpoint came, and a replay knows no owners"""


class Gap(NamedTuple):
    """Events of the run that are not in the file, and why."""

    first_seq: int
    last_seq: int
    reason: str
    time_ns: int = 0

    @property
    def size(self) -> int:
        """How many."""
        return self.last_seq - self.first_seq + 1


class Finding(NamedTuple):
    """One line of the index of findings; -1 and "": does not apply."""

    seq: int
    type: str
    kind: str = ""
    incident: str = ""
    group: str = ""
    slot: int = -1
    page: int = -1
    request: str = ""
    forward: int = 0
    time_ns: int = 0
    text: str = ""


@dataclass(slots=True)
class Frame:
    """Consecutive events, encoded, with what is noted of them. Grows by :meth:`join` until it is written."""

    segment: Segment
    first_seq: int
    last_seq: int
    first_forward: int
    last_forward: int
    first_time_ns: int
    last_time_ns: int
    chunks: list[bytes]
    size: int
    requests: set[str] = field(default_factory=set[str])
    pages: dict[str, list[PageRun]] = field(default_factory=dict[str, list[PageRun]])
    findings: list[Finding] = field(default_factory=list[Finding])

    @property
    def count(self) -> int:
        """Events in it."""
        return self.last_seq - self.first_seq + 1

    def follows(self, before: Frame) -> bool:
        """Whether it goes on where ``before`` ends, in the same segment."""
        return self.first_seq == before.last_seq + 1 and self.segment is before.segment

    def join(self, after: Frame) -> None:
        """Take what follows it."""
        self.last_seq = after.last_seq
        self.first_forward = min(self.first_forward or after.first_forward, after.first_forward or self.first_forward)
        self.last_forward = max(self.last_forward, after.last_forward)
        self.last_time_ns = after.last_time_ns
        self.chunks += after.chunks
        self.size += after.size
        self.requests |= after.requests
        for group, runs in after.pages.items():
            self.pages.setdefault(group, []).extend(runs)
        self.findings += after.findings

    def row(self) -> tuple[object, ...]:
        """Its line in the table ``frames``."""
        data = zlib.compress(
            b"".join(part for chunk in self.chunks for part in (_LENGTH.pack(len(chunk)), chunk)), _FAST
        )
        return (
            self.first_seq,
            self.last_seq,
            self.segment.number,
            self.first_forward,
            self.last_forward,
            self.first_time_ns,
            self.last_time_ns,
            zlib.crc32(data),
            _listed(self.requests),
            encoded(msgspec.msgpack.encode, self.pages),
            data,
        )


def unpack(data: bytes, crc: int) -> Iterator[msgspec.Raw]:
    """The encoded events of a frame.

    Raises:
        ValueError: it is not as it was written.
    """
    check(data, crc)
    try:
        plain = memoryview(zlib.decompress(data))
    except zlib.error as error:
        raise ValueError(str(error)) from error
    decoder = msgspec.msgpack.Decoder(list[msgspec.Raw])
    at = 0
    while at < len(plain):
        (length,) = _LENGTH.unpack_from(plain, at)
        at += _LENGTH.size
        yield from decoder.decode(plain[at : at + length])
        at += length


def check(data: bytes, crc: int) -> None:
    """Whether a frame is as it was written.

    Raises:
        ValueError: it is not.
    """
    if zlib.crc32(data) != crc:
        raise ValueError("checksum differs")


def names_request(requests: str, request: str) -> bool:
    """Whether a frame's list of requests may name this one."""
    return encodable(f"{_SEPARATOR}{request}{_SEPARATOR}") in requests


def names_page(pages: bytes, group: str, page: int) -> bool:
    """Whether a frame's list of pages has this one."""
    runs = msgspec.msgpack.decode(pages, type=dict[str, list[PageRun]]).get(group, ())
    return any(run.first <= page < run.first + run.count for run in runs)


class EventEncoder:
    """Encodes events, whatever they hold: what cannot be written must not cost its neighbours."""

    def __init__(self) -> None:
        self._encoder = msgspec.msgpack.Encoder()

    def encode(self, events: Sequence[Event]) -> bytes:
        """A MessagePack array."""
        try:
            if UnknownEvent not in set(map(type, events)):
                return self._encoder.encode(events)
        except (TypeError, ValueError, OverflowError):  # an event of somebody's own with a field that has no form
            pass
        return self._encoder.encode([self._one(event) for event in events])

    def _encode(self, event: Event) -> bytes:
        try:
            return self._encoder.encode(event)
        except UnicodeEncodeError:
            return self._encoder.encode(encodable(msgspec.to_builtins(event)))

    def whole(self, event: Event) -> bytes:
        """A MessagePack map with all that the event holds.

        Raises:
            TypeError: a field has no form.
        """
        return self._encode(event)

    def _one(self, event: Event) -> msgspec.Raw:
        if isinstance(event, UnknownEvent):
            return msgspec.Raw(_as_msgpack(event.raw))
        try:
            return msgspec.Raw(self._encode(event))
        except (TypeError, ValueError, OverflowError) as error:
            envelope = {name: getattr(event, name) for name in Event.__struct_fields__}
            config = type(event).__struct_config__
            return msgspec.Raw(self._encoder.encode({"type": config.tag, **envelope, "not_written": str(error)}))


def _as_msgpack(raw: bytes) -> bytes:
    return msgspec.msgpack.encode(msgspec.json.decode(raw)) if raw[:1] == b"{" else raw


def _listed(requests: set[str]) -> str:
    return encodable(f"{_SEPARATOR}{_SEPARATOR.join(requests)}{_SEPARATOR}") if requests else ""
