"""Clean traffic through the real engine in many modes, under watch: nothing may be found.

``python -m tests.engines.vllm.clean [RUNNER or names]`` prints a JSON line a mode.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
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
        """The new runner's kernels run in Triton's interpreter here, several times slower than the earlier one."""
        return 24 if self.runner == 1 else 12


def _both(name: str, **options: Any) -> list[Mode]:
    return [Mode(f"{name} {runner}", runner=runner, **options) for runner in (1, 2)]


SMALL = {"num_gpu_blocks_override": 24}
"""23 usable blocks for eight rows of up to nine: preemption, resumption, eviction"""
CHUNKS = {**SMALL, "max_num_batched_tokens": 48}
MODES = [
    *_both("prefix hits"),
    *_both("small pool", settings=SMALL),
    *_both("async", asynchronous=True),
    *_both("async small pool", asynchronous=True, settings=SMALL),
    *_both("chunked prefill", settings=CHUNKS),
    *_both("async chunked prefill", asynchronous=True, settings=CHUNKS),
    *_both("windows", windows=True, settings={"num_gpu_blocks_override": 64}),
    *_both("async windows", windows=True, asynchronous=True, settings={"num_gpu_blocks_override": 56}),
    *_both("draft model", draft=True),
    *_both("async draft model", draft=True, asynchronous=True, settings={"num_gpu_blocks_override": 32}),
    *_both("no prefix cache", settings={**SMALL, "enable_prefix_caching": False}),
]


def engine(mode: Mode) -> Any:
    """The engine of a mode; the process may have had others before."""
    os.environ.update(cpu.environ(runner=mode.runner, asynchronous=mode.asynchronous))
    model = cpu.WINDOWS if mode.windows else cpu.MODEL
    return serving.make_llm(model, draft=cpu.DRAFT if mode.draft else None, **mode.settings)


def close(llm: Any) -> None:
    """Take an engine down, so that the next one can start in this process."""
    from vllm.distributed import cleanup_dist_env_and_memory

    llm.llm_engine.engine_core.shutdown()
    del llm
    gc.collect()
    cleanup_dist_env_and_memory()


def run(mode: Mode) -> dict[str, Any]:
    """Serve under watch; what was found, in plain values."""
    began = time.monotonic()
    llm = engine(mode)
    started = time.monotonic()
    traffic = serving.Traffic(llm)
    with serving.watched(llm, poison="sample") as (found, _):
        prompts = serving.Prompts(len(mode.name))
        preempted = 0
        for wave in range(3):
            names = traffic.add(prompts.take(mode.prompts // 3), max_tokens=24)
            traffic.run(steps=20)
            preempted += sum(request.num_preemptions for request in traffic.scheduler.requests.values())
            if wave == 1:
                traffic.engine.abort_request(names[-1:])
        traffic.run()
        traffic.core.step()
    summary = found.summary()
    close(llm)
    return {
        "mode": mode.name,
        "answers": len(traffic.answers),
        "asked": mode.prompts,
        "preempted": preempted,
        "groups": len(found.last.verified["links"]) if found.last is not None else 0,
        "facts": dict(found.facts),
        "start_s": round(started - began, 1),
        "run_s": round(time.monotonic() - started, 1),
        "healthy": found.status["healthy"],
        "problems": found.status["problems"],
        **summary,
    }


def main(names: list[str]) -> None:
    """Run the modes that are named (or whose runner is), or all."""
    serving.start()
    for mode in MODES:
        if not names or mode.name in names or str(mode.runner) in names:
            print(json.dumps(run(mode)), flush=True)  # noqa: T201


if __name__ == "__main__":
    main(sys.argv[1:])
