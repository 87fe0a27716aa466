"""From the moment the GPU is done with a forward to an async observer that hears of it."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import torch

from kvcanary.cli.benches.engine_loop import EngineLoop
from kvcanary.cli.benches.observing import Ear, beside_python, place_of
from kvcanary.cli.benches.rows import BenchError, Measured
from kvcanary.cli.benches.running import Setting

SAMPLES = 2000
BUSY_SAMPLES = 100
METHOD = (
    "a step behind a spin of random 1 to 3 ms; the GPU's end is placed on the host's clock by a CUDA event recorded on "
    "the idle GPU just before (at most some 10 us early, which counts against the canary); the observer is an async "
    "function on the asyncio loop of the launching thread"
)


def measure(setting: Setting, name: str) -> Measured:
    """One of the rows; the places of one distribution share their samples."""
    return place_of(setting, name, "latency", METHOD, _sample)


async def _sample(setting: Setting, *, busy: bool) -> list[float]:
    count = setting.repeats(BUSY_SAMPLES if busy else SAMPLES)
    ear = Ear()
    loop = EngineLoop(setting, steps=count + 8)
    loop.canary.subscribe(ear)

    async def sample() -> list[float]:
        return [await _one(loop, ear, _gpu_end(setting)) for _ in range(count + 3)][3:]

    try:
        return await beside_python(sample, busy=busy)
    finally:
        loop.close()


async def _one(loop: EngineLoop, ear: Ear, gpu_end: Callable[[Callable[[], None]], Callable[[], int]]) -> float:
    """Milliseconds from the GPU's end of one step to the observer's call."""
    facts = loop.prepare()
    number = loop.canary.next_forward
    ended = gpu_end(lambda: loop.step(facts))
    late = await ear.wait(number) - ended()
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
