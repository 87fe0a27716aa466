"""What facts and drain take from an engine's thread that is busy in Python all the time: the worst case."""

from __future__ import annotations

import itertools
import random
import statistics
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from kvcanary.bus import Bus
from kvcanary.cli.benches.rows import BenchError, Measured
from kvcanary.cli.benches.running import Setting
from kvcanary.cli.benches.stream import make_snapshot, make_started
from kvcanary.config import CanaryConfig
from kvcanary.delivery import SinkReport
from kvcanary.events import Event, ForwardRetired, RunStarted
from kvcanary.facts import FactLog
from kvcanary.journal.sink import Journal
from kvcanary.mailbox import Mailbox
from kvcanary.observers import default_folds
from kvcanary.pipeline import Drain, DrainReport

REQUESTS = 1000
STEPS_PER_S = 50
STEPS = 10
"""steps of one block, a fifth of a second: whatever else disturbs the machine seldom lasts as short"""
PAIRS = 50
PAGE = 16
PAGES_EACH = 64
STOP_S = 5.0
_OBSERVERS = {"4_observers": (4, False), "16_observers": (16, False), "blocked_sink": (1, True)}
"""observers, and whether there is one more that blocks for ever"""
GROUP = "full"


def measure(setting: Setting, name: str) -> Measured:
    """Blocks of equal work in turns, with and without facts; the value is the median loss of a pair."""
    observers, blocked = _OBSERVERS.get(name.partition(".")[2], (1, False))
    work = Work(1 / (STEPS_PER_S * (20 if setting.rehearse else 1)))
    requests = setting.size(REQUESTS, 40)
    bare, engine = Scheduler(requests), Engine(requests, observers, blocked=blocked)
    pairs = setting.size(10 if setting.quick else PAIRS, 2)
    try:
        losses = [pair(engine, bare, work, number) for number in range(pairs)]
    finally:
        clean, seconds = engine.stop()
    if engine.published == 0 or engine.lost:
        raise BenchError(f"{engine.published} events went through the folds, {engine.lost} facts were lost")
    return Measured(
        name=name,
        value=statistics.median(losses),
        method=(
            f"{pairs} pairs of blocks of {STEPS} steps of pure Python work, {STEPS_PER_S} a second, in turns with "
            f"and without the facts of {requests} decoding requests (one page for each 16th of them a step, "
            "one request replaced a step, a snapshot a step), their drain and the default folds in the same "
            f"interpreter; {observers} observer{'s' * (observers > 1)} of all events in batches"
            f"{', and one that never returns' if blocked else ''}; both blocks do the scheduler's own bookkeeping, the "
            "one without facts while the drain stands still, and the one with facts lasts until the drain has folded "
            "and queued the last of them; median loss of throughput"
        ),
        details={
            "losses_percent": [round(loss, 3) for loss in losses],
            "quartiles_percent": [round(loss, 3) for loss in statistics.quantiles(losses, n=4)],
            "fact_calls_us_per_step": round(1e6 * statistics.median(engine.fact_seconds), 1),
            "looks_per_step": round(engine.looks / engine.steps, 2),
            "events": engine.published,
            "stopped_cleanly": clean,
            "seconds_to_stop": round(seconds, 3),
            "dropped_by_the_blocked_sink": engine.dropped,
        },
    )


def pair(engine: Engine, other: Engine | Scheduler, work: Work, number: int) -> float:
    """Percent of throughput that ``engine`` loses against ``other`` (a scheduler: nobody watches), in one block each.

    Which of them comes first changes with ``number``. A watched block lasts until its facts went through the folds.
    """
    times: dict[bool, float] = {}
    for first in (bool(number % 2), not number % 2):
        turn = engine if first else other
        if isinstance(turn, Engine):
            turn.resume()
        began = time.perf_counter()
        for _ in range(STEPS):
            turn.step()
            work()
        if isinstance(turn, Engine):
            turn.settle()
        times[first] = time.perf_counter() - began
        if isinstance(turn, Engine):
            turn.pause()
    return 100 * (1 - times[False] / times[True])


class Work:
    """The engine's own work of one step: a Python loop that takes ``seconds`` when nothing disturbs it."""

    def __init__(self, seconds: float) -> None:
        self._rounds = 10_000
        fastest = min(self._time() for _ in range(20))
        self._rounds = max(1, int(self._rounds * seconds / fastest))

    def __call__(self) -> int:
        """Do it."""
        total = 0
        for i in range(self._rounds):
            total ^= i
        return total

    def _time(self) -> float:
        began = time.perf_counter()
        self()
        return time.perf_counter() - began


@dataclass(slots=True)
class _Ear:
    """A batch sink that counts."""

    name: str = "bench.count"
    interests: tuple[type[Event], ...] = (Event,)
    count: int = 0

    def handle_batch(self, events: Sequence[Event]) -> None:
        """Count."""
        self.count += len(events)


class _Blocked:
    """A sink that never returns from its first event."""

    name = "bench.blocked"
    interests: tuple[type[Event], ...] = (Event,)

    def __init__(self) -> None:
        self.gate = threading.Event()

    def handle(self, _event: Event) -> None:
        """Wait until the bench is over."""
        self.gate.wait()


