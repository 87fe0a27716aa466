"""``kvcanary journal``: look into what a run recorded. Needs no torch."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TextIO

import msgspec

from kvcanary.cli.journal_words import (
    Concerns,
    concerns_page,
    concerns_request,
    concerns_slot,
    fits_kind,
    not_negative,
    nothing_fits,
    place,
    rank_of,
    say,
    span,
)
from kvcanary.errors import ConfigError
from kvcanary.events import Event, UnknownEvent, event_name, json_codec
from kvcanary.journal.format import Gap
from kvcanary.journal.reader import EVERYTHING, JournalError, JournalFile, Query, open_files
from kvcanary.journal.recorder import NOT_KEPT
from kvcanary.observers.log_format import iso_time
from kvcanary.text import printable

if TYPE_CHECKING:
    from rich.table import Table


def journal(
    target: Path,
    /,
    *,
    incidents: bool = False,
    request: str = "",
    page: str = "",
    slot: str = "",
    where: str = "",
    forwards: str = "",
    seq: str = "",
    limit: int = 200,
    json: bool = False,
) -> int:
    """Look into journals: which runs there are, what was found, and what happened to a slot, a page or a request.

    Without an option it lists the runs of a directory, or says what one file holds. With several options, events are
    shown that fit all of them. What is missing from a file is said, with the reason.

    Examples:
      kvcanary journal runs/                              the runs of a directory
      kvcanary journal runs/ --incidents                  what was found in them
      kvcanary journal runs/ --request chat-7             a request's history, in every run
      kvcanary journal run.sqlite --page full:12          who had page 12 of group full
      kvcanary journal run.sqlite --slot full:197         the same for one slot, with what was found there
      kvcanary journal run.sqlite --where CONTENT         events of a kind, or of a type such as pages.freed
      kvcanary journal run.sqlite --forwards 40:60 --json whole events as JSON lines

    Args:
        target: a journal, or a directory of journals.
        incidents: one line for each incident.
        request: events that name this request.
        page: GROUP:NUMBER; events in which the page changes hands or something was found on it.
        slot: GROUP:NUMBER; events of the slot's page, and what was found in the slot.
        where: a kind of finding or a type of event.
        forwards: FIRST:LAST; events of these forwards.
        seq: FIRST:LAST; events with these numbers.
        limit: lines to show at most, the newest; 0 for all.
        json: one JSON object a line.

    Returns:
        The exit status.
    """
    not_negative(limit, "--limit")
    unread: list[JournalError] = []
    with open_files(target, unread.append) as files:
        tell_notices(files, unread)
        if incidents:
            _show_incidents(files, limit, json=json)
        elif any((request, page, slot, where, forwards, seq)):
            wanted = Wanted(request, page, slot, where, forwards, seq)
            _show_events(files, wanted, limit, json=json)
        else:
            _show_runs(files, json=json)
        return int(tell_damage(files) or bool(unread))


def tell_notices(files: Sequence[JournalFile], errors: Sequence[JournalError]) -> None:
    """Say which files could not be read, or not in full."""
    notices = [file.notice for file in files if file.notice]
    for text in (*map(str, errors), *notices):
        print(f"kvcanary: {text}", file=sys.stderr)


def tell_damage(files: Sequence[JournalFile]) -> bool:
    """Say what was found to be broken while the files were read; whether anything was."""
    broken = [file for file in files if file.damage]
    for file in broken:
        print(f"kvcanary: {file.path.name} is {file.damage}; this is what could be read of it", file=sys.stderr)
    return bool(broken)


class Wanted(NamedTuple):
    """What was asked for, as it was written."""

    request: str
    page: str
    slot: str
    where: str
    forwards: str
    seq: str

    def query(self, file: JournalFile) -> tuple[Query, list[Concerns]]:
        """What to read of a file, and what to look for in it."""
        query, tests = EVERYTHING, list[Concerns]()
        if self.seq:
            first, last = span(self.seq, "--seq")
            query = query._replace(first_seq=first, last_seq=last)
        if self.forwards:
            first, last = span(self.forwards, "--forwards")
            query = query._replace(first_forward=first, last_forward=last)
            tests.append(lambda event: first <= event.forward <= last)
        if self.request:
            query = query._replace(request=self.request)
            tests.append(concerns_request(self.request))
        if self.page:
            group, number = place(self.page, "--page")
            _group_of(file, group, "--page")
            query = query._replace(page=(group, number))
            tests.append(concerns_page(group, number))
        if self.slot:
            group, number = place(self.slot, "--slot")
            held = number // _group_of(file, group, "--slot")
            query = query._replace(page=(group, held))
            tests.append(concerns_slot(group, held, number))
        if self.where:
            tests.append(fits_kind(self.where))
        return query, tests


def _group_of(file: JournalFile, group: str, option: str) -> int:
    """The page size of a group.

    Raises:
        ConfigError: the run has no such group.
    """
    sizes = {info.name: info.page_size for info in file.started.groups}
    if group not in sizes:
        raise ConfigError(f"{option} names group {group!r}; {file.path.name} has {', '.join(sizes) or 'none'}")
    return sizes[group]


# --- lines --------------------------------------------------------------------------------------------------


def _show_runs(files: Sequence[JournalFile], *, json: bool) -> None:
    rows = [_run(file) for file in files]
    if json:
        _print_json(rows)
        return
    table = _table(
        "run", "from", "engine", "began (UTC)", "seconds", "ended", "level", "events", "incidents", "missing"
    )
    for row in rows:
        _add(
            table,
            row["run"],
            row["from"],
            row["engine"],
            row["began"][:19],
            f"{row['seconds']:.1f}",
            row["ended"],
            row["level"],
            f"{row['events']:,}",
            f"{row['incidents']:,}",
            f"{row['missing']:,}",
        )
    _print(table)
    for row in rows:
        for reason, count in row["missing_because"].items():
            print(printable(f"{row['run']}: {count:,} events missing: {reason}"))


def _run(file: JournalFile) -> dict[str, Any]:
    started, stopped = file.started, file.stopped
    because: dict[str, int] = {}
    for gap in file.gaps():
        because[gap.reason] = because.get(gap.reason, 0) + gap.size
    ended = "goes on, or was killed" if stopped is None else stopped.reason
    return {
        "run": started.run,
        "file": str(file.path),
        "from": rank_of(started.origin),
        "engine": f"{started.origin.engine} {started.origin.engine_version}".strip(),
        "mode": started.mode,
        "began": iso_time(started.time_ns),
        "seconds": round(max(0, file.last_time_ns - started.time_ns) / 1e9, 3),
        "ended": ended if stopped is None or stopped.clean else f"{ended} (not clean)",
        "level": file.level,
        "redacted": file.redacted,
        "events": file.count,
        "incidents": len(file.findings(type="incident.opened")),
        "missing": sum(because.values()),
        "missing_because": because,
        "bytes": file.path.stat().st_size,
    }


def _show_incidents(files: Sequence[JournalFile], limit: int, *, json: bool) -> None:
    found = [(file, row) for file in files for row in file.findings(type="incident.opened")]
    shown = found[-limit:] if limit else found
    if json:
        _say_missing(files, (NOT_KEPT,), sys.stderr)
        seqs = ((file, Query(first_seq=row.seq, last_seq=row.seq)) for file, row in shown)
        _print_json([_whole(file, event) for file, query in seqs for event in file.events(query)])
        return
    table = _table("time (UTC)", "incident", "seq", "forward", "headline")
    for _, row in shown:
        _add(table, iso_time(row.time_ns)[:23], row.incident, str(row.seq), str(row.forward), row.text)
    _print(table)
    _say_rest(len(found), len(shown), "incidents")
    _say_missing(files, (NOT_KEPT,))  # in what was left out on purpose, nothing was found


def _show_events(files: Sequence[JournalFile], wanted: Wanted, limit: int, *, json: bool) -> None:
    found = [(file, event) for file in files for event in _matching(file, wanted)]
    if wanted.where and not found:
        nothing_fits(wanted.where)
    found.sort(key=lambda entry: entry[1].time_ns)
    shown = found[-limit:] if limit else found
    if json:
        _say_missing(files, out=sys.stderr)
        _print_json([_whole(file, event) for file, event in shown])
        return
    several = len(files) > 1
    table = _table(*(("run",) if several else ()), "time (UTC)", "seq", "forward", "event", "what")
    for file, event in shown:
        run = (file.started.run,) if several else ()
        cells = (iso_time(event.time_ns)[:23], str(event.seq), str(event.forward or ""), event_name(event), say(event))
        _add(table, *run, *cells)
    _print(table)
    _say_rest(len(found), len(shown), "events")
    _say_missing(files)


def _say_missing(files: Sequence[JournalFile], meant: tuple[str, ...] = (), out: TextIO | None = None) -> None:
    """Say what the files lack, but for gaps whose reasons are ``meant``."""
    for file in files:
        missing = sum(gap.size for gap in file.gaps() if gap.reason not in meant)
        if missing:
            why = f"`kvcanary journal {file.path}` says why"
            print(f"{file.path.name} lacks {missing:,} events of its run; {why}", file=out)


def _matching(file: JournalFile, wanted: Wanted) -> Iterator[Event]:
    query, tests = wanted.query(file)
    for event in file.read(query):
        if isinstance(event, Gap):
            where = f"{file.path.name}: events {event.first_seq} to {event.last_seq}"
            print(printable(f"{where}: {event.reason}"), file=sys.stderr)
        elif all(test(event) for test in tests):
            yield event


def _whole(file: JournalFile, event: Event) -> dict[str, Any]:
    return {"run": file.started.run, **as_json(event)}


def as_json(event: Event) -> dict[str, Any]:
    """All fields of an event, as its JSON form has them."""
    if isinstance(event, UnknownEvent):
        return msgspec.msgpack.decode(event.raw, type=dict[str, Any])
    return msgspec.json.decode(json_codec().encode(event), type=dict[str, Any])


def _say_rest(found: int, shown: int, what: str) -> None:
    if not found:
        print(f"no such {what}")
    elif found > shown:
        print(f"the newest {shown:,} of {found:,} {what}; --limit 0 shows all")


def _print_json(rows: Sequence[dict[str, Any]]) -> None:
    for row in rows:
        print(msgspec.json.encode(row).decode())


def _table(*headers: str) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for header in headers:
        right = header in {"seq", "forward", "events", "incidents", "missing", "seconds"}
        last = header in {"what", "headline", "ended"}
        table.add_column(header, justify="right" if right else "left", no_wrap=not last, overflow="fold")
    return table


def _add(table: Table, *cells: str) -> None:
    table.add_row(*map(printable, cells))


def _print(table: Table) -> None:
    from rich.console import Console

    if table.row_count:
        console = Console(highlight=False, markup=False, width=None if sys.stdout.isatty() else 200)
        console.print(table)
