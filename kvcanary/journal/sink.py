"""The journal on a bus: takes events on the drain's thread, writes them on its own, and keeps the books of both.

Nothing raises into the drain and nothing waits for the disk. What waits to be written is bounded in bytes; beyond that
events are given up, and the gap is counted, told on the bus, and written down once there is room again.
"""

from __future__ import annotations

import contextlib
import sqlite3
import threading
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from kvcanary.delivery import SinkReport, failure
from kvcanary.endings import seconds_left
from kvcanary.errors import ConfigError, words_of
from kvcanary.events import Event, RunStarted
from kvcanary.journal.format import Frame, Gap
from kvcanary.journal.recorder import FRAME_BYTES, Begin, Item, Level, Recorder
from kvcanary.journal.writer import Bounds, Writer
from kvcanary.queues import Gap as Losses

COMMIT_SECONDS = 0.05
"""Between commits while events come: what a killed process may lose of what nobody flushed."""
_URGENT_BYTES = 2 << 20
_RETRY_SECONDS = 0.5
_OVERHEAD = 512  # bytes of a frame that is small

Redact = Callable[[Sequence[Event]], Sequence[Event]]


class Ticket(NamedTuple):
    """What was handed over up to a moment."""

    items: int
    dropped: int


class Journal:
    """One journal of a bus; see :class:`kvcanary.delivery.Recipient`. ``offer`` belongs to the drain's thread.

    Args:
        directory: made if it is not there.
        level: what is kept.
        bounds: of memory and disk.
        after_s: seconds that are kept after a finding, at level ``incidents``.
        redact: makes events harmless; None: they are kept whole.
        tell: takes failures to write, from the writing thread.

    Attributes:
        path: file of the present run, or of the last one.
        on_written: called from the writing thread after each commit.

    Raises:
        ConfigError: there can be no such directory.
    """

    name = "journal"
    label = "kvcanary-sink-journal"

    def __init__(
        self,
        directory: str | Path,
        level: Level = "all",
        *,
        bounds: Bounds | None = None,
        after_s: float = 5.0,
        redact: Redact | None = None,
        tell: Callable[[Event], None] | None = None,
    ) -> None:
        self._directory = _usable(Path(directory))
        self._bounds = bounds = bounds or Bounds()
        self._notes: dict[str, object] = {"level": level, "redacted": int(redact is not None)}
        self._recorder = Recorder(
            level, ring_bytes=bounds.ring, after_s=after_s, redact=redact, segment_bytes=bounds.segment
        )
        self.path: Path | None = None
        self.tell = tell or _nobody
        self.on_written: Callable[[], None] = _nothing
        self.unreported = Losses()
        self._changed = threading.Condition()
        self._items: deque[Item] = deque()
        self._bytes = self._events = 0  # that wait or are being written
        self._put = self._done = 0  # items, since the beginning
        self._taken = self._dropped = self._excused = 0
        self._gap: Gap | None = None
        self._begun = False
        self._urgent = self._closing = False
        self._discarded = 0
        self._asked = False
        self._state = "running"
        self._trouble = ""
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._main, name=self.label, daemon=True)
        self._thread.start()

    # --- the drain's side ---------------------------------------------------------------------------------

    def wants(self, event_type: type[Event]) -> bool:  # noqa: ARG002 - a recording with gaps could not be replayed
        """Everything."""
        return True

    @property
    def thread(self) -> int:
        """Identity of the writing thread."""
        return self._thread.ident or 0

    @property
    def running(self) -> bool:
        """Whether it takes events."""
        return not self._closing

    @property
    def ended(self) -> bool:
        """Whether its thread is gone."""
        return self._ended.is_set()

    @property
    def pending(self) -> int:
        """Events that wait to be written."""
        return self._events

    @property
    def dropped(self) -> int:
        """Events that were given up."""
        return self._dropped

    def checkpoint_due(self) -> bool:
        """Whether the next segment should begin: True once, until a checkpoint came."""
        if self._asked or not self._recorder.wants_checkpoint:
            return False
        self._asked = True
        return True

    def offer(self, events: Sequence[Event], *, notices: bool = False) -> None:
        """Take the events of one publish. Never waits, never raises."""
        del notices  # what concerns the journal itself belongs into it as well
        if not events or self._closing:
            return
        self._taken += len(events)
        begins = isinstance(events[0], RunStarted)
        if begins:
            self._begun = False
        elif not self._begun:
            self._count_lost(events)
            return
        if self._bytes > self._bounds.queue and not begins:
            self._drop(events, self._trouble or "the disk did not keep up: the queue was full")
            return
        try:
            items = self._recorder.take(events)
        except Exception as error:  # noqa: BLE001 - whatever an event of somebody's own does, the drain goes on
            if self._begun:
                self._drop(events, words_of(error))
            else:
                self._count_lost(events)  # no gap either: the run that it would be in has no file
            self.tell(failure(self.name, error, "", 1, "continued"))
            return
        self._begun = True
        if self._asked and not self._recorder.wants_checkpoint:
            self._asked = False
        self._hand_over(items)

    def _drop(self, events: Sequence[Event], reason: str) -> None:
        self._count_lost(events)
        lost = self._recorder.lost(events, reason)
        before = self._gap
        self._gap = lost if before is None else lost._replace(first_seq=before.first_seq)

    def _count_lost(self, events: Sequence[Event]) -> None:
        self._dropped += len(events)
        self._asked = False
        self.unreported.add(events)

    def _hand_over(self, items: Sequence[Item]) -> None:
        gap, self._gap = self._gap, None
        if gap is not None:
            items = [gap, *items]
        if not items:
            return
        with self._changed:
            for item in items:
                self._append(item)
            self._urgent = self._urgent or self._bytes > _URGENT_BYTES
            self._changed.notify()

    def _append(self, item: Item) -> None:
        last = self._items[-1] if self._items else None
        if isinstance(item, Frame):
            self._events += item.count
            self._bytes += item.size
            if isinstance(last, Frame) and item.follows(last) and last.size < FRAME_BYTES:
                last.join(item)
                return
            self._bytes += _OVERHEAD
        self._items.append(item)
        self._put += 1

    # --- flushing -----------------------------------------------------------------------------------------

    def ticket(self) -> Ticket:
        """What was handed over so far; asks for it to be written now. Does not wait."""
        with self._changed:
            self._urgent = True
            self._changed.notify_all()
            return Ticket(self._put, self._dropped)

    def written(self, ticket: Ticket) -> bool:
        """Whether all of it is in the file, where a killed process leaves it."""
        return self._done >= ticket.items

    def flush(self, until: float) -> bool:
        """Whether all that was taken, and is to be kept, was written before the monotonic time ``until``.

        False as well, once, after events were given up.
        """
        ticket = self.ticket()
        with self._changed:
            done = self._changed.wait_for(lambda: self.written(ticket) or self.ended, seconds_left(until))
            whole, self._excused = ticket.dropped == self._excused, ticket.dropped
        return done and whole and self.written(ticket)

    wait_idle = flush

    # --- ending -------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Write what is there, then end. Does not wait."""
        with self._changed:
            if not self._closing:
                self._closing = self._urgent = True
                if self._gap is not None:
                    self._append(self._gap)
                    self._gap = None
            self._changed.notify_all()

    def wait(self, until: float) -> bool:
        """Whether its thread ended before the monotonic time ``until``."""
        return self._ended.wait(seconds_left(until))

    def abandon(self) -> None:
        """Give up on a disk that does not answer."""
        with self._changed:
            if not self.ended:
                self._state = "abandoned"
                self._discarded = self._events
                self._items.clear()
                self._closing = self._urgent = True
                self._changed.notify_all()

    def report(self) -> SinkReport:
        """The counts so far. At level ``incidents``, what the ring let go counts as delivered."""
        undelivered = self._discarded or self._events
        return SinkReport(
            delivered=max(0, self._taken - self._dropped - undelivered),
            dropped=self._dropped,
            undelivered=undelivered,
            state="failing" if self._trouble and self._state == "running" else self._state,
            error=self._trouble,
        )

    # --- the writing thread -------------------------------------------------------------------------------

    def _main(self) -> None:
        # The file stays on this stack: a forked copy of the process has no such thread, so it can never close it, which
        # would touch a file that its parent goes on writing.
        writer = Writer(self._directory, self._bounds, self._notes)
        failures = 0
        items: list[Item] = []
        while True:
            if not items:
                items = self._wait()
            if not items and self._closing:
                break
            try:
                writer.write(items)
            except (sqlite3.Error, OSError) as error:
                failures += 1
                if self._failed(error, failures):
                    break
                continue
            except Exception as error:  # noqa: BLE001 - its thread must not end without a word
                self._trouble, self._state = words_of(error), "stopped"
                self._closing = True
                self.tell(failure(self.name, error, "", failures + 1, "stopped"))
                break
            failures = 0
            self._trouble = ""
            self.path = writer.path
            self._wrote(items)
            items = []
        writer.close()
        if self._state == "running":
            self._state = "closed"
        self._ended.set()
        with self._changed:
            self._changed.notify_all()

    def _wait(self) -> list[Item]:
        """The next items, once they are worth a commit."""
        with self._changed:
            while not self._items and not self._closing:
                self._urgent = False
                self._changed.notify_all()
                self._changed.wait()
            self._changed.wait_for(lambda: self._urgent, COMMIT_SECONDS)
            self._urgent = self._closing
            return self._take_run()

    def _take_run(self) -> list[Item]:
        """Everything up to the next run's beginning: files are written one at a time."""
        items: list[Item] = []
        while self._items and not (items and isinstance(self._items[0], Begin)):
            items.append(self._items.popleft())
        return items

    def _wrote(self, items: Sequence[Item]) -> None:
        frames = [item for item in items if isinstance(item, Frame)]
        with self._changed:
            self._done += len(items)
            self._events -= sum(frame.count for frame in frames)
            self._bytes -= sum(frame.size + _OVERHEAD for frame in frames)
            self._changed.notify_all()
        self.on_written()

    def _failed(self, error: Exception, failures: int) -> bool:
        """Tell of it, and wait before the next try; True: give up, since it ends anyway."""
        self._trouble = f"the disk did not take it: {error}"
        if failures == 1:
            self.tell(failure(self.name, error, "", failures, "continued"))
        with self._changed:
            if self._state == "abandoned":
                return True
            self._changed.wait_for(lambda: self._state == "abandoned", _RETRY_SECONDS)
            return self._state == "abandoned"


def _usable(directory: Path) -> Path:
    """The directory, made if need be.

    Raises:
        ConfigError: it cannot be made or written.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        probe = directory / f".kvcanary-{threading.get_ident()}"
        probe.touch()
        with contextlib.suppress(FileNotFoundError):
            probe.unlink()
    except OSError as error:
        raise ConfigError(
            f"journal is {str(directory)!r}, which is no directory that can be written ({error}); name another"
        ) from error
    return directory


def _nobody(_: Event) -> None:
    return


def _nothing() -> None:
    return
