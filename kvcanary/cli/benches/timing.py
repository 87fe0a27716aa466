"""Clocks. On CUDA the replay of captured graphs, cold or warm; elsewhere a host clock, for rehearsals.

A serving step streams tens of gigabytes of weights between two calls of the canary, so the number to plan with is
the *cold* one: before each call the L2 cache is filled with clean foreign lines.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any, Protocol

import torch

from kvcanary.cli.benches.running import Setting

Call = Callable[[], object]

FLUSH_BYTES = 160 << 20
CALLS = 8
"""calls in one graph, so that a microsecond is more than the clock's grain"""
COLD = (
    f"CUDA-graph replay, medians of interleaved replays, L2 cold: a graph of (read 160 MiB; call) x {CALLS} "
    f"minus a graph of (read 160 MiB) x {CALLS}, over {CALLS}"
)
WALL = "rehearsal on a host clock with tiny sizes: says that the code runs, not how fast"


class Timer(Protocol):
    """Measures calls on one device; microseconds."""

    method: str

    def cold(self, *parts: Call) -> float:
        """One run of all ``parts``, with the cache flushed before each of them."""
        ...

    def compare(self, first: Call, second: Call, repeats: int) -> tuple[float, float]:
        """Medians of two calls, replayed in turns, without flushing."""
        ...


def make_timer(setting: Setting) -> Timer:
    """The timer of a setting's device; kept for all rows."""

    def make() -> Timer:
        return GraphTimer(setting) if setting.device == "cuda" else WallTimer(setting)

    return setting.keep("timer", make)


class GraphTimer:
    """CUDA-graph replays between CUDA events."""

    method = COLD

    def __init__(self, setting: Setting) -> None:
        from kvcanary.cli.benches.reading import read_all

        self._repeats = setting.repeats(60)
        buffer = torch.randint(-(1 << 31), (1 << 31) - 1, (FLUSH_BYTES // 4,), dtype=torch.int32, device="cuda")
        self._flush: Call = lambda: read_all(buffer)
        self._empty: dict[int, Any] = {}

    def cold(self, *parts: Call) -> float:
        """See :class:`Timer`."""

        def both() -> None:
            for part in parts:
                self._flush()
                part()

        full = capture(both, times=CALLS)
        empty = self._empty.get(len(parts))
        if empty is None:
            empty = self._empty[len(parts)] = capture(self._flush, times=CALLS * len(parts))
        loaded, bare = _in_turns(full.replay, empty.replay, self._repeats)
        return (loaded - bare) / CALLS

    def compare(self, first: Call, second: Call, repeats: int) -> tuple[float, float]:
        """See :class:`Timer`."""
        return _in_turns(capture(first).replay, capture(second).replay, repeats)


class WallTimer:
    """A host clock around plain calls."""

    method = WALL

    def __init__(self, setting: Setting) -> None:
        self._repeats = setting.repeats(8)

    def cold(self, *parts: Call) -> float:
        """See :class:`Timer`; nothing is flushed."""
        return statistics.median(sum(_wall(part) for part in parts) for _ in range(self._repeats))

    def compare(self, first: Call, second: Call, repeats: int) -> tuple[float, float]:
        """See :class:`Timer`."""
        pairs = [(_wall(first), _wall(second)) for _ in range(max(1, repeats))]
        return statistics.median(a for a, _ in pairs), statistics.median(b for _, b in pairs)


def capture(call: Call, *, times: int = 1) -> Any:
    """A ``torch.cuda.CUDAGraph`` of ``call``, run once before so that nothing compiles in the capture."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    # Other threads may ask their events meanwhile: a canary's drain does.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(times):
            call()
    return graph


def replayable(call: Call, device: str) -> Call:
    """``call`` as a graph's replay on CUDA, as it is elsewhere."""
    if device != "cuda":
        return call
    replay: Call = capture(call).replay
    return replay


def synchronize(device: str) -> None:
    """Wait for the device."""
    if device == "cuda":
        torch.cuda.synchronize()


def _in_turns(first: Call, second: Call, repeats: int) -> tuple[float, float]:
    marks: list[tuple[Any, Any, Any]] = []
    for _ in range(3):
        first()
        second()
    torch.cuda.synchronize()
    for _ in range(repeats):
        start, middle, end = (torch.cuda.Event(enable_timing=True) for _ in range(3))
        start.record()
        first()
        middle.record()
        second()
        end.record()
        marks.append((start, middle, end))
        # A short queue: launches never fall behind, and never run so far ahead that they block.
        if len(marks) % 8 == 0:
            end.synchronize()
    torch.cuda.synchronize()
    return (
        1000 * statistics.median(start.elapsed_time(middle) for start, middle, _ in marks),
        1000 * statistics.median(middle.elapsed_time(end) for _, middle, end in marks),
    )


def _wall(call: Call) -> float:
    began = time.perf_counter_ns()
    call()
    return (time.perf_counter_ns() - began) / 1000
