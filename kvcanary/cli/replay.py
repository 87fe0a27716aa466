"""``kvcanary replay``: recorded events through the folds and observers again. Needs no torch."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections.abc import Generator, Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from kvcanary.cli.journal import as_json, tell_damage, tell_notices
from kvcanary.cli.journal_words import fits_kind, not_negative, nothing_fits, rank_of, say
from kvcanary.events import Event, event_name
from kvcanary.journal.format import Gap
from kvcanary.journal.reader import JournalError, open_files
from kvcanary.observers import load_observer
from kvcanary.observers.base import ObserverSpec
from kvcanary.observers.log import DEFAULT_INTERESTS
from kvcanary.observers.log_format import iso_time
from kvcanary.replay import Difference, Replay, Verdict, in_order
from kvcanary.text import printable

_MOST_SHOWN = 20


def replay(
    target: Path,
    /,
    *,
    check: bool = False,
    observer: tuple[str, ...] = (),
    from_: int = 0,
    where: str = "",
    json: bool = False,
) -> int:
    """Replay recorded runs: facts and findings go through the folds again, and on to observers of yours.

    It prints what the log would say: runs, incidents, health, statistics, losses. The journals of a directory are
    replayed together, in the order of their events' times. With --check it prints only whether the folds derive what
    was recorded: the exit status is 1 if something differs, or if nothing could be compared. What cannot be compared is
    counted with its reason.

    Examples:
      kvcanary replay runs/                                 what happened, of all ranks together
      kvcanary replay run.sqlite --check                    do the folds conclude the same today?
      kvcanary replay run.sqlite --observer mine:on_event   through an observer of your own
      kvcanary replay run.sqlite --from 5000 --where CONTENT
      kvcanary replay run.sqlite --where pages.freed --json

    Args:
        target: a journal, or a directory of journals.
        check: compare what the folds derive with what was recorded.
        observer: package.module:attribute; gets the events in place of the printing; may be repeated.
        from_: number of the first event to show; those before it are fed from the last checkpoint on.
        where: show only events of a kind (CONTENT) or a type (incident.opened, pages.freed).
        json: one JSON object a line.

    Returns:
        The exit status.
    """
    not_negative(from_, "--from")
    specs = [load_observer(name) for name in observer]
    unread: list[JournalError] = []
    with open_files(target, unread.append) as files:
        tell_notices(files, unread)
        replays = [Replay(file, first_seq=from_) for file in files]
        several = len(files) > 1
        fits = fits_kind(where) if where else None
        shown = 0
        with _audience(specs) as audience:
            for one, events in in_order(replays):
                chosen = [event for event in events if event.seq >= from_ and (fits is None or fits(event))]
                shown += len(chosen)
                if audience is not None:
                    audience.show(chosen)
                elif not check:
                    _print_events(one, chosen, everything=fits is not None, several=several, json=json)
        if where and not shown:
            nothing_fits(where)
        verdicts = [one.verdict for one in replays]
        broken = tell_damage(files) or bool(unread)
    if check:
        for verdict in verdicts:
            _print_verdict(verdict, json=json)
        return int(broken or not all(verdict.holds for verdict in verdicts))
    for verdict in verdicts:
        _print_gaps(verdict.run, verdict.gaps, json=json)
    return int(broken)


# --- observers ----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _audience(specs: Sequence[ObserverSpec]) -> Generator[_Audience | None]:
    if not specs:
        yield None
        return
    with asyncio.Runner() as runner:
        audience = _Audience(specs, runner)
        audience.call([spec.open for spec in specs])
        try:
            yield audience
        finally:
            audience.call([spec.close for spec in specs])


class _Audience:
    """Observers in the order in which they were named; none loses anything, since nobody hurries a replay."""

    def __init__(self, specs: Sequence[ObserverSpec], runner: asyncio.Runner) -> None:
        self._specs = specs
        self._runner = runner

    def show(self, events: Sequence[Event]) -> None:
        """Hand events on."""
        for spec in self._specs:
            wanted = [event for event in events if spec.wants(type(event))]
            if spec.batch and wanted:
                self._settle(spec.call(wanted))
            elif not spec.batch:
                for event in wanted:
                    self._settle(spec.call(event))

    def call(self, hooks: Iterable[Any]) -> None:
        """Call what is there to be called."""
        for hook in hooks:
            if hook is not None:
                self._settle(hook())

    def _settle(self, result: Any) -> None:
        if inspect.isawaitable(result):
            self._runner.run(_awaited(result))


async def _awaited(result: Any) -> object:
    return await result


# --- lines --------------------------------------------------------------------------------------------------


def _print_events(one: Replay, events: Sequence[Event], *, everything: bool, several: bool, json: bool) -> None:
    started = one.file.started
    for event in events:
        if not everything and not isinstance(event, DEFAULT_INTERESTS):
            continue
        if json:
            print(msgspec.json.encode({"run": started.run, "from": rank_of(started.origin), **as_json(event)}).decode())
            continue
        run = f"{rank_of(started.origin)} " if several else ""
        forward = f" forward {event.forward}" if event.forward else ""
        head = f"{iso_time(event.time_ns)[:23]} {run}#{event.seq}{forward}"
        print(printable(f"{head} {event_name(event)}: {say(event)}"))


def _print_gaps(run: str, gaps: Sequence[Gap], *, json: bool) -> None:
    for gap in gaps:
        if json:
            line = {"run": run, "type": "gap", "first_seq": gap.first_seq, "last_seq": gap.last_seq}
            print(msgspec.json.encode({**line, "reason": gap.reason}).decode())
        else:
            print(printable(f"run {run}: events {gap.first_seq} to {gap.last_seq} are missing: {gap.reason}"))


def _print_verdict(verdict: Verdict, *, json: bool) -> None:
    if json:
        line = msgspec.to_builtins({name: getattr(verdict, name) for name in ("run", "events", "compared", "skipped")})
        differences = [
            {"seq": one.seq, "recorded": _json(one.recorded), "derived": _json(one.derived)}
            for one in verdict.differences
        ]
        gaps = [{"first_seq": gap.first_seq, "last_seq": gap.last_seq, "reason": gap.reason} for gap in verdict.gaps]
        line |= {"gaps": gaps, "different": verdict.different, "differences": differences, "holds": verdict.holds}
        print(msgspec.json.encode(line).decode())
        return
    word = "no difference" if verdict.different == 0 else f"{verdict.different:,} differ"
    if verdict.blank:
        word = "nothing could be compared"
    elif verdict.different == 0 and verdict.lost:
        word = "no difference in what is there, but events are missing"
    print(f"run {verdict.run}: {verdict.events:,} events replayed, {verdict.compared:,} derived compared: {word}")
    for reason, count in verdict.skipped.items():
        print(f"  not compared: {count:,}, {reason}")
    for difference in verdict.differences[:_MOST_SHOWN]:
        _print_difference(difference)
    if verdict.different > _MOST_SHOWN:
        print(f"  and {verdict.different - _MOST_SHOWN:,} more")
    _print_gaps(verdict.run, verdict.gaps if verdict.blank else verdict.lost, json=False)


def _print_difference(difference: Difference) -> None:
    print(f"  after event {difference.seq}:")
    for label, event in (("recorded", difference.recorded), ("derived now", difference.derived)):
        print(printable(f"    {label}: {f'{event_name(event)}: {say(event)}' if event is not None else 'nothing'}"))
    if difference.recorded is not None and type(difference.recorded) is type(difference.derived):
        then, now = _json(difference.recorded), _json(difference.derived)
        fields = [name for name in then if then[name] != now.get(name) and name != "seq"]
        print(f"    fields: {', '.join(fields)}")


def _json(event: Event | None) -> dict[str, Any]:
    return {} if event is None else as_json(event)
