"""A bus with a journal, and traffic for it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvcanary.bus import Bus
from kvcanary.cli.benches.stream import make_events
from kvcanary.config import CanaryConfig
from kvcanary.events import Event, GroupInfo, Origin, RunStarted, Ticked, ViolationDetected
from kvcanary.journal.reader import JournalFile
from kvcanary.journal.sink import Journal
from kvcanary.journal.writer import Bounds
from kvcanary.mailbox import Mailbox
from kvcanary.observers import default_folds
from kvcanary.observers.redact import redact_all

SECOND = 1_000_000_000
TOKEN, DIGEST = 485_177_331, "7c2f78936c7d6112"
CONFIG = CanaryConfig(mode="log", stats_every=10, health_every=10, health_warmup=10)


def started(run: str = "r1", *, time_ns: int = 0, config: CanaryConfig = CONFIG, **origin: Any) -> RunStarted:
    """The beginning of a run over one group of pages of 16 slots."""
    group = GroupInfo(name="full", kind="full", num_slots=1 << 20, page_size=16, token_bytes=1, sources=1)
    return RunStarted(
        run=run,
        origin=Origin(host="here", engine="test", **origin),
        mode=config.mode,
        config=config.describe(),
        groups=(group,),
        roles=("facts", "mark", "check", "seal", "scrub"),
        time_ns=time_ns,
    )


def violation(forward: int = 1, slot: int = 57, request: str = "chat-7", **fields: Any) -> ViolationDetected:
    """A changed token in a slot."""
    return ViolationDetected(
        forward=forward,
        kind="INPUT_TOKEN",
        role="mark",
        group="full",
        slot=slot,
        page=slot // 16,
        request=request,
        token_expected=TOKEN,
        token_found=TOKEN + 1,
        digest_expected=DIGEST,
        **fields,
    )


def tick(second: float) -> Ticked:
    """The clock."""
    return Ticked(time_ns=int(second * SECOND), monotonic_ns=int(second * SECOND))


def at(second: float, events: Sequence[Event]) -> list[Event]:
    """The same events at a moment."""
    from msgspec.structs import replace

    return [replace(event, time_ns=int(second * SECOND), monotonic_ns=int(second * SECOND)) for event in events]


def seconds_of(count: int, each: int) -> Iterator[tuple[int, list[Event]]]:
    """Decode traffic without a fault, a second after another, each with its tick."""
    events = make_events(count * each)
    for second in range(count):
        part = events[second * each : (second + 1) * each]
        yield second, [*at(second, part), tick(second)]


class Recording:
    """A bus in this thread, with the default folds, and its journal."""

    def __init__(self, folder: Path, level: Any = "all", *, redact: Any = True, **options: Any) -> None:
        self.mailbox = Mailbox()
        self.journal = Journal(folder, level, redact={True: redact_all, False: None}.get(redact, redact), **options)
        self.bus = Bus(default_folds(CONFIG, self.mailbox, self.journal.checkpoint_due))
        self.journal.tell = self.bus.take_notice
        self.bus.attach(self.journal)
        self.published: list[Event] = []

    def begin(self, run: str = "r1", **fields: Any) -> None:
        """A run."""
        self.published = list(self.bus.begin_run(started(run, **fields)))

    def publish(self, events: Sequence[Event], batch: int = 64) -> None:
        """As a drain does, a few at a time."""
        for first in range(0, len(events), batch):
            self.published += self.bus.publish(events[first : first + batch])
            self.published += self.bus.pump()

    def flush(self, seconds: float = 20) -> bool:
        """Whether all is on disk."""
        return self.journal.flush(time.monotonic() + seconds)

    def close(self) -> None:
        """End the run and the journal."""
        self.bus.end_run("done")
        reports, abandoned = self.bus.close(time.monotonic() + 20)
        assert not abandoned, reports

    @property
    def path(self) -> Path:
        assert self.journal.path is not None
        return self.journal.path

    def open(self) -> JournalFile:
        return JournalFile(self.path)


@contextmanager
def recording(folder: Path, level: Any = "all", **options: Any) -> Iterator[Recording]:
    """A run, begun, and ended at the end."""
    made = Recording(folder, level, **options)
    try:
        made.begin()
        yield made
    finally:
        made.close()


def record(folder: Path, events: Sequence[Event], level: Any = "all", **options: Any) -> Path:
    """The file of a whole run."""
    with recording(folder, level, **options) as made:
        made.publish(events)
        made.flush()
    return made.path


def faulty(forwards: int = 60, broken: int = 40) -> list[Event]:
    """Decode traffic in which things are found in two places in one forward, in the first twice."""
    events: list[Event] = []
    for event in make_events(forwards * 4):
        events.append(event)
        if event.forward == broken and type(event).__name__ == "SnapshotTaken":
            owner: dict[str, Any] = {"owner_state": "held", "owner_request": "r3", "owner_tag": 4, "owner_as_of": 16}
            events += [violation(broken, request="r3", **owner) for _ in range(2)]
            events += [violation(broken, slot=900, request="r5")]
    return events


def seqs(events: Sequence[Event]) -> list[int]:
    """Their numbers."""
    return [event.seq for event in events]


Small = Bounds(file=200_000, directory=1 << 30, queue=1 << 20, ring=400_000, segment=20_000)
