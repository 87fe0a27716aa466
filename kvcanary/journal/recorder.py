"""From the stream to frames: what is kept, how it is cut into segments, and the ring of the flight recorder.

Runs on the drain's thread, since only there events are still at hand; an event costs about one microsecond.
Encoded events are what a bound in bytes can count.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple, cast

from kvcanary.events import (
    CanaryDisarmed,
    Event,
    FaultInjected,
    HealthChecked,
    IncidentOpened,
    IncidentUpdated,
    KernelStalled,
    ObserverFailed,
    OwnershipCheckpointed,
    OwnershipViolated,
    PageRun,
    PagesFact,
    PagesMoved,
    QuarantineFailed,
    QuarantineRequested,
    RequestQuarantined,
    RunStarted,
    RunStopped,
    ViolationDetected,
    event_name,
)
from kvcanary.journal.format import EventEncoder, Finding, Frame, Gap, Segment

Level = Literal["incidents", "all"]

FRAME_BYTES = 1 << 17
SEGMENT_BYTES = 8 << 20
_INT64 = 1 << 63
CHECKPOINT_SHARE = 16
"""A segment is at least so many times as large as the checkpoint it began with: the books must not outweigh the run."""
NOT_KEPT = "level incidents: nothing was found"

TRIGGERS: tuple[type[Event], ...] = (
    ViolationDetected,
    OwnershipViolated,
    IncidentOpened,
    IncidentUpdated,
    KernelStalled,
    CanaryDisarmed,
    QuarantineFailed,
)
"""What the flight recorder writes its ring for. All findings, not incidents alone, and each end of the checks: so what
is left out holds none."""
_INDEXED: tuple[type[Event], ...] = (*TRIGGERS, FaultInjected, ObserverFailed, QuarantineRequested, RequestQuarantined)


class Begin(NamedTuple):
    """A run begins: open its file."""

    started: RunStarted


class End(NamedTuple):
    """The run ended: close its file."""

    stopped: RunStopped


Item = Begin | Frame | Gap | End
"""What is handed to the thread that writes, in its order."""


class Recorder:
    """Cuts a run's events into frames.

    Args:
        level: ``all``, or ``incidents``: the last ``ring_bytes`` before a finding and ``after_s`` seconds after it.
        ring_bytes: what the ring holds, encoded.
        after_s: by the events' own clock.
        redact: makes events harmless; None: they are kept whole.
        segment_bytes: size of a segment at which it is time for the next.
    """

    def __init__(
        self,
        level: Level = "all",
        *,
        ring_bytes: int = SEGMENT_BYTES,
        after_s: float = 5.0,
        redact: Callable[[Sequence[Event]], Sequence[Event]] | None = None,
        segment_bytes: int = SEGMENT_BYTES,
    ) -> None:
        self._all = level == "all"
        self._after_ns = int(after_s * 1e9)
        self._redact = redact
        # Of a ring that is let go a segment at a time, most must stay.
        self._segment_bytes = segment_bytes if self._all else min(segment_bytes, max(1, ring_bytes // 4))
        self._ring = Ring(ring_bytes)
        self._encoder = EventEncoder()
        self._notes = _Notes()
        self._begin(0)

    @property
    def wants_checkpoint(self) -> bool:
        """Whether the segment is long enough, or was cut by a loss: a checkpoint would begin the next."""
        return self._cut or self._segment_size >= max(self._segment_bytes, CHECKPOINT_SHARE * self._checkpoint_size)

    def take(self, events: Sequence[Event]) -> list[Item]:
        """What is to be written now, these events included or not."""
        items: list[Item] = []
        for part in _parts(events):
            first, last = part[0], part[-1]
            if isinstance(first, RunStarted):
                self._begin(first.seq)
                items.append(Begin(first))
            elif isinstance(first, OwnershipCheckpointed):
                self._open_segment(first.seq, event_name(first))
            items += self._keep(self._frame(part), part)
            if isinstance(last, RunStopped):
                items += self._end(last)
        return items

    def lost(self, events: Sequence[Event], reason: str) -> Gap:
        """These events were given up; the ring must not span them."""
        time_ns = events[-1].time_ns
        gap = Gap(events[0].seq, events[-1].seq, reason, time_ns if _fits(time_ns) else 0)
        self._cut = True
        self._open_segment(gap.last_seq + 1, "gap", size=self._segment_size)
        return gap

    # --- segments -----------------------------------------------------------------------------------------

    def _begin(self, seq: int) -> None:
        self._number = 0
        self._until_ns = 0
        self._ring.clear()
        self._cut = False
        self._open_segment(seq, event_name(RunStarted))

    def _open_segment(self, seq: int, opened_by: str, *, size: int = 0) -> None:
        self._number += 1
        self._segment = Segment(self._number, seq, opened_by)
        self._segment_size = size
        if opened_by != "gap":
            self._cut = False
            self._checkpoint_size = 0

    def _frame(self, events: Sequence[Event]) -> Frame:
        kept = events if self._redact is None else self._redact(events)
        chunk = self._encoder.encode(kept)
        first, last = events[0], events[-1]
        if isinstance(first, OwnershipCheckpointed):
            self._checkpoint_size = len(chunk)
        elif self._segment_size > 4 * max(self._segment_bytes, CHECKPOINT_SHARE * self._checkpoint_size):
            # Nobody answers with a checkpoint (ownership is off): cut all the same, or nothing could ever be let go.
            self._open_segment(first.seq, "size")
        self._segment_size += len(chunk)
        forwards = [event.forward for event in events]
        if not all(map(_fits, (*forwards, first.time_ns, last.time_ns))):
            raise OverflowError("a time or forward of these events does not fit 64 bits")
        least = min(forwards) or min(filter(None, forwards), default=0)
        frame = Frame(
            self._segment,
            first.seq,
            last.seq,
            least,
            max(forwards),
            first.time_ns,
            last.time_ns,
            [chunk],
            len(chunk),
        )
        self._notes.take(kept, frame)
        return frame

    # --- what is kept -------------------------------------------------------------------------------------

    def _keep(self, frame: Frame, events: Sequence[Event]) -> Iterator[Item]:
        if self._all:
            yield frame
            return
        self._follow(events)
        last = events[-1]
        if self._until_ns or (isinstance(last, RunStopped) and not last.clean):
            yield from self._ring.pour(NOT_KEPT)
            yield frame
        elif isinstance(last, RunStopped):
            yield from self._ring.forget(NOT_KEPT)
            yield frame
        else:
            self._ring.put(frame)

    def _follow(self, events: Sequence[Event]) -> None:
        """A finding opens the while in which everything is written; the events' own clock closes it."""
        trigger = next((event for event in reversed(events) if isinstance(event, TRIGGERS)), None)
        if trigger is not None:
            self._until_ns = max(self._until_ns, trigger.monotonic_ns + self._after_ns)
        elif events[-1].monotonic_ns > self._until_ns:
            self._until_ns = 0

    def _end(self, stopped: RunStopped) -> Iterator[Item]:
        yield from self._ring.forget(NOT_KEPT)
        yield End(stopped)


