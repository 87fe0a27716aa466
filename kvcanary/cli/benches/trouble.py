"""What an engine's thread loses when its watch is in trouble: a sink that blocks for ever, and a disk that is full."""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path

from kvcanary.cli.benches.engine_thread import PAIRS, REQUESTS, STEPS, STEPS_PER_S, STOP_S, Engine, Work, pair
from kvcanary.cli.benches.rows import BenchError, Measured
from kvcanary.cli.benches.running import Setting
from kvcanary.journal.sink import Journal
from kvcanary.journal.writer import Bounds

FULL = Bounds(pages=64, queue=1 << 18)
"""SQLite says that the disk is full after 256 KiB; another 256 KiB wait for it in memory."""
_MOST_STEPS = 100_000
_BLOCKED = "bench.blocked"


def measure(setting: Setting, name: str) -> Measured:
    """Blocks of equal work in turns, beside a watch in trouble and one that is not; the value is the median loss."""
    work = Work(1 / (STEPS_PER_S * (20 if setting.rehearse else 1)))
    requests = setting.size(REQUESTS, 40)
    blocks = setting.size(4 if setting.quick else PAIRS, 2)
    with tempfile.TemporaryDirectory() as folder:
        troubled = Engine(requests, 1, blocked=True, journal=Journal(Path(folder), bounds=FULL))
        healthy = Engine(requests, 1, blocked=False)
        try:
            _until_both_lose(troubled)
            losses = [pair(troubled, healthy, work, number) for number in range(blocks)]
        finally:
            clean, seconds = troubled.stop()
            healthy.stop()
    report = troubled.report
    written = report.sinks[Journal.name]
    told = written.delivered + written.dropped + written.undelivered
    if told != report.events:
        raise BenchError(f"the journal tells what became of {told} events, but there were {report.events}")
    if clean or troubled.lost or seconds > STOP_S + 0.5:
        raise BenchError(f"clean {clean}, {troubled.lost} facts lost, stopped after {seconds:.2f} s")
    return Measured(
        name=name,
        value=statistics.median(losses),
        method=(
            f"{blocks} pairs of blocks of {STEPS} steps of pure Python work, {STEPS_PER_S} a second, in turns, each "
            f"with the facts of {requests} decoding requests, their drain, the default folds and an observer of all "
            "events: beside a sink that never returns and a journal of every event on a full disk (both lose events "
            "from before the first block on), and beside neither; each block lasts until its facts are folded and "
            "queued, and the other watch's drain stands still; median loss of throughput"
        ),
        details={
            "losses_percent": [round(loss, 3) for loss in losses],
            "events": report.events,
            "dropped": {sink: report.sinks[sink].dropped for sink in (_BLOCKED, Journal.name)},
            "undelivered": {sink: report.sinks[sink].undelivered for sink in (_BLOCKED, Journal.name)},
            "stopped_cleanly": clean,
            "seconds_to_stop": round(seconds, 3),
            "deadline_s": STOP_S,
        },
    )


def _until_both_lose(engine: Engine) -> None:
    engine.resume()
    for _ in range(_MOST_STEPS):
        engine.step()
        if engine.steps % 50 == 0:
            engine.settle()
            if all(engine.reports[sink].dropped for sink in (_BLOCKED, Journal.name)):
                engine.pause()
                return
    raise BenchError(f"after {_MOST_STEPS} steps nothing was given up: {engine.reports}")
