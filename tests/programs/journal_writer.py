"""Forks writers of journals, one for each line that it reads; the test kills them. What is acknowledged goes to a pipe.

A writer is a drain as in a canary of mode ``raise``: folds, journal, and the gate that holds errors back.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from kvcanary.bus import Bus
from kvcanary.cli.benches.stream import make_events
from kvcanary.config import CanaryConfig
from kvcanary.errors import KVCorruptionError
from kvcanary.events import GroupInfo, Origin, RunStarted, Ticked, ViolationDetected
from kvcanary.journal.gate import Gate
from kvcanary.journal.sink import Journal
from kvcanary.journal.writer import Bounds
from kvcanary.mailbox import Mailbox
from kvcanary.observers import default_folds
from kvcanary.observers.redact import redact_all

EVENTS = make_events(200_000)


def write(folder: Path, said: int) -> None:
    """Until it is killed. ``said``: descriptor for `A SEQ` (flushed), `V SEQ` (published), `R REQUEST` (raised)."""
    config = CanaryConfig(mode="raise", flush_deadline_s=30)
    mailbox = Mailbox()
    journal = Journal(folder, bounds=Bounds(segment=1 << 19), redact=redact_all)
    gate = Gate(journal, mailbox, config.flush_deadline_s)
    bus = Bus(default_folds(config, mailbox, journal.checkpoint_due))
    bus.attach(journal)
    group = GroupInfo(name="full", kind="full", num_slots=1 << 20, page_size=16, token_bytes=1, sources=1)
    bus.begin_run(RunStarted(run="killed", origin=Origin(pid=os.getpid()), mode="raise", groups=(group,)))
    tell(said, "B")
    told = False
    for number, first in enumerate(range(0, len(EVENTS), 64)):
        bus.publish(EVENTS[first : first + 64])
        if number % 50 == 25:
            bus.publish([Ticked(monotonic_ns=time.monotonic_ns())])
        if number == 8:
            bus.publish([ViolationDetected(kind="CONTENT", role="check", group="full", slot=5, page=0, request="r1")])
        gate.settle()
        if isinstance(mailbox.error, KVCorruptionError) and not told:
            told = True
            tell(said, f"R {mailbox.error.request} {mailbox.error.journal_flushed}")
        if number % 5 == 4 and journal.flush(time.monotonic() + 30):
            tell(said, f"A {bus.seq}")
    tell(said, "E")


def tell(said: int, line: str) -> None:
    os.write(said, f"{line}\n".encode())


for line in sys.stdin:
    child = os.fork()
    if child == 0:
        write(Path(line.strip()), sys.stdout.fileno())
        os._exit(0)
    os.write(sys.stdout.fileno(), f"P {child}\n".encode())
    os.waitpid(child, 0)
    os.write(sys.stdout.fileno(), b"Z\n")
