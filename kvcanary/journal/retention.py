"""The bound of a directory of journals: the oldest files go first, never one that somebody writes."""

from __future__ import annotations

import contextlib
import os
import socket
import sqlite3
from pathlib import Path
from typing import NamedTuple

import msgspec

from kvcanary.events import RunStarted
from kvcanary.journal.format import APPLICATION_ID, FILE_PATTERN

_APPLICATION_AT = 68
_SIDES = ("", "-wal", "-shm")


class _Found(NamedTuple):
    modified_ns: int
    size: int
    path: Path


def is_journal(path: Path) -> bool:
    """Whether the file's header says that it is one of ours."""
    try:
        with path.open("rb") as file:
            header = file.read(_APPLICATION_AT + 4)
    except OSError:
        return False
    return header[:15] == b"SQLite format 3" and int.from_bytes(header[_APPLICATION_AT:], "big") == APPLICATION_ID


def make_room(directory: Path, limit_bytes: int, keep: Path) -> list[Path]:
    """Delete the oldest journals that nobody writes until the directory's are within ``limit_bytes``.

    Other files are never touched, nor ``keep``. Returns what was deleted.
    """
    found = sorted(entry for path in directory.glob(FILE_PATTERN) if (entry := _look(path)) is not None)
    total = sum(entry.size for entry in found)
    deleted: list[Path] = []
    for entry in found:
        if total <= limit_bytes:
            break
        if entry.path != keep and is_journal(entry.path) and not _in_use(entry.path):
            _delete(entry.path)
            deleted.append(entry.path)
            total -= entry.size
    return deleted


def _look(path: Path) -> _Found | None:
    try:
        stats = [side.stat() for name in _SIDES if (side := Path(f"{path}{name}")).exists()]
    except OSError:  # another process deletes too
        return None
    if not stats:
        return None
    return _Found(max(stat.st_mtime_ns for stat in stats), sum(stat.st_size for stat in stats), path)


def _in_use(path: Path) -> bool:
    """Whether its run goes on, as far as this host can tell: what it cannot tell counts as in use."""
    try:
        with contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as db:
            meta = dict(db.execute("SELECT key, value FROM meta WHERE key IN ('started', 'stopped')"))
        if "stopped" in meta:
            return False
        origin = msgspec.msgpack.decode(meta["started"], type=RunStarted).origin
    except sqlite3.OperationalError:  # locked, or being made
        return True
    except (sqlite3.Error, msgspec.MsgspecError, KeyError):
        return False  # damaged: nobody can write it
    return origin.host != socket.gethostname() or _alive(origin.pid)


def _alive(pid: int) -> bool:
    if pid <= 0:
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def _delete(path: Path) -> None:
    for name in _SIDES:
        with contextlib.suppress(OSError):
            Path(f"{path}{name}").unlink()
