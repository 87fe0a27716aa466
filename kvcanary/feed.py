"""What the drain reads: facts from the engine's thread and snapshots from the device, as events in order.

The engine's thread appends; the drain's thread collects. Nothing here waits for the device, and nothing takes
a lock that the engine's thread could meet.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from kvcanary.decode import Decoder
from kvcanary.delivery import failure
from kvcanary.digests import digest_tokens
from kvcanary.events import Event, ForwardRetired, RequestsFinished, RunStarted, SnapshotsSkipped, ViolationDetected
from kvcanary.facts import FactLog
from kvcanary.kernels import DeviceFact, FactOp
from kvcanary.record import Keys, hex64
from kvcanary.requests import Request
from kvcanary.snapshot import Fence, Snapshot, SnapshotRing
from kvcanary.state import Word

_MOST_AUDITS = 1 << 14
_MOST_WAITING = 1 << 10


class _Audit(NamedTuple):
    request: str
    length: int
    digest: int


class _Base(NamedTuple):
    entry: Request
    tokens: Sequence[int]
    answers: deque[DeviceFact]


class _Run(NamedTuple):
    ring: SnapshotRing
    decoder: Decoder
    keys: Keys


class Feed:
    """One canary's source of events. ``begin`` starts a run on a new pool."""

    def __init__(self, facts: FactLog) -> None:
        self._facts = facts
        self._runs: deque[RunStarted] = deque()
        self._run: _Run | None = None
        self._skipped = 0
        # Bounded for an engine that goes on after the drain failed; what is given up stays unaudited or unarmed.
        self._finished: deque[tuple[Request, Sequence[int]]] = deque(maxlen=_MOST_WAITING)
        self._bases: deque[_Base] = deque(maxlen=_MOST_WAITING)
        self._failures = 0
        self._audits: dict[int, _Audit] = {}
        self._unread: deque[Event] = deque()
        self._ending: dict[str, int] | None = None
        self._error: Exception | None = None
        self._gave_up = False

    def begin(self, started: RunStarted, ring: SnapshotRing, decoder: Decoder, keys: Keys) -> None:
        """A new run; what the old one left must have been collected before."""
        self._run = _Run(ring, decoder, keys)
        self._skipped = 0
        self._error, self._gave_up = None, False
        self._ending = None  # if the drain had no time for the old run's last look, it must not take it at this one
        self._unread.clear()
        self._audits.clear()
        self._finished.clear()
        self._bases.clear()
        self._runs.append(started)

    @property
    def in_flight(self) -> bool:
        """Whether a forward's snapshot, a digest or a run's end is still awaited."""
        run = self._run
        return (
            bool(self._bases)
            or self._ending is not None
            or self._error is not None
            or (run is not None and run.ring.in_flight > 0)
        )

    @property
    def queued_facts(self) -> int:
        """Facts that wait for the drain."""
        return self._facts.queued

    def next_run(self) -> RunStarted | None:
        """The run that begins now, once."""
        return self._runs.popleft() if self._runs else None

    def expect_audit(self, entry: Request, tokens: Sequence[int]) -> None:
        """The device will report this finished request's digest; compare it with that of ``tokens``."""
        self._finished.append((entry, tokens))

    def compute_base(self, entry: Request, tokens: Sequence[int], answers: deque[DeviceFact]) -> None:
        """Compute the digest after ``tokens`` on the drain's thread; the fact that arms the row goes to ``answers``."""
        self._bases.append(_Base(entry, tokens, answers))

    def collect(self) -> list[Event]:
        """Everything that is ready.

        Snapshots are looked at first and put last, so that the launch of a forward, which was recorded before it
        was fenced, always precedes what was found in it. When the device cannot be read any more, what is known
        on the host comes first, and the error at the next call.
        """
        if self._error is not None and self._gave_up:
            raise self._error
        run, ending = self._run, self._ending  # first: an end that comes later may have its launch among later facts
        snapshots = [] if run is None else self._look(run)
        broken = self._gave_up = self._error is not None
        events: list[Event] = [self._with_digests(fact) for fact in self._facts.take(everything=broken)]
        events += [self._unread.popleft() for _ in range(len(self._unread))]
        if run is not None:
            events += self._read(run, snapshots)
        if run is not None and ending is not None and not broken:
            events += self._last_look(run, ending)
            self._ending = self._run = None
        return events

    def break_off(self, error: Exception) -> None:
        """The device cannot be used any more: a launch failed. Engine's thread."""
        self._error = self._error or error
        self._facts.hurry()

    def _look(self, run: _Run) -> list[Snapshot]:
        """What the device has ready; what is owed to requests is computed meanwhile."""
        self._answer_bases(run.keys)
        snapshots: list[Snapshot] = []
        if self._error is None:
            try:
                snapshots = run.ring.poll()
            except Exception as error:  # noqa: BLE001 - a CUDA error is data
                self._error = error
        self._facts.retired = run.ring.retired
        self._digest_finished(run.keys)
        return snapshots

    def _read(self, run: _Run, snapshots: list[Snapshot]) -> list[Event]:
        events = [event for snapshot in snapshots for event in self._decode(run.decoder, snapshot)]
        if run.ring.skipped > self._skipped:
            events.append(SnapshotsSkipped(count=run.ring.skipped - self._skipped, **_now()))
            self._skipped = run.ring.skipped
        return events

    def end(self, due: dict[str, int]) -> None:
        """The last launch was made: the next :meth:`collect` takes a last look, which waits for the device."""
        self._facts.hurry()
        self._ending = due

    def _last_look(self, run: _Run, due: dict[str, int]) -> list[Event]:
        forward = run.ring.retired
        snapshot = run.ring.final(Fence(forward, None, time.monotonic_ns(), 0, due))
        if not snapshot.violations and not snapshot.outbox and snapshot.words[Word.FORWARD] == forward:
            return []
        fence = snapshot.fence._replace(forward=snapshot.words[Word.FORWARD])
        return self._decode(run.decoder, snapshot._replace(fence=fence))

    def _decode(self, decoder: Decoder, snapshot: Snapshot) -> list[Event]:
        now, wall = time.monotonic_ns(), time.time_ns()
        events: list[Event] = [decoder.snapshot(snapshot, now, wall)]
        if self._facts.wants(ForwardRetired):
            through = snapshot.words[Word.FORWARD]
            events.insert(0, ForwardRetired(time_ns=wall, monotonic_ns=now, forward=through, through=through))
        events += [decoder.violation(row, now, wall) for row in snapshot.violations]
        events += [finding for row in snapshot.outbox for finding in self._audit(row, now, wall)]
        events += decoder.scrubs(snapshot, now, wall)
        return events

    def _audit(self, row: list[int], now: int, wall: int) -> list[Event]:
        """The finish audit: the digest that the device followed against that of prompt plus output."""
        _, tag, length, held, digest, forward = row
        audit = self._audits.pop(tag, None)
        if audit is None or not held or audit.length != length or audit.digest == digest:
            return []
        return [
            ViolationDetected(
                time_ns=wall,
                monotonic_ns=now,
                forward=forward,
                kind="FINAL_DIGEST",
                role="facts",
                group="",
                tag=tag,
                request=audit.request,
                position_expected=length,
                position_found=length,
                digest_expected=hex64(audit.digest),
                digest_found=hex64(digest),
            )
        ]

    def _digest_finished(self, keys: Keys) -> None:
        while self._finished:
            entry, tokens = self._finished.popleft()
            digest = self._digest(keys, entry, tokens, "requests.finished")
            if digest is not None:
                self._audits[entry.tag] = _Audit(entry.name, len(tokens), digest)
        while len(self._audits) > _MOST_AUDITS:
            del self._audits[next(iter(self._audits))]

    def _answer_bases(self, keys: Keys) -> None:
        while self._bases:
            entry, tokens, answers = self._bases.popleft()
            digest = self._digest(keys, entry, tokens, "requests.admitted")
            if digest is not None:
                anchor = DeviceFact(FactOp.ANCHOR, row=entry.row, tag=entry.tag, position=len(tokens), digest=digest)
                answers.append(anchor)

    def _digest(self, keys: Keys, entry: Request, tokens: Sequence[int], event_type: str) -> int | None:
        """None, and told, for tokens that are no numbers: one engine's slip must not end the watch."""
        try:
            return digest_tokens(keys, entry.seed, tokens, salts=entry.salts)
        except (TypeError, ValueError, OverflowError, RuntimeError) as error:
            self._failures += 1
            told = f"tokens of request {entry.name}"
            self._unread.append(failure(told, error, event_type, self._failures, "continued"))
            return None

    def _with_digests(self, fact: Event) -> Event:
        if not isinstance(fact, RequestsFinished):
            return fact
        audits = [self._audits.get(tag) for tag in fact.tags]
        digests = tuple(hex64(audit.digest) if audit is not None else "" for audit in audits)
        return msgspec.structs.replace(fact, digests=digests)


def _now() -> dict[str, int]:
    return {"time_ns": time.time_ns(), "monotonic_ns": time.monotonic_ns()}
