"""Clean traffic through the real engine in many modes, watched by nothing but the environment: nothing may be found.

``python -m tests.engines.vllm.clean [RUNNER or names]`` prints a JSON line a mode.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from tests.engines.vllm import cpu, serving


@dataclass(frozen=True)
class Mode:
    """One way to run the engine."""

    name: str
    runner: int = 2
    asynchronous: bool = False
    windows: bool = False
    draft: bool = False
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def prompts(self) -> int:
        """Triton's kernels run in its interpreter here, several times slower: the new runner's, and those of drafts."""
        return 6 if self.draft else 15 if self.runner == 1 else 9


def _both(name: str, *, small: bool = False, **options: Any) -> list[Mode]:
    settings = options.pop("settings", {})
    return [
        Mode(f"{name} {runner}", runner=runner, settings={**settings, **(SMALL[runner] if small else {})}, **options)
        for runner in (1, 2)
    ]


SMALL = {runner: {"num_gpu_blocks_override": blocks, "max_model_len": 160} for runner, blocks in ((1, 20), (2, 14))}
"""By runner, which serve other numbers of prompts, of up to nine blocks each: preemption, resumption, eviction"""
CHUNKS = {"max_num_batched_tokens": 48}
MODES = [
    *_both("prefix hits"),
    *_both("small pool", small=True),
    *_both("async", asynchronous=True),
    *_both("async small pool", small=True, asynchronous=True),
    *_both("chunked prefill", small=True, settings=CHUNKS),
    *_both("async chunked prefill", small=True, asynchronous=True, settings=CHUNKS),
    *_both("windows", windows=True, settings={"num_gpu_blocks_override": 64}),
    *_both("async windows", windows=True, asynchronous=True, settings={"num_gpu_blocks_override": 56}),
    *_both("draft model", draft=True),
    *_both("async draft model", draft=True, asynchronous=True, settings={"num_gpu_blocks_override": 32}),
    *_both("no prefix cache", small=True, settings={"enable_prefix_caching": False}),
]


@contextmanager
def engine(mode: Mode) -> Iterator[Any]:
    """The engine of a mode; the process may have had others before, and may have more."""
    from vllm.distributed import cleanup_dist_env_and_memory

    os.environ.update(cpu.environ(runner=mode.runner, asynchronous=mode.asynchronous))
    model = cpu.WINDOWS if mode.windows else cpu.MODEL
    llm = serving.make_llm(model, draft=cpu.DRAFT if mode.draft else None, **mode.settings)
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()
        cleanup_dist_env_and_memory()


def run(mode: Mode) -> dict[str, Any]:
    """Serve under watch; what was found, in plain values."""
    from kvcanary.engines.vllm import installation

    began = time.process_time()
    found = serving.listen_anew()
    with engine(mode) as llm:
        started = time.process_time()
        traffic = serving.Traffic(llm)
        preempted = _serve(traffic, mode)
        canary = installation._WATCHES[id(traffic.runner)].canary
        canary.flush(serving.DEADLINE_S)
        status = canary.status()
        asynchronous = traffic.scheduler.scheduler_config.async_scheduling
    # The watch ended with the engine: all was heard.
    return {
        "mode": mode.name,
        "asynchronous": asynchronous,
        "answers": len(traffic.answers),
        "asked": mode.prompts,
        "preempted": preempted,
        "groups": len(found.last.verified["links"]) if found.last is not None else 0,
        "facts": dict(found.facts),
        "start_cpu_s": round(started - began, 1),
        "run_cpu_s": round(time.process_time() - started, 1),
        "healthy": status["healthy"],
        "problems": status["problems"],
        **found.summary(),
    }


def _serve(traffic: serving.Traffic, mode: Mode) -> int:
    """Three waves of prompts, one of which is aborted; how often requests were preempted."""
    prompts = serving.Prompts(len(mode.name))
    preempted: dict[str, int] = {}

    def note() -> bool:
        preempted.update({name: request.num_preemptions for name, request in traffic.scheduler.requests.items()})
        return False

    for wave in range(3):
        names = traffic.add(prompts.take(mode.prompts // 3), max_tokens=14 if mode.draft else 24)
        traffic.run(steps=20, until=note)
        if wave == 1:
            traffic.engine.abort_request(names[-1:])
    traffic.run(until=note)
    traffic.core.step()
    return sum(preempted.values())


def main(names: list[str]) -> None:
    """Run the modes that are named (or whose runner is), or all."""
    os.environ.update(serving.ENVIRONMENT)
    serving.start()
    for mode in MODES:
        if not names or mode.name in names or str(mode.runner) in names:
            print(json.dumps(run(mode)), flush=True)  # noqa: T201


if __name__ == "__main__":
    main(sys.argv[1:])
