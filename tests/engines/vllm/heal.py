"""Quarantine on the real engine: a request that read a wrong block is computed anew, and answers as if nothing was.

``python -m tests.engines.vllm.heal RUNNER [async]`` prints a JSON line a fault.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

from tests.engines.vllm import serving
from tests.engines.vllm.clean import Mode, close, engine
from tests.engines.vllm.faults import Injection, flipped_bit, stale_row


def _serve(one: Injection, fault: Callable[[Injection], None] | None) -> dict[str, list[int]]:
    names = one.traffic.add(serving.Prompts(5).take(6), max_tokens=20)
    one.traffic.run(steps=4)
    if fault is not None:
        fault(one)
    one.traffic.run()
    one.traffic.core.step()
    answers = {str(place): one.traffic.answers[name] for place, name in enumerate(names)}
    one.traffic.reset()
    return answers


def run(llm: Any, fault: Callable[[Injection], None]) -> dict[str, Any]:
    """Serve without a fault, then with one in quarantine, and compare the answers."""
    clean = _serve(Injection(llm), None)
    with serving.watched(llm, "log"):
        broken = _serve(Injection(llm), fault)
    one = Injection(llm)
    with serving.watched(llm, "quarantine", scrub_mib_per_step=64.0) as (found, watch):
        healed = _serve(one, fault)
        found.catch_up(watch.canary)
    return {
        "fault": fault.__name__,
        "victim": one.victim,
        "broken": [place for place in clean if broken[place] != clean[place]],
        "differs": [place for place in clean if healed[place] != clean[place]],
        "kinds": sorted(found.kinds),
        "quarantined": [[event.request, event.action, event.tokens_left] for event in found.quarantined],
        "pages": sum(len(event.pages) for event in found.withdrawn),
        "incidents": sorted({event.incident for event in found.quarantined} - {""}),
        "error": found.status["error"],
    }


def main(runner: int, asynchronous: bool) -> None:
    """Faults on an engine of one runner."""
    serving.start(runner=runner, asynchronous=asynchronous)
    llm = engine(Mode("heal", runner=runner, asynchronous=asynchronous))
    for fault in (stale_row, flipped_bit):
        print(json.dumps(run(llm, fault)), flush=True)  # noqa: T201
    close(llm)


if __name__ == "__main__":
    main(int(sys.argv[1]), asynchronous="async" in sys.argv)