class Ring:
    """The last frames that were not written, ``capacity`` bytes at most. Whole segments are let go while there are two.

    So what is left begins with a checkpoint. A single segment that is too long loses its oldest frames.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._frame_bytes = min(FRAME_BYTES, capacity // 8)
        self._frames: deque[Frame] = deque()
        self._bytes = 0
        self._gone: tuple[int, int] | None = None

    def put(self, frame: Frame) -> None:
        """The newest frame."""
        last = self._frames[-1] if self._frames else None
        self._bytes += frame.size
        if last is not None and frame.follows(last) and last.size < self._frame_bytes:
            last.join(frame)
        else:
            self._frames.append(frame)
        while self._bytes > self._capacity and len(self._frames) > 1:
            number = self._frames[0].segment.number
            self._let_go()
            while self._frames[0].segment.number == number != self._frames[-1].segment.number:
                self._let_go()

    def pour(self, reason: str) -> Iterator[Item]:
        """Everything in it, with the gap before; it is empty afterwards."""
        yield from self._gap(reason)
        frames, self._frames, self._bytes = self._frames, deque(), 0
        yield from frames

    def forget(self, reason: str) -> Iterator[Item]:
        """Let everything go; the gap that this leaves."""
        while self._frames:
            self._let_go()
        yield from self._gap(reason)

    def clear(self) -> None:
        """Another run begins."""
        self._frames.clear()
        self._bytes = 0
        self._gone = None

    def _let_go(self) -> None:
        frame = self._frames.popleft()
        self._bytes -= frame.size
        self._gone = (self._gone[0] if self._gone else frame.first_seq, frame.last_seq)
        self._gone_at = frame.last_time_ns

    def _gap(self, reason: str) -> Iterator[Gap]:
        if self._gone is not None:
            yield Gap(*self._gone, reason, self._gone_at)
            self._gone = None


class _Notes(dict[type[Event], "Callable[[Any, Frame], None] | None"]):
    """What is noted of events so that queries find them: findings one by one, pages and requests per frame."""

    def take(self, events: Sequence[Event], frame: Frame) -> None:
        """Note these events."""
        for event in events:
            note = self[type(event)]
            if note is not None:
                note(event, frame)

    def __missing__(self, kind: type[Event]) -> Callable[[Any, Frame], None] | None:
        self[kind] = note = _note_of(kind)
        return note


def _note_of(kind: type[Event]) -> Callable[[Any, Frame], None] | None:
    if kind is ViolationDetected:
        return _note_violation
    if issubclass(kind, _INDEXED):
        return _note_finding
    if kind is HealthChecked:
        return _note_health
    if issubclass(kind, PagesFact):
        return _note_pages
    if kind is PagesMoved:
        return _note_moved
    return _note_requests if "requests" in kind.__struct_fields__ else None


def _note_pages(event: PagesFact, frame: Frame) -> None:
    runs = frame.pages.get(event.group)
    if runs is None:
        runs = frame.pages[event.group] = []
    runs += event.runs
    frame.requests.update(event.requests)


def _note_moved(event: PagesMoved, frame: Frame) -> None:
    runs = frame.pages.setdefault(event.group, [])
    runs += [PageRun(0, page, 1) for page in (*event.sources, *event.targets)]


def _note_requests(event: Any, frame: Frame) -> None:
    frame.requests.update(event.requests)


def _note_health(event: HealthChecked, frame: Frame) -> None:
    if not event.healthy:
        text = "; ".join(event.problems)
        found = Finding(event.seq, event_name(event), forward=event.forward, time_ns=event.time_ns, text=text)
        frame.findings.append(found)


def _note_violation(event: ViolationDetected, frame: Frame) -> None:
    # One by one, since a flood of these is when the journal must keep up.
    group, page, request = event.group, event.page, event.request
    frame.findings.append(
        Finding(
            event.seq,
            _VIOLATION,
            event.kind,
            "",
            group,
            event.slot,
            page,
            request,
            event.forward,
            event.time_ns,
            f"found by {event.role}",
        )
    )
    frame.requests.update({request, event.writer_request, event.owner_request})
    if page >= 0:
        frame.pages.setdefault(group, []).append(PageRun(0, page, 1))


_VIOLATION = event_name(ViolationDetected)
_WORDS = ("headline", "detail", "error", "description", "reason")


def _note_finding(event: Event, frame: Frame) -> None:
    requests = cast("Sequence[str]", getattr(event, "requests", ()))
    found = Finding(
        seq=event.seq,
        type=event_name(event),
        kind=getattr(event, "kind", "") or getattr(event, "fault", ""),
        incident=getattr(event, "incident", ""),
        group=getattr(event, "group", ""),
        slot=getattr(event, "slot", -1),
        page=getattr(event, "page", -1),
        request=getattr(event, "request", "") or next(iter(requests), ""),
        forward=event.forward,
        time_ns=event.time_ns,
        text=next((text for name in _WORDS if (text := getattr(event, name, ""))), ""),
    )
    frame.findings.append(found)
    frame.requests.update((found.request, getattr(event, "other", ""), *requests))
    if found.page >= 0:
        frame.pages.setdefault(found.group, []).append(PageRun(0, found.page, 1))


def _fits(number: int) -> bool:
    """Whether SQLite can hold it."""
    return -_INT64 <= number < _INT64


_EDGES = frozenset({RunStarted, OwnershipCheckpointed, RunStopped})


def _parts(events: Sequence[Event]) -> Iterator[Sequence[Event]]:
    """The events of one publish, cut before those that begin something and after the one that ends the run."""
    if _EDGES.isdisjoint(map(type, events)):
        if events:
            yield events
        return
    start = 0
    for at, event in enumerate(events):
        if at > start and isinstance(event, (RunStarted, OwnershipCheckpointed)):
            yield events[start:at]
            start = at
        if isinstance(event, RunStopped):
            yield events[start : at + 1]
            start = at + 1
    if start < len(events):
        yield events[start:]
