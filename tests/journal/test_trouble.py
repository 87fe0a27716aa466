"""A sink that blocks for ever and a disk that is full, at the same time, in a real canary."""

from __future__ import annotations

import functools
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvcanary.canary import Canary
from kvcanary.config import CanaryConfig
from kvcanary.errors import KVCorruptionError
from kvcanary.events import Event, EventsDropped, FaultInjected, ObserverFailed, RunStopped
from kvcanary.journal import writer
from kvcanary.journal.reader import JournalFile, find_files
from kvcanary.observers.base import observer
from kvcanary.pipeline import DrainReport
from kvcanary.testing import EventRecorder
from tests.canary.hand import HandEngine

FLUSH_S, STOP_S = 0.5, 3.0
SOON = 20.0


class Trouble:
    """A canary in ``raise`` mode whose journal and whose observer ``stuck`` take nothing more, and what came of it."""

    def __init__(self, folder: Path) -> None:
        self.gate = threading.Event()
        self.seen = EventRecorder()

        @observer(name="stuck", queue=50)
        def stuck(_: Event) -> None:
            self.gate.wait()

        config = CanaryConfig(
            mode="raise",
            journal=str(folder),
            journal_level="all",
            journal_queue_mib=0.1,
            flush_deadline_s=FLUSH_S,
            stop_deadline_s=STOP_S,
        )
        self.canary = Canary(config, observers=[stuck, self.seen]).start()
        self.engine = HandEngine(self.canary)
        self.engine.admit("a", 9)
        self.engine.step()
        self.fill()
        self.engine.flip_bit("a", 3)
        self.error = self.until_raised()
        self.report: DrainReport = self.canary.stop()

    def fill(self) -> None:
        """Until both give events up."""
        noise = random.Random(1)
        end = time.monotonic() + SOON
        while time.monotonic() < end:
            for _ in range(50):
                self.canary.emit(FaultInjected(fault="noise", description=noise.randbytes(1500).hex()))
            self.canary.drain.flush(SOON)
            reports = self.canary.bus.reports()
            if reports["journal"].dropped and reports["stuck"].dropped:
                return
        raise AssertionError(f"nothing was given up: {self.canary.bus.reports()}")

    def until_raised(self) -> KVCorruptionError:
        """The error, at a step of the engine."""
        end = time.monotonic() + SOON
        while time.monotonic() < end:
            try:
                self.engine.step()
            except KVCorruptionError as error:
                return error
        raise AssertionError("nothing was raised")


@pytest.fixture(scope="module")
def trouble(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trouble]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writer, "Bounds", functools.partial(writer.Bounds, pages=40))  # SQLite's own "disk is full"
        made = Trouble(tmp_path_factory.mktemp("full"))
    yield made
    made.gate.set()


def test_the_engine_is_stopped_all_the_same_and_the_error_says_that_the_journal_lacks_it(trouble: Trouble) -> None:
    assert trouble.error.kind == "CONTENT"
    assert trouble.error.journal_flushed is False
    assert "did not take" in trouble.error.__notes__[0]


def test_stopping_keeps_its_deadline_and_names_both(trouble: Trouble) -> None:
    report = trouble.report
    assert set(report.abandoned) == {"kvcanary-sink-stuck", "kvcanary-sink-journal"}
    assert not report.clean
    assert report.seconds < STOP_S
    states = {name: (sink.state, sink.undelivered > 0) for name, sink in report.sinks.items()}
    assert states == {"stuck": ("abandoned", True), "journal": ("abandoned", True), "recorder": ("closed", False)}


def test_every_event_is_accounted_for_and_others_miss_none(trouble: Trouble) -> None:
    events, sinks = trouble.seen.events, trouble.report.sinks
    assert [event.seq for event in events] == list(range(1, trouble.report.events + 1))
    of_itself = sum(isinstance(e, (EventsDropped, ObserverFailed)) and e.observer == "stuck" for e in events)
    for name, wanted in (("stuck", len(events) - of_itself), ("journal", len(events))):
        sink = sinks[name]
        assert sink.delivered + sink.failed + sink.dropped + sink.undelivered == wanted


def test_losses_are_told_to_the_event_while_the_run_lasts(trouble: Trouble) -> None:
    *events, stopped = trouble.seen.events
    told = Counter[str]()
    last: dict[str, int] = {"stuck": 0, "journal": 0}
    for event in events:
        if isinstance(event, EventsDropped):
            assert event.first_seq > last[event.observer]
            last[event.observer] = event.last_seq
            told[event.observer] += event.count
    assert isinstance(stopped, RunStopped)
    for name, sink in trouble.report.sinks.items():
        after = trouble.report.events - last[name] if name in last else 0
        assert 0 <= sink.dropped - told[name] <= after
    assert set(stopped.undelivered) == {"stuck", "journal"}
    failed = [event for event in events if isinstance(event, ObserverFailed)]
    assert {event.observer for event in failed} == {"journal"}
    assert "full" in failed[0].error


def test_what_the_journal_says_it_delivered_is_in_its_file(trouble: Trouble) -> None:
    with JournalFile(*find_files(Path(str(trouble.canary.config.journal)))) as file:
        kept = [event.seq for event in file.events()]
    assert kept == list(range(1, trouble.report.sinks["journal"].delivered + 1))
