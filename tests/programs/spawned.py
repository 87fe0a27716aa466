"""A process with a stream, and one that it spawns, with another."""

from __future__ import annotations

import multiprocessing
import os
from collections import deque

from kvcanary.bus import Bus
from kvcanary.events import Event, HazardCounted, Origin, RunStarted
from kvcanary.observers.base import observer
from kvcanary.pipeline import Drain


class Source:
    """Two or three events, ready from the beginning."""

    in_flight = False

    def __init__(self, count: int) -> None:
        self._runs = deque([RunStarted(run="r", origin=Origin())])
        self._ready = deque(HazardCounted(hazard="x", count=n) for n in range(count))

    def collect(self) -> list[HazardCounted]:
        """All that is left."""
        return [self._ready.popleft() for _ in range(len(self._ready))]

    def next_run(self) -> RunStarted | None:
        """The run, once."""
        return self._runs.popleft() if self._runs else None


def serve(name: str, count: int) -> None:
    """Run a drain to its end and print the numbers of its events."""
    numbers: list[int] = []

    @observer
    def keep(event: Event) -> None:
        numbers.append(event.seq)

    bus = Bus()
    bus.subscribe(keep)
    drain = Drain(Source(count), bus)
    drain.start()
    if name == "parent":
        child = multiprocessing.get_context("spawn").Process(target=serve, args=("child", count - 1))
        child.start()
        child.join()
    drain.stop(10)
    os.write(1, f"{name} {' '.join(map(str, numbers))}\n".encode())


if __name__ == "__main__":
    serve("parent", 2)
