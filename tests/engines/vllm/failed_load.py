"""A block that failed to load, told to vLLM's scheduler in the middle of a request, on either model runner.

``python -m tests.engines.vllm.failed_load RUNNER`` prints a JSON line: whether the answers are those of an undisturbed
run, and what a watch in ``log`` mode said. The story is in docs/vllm_failed_load.md.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

from tests.engines.vllm import serving
from tests.engines.vllm.clean import Mode, engine
from tests.engines.vllm.faults import Injection


def report_failed_load(one: Injection) -> None:
    """Have the next step's output say that the victim's second block holds nothing that was loaded."""
    from vllm.v1.outputs import KVConnectorOutput

    one.choose(length=3)
    scheduler, block = one.traffic.scheduler, one.blocks()[1]
    original = scheduler.update_from_output

    def update_from_output(scheduler_output: Any, model_runner_output: Any) -> Any:
        model_runner_output.kv_connector_output = KVConnectorOutput(invalid_block_ids={block})
        return original(scheduler_output, model_runner_output)

    scheduler.update_from_output = update_from_output
    one.traffic.step()
    scheduler.update_from_output = original
    one.traffic.step()


def serve(one: Injection, *, disturbed: bool) -> list[list[int]]:
    """Three prompts; their answers."""
    names = one.traffic.add(serving.Prompts(5).take(3), max_tokens=20)
    one.traffic.run(steps=4)
    if disturbed:
        report_failed_load(one)
    one.traffic.run()
    return [one.traffic.answers[name] for name in names]


def run_all(runner: int) -> Iterator[dict[str, Any]]:
    """Serve undisturbed, then disturbed and watched."""
    with engine(Mode("failed load", runner=runner, settings={"enable_prefix_caching": False})) as llm:
        clean = serve(Injection(llm), disturbed=False)
        one = Injection(llm)
        with serving.watched(llm, scrub_mib_per_step=64.0) as (found, _):
            disturbed = serve(one, disturbed=True)
    yield {
        "runner": runner,
        "victim": one.victim,
        "same_answers": disturbed == clean,
        "kinds": dict(found.kinds),
        "headlines": [incident.headline for incident in found.incidents],
        "causes": [incident.likely_cause for incident in found.incidents],
        "first": [str(event) for event in found.violations[:4]],
    }


if __name__ == "__main__":
    serving.start(runner=int(sys.argv[1]))
    print(json.dumps(next(run_all(int(sys.argv[1])))))  # noqa: T201
