"""Replay: recorded events go through the folds again, and what these derive is compared with what they derived then.

Primary events (facts, findings of the device, the run's own) are fed; events that folds had derived are not, they are
what is compared. Each keeps its recorded number. Needs no torch.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from kvcanary.config import CanaryConfig, Mode
from kvcanary.events import (
    Derived,
    Event,
    EventsDropped,
    FactsLost,
    HazardCounted,
    IncidentOpened,
    IncidentUpdated,
    ObserverFailed,
    OwnershipCheckpointed,
    OwnershipViolated,
    QuarantineRequested,
    RunStarted,
    event_name,
    msgpack_codec,
)
from kvcanary.folding import Folding
from kvcanary.journal.format import Gap
from kvcanary.journal.reader import JournalFile, Query
from kvcanary.journal.recorder import NOT_KEPT, TRIGGERS
from kvcanary.mailbox import Mailbox
from kvcanary.observers import default_folds
from kvcanary.observers.base import Fold
from kvcanary.observers.ownership import OwnershipFold
from kvcanary.observers.redact import redact_all

MOST_DIFFERENCES = 100
"""Differences that are kept; of more, the number."""
_BOOKS_UNKNOWN = "the recording begins, or goes on after a gap, without a checkpoint"
_CAUSE_UNKNOWN = "derived from an event that the recording lacks"
_COUNTED_FROM_BEFORE = "counts from before the recording begins, or over a gap"
_MISSED_FINDINGS = "a gap may have held findings of the same incident"
_RESTORED: tuple[type[Event], ...] = (OwnershipViolated, IncidentOpened, IncidentUpdated, QuarantineRequested)
"""What follows from a checkpoint and the findings alone."""
_FINDINGS = frozenset(map(event_name, TRIGGERS))


class Difference(NamedTuple):
    """What the folds derive from one event, where it is not what was recorded. None: nothing."""

    seq: int
    recorded: Event | None
    derived: Event | None


@dataclass(slots=True)
class Verdict:
    """What a replay compared. What was left out is counted with its reason; it is not the same as equal."""

    run: str
    events: int = 0
    """primary events that went through the folds"""
    compared: int = 0
    """events that had been derived, or are derived now, and were compared"""
    skipped: dict[str, int] = field(default_factory=dict[str, int])
    gaps: list[Gap] = field(default_factory=list[Gap])
    different: int = 0
    differences: list[Difference] = field(default_factory=list[Difference])

    @property
    def holds(self) -> bool:
        """Whether something was compared, or nothing had to be, nothing differs, and no event is missing."""
        return self.different == 0 and not self.lost and not self.blank

    @property
    def blank(self) -> bool:
        """Nothing was compared, though the run had more than what went through the folds."""
        return self.compared == 0 and bool(self.skipped or self.gaps)

    @property
    def lost(self) -> list[Gap]:
        """Gaps in which something is missing that was meant to be kept: damage, a full disk."""
        return [gap for gap in self.gaps if gap.reason != NOT_KEPT]

    def skip(self, reason: str, count: int) -> None:
        """Count what is not compared."""
        if count:
            self.skipped[reason] = self.skipped.get(reason, 0) + count


class Replay:
    """One run, once more. Iterate over it, then look at its ``verdict``.

    Args:
        file: the recording.
        first_seq: begin at the last checkpoint before this event; earlier events of that segment are fed, not given.
        folds: in place of those of the recorded configuration.

    Attributes:
        verdict: grows while it is iterated.
    """

    def __init__(self, file: JournalFile, *, first_seq: int = 0, folds: Sequence[Fold] | None = None) -> None:
        self.file = file
        self.verdict = Verdict(file.started.run)
        self._first_seq = first_seq
        self._folds = tuple(default_folds(config_of(file.started), Mailbox()) if folds is None else folds)
        self._ledger = next((fold for fold in self._folds if isinstance(fold, OwnershipFold)), None)
        self._names = frozenset(fold.name for fold in self._folds)
        self._folding = Folding(self._folds)
        self._comparison = _Comparison(self.verdict, redacted=file.redacted)
        self._began = 0  # what was derived from earlier events has no cause here

    def __iter__(self) -> Iterator[Sequence[Event]]:
        """What each primary event leads to: itself first, then what the folds derive from it."""
        self._folding.begin()
        yield self._feed(self.file.started)
        start = self._start()
        if start > 1:
            self._comparison.lost(known=self._ledger is None, findings=self._has_findings_before(start))
        for item in self.file.read(Query(first_seq=max(2, start))):
            events = self._take(item)
            if events and events[-1].seq >= self._first_seq:
                yield events
        self._comparison.settle()

    def _start(self) -> int:
        """Where the books are known: the last beginning of a segment up to the wanted event."""
        known = ("run.started", event_name(OwnershipCheckpointed))
        segments = [one.first_seq for one in self.file.segments() if one.opened_by in known]
        return max((seq for seq in segments if seq <= max(1, self._first_seq)), default=1)

    def _has_findings_before(self, seq: int) -> bool:
        told = any(found.seq < seq and found.type in _FINDINGS for found in self.file.findings())
        return told or any(gap.first_seq < seq and gap.reason != NOT_KEPT for gap in self.file.gaps())

    def _take(self, item: Event | Gap) -> Sequence[Event]:
        if isinstance(item, Gap):
            return self._pass_over(item)
        if isinstance(item, OwnershipCheckpointed):
            return self._checkpoint(item)
        if self._is_derived(item):
            if isinstance(item, Derived) and item.cause < self._began:
                self.verdict.skip(_CAUSE_UNKNOWN, 1)
            else:
                self._comparison.recorded.append(item)
            return ()
        if isinstance(item, Derived):
            self.verdict.skip(f"derived by {item.by or 'somebody'}, which is no fold of this replay", 1)
            return (item,)
        return self._feed(item)

    def _is_derived(self, event: Event) -> bool:
        if isinstance(event, Derived):
            return event.by in self._names
        return isinstance(event, ObserverFailed) and event.observer in self._names

    def _feed(self, event: Event) -> Sequence[Event]:
        self._comparison.settle()
        self.verdict.events += 1
        self._folding.seq = event.seq - 1
        out = self._folding.run([event])
        self._comparison.derived = out[1:]
        self._comparison.seq = event.seq
        return out

    def _checkpoint(self, event: OwnershipCheckpointed) -> Sequence[Event]:
        """One that is reached is compared with the books; one that a replay begins with becomes them."""
        # Not settled: what later folds derived from the same second stands behind it.
        if self._ledger is None:
            return (event,)
        if self._comparison.books_known:
            self._comparison.compare(event.seq, [event], [self._ledger.checkpoint(event)])
            return (event,)
        self._began = event.seq
        self._comparison.books_known = True
        return self._feed(event)

    def _pass_over(self, gap: Gap) -> Sequence[Event]:
        self._comparison.settle()
        self.verdict.gaps.append(gap)
        self._began = gap.last_seq + 1
        # To the ledger, whatever happened in a gap is a loss of facts: nothing is claimed of any page after it.
        self._folding.seq = gap.last_seq - 1
        self._folding.run([FactsLost(count=gap.size)])
        self._comparison.lost(known=self._ledger is None, findings=gap.reason != NOT_KEPT)
        dropped = EventsDropped(
            seq=gap.last_seq,
            time_ns=gap.time_ns,
            observer="journal",
            count=gap.size,
            first_seq=gap.first_seq,
            last_seq=gap.last_seq,
        )
        return (dropped,)


class _Comparison:
    """What was recorded against what is derived, one primary event after another."""

    def __init__(self, verdict: Verdict, *, redacted: bool) -> None:
        self._verdict = verdict
        self._redacted = redacted
        self._encode = msgpack_codec().encode
        self.recorded: list[Event] = []
        self.derived: list[Event] = []
        self.seq = 0
        self.books_known = self._exact = self._all_findings = True

    def lost(self, *, known: bool, findings: bool = False) -> None:
        """Events are missing. ``known``: the books need none of them; ``findings``: there may be some among them."""
        self.books_known = known
        self._exact = False
        self._all_findings = self._all_findings and not findings

    def settle(self) -> None:
        """Compare what belongs to the last primary event."""
        recorded, derived = self.recorded, self.derived
        if recorded or derived:
            self.recorded, self.derived = [], []
            self.compare(self.seq, recorded, derived)

    def compare(self, seq: int, recorded: Sequence[Event], derived: Sequence[Event]) -> None:
        """In order, as far as they can be compared."""
        if not self._exact:
            recorded, derived = self._comparable(recorded), self._comparable(derived, count=False)
        if self._redacted:
            derived = redact_all(derived)
        self._verdict.compared += max(len(recorded), len(derived))
        for at in range(max(len(recorded), len(derived))):
            then = recorded[at] if at < len(recorded) else None
            now = derived[at] if at < len(derived) else None
            if then is None or now is None or self._differ(then, now):
                self._verdict.different += 1
                if len(self._verdict.differences) < MOST_DIFFERENCES:
                    self._verdict.differences.append(Difference(seq, then, now))

    def _differ(self, recorded: Event, derived: Event) -> bool:
        # Their order is compared; their numbers leave room for a checkpoint between them.
        return self._encode(recorded) != self._encode(replace(derived, seq=recorded.seq))

    def _comparable(self, events: Sequence[Event], *, count: bool = True) -> list[Event]:
        kept: list[Event] = []
        for event in events:
            reason = self._incomparable(event)
            if reason:
                self._verdict.skip(reason, int(count))
            else:
                kept.append(event)
        return kept

    def _incomparable(self, event: Event) -> str:
        if isinstance(event, OwnershipCheckpointed):
            return ""
        if isinstance(event, HazardCounted) or not isinstance(event, _RESTORED):
            return _COUNTED_FROM_BEFORE
        if not self.books_known:
            return _BOOKS_UNKNOWN
        return "" if self._all_findings or isinstance(event, OwnershipViolated) else _MISSED_FINDINGS


def config_of(started: RunStarted) -> CanaryConfig:
    """The configuration of a recorded run, as far as this version knows its settings; without its key."""
    known = {name: value for name, value in started.config.items() if name in CanaryConfig.__struct_fields__}
    mode: Mode = msgspec.convert(started.mode or "log", Mode)
    known |= {"mode": mode, "key": None}
    return msgspec.convert(known, CanaryConfig)


def in_order(replays: Iterable[Replay]) -> Iterator[tuple[Replay, Sequence[Event]]]:
    """Several runs, of one process after another or of many ranks, by the wall clocks of their events."""
    streams = [_timed(number, replay) for number, replay in enumerate(replays)]
    return ((replay, events) for _, _, replay, events in heapq.merge(*streams, key=lambda entry: entry[:2]))


def _timed(number: int, replay: Replay) -> Iterator[tuple[int, int, Replay, Sequence[Event]]]:
    latest = 0  # a clock that is set back must not turn a run's own order
    for events in replay:
        latest = max(latest, events[0].time_ns)
        yield latest, number, replay, events
