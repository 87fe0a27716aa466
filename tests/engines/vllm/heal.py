"""Quarantine on the real engine: a request that read a wrong block is computed anew, and answers as if nothing was.

``python -m tests.engines.vllm.parts RUNNER healed`` prints a JSON line a fault and kind of scheduling.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from tests.engines.vllm import serving
from tests.engines.vllm.clean import Mode, engine
from tests.engines.vllm.faults import Injection, flipped_bit, stale_row


def _serve(one: Injection, fault: Callable[[Injection], None] | None) -> dict[str, list[int]]:
    names = one.traffic.add(serving.Prompts(5).take(6), max_tokens=14)
    one.traffic.run(steps=4)
    if fault is not None:
        fault(one)
    one.traffic.run()
    one.traffic.core.step()
    answers = {str(place): one.traffic.answers[name] for place, name in enumerate(names)}
    one.traffic.reset()
    return answers


def _heal(llm: Any, clean: dict[str, list[int]], fault: Callable[[Injection], None]) -> dict[str, Any]:
    """Serve with a fault in quarantine, and compare the answers with those without one."""
    one = Injection(llm)
    with serving.watched(llm, "quarantine", scrub_mib_per_step=64.0) as (found, watch):
        healed = _serve(one, fault)
        found.catch_up(watch.canary)
    return {
        "fault": fault.__name__,
        "victim": one.victim,
        "differs": [place for place in clean if healed[place] != clean[place]],
        "kinds": sorted(found.kinds),
        "quarantined": [[event.request, event.action, event.tokens_left] for event in found.quarantined],
        "pages": sum(len(event.pages) for event in found.withdrawn),
        "incidents": sorted({event.incident for event in found.quarantined} - {""}),
        "error": found.status["error"],
    }


def run_all(runner: int) -> Iterator[dict[str, Any]]:
    """Faults on engines of one runner, with both kinds of scheduling."""
    for asynchronous in (False, True):
        name = f"{runner} async" if asynchronous else f"{runner}"
        with engine(Mode("heal", runner=runner, asynchronous=asynchronous)) as llm:
            clean = _serve(Injection(llm), None)
            with serving.watched(llm, "log"):
                broken = _serve(Injection(llm), stale_row)
            differs = [place for place in clean if broken[place] != clean[place]]
            yield {"engine": name, "fault": "none", "broken": differs}
            for fault in (stale_row, flipped_bit):
                yield {"engine": name, **_heal(llm, clean, fault)}
