"""Events per second on one core: through the folds to a sink, as lines of JSON, and into the journal."""

from __future__ import annotations

import contextlib
import os
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvcanary.bus import Bus
from kvcanary.cli.benches.rows import BenchError, Measured
from kvcanary.cli.benches.running import Setting
from kvcanary.config import CanaryConfig
from kvcanary.delivery import SinkReport
from kvcanary.events import (
    Event,
    ForwardLaunched,
    ForwardRetired,
    GroupInfo,
    Origin,
    PageRun,
    PagesAllocated,
    PagesFreed,
    RequestsAdmitted,
    RequestsFinished,
    RunStarted,
    SnapshotTaken,
    ViolationDetected,
    event_name,
)
from kvcanary.journal.sink import Journal
from kvcanary.journal.writer import Bounds
from kvcanary.mailbox import Mailbox
from kvcanary.observers import default_folds
from kvcanary.observers.base import Fold, Observer
from kvcanary.observers.log import LogSink
from kvcanary.observers.redact import redact_all

EVENTS = 200_000
REPEATS = 5
BATCH = 512
"""events of one publish, as many as a drain finds after some milliseconds"""
ROWS, PAGE = 32, 16
TIMEOUT_S = 120.0
ROLES = ("facts", "mark", "check", "seal", "scrub", "window")


def measure(setting: Setting, name: str) -> Measured:
    """One of the rows."""
    count = setting.size(EVENTS // 4 if setting.quick else EVENTS, 2000)
    make = _MAKERS.get(name, make_events)
    rates: list[float] = []
    with _one_core() as pinned, tempfile.TemporaryDirectory(prefix="kvcanary-bench-") as folder:
        for number in range(setting.size(REPEATS, 1)):
            bus, report = _target(name, Path(folder) / str(number))
            rates.append(_rate(bus, report, make(count)))
    mix = Counter(event_name(event) for event in make(1000))
    return Measured(
        name=name,
        value=statistics.median(rates),
        method=(
            f"{count} events ({_WORDS[name]}), made before the clock starts, published {BATCH} at a time; from the "
            f"first publish until the sink has handled the last; median of {len(rates)} runs"
            f"{', all threads on one core' if pinned else ''}"
        ),
        details={"runs": [round(rate) for rate in rates], "mix_per_1000": dict(mix)},
    )


def make_small(count: int) -> list[Event]:
    """The smallest events of a forward: what they cost is the bus, not the folds' own work."""
    return [ForwardRetired(forward=number, through=number) for number in range(1, count + 1)]


def make_violations(count: int) -> list[Event]:
    """Events as people log them: violations with all they know."""
    return [
        ViolationDetected(
            time_ns=1_700_000_000_000_000_000 + number,
            monotonic_ns=number,
            forward=number,
            kind="DIGEST",
            role="check",
            group="full",
            slot=number,
            page=number // PAGE,
            row=number % ROWS,
            tag=number % 1000 + 1,
            request=f"request-{number % 1000}",
            position_expected=number % 4096,
            position_found=number % 4096,
            token_expected=number % 1000,
            token_found=number % 999,
            digest_expected=f"{number:016x}",
            digest_found=f"{number + 1:016x}",
            writer_tag=number % 1000 + 1,
            writer_request=f"request-{number % 1000}",
            writer_forward=number,
            owner_state="held",
        )
        for number in range(count)
    ]


_MAKERS = {"events_per_s.batch_sink": make_small, "events_per_s.json_lines": make_violations}
_TRAFFIC = f"decode traffic of {ROWS} rows: admissions, pages, launches, snapshots"
_WORDS = {
    "events_per_s.batch_sink": (
        "forward.retired, the smallest, through the default folds to a sink that takes batches: the price of "
        "numbering, routing, queueing and delivery; decode_traffic has that of the folds' own work"
    ),
    "events_per_s.decode_traffic": f"{_TRAFFIC}, through the default folds to a sink that takes batches",
    "events_per_s.json_lines": "violations with all fields, to the log sink, redacted, into a file",
    "events_per_s.journal": f"{_TRAFFIC}, redacted, every event written to the journal's file and flushed",
}


@dataclass(slots=True)
class CountingSink:
    """A batch sink that counts."""

    name: str = "bench.count"
    interests: tuple[type[Event], ...] = (Event,)
    queue: int = 1 << 20
    count: int = 0

    def handle_batch(self, events: Sequence[Event]) -> None:
        """Count."""
        self.count += len(events)


def _target(name: str, folder: Path) -> tuple[Bus, Callable[[], SinkReport]]:
    """A bus with what is measured, and what became of the events there."""
    folder.mkdir()
    folds: list[Fold] = []
    if name not in {"events_per_s.json_lines", "events_per_s.journal"}:
        folds = default_folds(CanaryConfig(mode="log"), Mailbox())
    bus = Bus(folds, sink_queue=1 << 20)
    if name == "events_per_s.journal":
        journal = Journal(folder, bounds=Bounds(queue=1 << 30), redact=redact_all)
        bus.attach(journal)
        return bus, journal.report
    sink: Observer = CountingSink()
    if name == "events_per_s.json_lines":
        sink = LogSink(folder / "log.jsonl", interests=(Event,), level="debug")
    return bus, bus.subscribe(sink).report


def _rate(bus: Bus, sink: Callable[[], SinkReport], events: Sequence[Event]) -> float:
    count = len(events)
    bus.begin_run(make_started())
    if not bus.flush(time.monotonic() + TIMEOUT_S):
        raise BenchError("the sink did not open in time")
    before = sink().delivered
    began = time.perf_counter()
    for start in range(0, count, BATCH):
        bus.publish(events[start : start + BATCH])
    handled = bus.flush(time.monotonic() + TIMEOUT_S)
    seconds = time.perf_counter() - began
    report = sink()
    bus.end_run("measured")
    bus.close(time.monotonic() + TIMEOUT_S)
    if not handled or report.dropped or report.failed or report.delivered - before < count:
        raise BenchError(f"of {count} events the sink took {report.delivered - before}: {report}")
    return count / seconds


@contextlib.contextmanager
def _one_core() -> Generator[bool]:
    """All threads that start inside on one core; False where the system cannot do that."""
    if not hasattr(os, "sched_setaffinity"):
        yield False
        return
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(cores)})
    try:
        yield True
    finally:
        os.sched_setaffinity(0, cores)