class _Source:
    """What a feed is, with snapshots that are ready as soon as their forward was launched."""

    def __init__(self, facts: FactLog) -> None:
        self._facts = facts
        self._runs: deque[RunStarted] = deque([make_started()])
        self.launched: deque[int] = deque()
        self.at_work = threading.Event()
        """while it is not set, a look waits: the drain stands still"""
        self.at_work.set()
        self.looks = 0

    @property
    def in_flight(self) -> bool:
        """Whether a snapshot is waiting."""
        return bool(self.launched)

    @property
    def queued_facts(self) -> int:
        """Facts that wait for the drain."""
        return self._facts.queued

    def next_run(self) -> RunStarted | None:
        """The run, once."""
        return self._runs.popleft() if self._runs else None

    def collect(self) -> list[Event]:
        """Facts, then what the device would have said."""
        self.at_work.wait()
        self.looks += 1
        events = self._facts.take()
        while self.launched:
            forward = self.launched.popleft()
            events += [ForwardRetired(forward=forward, through=forward), make_snapshot(forward)]
        return events


class Scheduler:
    """An engine's own bookkeeping of requests and pages."""

    def __init__(self, requests: int) -> None:
        rng = random.Random(5)
        self.names = [f"r{i}" for i in range(requests)]
        self.pages: dict[str, list[int]] = {}
        self.steps = 0
        free = list(range(requests * 2 * PAGES_EACH))
        rng.shuffle(free)
        self._free = deque(free)
        for row, name in enumerate(self.names):
            self.pages[name] = self._take(row)

    def step(self) -> tuple[list[str], list[int], int, str, list[int]]:
        """A page for each 16th request, and one request replaced.

        Returns:
            The requests that grew and their new pages, then the row, name and pages of the request that ended.
        """
        self.steps += 1
        grown = self.names[self.steps % PAGE :: PAGE]
        fresh = [self._free.popleft() for _ in grown]
        for name, page in zip(grown, fresh, strict=True):
            self.pages[name].append(page)
        row = self.steps % len(self.names)
        old = self.names[row]
        given_back = self.pages.pop(old)
        self._free.extend(given_back)
        self.names[row] = new = f"{old.partition('.')[0]}.{self.steps}"
        self.pages[new] = self._take(row)
        return grown, fresh, row, old, given_back

    def _take(self, row: int) -> list[int]:
        return [self._free.popleft() for _ in range(PAGES_EACH - (row + self.steps) % 8)]


class Engine:
    """Records what an engine with many decoding requests records."""

    def __init__(self, requests: int, observers: int, *, blocked: bool, journal: Journal | None = None) -> None:
        config = CanaryConfig(mode="log")
        self._facts = FactLog(config.fact_queue)
        self._facts.enabled = True
        self._source = _Source(self._facts)
        self._bus = Bus(default_folds(config, Mailbox()))
        self._ears = [_Ear() for _ in range(observers)]
        for ear in self._ears:
            self._bus.subscribe(ear)
        self._blocked = _Blocked()
        if blocked:
            self._bus.subscribe(self._blocked)
        if journal is not None:
            self._bus.attach(journal)
        self.dropped = 0
        self.report = DrainReport()
        self._drain = Drain(self._source, self._bus)
        self._drain.start()
        self._scheduler = Scheduler(requests)
        self._tags = itertools.count(1)
        self._due: dict[str, int] = dict.fromkeys(("facts", "mark", "check", "seal", "scrub"), 0)
        self.forward = 1
        self.fact_seconds: list[float] = []
        for row in range(requests):
            self._admit(row)
        self.step()
        self.settle()
        self.pause()

    @property
    def published(self) -> int:
        """Events that reached the sink."""
        return min(ear.count for ear in self._ears)

    @property
    def reports(self) -> dict[str, SinkReport]:
        """What became of the events of each sink."""
        return self._bus.reports()

    @property
    def lost(self) -> int:
        """Facts that found the queue full."""
        return self._bus.losses.facts

    @property
    def steps(self) -> int:
        """Steps so far."""
        return self._scheduler.steps

    @property
    def looks(self) -> int:
        """How often the drain looked."""
        return self._source.looks

    def step(self) -> None:
        """The facts of one step, and its forward."""
        grown, fresh, row, old, given_back = self._scheduler.step()
        began = time.perf_counter()
        facts = self._facts
        facts.pages_each("alloc", GROUP, grown, fresh)
        facts.finished(old, row + 1, len(given_back) * PAGE)
        facts.pages("free", GROUP, old, given_back)
        self._admit(row)
        facts.step(self.forward, self.forward - 1)
        for role in self._due:
            self._due[role] += 1
        requests = len(self._scheduler.names)
        facts.launched(self.forward, self.forward - 1, requests, requests, 1, dict(self._due))
        self._source.launched.append(self.forward)
        self._drain.wake()
        self.forward += 1
        self.fact_seconds.append(time.perf_counter() - began)

    def settle(self) -> None:
        """Let the drain finish what it has."""
        self._drain.flush(5.0)

    def pause(self) -> None:
        """Let the drain stand still."""
        self._source.at_work.clear()

    def resume(self) -> None:
        """Let it go on."""
        self._source.at_work.set()

    def stop(self) -> tuple[bool, float]:
        """Stop the drain; whether it was clean, and how long it took."""
        self.resume()
        self.report = report = self._drain.stop(STOP_S)
        stuck = report.sinks.get(self._blocked.name)
        self.dropped = 0 if stuck is None else stuck.dropped
        self._blocked.gate.set()
        return report.clean, report.seconds

    def _admit(self, row: int) -> None:
        name = self._scheduler.names[row]
        self._facts.admitted(name, row, next(self._tags), 0, "")
        self._facts.pages("alloc", GROUP, name, self._scheduler.pages[name])
