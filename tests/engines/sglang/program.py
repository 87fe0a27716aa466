"""Serve with a real scheduler, watched: clean, then with one fault after another. Prints one JSON document.

``python -m tests.engines.sglang.program CONFIGURATION``; SGLang keeps its settings in the process, so each
configuration is a process of its own.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from typing import Any, Self

from kvcanary.errors import KVCorruptionError
from kvcanary.events import OwnershipViolated, RequestQuarantined, RunStarted, SnapshotTaken, ViolationDetected
from tests.engines.sglang import attaching
from tests.engines.sglang.faults import FAULTS, Injection
from tests.engines.sglang.rig import MODELS, Rig

CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "tokens": {"model": "full", "page_size": 1},
    "pages": {
        "model": "full",
        "page_size": 16,
        "chunked_prefill_size": 48,
        "enable_mixed_chunk": True,
        "max_total_tokens": 480,
    },
    "window": {"model": "window", "page_size": 1, "swa_full_tokens_ratio": 1},
    "drafts": {
        "model": "full",
        "page_size": 1,
        "attention_backend": "triton",
        "speculative_algorithm": "STANDALONE",
        "speculative_draft_model_path": str(MODELS / "draft"),
        "speculative_num_steps": 3,
        "speculative_eagle_topk": 1,
        "speculative_num_draft_tokens": 4,
        "max_total_tokens": 1200,
    },
}
ENVIRONMENT = {
    # A fault is meant to break the pool's books; SGLang would end the process over them once it is idle.
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE": "0",
    "SGLANG_TEST_RETRACT_INTERVAL": "40",
    "SGLANG_NATIVE_MOVE_KV_CACHE": "1",
}
ATTACHING = HEALING = RAISING = SALTING = UPDATING = frozenset({"tokens"})
RETRACTING = frozenset({"pages"})


def main(name: str) -> None:
    """Run one configuration."""
    settings = dict(CONFIGURATIONS[name])
    rig = Rig(settings.pop("model"), **settings)
    report: dict[str, Any] = {"clean": clean(rig, small=name == "drafts")}
    if name in ATTACHING:
        report["attaching"] = attaching.report(rig)
    if name in SALTING:
        report["salted"] = {fault: salted(rig, fault) for fault in ("", "stale_entry")}
    if name in UPDATING:
        report["updated"] = update_weights(rig)
    if name in HEALING:
        report["healed"] = heal(rig)
    small = name == "drafts"  # SGLang has a kernel for these on a CPU only in Triton's interpreter
    report["faults"] = {
        fault: spoil(rig, fault, small=small) for fault, where in FAULTS.items() if name in where.configurations
    }
    if name in RAISING:
        report["raised"] = raised(rig)  # last, since it leaves the loop in the middle of a turn
    print("REPORT " + json.dumps(report))  # noqa: T201 - what the test reads


def clean(rig: Rig, *, small: bool) -> dict[str, Any]:
    """A workload with shared prefixes, more requests than fit, and an abort."""
    requests, prefix, prompt, output = (2, 4, 6, 5) if small else (30, 40, 30, 30)
    shared = rig.prompt(prefix)
    for i in range(requests):
        rig.submit(f"r{i:02}", shared[: (i % 3) * prefix // 2] + rig.prompt(prompt + i), output + i)
    with watched(rig) as seen:
        rig.run(lambda: abort(rig, "r01") if rig.turns == 60 and not small else True)
        rig.scheduler.flush_cache()
        rig.submit("after", rig.prompt(prompt), 2)
        rig.run()
    return seen.report(rig)


def heal(rig: Rig) -> dict[str, Any]:
    """The same requests three times: clean, with a fault, with the fault and a quarantine."""
    answers: dict[str, list[list[int]]] = {}
    report: dict[str, Any] = {}
    for mode, fault in (("clean", ""), ("log", "swapped_rows"), ("quarantine", "swapped_rows")):
        rig.scheduler.flush_cache()
        rig.random.seed(11)
        for i in range(4):
            rig.submit(f"{mode}-{i}", rig.prompt(50 + i), 40)
        injection = Injection(rig, fault) if fault else None
        with watched(rig, mode if fault else "log") as seen:
            if injection is None:
                rig.run()
            else:
                injection.start(seen.canary)
                rig.run(injection.turn)
                injection.end()
        answers[mode] = [rig.finished[f"{mode}-{i}"] for i in range(4)]
        report[mode] = seen.report(rig)
    return {**report, "answers": answers}


def salted(rig: Rig, fault: str) -> dict[str, Any]:
    """One prompt under several names of its own, which must not share; ``fault``: a slot of one is given to another."""
    rig.scheduler.flush_cache()
    prompt = rig.prompt(50)
    for i, names in enumerate(({"extra_key": "a"}, {"extra_key": "b"}, {"cache_salt": "b"}, {"cache_salt": "c"})):
        rig.submit(f"salted-{i}", prompt, 30, **names)
    injection = Injection(rig, fault or "none")
    with watched(rig) as seen:
        injection.start(seen.canary)
        rig.run(injection.turn)
        injection.end()
    return {**seen.report(rig), **injection.report()}


def update_weights(rig: Rig) -> dict[str, Any]:
    """New weights that leave the prefix tree as it is, and a request that finds its prefix there."""
    rig.scheduler.flush_cache()
    prompt = rig.prompt(40)
    with watched(rig) as seen:
        rig.submit("weights-before", prompt, 4)
        rig.run()
        rig.scheduler.record_weight_version_change("2")
        rig.submit("weights-after", prompt, 4)
        rig.run()
    return seen.report(rig)


def raised(rig: Rig) -> dict[str, Any]:
    """What comes out of the loop in ``raise`` mode."""
    rig.scheduler.flush_cache()
    for i in range(4):
        rig.submit(f"raise-{i}", rig.prompt(50 + i), 40)
    injection = Injection(rig, "stale_entry")
    try:
        with watched(rig, "raise") as seen:
            injection.start(seen.canary)
            rig.run(injection.turn)
    except KVCorruptionError as error:
        return {"kind": error.kind, "request": error.request, "finished": "raise-0" in rig.finished}
    return {}


def abort(rig: Rig, name: str) -> bool:
    from sglang.srt.managers.io_struct import AbortReq

    rig.scheduler.abort_request(AbortReq(rid=name))
    return True


def spoil(rig: Rig, fault: str, *, small: bool) -> dict[str, Any]:
    """The same requests each time, and one fault in the middle."""
    rig.scheduler.flush_cache()
    rig.random.seed(7)
    requests, prompt, output, turns = (3, 24, 9, 4) if small else (4, 50, 40, 15)
    for i in range(requests):
        rig.submit(f"{fault}-{i}", rig.prompt(prompt + i), output)
    injection = Injection(rig, fault, turns)
    with watched(rig) as seen:
        injection.start(seen.canary)
        rig.run(injection.turn)
        injection.end()
    return {**seen.report(rig), **injection.report()}


class watched:  # noqa: N801 - a context manager
    """Watches, and remembers what was reported."""

    def __init__(self, rig: Rig, mode: str = "log") -> None:
        from kvcanary.testing import EventRecorder
        from kvcanary.watching import watch

        self._recorder = EventRecorder()
        self._watch = watch(rig.scheduler, mode=mode, observers=[self._recorder])

    def __enter__(self) -> Self:
        self._watch.start()
        self.canary = self._watch.canary
        return self

    def __exit__(self, *_: object) -> None:
        if self.canary is not None:
            self.canary.flush(10)
        self._watch.stop()

    def report(self, rig: Rig) -> dict[str, Any]:
        events = self._recorder.events
        (started,) = [event for event in events if isinstance(event, RunStarted)]
        last = [event for event in events if isinstance(event, SnapshotTaken)][-1]
        return {
            "events": Counter(type(event).__name__ for event in events),
            "violations": [
                {
                    "kind": event.kind,
                    "group": event.group,
                    "request": event.request,
                    "slot": event.slot,
                    "forward": event.forward,
                    "owner_state": event.owner_state,
                    "part": event.part,
                    "position": event.position_expected,
                }
                for event in events
                if isinstance(event, ViolationDetected)
            ],
            "ownership": sorted({event.kind for event in events if isinstance(event, OwnershipViolated)}),
            "quarantined": [
                (event.request, event.action, event.tokens_left)
                for event in events
                if isinstance(event, RequestQuarantined)
            ],
            "finished": {name: len(ids) for name, ids in rig.finished.items()},
            "verified": last.verified,
            "unverified": last.unverified,
            "groups": [group.name for group in started.groups],
            "parts": [group.parts for group in started.groups],
            "uncovered": started.uncovered,
            "unarmed": started.unarmed,
            "overlap": bool(rig.scheduler.enable_overlap),
        }


if __name__ == "__main__":
    os.environ.update(ENVIRONMENT)
    if sys.argv[1] in RETRACTING:
        os.environ["SGLANG_TEST_RETRACT"] = "1"
    main(sys.argv[1])
