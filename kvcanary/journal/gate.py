"""An error is shown once the journal has what led to it, or says that it has not. Nobody waits for either."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass

from kvcanary.errors import KVCorruptionError
from kvcanary.journal.sink import Journal, Ticket
from kvcanary.mailbox import Mailbox, Raise


@dataclass(slots=True)
class _Held:
    message: Raise
    until: float
    dropped: int
    ticket: Ticket | None = None


class Gate:
    """Holds what is posted to ``mailbox`` for at most ``seconds``. Belongs to the drain's thread.

    An error is posted by a fold, before the event that it folds is published: so the journal is asked to write at the
    next :meth:`settle`, and the error is delivered at one of those after it.
    """

    def __init__(self, journal: Journal, mailbox: Mailbox, seconds: float) -> None:
        self._journal = journal
        self._mailbox = mailbox
        self._seconds = seconds
        self._held: deque[_Held] = deque()
        mailbox.hold = self.hold

    @property
    def holding(self) -> bool:
        """Whether an error is held back."""
        return bool(self._held)

    def hold(self, message: Raise) -> None:
        """Keep an error until the journal has written."""
        self._held.append(_Held(message, time.monotonic() + self._seconds, self._journal.dropped))

    def settle(self) -> bool:
        """Deliver what was written, and what has waited too long; whether something is still held."""
        for held in self._held:
            if held.ticket is None:
                held.ticket = self._journal.ticket()
        while self._held and self._decide(self._held[0]):
            self._held.popleft()
        return self.holding

    def release(self) -> None:
        """The drain has ended: deliver everything, with what is known."""
        while self._held:
            held = self._held.popleft()
            held.ticket = held.ticket or self._journal.ticket()
            self._deliver(held, flushed=self._is_written(held))

    def _decide(self, held: _Held) -> bool:
        written = self._is_written(held)
        gone = held.ticket is not None and held.ticket.dropped != held.dropped
        if not (written or gone) and time.monotonic() < held.until:
            return False
        self._deliver(held, flushed=written)
        return True

    def _is_written(self, held: _Held) -> bool:
        ticket = held.ticket
        return ticket is not None and ticket.dropped == held.dropped and self._journal.written(ticket)

    def _deliver(self, held: _Held, *, flushed: bool) -> None:
        error = held.message.error
        if isinstance(error, KVCorruptionError):
            error.journal_flushed = flushed
        where = self._journal.path or "the journal"
        error.add_note(f"{where} {'has' if flushed else f'did not take, within {self._seconds:g} s,'} what led to it")
        self._mailbox.deliver(held.message)
