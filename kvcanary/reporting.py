"""The stream half of the canary: feed, drain, bus, observers, and what may be asked from any thread."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Self

import msgspec

from kvcanary.binding import Binding
from kvcanary.bus import Bus, Subscription
from kvcanary.config import CanaryConfig
from kvcanary.endings import Deadline
from kvcanary.errors import CanaryStalledError
from kvcanary.events import Event
from kvcanary.facts import FactLog
from kvcanary.feed import Feed
from kvcanary.mailbox import Mailbox, Raise
from kvcanary.observers import default_folds, default_sinks
from kvcanary.observers.base import Observer
from kvcanary.observers.redact import redact_all
from kvcanary.observers.violations import ViolationsFold
from kvcanary.pipeline import Drain, DrainReport

if TYPE_CHECKING:
    from kvcanary.journal.gate import Gate
    from kvcanary.journal.sink import Journal


class Reporting(Binding):
    """What a canary finds, on its way to observers."""

    def __init__(self, config: CanaryConfig, observers: Sequence[Observer]) -> None:
        super().__init__(config)
        self._observers = tuple(observers)
        self.mailbox = Mailbox()
        self.facts = FactLog(config.fact_queue)
        self.feed = Feed(self.facts)
        self._journal: Journal | None = None
        self._gate: Gate | None = None
        due = self._checkpoint_due if config.journal is not None else None
        folds = default_folds(config, self.mailbox, due)
        self._violations = next(fold for fold in folds if isinstance(fold, ViolationsFold))
        self.bus = Bus(folds, sink_queue=config.sink_queue, on_guard_failure=self._unguarded)
        self.facts.wants = self.bus.wants
        self.drain = Drain(self.feed, self.bus, on_failure=self._unguarded, settle=self._settle)

    @property
    def error(self) -> BaseException | None:
        """The first corruption or stall in ``raise`` mode; stays. With a journal, once that has what led to it."""
        return self.mailbox.error

    def start(self) -> Self:
        """Start the drain and the observers. Idempotent; after :meth:`stop` all of it starts again."""
        if not self.drain.running:
            with ExitStack() as undo:
                for sink in (*default_sinks(self.config), *self._observers):
                    undo.callback(self.bus.subscribe(sink).close)
                self._open_journal()
                undo.pop_all()
            self.facts.enabled = True
            self.drain.start()
        return self

    def stop(self, deadline: float | None = None) -> DrainReport:
        """Deliver what is queued within ``deadline`` seconds and stop the drain. Idempotent."""
        self.facts.enabled = False
        report = self.drain.stop(self.config.stop_deadline_s if deadline is None else deadline)
        if self._gate is not None and not self.drain.inert:
            self._gate.release()
        return report

    def subscribe(self, observer: Observer) -> Subscription:
        """Add an observer; async ones run on the loop of the caller. Any thread."""
        return self.bus.subscribe(observer)

    def emit(self, event: Event) -> None:
        """Put an event of one's own into the stream. Any thread."""
        self.drain.submit(event)

    def announce(self, event: Event) -> None:
        """As :meth:`emit`, in its place among the lifecycle calls. Engine's thread."""
        if not self.facts.enabled:
            self.emit(event)
            return
        self.facts.announce(event)
        self.drain.wake()

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until everything that happened so far went through the folds, and into the journal if there is one.

        Returns:
            False after ``timeout`` seconds, or when the journal had to give events up since the last call. What it
            took before True is on disk, even if the process is killed now.
        """
        self.facts.hurry()
        deadline = Deadline(self.config.flush_deadline_s if timeout is None else timeout)
        done = self.drain.flush(deadline.left)
        if not done or self._journal is None:
            return done
        done = self._journal.flush(deadline.at(1.0))
        if self._gate is not None and self._gate.holding:
            self.drain.flush(deadline.left)  # a look that shows the error
        return done

    def status(self) -> dict[str, Any]:
        """Plain values for a readiness probe. Any thread; waits for nothing.

        ``healthy`` is False after corruption was found, while a guard or the drain is out of order, or before
        the canary is armed.
        """
        losses = self.bus.losses
        problems = list(self.bus.degraded)
        if not self.drain.running:
            problems.append("the drain is not running")
        return {
            "mode": self.config.mode,
            "watching": self.bound,
            "armed": self._armed,
            "healthy": self._armed and self.error is None and self._violations.incidents == 0 and not problems,
            "incidents": self._violations.incidents,
            "error": None if self.error is None else str(self.error),
            "problems": problems,
            "forward": self.next_forward - 1,
            "events": self.bus.seq,
            "facts_lost": losses.facts,
            "snapshots_skipped": losses.snapshots,
            "journal": None if self._journal is None or self._journal.path is None else str(self._journal.path),
            "observers": {name: msgspec.to_builtins(report) for name, report in self.bus.reports().items()},
        }

    # --- the journal --------------------------------------------------------------------------------------

    def _open_journal(self) -> None:
        config = self.config
        if config.journal is None:
            return
        from kvcanary.journal.gate import Gate
        from kvcanary.journal.sink import Journal
        from kvcanary.journal.writer import Bounds

        self._journal = Journal(
            config.journal,
            config.journal_level,
            bounds=Bounds(
                file=_bytes(config.journal_file_mib),
                directory=_bytes(config.journal_dir_mib),
                queue=_bytes(config.journal_queue_mib),
                ring=_bytes(config.journal_ring_mib),
            ),
            after_s=config.journal_after_s,
            redact=redact_all if config.redact else None,
            tell=self.bus.take_notice,
        )
        self._journal.on_written = self._written
        if config.mode == "raise":
            self._gate = Gate(self._journal, self.mailbox, config.flush_deadline_s)
        self.bus.attach(self._journal)

    def _checkpoint_due(self) -> bool:
        return self._journal is not None and self._journal.checkpoint_due()

    def _settle(self) -> bool:
        return self._gate is not None and self._gate.settle()

    def _written(self) -> None:
        if self._gate is not None and self._gate.holding:
            self.drain.wake()

    def _unguarded(self, error: CanaryStalledError) -> None:
        if self.config.mode == "raise":
            self.mailbox.post(Raise(error))


def _bytes(mib: float) -> int:
    return max(1, int(mib * (1 << 20)))
