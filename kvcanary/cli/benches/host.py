"""What the canary costs the thread that launches: microseconds a forward with its facts, and that it never waits."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from kvcanary.cli.benches.engine_loop import ROWS, EngineLoop
from kvcanary.cli.benches.rows import Measured
from kvcanary.cli.benches.running import Setting
from kvcanary.cli.benches.timing import Call, replayable, synchronize

STEPS = 400
SPIN_MS = 5.0
SPIN_STEPS = 20
ENGINE_WORK_S = 0.5e-3
"""Python work of the engine's own between two steps, so that the drain has to share the interpreter with it"""


class Step(NamedTuple):
    """One step's host time, in microseconds: the canary's own calls, and the call of the forward."""

    own: float
    forward: float


def measure(setting: Setting, name: str) -> Measured:
    """One of the three rows."""
    if name == "host_return_ms.20_steps_of_5ms":
        return _never_waits(setting, name)
    return _replay(setting, name) if name == "host_us.graph_replay" else _eager(setting, name)


def _replay(setting: Setting, name: str) -> Measured:
    loop = EngineLoop(setting)
    steps = _run(loop, setting, loop.replay)
    bare = _plain_replay(setting)
    loop.close()
    own = [step.own for step in steps]
    extra = max(0.0, statistics.median(step.forward for step in steps) - bare)
    return Measured(
        name=name,
        value=statistics.median(own) + extra,
        method=(
            f"{_words(setting)}; time of the fact calls and of step()'s entry and exit around a graph replay, plus "
            "what the canary's nodes add to the replay call itself against a graph of one kernel; median of "
            f"{len(steps)} steps"
        ),
        details={"own_us": _spread(own), "replay_call_adds_us": round(extra, 2)},
    )


def _eager(setting: Setting, name: str) -> Measured:
    loop = EngineLoop(setting)
    steps = _run(loop, setting, loop.eager)
    loop.close()
    total = [step.own + step.forward for step in steps]
    return Measured(
        name=name,
        value=statistics.median(total),
        method=(
            f"{_words(setting)}; time of the fact calls, of step()'s entry and exit, and of enter() and leave(), whose "
            f"kernels are launched one by one; median of {len(steps)} steps"
        ),
        details={"us": _spread(total), "enter_and_leave_us": _spread([step.forward for step in steps])},
    )


def _never_waits(setting: Setting, name: str) -> Measured:
    loop = EngineLoop(setting)
    count = setting.size(SPIN_STEPS, 3)
    spin = _spin(setting)
    for _ in range(3):
        loop.step(loop.prepare())
    synchronize(setting.device)
    longest = 0.0
    facts = loop.prepare()
    began = time.perf_counter()
    for number in range(count):
        before = time.perf_counter()
        spin()
        # The engine's own uploads are kept out: a copy from pageable memory would wait by itself.
        loop.step(facts if number == 0 else ())
        longest = max(longest, time.perf_counter() - before)
    returned = time.perf_counter() - began
    synchronize(setting.device)
    done = time.perf_counter() - began
    loop.close()
    return Measured(
        name=name,
        value=1000 * returned,
        method=(
            f"{count} steps (facts in the first, graph replay in each), each behind a spin kernel of {SPIN_MS} ms; "
            "time until the launching thread has launched them all; a canary that waited once would need at least one "
            "spin"
        ),
        details={"gpu_done_ms": round(1000 * done, 2), "longest_step_ms": round(1000 * longest, 3)},
    )


def _run(loop: EngineLoop, setting: Setting, forward: Call) -> list[Step]:
    steps: list[Step] = []
    warmup = setting.size(20, 1)
    for number in range(setting.repeats(STEPS) + warmup):
        facts = loop.prepare()
        synchronize(setting.device)
        busy = time.perf_counter() + ENGINE_WORK_S
        while time.perf_counter() < busy:
            pass
        began = time.perf_counter_ns()
        for fact in facts:
            fact()
        with loop.canary.step():
            entered = time.perf_counter_ns()
            forward()
            launched = time.perf_counter_ns()
        done = time.perf_counter_ns()
        if number >= warmup:
            steps.append(Step((entered - began + done - launched) / 1000, (launched - entered) / 1000))
    return steps


def _plain_replay(setting: Setting) -> float:
    """Median host time of replaying a graph of one small kernel."""
    word = torch.zeros(1, device=setting.device)
    replay = replayable(lambda: word.add_(1), setting.device)
    times: list[float] = []
    for _ in range(setting.repeats(200)):
        synchronize(setting.device)
        began = time.perf_counter_ns()
        replay()
        times.append((time.perf_counter_ns() - began) / 1000)
    return statistics.median(times)


def _spin(setting: Setting) -> Call:
    """Keeps the device busy for :data:`SPIN_MS` without keeping the host."""
    if setting.device != "cuda":
        return lambda: None
    cuda: Any = torch.cuda
    spin: Callable[[int], None] = cuda._sleep  # noqa: SLF001 - the one spin kernel that torch has
    cycles = 1 << 20
    for _ in range(2):  # the second time the clock has come up
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        spin(cycles)
        end.record()
        end.synchronize()
        cycles = int(cycles * SPIN_MS / start.elapsed_time(end))
    return lambda: spin(cycles)


def _spread(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {
        "mean": round(statistics.fmean(values), 2),
        "p50": round(ordered[len(ordered) // 2], 2),
        "p99": round(ordered[min(len(ordered) - 1, len(ordered) * 99 // 100)], 2),
    }


def _words(setting: Setting) -> str:
    rows = setting.size(ROWS, 4)
    return (
        f"a real Canary with its drain running, {rows} decode rows, about {rows // 16} pages allotted and published a "
        "step, one request in 16 steps replaced"
    )
