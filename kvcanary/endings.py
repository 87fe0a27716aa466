"""How a background thread's life can end: by a deadline, at the interpreter's exit, in a forked copy.

Hooks for forks cannot be taken back, so one is shared by all and made when the first is needed; they and the
hooks for exit hold weak references, so nothing is kept alive for them.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
import weakref
from collections.abc import Callable
from typing import Protocol


def seconds_left(until: float) -> float:
    """Seconds until the monotonic time ``until``: at least 0, and at most what a lock can be asked to wait for.

    The standard library's locks refuse longer ones with an OverflowError, infinity among them.
    """
    return min(max(0.0, until - time.monotonic()), threading.TIMEOUT_MAX)


class Deadline:
    """One span of time that several duties share.

    Attributes:
        began: monotonic time of its beginning.
        seconds: its length.
    """

    __slots__ = ("began", "seconds")

    def __init__(self, seconds: float) -> None:
        self.began = time.monotonic()
        self.seconds = max(0.0, seconds)

    def at(self, share: float) -> float:
        """The monotonic time at which ``share`` of it has passed."""
        return self.began + self.seconds * share

    @property
    def left(self) -> float:
        """Seconds that are left, at least 0."""
        return seconds_left(self.at(1.0))

    @property
    def spent(self) -> float:
        """Seconds since it began."""
        return time.monotonic() - self.began


class Mortal(Protocol):
    """What a process can copy or forget."""

    def forked(self) -> None:
        """This is the copy in a forked child: its threads do not exist, its descriptors belong to the parent too."""

    def forgotten(self) -> None:
        """The interpreter ends and nobody stopped it."""


class Vigil:
    """Tells ``mortal`` of the ends that it cannot see, until :meth:`end`."""

    def __init__(self, mortal: Mortal) -> None:
        self._reference = weakref.ref(mortal)
        _VIGILS.add(self)
        _hook_forks()
        atexit.register(self._at_exit)

    def end(self) -> None:
        """Tell no more. Idempotent."""
        atexit.unregister(self._at_exit)
        _VIGILS.discard(self)

    def fork(self) -> None:
        """Called in a forked child."""
        self._tell(lambda mortal: mortal.forked())
        self.end()

    def _at_exit(self) -> None:
        self._tell(lambda mortal: mortal.forgotten())

    def _tell(self, message: Callable[[Mortal], None]) -> None:
        mortal = self._reference()
        if mortal is not None:
            message(mortal)


_VIGILS: set[Vigil] = set()
_HOOKED = threading.Event()


def _hook_forks() -> None:
    if not _HOOKED.is_set() and hasattr(os, "register_at_fork"):
        _HOOKED.set()
        os.register_at_fork(after_in_child=_after_fork)


def _after_fork() -> None:
    for vigil in tuple(_VIGILS):
        vigil.fork()
