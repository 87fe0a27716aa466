"""The demo as JSON lines: the canary's own log, with what the demo plants and judges between its lines."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext

import msgspec

from kvcanary.cli.models import ModelName
from kvcanary.cli.report import FaultJudged, PhaseEnded, Results
from kvcanary.cli.scoreboard import Scoreboard
from kvcanary.events import Event, FaultInjected
from kvcanary.observers.base import Observer
from kvcanary.observers.log import DEFAULT_INTERESTS, ByteStream, LogSink
from kvcanary.observers.log_format import iso_time


class JsonLines:
    """Writes to ``stream``; the last line is ``demo.ended``."""

    def __init__(self, stream: ByteStream) -> None:
        self._stream = stream

    @property
    def observers(self) -> tuple[Observer, ...]:
        """The log sink."""
        interests: tuple[type[Event], ...] = (*DEFAULT_INTERESTS, FaultInjected, PhaseEnded, FaultJudged)
        return (LogSink(self._stream, interests=interests),)

    def showing(self, board: Scoreboard, model: ModelName) -> AbstractContextManager[object]:
        """The log says it all."""
        del board, model
        return nullcontext()

    def told(self, report: PhaseEnded | FaultJudged) -> None:
        """It is in the stream."""

    def closing(self, results: Results, seconds: float) -> None:
        """``demo.ended``: the sum."""
        line = {
            "timestamp": iso_time(time.time_ns()),
            "level": "error" if results.problems else "info",
            "event": "demo.ended",
            "passed": not results.problems,
            "problems": results.problems,
            "faults": len(results.verdicts),
            "faults_named": sum(verdict.passed for verdict in results.verdicts),
            "clean_phases": len(results.phases),
            "positions": results.positions,
            "seconds": round(seconds, 1),
        }
        self._stream.write(msgspec.json.encode(line) + b"\n")
        self._stream.flush()
