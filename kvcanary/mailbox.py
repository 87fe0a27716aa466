"""The one way back: what the drain asks of the engine's thread.

The drain posts; the engine's thread looks at the entry of a step. Nothing else flows back.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Raise:
    """Raise ``error`` at this and every later step."""

    error: BaseException


@dataclass(frozen=True, slots=True)
class Quarantine:
    """Take ``requests``, and all live requests whose tables hold ``pages`` of ``group``, out of service.

    ``forward``: the one that found it. Who got a page, or began, later than that is not concerned.
    """

    incident: str
    requests: tuple[str, ...] = ()
    group: str = ""
    pages: tuple[int, ...] = ()
    forward: int = 0


class Mailbox:
    """Thread-safe. ``pending`` is a plain attribute, so that a step that has no mail pays one read.

    Attributes:
        pending: there is an error, or a quarantine that nobody took yet.
        error: the first error that was delivered; it stays.
        hold: takes errors in place of the engine until it delivers them, once a journal has what led to them.
    """

    __slots__ = ("_lock", "_quarantines", "error", "hold", "pending")

    def __init__(self) -> None:
        self.pending: bool = False
        self.error: BaseException | None = None
        self.hold: Callable[[Raise], None] | None = None
        self._lock = threading.Lock()
        self._quarantines: dict[tuple[str, str], Quarantine] = {}

    def post(self, message: Raise | Quarantine) -> None:
        """Leave a message. Quarantines of one incident and group are merged until they are taken."""
        if isinstance(message, Raise) and self.hold is not None:
            self.hold(message)
        else:
            self.deliver(message)

    def deliver(self, message: Raise | Quarantine) -> None:
        """Let the engine's thread find the message, whoever holds others."""
        with self._lock:
            if isinstance(message, Raise):
                self.error = self.error or message.error
            else:
                key = (message.incident, message.group)
                self._quarantines[key] = _merge(self._quarantines.get(key), message)
            self.pending = True

    def take_quarantines(self) -> list[Quarantine]:
        """All quarantines since the last call, oldest first."""
        with self._lock:
            taken = list(self._quarantines.values())
            self._quarantines.clear()
            self.pending = self.error is not None
            return taken


def _merge(before: Quarantine | None, new: Quarantine) -> Quarantine:
    if before is None:
        return new
    return replace(
        before,
        requests=tuple(dict.fromkeys(before.requests + new.requests)),
        pages=tuple(dict.fromkeys(before.pages + new.pages)),
        # The later one: rather is somebody healed who need not be than a bad page left in service.
        forward=max(before.forward, new.forward),
    )
