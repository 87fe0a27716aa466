"""A run whose disk is full for a while: nothing may raise, and everything must be told."""

from __future__ import annotations

import resource
import sys
import time
from pathlib import Path

from kvcanary.bus import Bus
from kvcanary.cli.benches.stream import make_events, make_started
from kvcanary.config import CanaryConfig
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


def publish(first: int, last: int) -> None:
    for start in range(first, last, 64):
        bus.publish(events[start : min(last, start + 64)])
        bus.pump()


publish(0, 500)
if not journal.flush(time.monotonic() + 20):
    sys.exit("the disk was full too early")
limit(120_000)
publish(500, 20_000)
sys.stdout.write("published\n")
if not journal.dropped or journal.flush(time.monotonic() + 0.1):
    sys.exit("the disk was never full")
sys.stdout.write("dropped\n")
if not bus.reports()["journal"].dropped:
    sys.exit("nobody was told")
bus.pump(everything=True)
sys.stdout.write("told\n")
limit(-1)
while journal.pending:
    time.sleep(0.01)
publish(20_000, 20_800)
journal.flush(time.monotonic() + 20)
if journal.flush(time.monotonic() + 20):
    sys.stdout.write("flushed\n")
bus.pump(everything=True)
publish(20_800, 21_200)
bus.end_run("done")
_, abandoned = bus.close(time.monotonic() + 20)
sys.exit(f"abandoned: {abandoned}" if abandoned else 0)