# --- the events ---------------------------------------------------------------------------------------------


def make_started() -> RunStarted:
    """The beginning of a run over one group."""
    group = GroupInfo(
        name="full", kind="full", num_slots=1 << 20, page_size=PAGE, token_bytes=98_304, sources=96, parts=("target",)
    )
    return RunStarted(
        run="bench", origin=Origin(host="bench", engine="bench"), mode="log", groups=(group,), roles=ROLES[:5]
    )


def make_snapshot(forward: int) -> SnapshotTaken:
    """A healthy snapshot of one group."""
    return SnapshotTaken(
        forward=forward,
        host_forward=forward,
        launches=dict.fromkeys(ROLES, forward),
        due=dict.fromkeys(ROLES, forward),
        verified={check: {"full": forward * 1000} for check in ("links", "row_ends", "writes", "sealed", "content")},
        unverified={"unknown_record": {"full": 0}},
        new_tokens=forward * ROWS,
        digest_sum=f"{forward:016x}",
        scrub_passes={"full": forward // 1000},
        scrub_pass_forwards={"full": forward - forward % 1000 + 1},
        host_us=20.0,
        lag_us=500.0,
    )


def make_events(count: int) -> list[Event]:
    """``count`` events of decode traffic without a fault, in the order in which a drain hands them on."""
    events: list[Event] = []
    engine = _Decode()
    while len(events) < count:
        events += engine.step()
    return events[:count]


class _Decode:
    """Rows that grow by a page each sixteenth step; one request in eight steps is replaced."""

    def __init__(self) -> None:
        self._forward = 0
        self._tag = ROWS
        self._names = [f"r{i}" for i in range(ROWS)]
        self._pages: list[list[int]] = [[] for _ in range(ROWS)]
        self._free: list[int] = list(range((1 << 20) // PAGE - 1, 0, -1))

    def step(self) -> list[Event]:
        """The events of one forward."""
        self._forward = forward = self._forward + 1
        events: list[Event] = []
        left: tuple[str, ...] = ()
        joined: tuple[str, ...] = ()
        if forward == 1:
            joined = tuple(self._names)
            tags = tuple(range(1, ROWS + 1))
            events.append(
                RequestsAdmitted(forward=1, requests=joined, rows=tuple(range(ROWS)), tags=tags, starts=(0,) * ROWS)
            )
        elif forward % 8 == 0:
            row = forward // 8 % ROWS
            left = (self._names[row],)
            events += self._replace(row)
            joined = (self._names[row],)
        grown = [row for row in range(ROWS) if (forward + row) % PAGE == 0 or not self._pages[row]]
        events.append(self._grow(grown))
        events.append(
            ForwardLaunched(
                forward=forward,
                retired=forward - 1,
                rows=ROWS,
                tokens=ROWS,
                joined=joined,
                left=left,
                due=dict.fromkeys(ROLES, forward),
            )
        )
        events += [ForwardRetired(forward=forward, through=forward), make_snapshot(forward)]
        return events

    def _grow(self, rows: Sequence[int]) -> PagesAllocated:
        pages = [self._free.pop() for _ in rows]
        for row, page in zip(rows, pages, strict=True):
            self._pages[row].append(page)
        return PagesAllocated(
            forward=self._forward,
            retired=self._forward - 1,
            group="full",
            requests=tuple(self._names[row] for row in rows),
            runs=tuple(PageRun(i, page, 1) for i, page in enumerate(pages)),
        )

    def _replace(self, row: int) -> list[Event]:
        old, pages = self._names[row], self._pages[row]
        self._tag += 1
        self._names[row] = f"r{row}.{self._tag}"
        self._pages[row] = []
        self._free += pages
        common: dict[str, Any] = {"forward": self._forward, "retired": self._forward - 1}
        return [
            RequestsFinished(**common, requests=(old,), tags=(row + 1,), lengths=(len(pages) * PAGE,), digests=("",)),
            PagesFreed(**common, group="full", requests=(old,), runs=tuple(PageRun(0, page, 1) for page in pages)),
            RequestsAdmitted(**common, requests=(self._names[row],), rows=(row,), tags=(self._tag,), starts=(0,)),
        ]
