"""From a snapshot that is ready to an async observer that hears of it: the host's half, without a device."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine

from kvcanary.bus import Bus
from kvcanary.cli.benches.rows import BenchError, Measured
from kvcanary.cli.benches.running import Setting
from kvcanary.cli.benches.stream import make_snapshot, make_started
from kvcanary.config import CanaryConfig
from kvcanary.events import Event, ForwardRetired, RunStarted, SnapshotTaken
from kvcanary.mailbox import Mailbox
from kvcanary.observers import default_folds
from kvcanary.pipeline import Drain

SAMPLES = 2000
BUSY_SAMPLES = 300
TIMEOUT_S = 30.0
PLACES = {"p50": 50.0, "p99": 99.0, "p99_9": 99.9}
METHOD = (
    "a forward that is done at a random moment 1 to 3 ms after its launch, found by a drain that polls as always, then "
    "through the default folds to an async function on the asyncio loop of the launching thread"
)


def measure(setting: Setting, name: str) -> Measured:
    """One of the rows; the three places of one distribution share their samples."""
    return place_of(setting, name, "observing", METHOD, _sample)


def place_of(
    setting: Setting, name: str, kept: str, method: str, sample: Callable[..., Coroutine[object, object, list[float]]]
) -> Measured:
    """The row ``name`` of a distribution whose milliseconds ``sample(setting, busy=...)`` takes once a run.

    Args:
        setting: of the run; keeps the samples.
        name: ends with the place, and with ``_busy_python`` where another thread runs beside.
        kept: what the samples are called there.
        method: how they are taken, in words.
        sample: takes them.
    """
    place, _, beside = name.partition(".")[2].partition("_busy")
    busy = bool(beside)
    samples = setting.keep(f"{kept}{beside}", lambda: asyncio.run(sample(setting, busy=busy)))
    return Measured(
        name=name,
        value=percentile(samples, PLACES[place]),
        method=(
            f"{method}; {'beside a thread that runs pure Python' if busy else 'the interpreter otherwise idle'}; "
            f"{len(samples)} samples"
        ),
        details=spread_ms(samples),
    )


class Ear:
    """An async observer that tells when it heard of each forward."""

    name = "bench.ear"
    interests = (SnapshotTaken,)

    def __init__(self) -> None:
        self.heard: dict[int, int] = {}
        self.news = asyncio.Event()

    async def handle(self, event: SnapshotTaken) -> None:
        """Note the time."""
        self.heard[event.forward] = time.perf_counter_ns()
        self.news.set()

    async def wait(self, forward: int) -> int:
        """When it heard of a forward, in nanoseconds of the performance counter."""
        async with asyncio.timeout(TIMEOUT_S):
            while forward not in self.heard:
                self.news.clear()
                await self.news.wait()
        return self.heard.pop(forward)


async def beside_python(work: Callable[[], Coroutine[None, None, list[float]]], *, busy: bool) -> list[float]:
    """Await ``work()``, if ``busy`` beside a thread that runs pure Python."""
    stop = threading.Event()
    thread = threading.Thread(target=_keep_busy, args=(stop,), daemon=True)
    if busy:
        thread.start()
    try:
        return await work()
    finally:
        stop.set()
        if busy:
            thread.join()


def percentile(samples: list[float], percent: float) -> float:
    """The sample that so many percent are not above."""
    ordered = sorted(samples)
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))]


def spread_ms(samples: list[float]) -> dict[str, float]:
    """The distribution in short."""
    return {f"p{percent:g}_ms": round(percentile(samples, percent), 3) for percent in (1, 50, 90, 99, 99.9, 100)}


class _Source:
    """Forwards that are done at a moment that is known beforehand, so that no other thread has to say so."""

    queued_facts = 0

    def __init__(self) -> None:
        self._runs: deque[RunStarted] = deque([make_started()])
        self._due: deque[tuple[int, int]] = deque()

    def launch(self, forward: int) -> int:
        """When the forward will be done, in nanoseconds of the performance counter."""
        due = time.perf_counter_ns() + random.randint(1_000_000, 3_000_000)
        self._due.append((forward, due))
        return due

    @property
    def in_flight(self) -> bool:
        """Whether a forward is not done yet."""
        return bool(self._due)

    def next_run(self) -> RunStarted | None:
        """The run, once."""
        return self._runs.popleft() if self._runs else None

    def collect(self) -> list[Event]:
        """What a device would have said of the forwards that are done."""
        events: list[Event] = []
        while self._due and self._due[0][1] <= time.perf_counter_ns():
            forward, _ = self._due.popleft()
            events += [ForwardRetired(forward=forward, through=forward), make_snapshot(forward)]
        return events


async def _sample(setting: Setting, *, busy: bool) -> list[float]:
    count = setting.repeats(BUSY_SAMPLES if busy else SAMPLES)
    source, ear = _Source(), Ear()
    bus = Bus(default_folds(CanaryConfig(mode="log"), Mailbox()))
    bus.subscribe(ear)
    drain = Drain(source, bus)
    drain.start()

    async def sample() -> list[float]:
        lags: list[float] = []
        for forward in range(1, count + 4):
            due = source.launch(forward)
            drain.wake()
            lags.append((await ear.wait(forward) - due) / 1e6)
        return lags[3:]

    try:
        samples = await beside_python(sample, busy=busy)
    finally:
        await drain.astop()
    if min(samples) < 0:
        raise BenchError(f"a forward was reported {-min(samples):.1f} ms before it was done")
    return samples


def _keep_busy(stop: threading.Event) -> None:
    total = 0
    while not stop.is_set():
        for i in range(10_000):
            total ^= i
