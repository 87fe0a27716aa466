"""A device that does later what is launched now: one stream in order, and copies that no stream orders."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

Work = Callable[[], object]


@dataclass(slots=True, eq=False)
class Copy:
    """A copy on a stream of its own.

    Attributes:
        work: what it does; its result is ignored.
        after: it must not run before so much of the main stream is done; 0: it waits for nothing.
        landed: its bytes are there.
    """

    work: Work
    after: int
    landed: bool = False


class Device:
    """The main stream runs in order, and only when somebody waits for it or lets it :meth:`run`.

    Args:
        wait: waits for the real device, if there is one.

    Attributes:
        launched, done: pieces of work on the main stream.
    """

    def __init__(self, wait: Work = bool) -> None:
        self._wait = wait
        self._stream: deque[Work] = deque()
        self.launched = 0
        self.done = 0

    def launch(self, work: Work) -> int:
        """Put work on the main stream; returns the number to wait for."""
        self._stream.append(work)
        self.launched += 1
        return self.launched

    def run(self, until: int | None = None) -> None:
        """Do the work up to number ``until``, or all of it."""
        target = self.launched if until is None else min(until, self.launched)
        while self.done < target:
            self.done += 1
            self._stream.popleft()()
        self._wait()

    def copy(self, work: Work) -> Copy:
        """A copy that begins when all that is launched by now is done."""
        return Copy(work, self.launched)

    def land(self, copy: Copy) -> None:
        """Wait for a copy."""
        if not copy.landed:
            self.run(copy.after)
            copy.landed = True
            copy.work()
