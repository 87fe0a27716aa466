"""From the moment the GPU is done with a forward to an async observer that hears of it."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from kvcanary.cli.benches.engine_loop import EngineLoop
from kvcanary.cli.benches.rows import BenchError, Measured
from kvcanary.cli.benches.running import Setting
from kvcanary.events import SnapshotTaken

SAMPLES = 400
BUSY_SAMPLES = 60
TIMEOUT_S = 5.0
METHOD = (
    "a step behind a spin of random 1 to 3 ms; the GPU's end is placed on the host's clock by a CUDA event recorded on "
    "the idle GPU just before (at most some 10 us early, which counts against the canary); the observer is an async "
    "function on the asyncio loop of the launching thread"
)


def measure(setting: Setting, name: str) -> Measured:
    """One of the three rows; the two of the idle interpreter share their samples."""
    if name.endswith("busy_python"):
        samples = asyncio.run(_sample(setting, setting.repeats(BUSY_SAMPLES), busy=True))
        beside = "beside a thread that runs pure Python"
    else:
        samples = setting.keep("latency", lambda: asyncio.run(_sample(setting, setting.repeats(SAMPLES), busy=False)))
        beside = "the interpreter otherwise idle"
    ordered = sorted(samples)
    place = 50 if name.endswith("p50") else 99
    return Measured(
        name=name,
        value=_percentile(ordered, place),
        method=f"{METHOD}; {beside}; {len(samples)} samples",
        details={f"p{p}_ms": round(_percentile(ordered, p), 3) for p in (1, 50, 90, 99, 100)},
    )


class _Ear:
    """An async observer that tells when it heard of each forward."""

    name = "bench.ear"
    interests = (SnapshotTaken,)

    def __init__(self) -> None:
        self.heard: dict[int, int] = {}
        self.news = asyncio.Event()

    async def handle(self, event: SnapshotTaken) -> None:
        """Note the time."""
        self.heard[event.forward] = time.perf_counter_ns()
        self.news.set()


async def _sample(setting: Setting, count: int, *, busy: bool) -> list[float]:
    ear = _Ear()
    loop = EngineLoop(setting, steps=count + 8)
    loop.canary.subscribe(ear)
    stop = threading.Event()
    thread = threading.Thread(target=_keep_busy, args=(stop,), daemon=True)
    if busy:
        thread.start()
    try:
        for _ in range(3):
            await _one(loop, ear, _gpu_end(setting))
        return [await _one(loop, ear, _gpu_end(setting)) for _ in range(count)]
    finally:
        stop.set()
        if busy:
            thread.join()
        loop.close()


async def _one(loop: EngineLoop, ear: _Ear, gpu_end: Callable[[Callable[[], None]], Callable[[], int]]) -> float:
    """Milliseconds from the GPU's end of one step to the observer's call."""
    facts = loop.prepare()
    number = loop.canary.next_forward
    ended = gpu_end(lambda: loop.step(facts))
    async with asyncio.timeout(TIMEOUT_S):
        while number not in ear.heard:
            ear.news.clear()
            await ear.news.wait()
    late = ear.heard.pop(number) - ended()
    if late < -1_000_000:
        raise BenchError(f"forward {number} was reported {-late / 1e6:.1f} ms before the GPU had finished it")
    return late / 1e6


def _gpu_end(setting: Setting) -> Callable[[Callable[[], None]], Callable[[], int]]:
    """Launches a step and tells later when the device was done with it, on the host's clock in nanoseconds."""

    def on_host(step: Callable[[], None]) -> Callable[[], int]:
        step()
        now = time.perf_counter_ns()
        return lambda: now

    def on_device(step: Callable[[], None]) -> Callable[[], int]:
        cuda: Any = torch.cuda
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        began = time.perf_counter_ns()
        start.record()
        cuda._sleep(random.randint(2_000_000, 6_000_000))  # noqa: SLF001 - about 1 to 3 ms
        step()
        end.record()

        def ended() -> int:
            end.synchronize()
            return began + int(1e6 * start.elapsed_time(end))

        return ended

    return on_device if setting.device == "cuda" else on_host


def _keep_busy(stop: threading.Event) -> None:
    total = 0
    while not stop.is_set():
        for i in range(10_000):
            total ^= i


def _percentile(ordered: list[float], percent: int) -> float:
    return ordered[min(len(ordered) - 1, len(ordered) * percent // 100)]
