"""A run whose disk is full for a while: nothing may raise, and everything must be told."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path

from kvcanary.bus import Bus
from kvcanary.cli.benches.stream import make_events, make_started
from kvcanary.config import CanaryConfig
from kvcanary.events import EventsDropped, ObserverFailed
from kvcanary.journal.sink import Journal
from kvcanary.journal.writer import Bounds
from kvcanary.mailbox import Mailbox
from kvcanary.observers import default_folds


def limit(size: int) -> None:
    """Of every file that this process writes; -1: none."""
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size if size >= 0 else hard, hard))


journal = Journal(Path(sys.argv[1]), bounds=Bounds(queue=200_000))
bus = Bus(default_folds(CanaryConfig(mode="log"), Mailbox(), journal.checkpoint_due))
journal.tell = bus.take_notice
bus.attach(journal)
bus.begin_run(make_started())
events = make_events(40_000)


failures: list[ObserverFailed] = []
dropped: list[int] = []


def publish(first: int, last: int) -> None:
    for start in range(first, last, 64):
        bus.publish(events[start : min(last, start + 64)])
        pump()


def pump(*, everything: bool = False) -> None:
    told = bus.pump(everything=everything)
    failures.extend(event for event in told if isinstance(event, ObserverFailed))
    dropped.extend(event.count for event in told if isinstance(event, EventsDropped))


def until(condition: Callable[[], object], what: str) -> None:
    end = time.monotonic() + 20
    while not condition():
        if time.monotonic() > end:
            sys.exit(what)
        pump()
        time.sleep(0.01)


def say(word: str) -> None:
    sys.stdout.write(f"{word}\n")


publish(0, 500)
if not journal.flush(time.monotonic() + 20):
    sys.exit("the disk was full too early")
limit(120_000)
for chunk in range(500, 20_000, 500):  # until what fits is written, and the next does not fit
    publish(chunk, chunk + 500)
    if not journal.flush(time.monotonic() + 0.1):
        break
until(lambda: failures, "the failure was not told")
publish(20_000, 30_000)
say("published")
if not bus.reports()["journal"].dropped:
    sys.exit("nothing was given up")
say("dropped")
if failures[0].observer == "journal":
    say("told")
limit(-1)
until(lambda: not journal.pending, "it was not written once there was room")
publish(30_000, 30_800)
journal.flush(time.monotonic() + 20)
pump(everything=True)
publish(30_800, 31_200)
if journal.flush(time.monotonic() + 20):
    say("flushed")
say(str(sum(dropped)))
bus.end_run("done")
_, abandoned = bus.close(time.monotonic() + 20)
sys.exit(f"abandoned: {abandoned}" if abandoned else 0)
