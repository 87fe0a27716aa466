"""A tiny vLLM in this process, traffic for it, and what a watch of it found."""

from __future__ import annotations

import json
import os
import random
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import kvcanary
from kvcanary.config import CanaryConfig, Mode
from kvcanary.events import (
    Event,
    FaultInjected,
    IncidentOpened,
    OwnershipViolated,
    PagesAllocated,
    PagesFact,
    PagesFreed,
    PagesQuarantined,
    PrefixEvicted,
    PrefixReused,
    RequestQuarantined,
    SnapshotTaken,
    ViolationDetected,
    WeightsUpdated,
    event_name,
)
from tests.engines.vllm import cpu

Heard = (
    ViolationDetected
    | OwnershipViolated
    | IncidentOpened
    | SnapshotTaken
    | RequestQuarantined
    | PagesQuarantined
    | FaultInjected
    | PagesAllocated
    | PagesFreed
    | PrefixReused
    | PrefixEvicted
    | WeightsUpdated
)
VOCABULARY = 512
DEADLINE_S = 10.0


def make_llm(model: dict[str, Any], *, draft: dict[str, Any] | None = None, **settings: Any) -> Any:
    """An ``LLM`` of a model with random weights."""
    from vllm import LLM

    folder = Path(tempfile.mkdtemp(prefix="kvcanary-vllm-"))
    arguments: dict[str, Any] = {
        "model": _model(folder / "model", model),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "enforce_eager": True,
        "dtype": "float32",
        "max_model_len": 256,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 256,
        "num_gpu_blocks_override": 96,
        "block_size": 16,
        "disable_log_stats": True,
        "compilation_config": {"custom_ops": ["none"]},
    }
    if draft is not None:
        arguments["speculative_config"] = {"model": _model(folder / "draft", draft), "num_speculative_tokens": 3}
    llm = LLM(**{**arguments, **settings})
    core = getattr(llm.llm_engine.engine_core, "engine_core", None)
    if core is not None:
        _randomise(core.model_executor.driver_worker.worker.model_runner)
    return llm


def _randomise(runner: Any) -> None:
    """Dummy weights are so small that a model only repeats its last token. A draft model agrees with its target now and
    then, because it has the same first layer.
    """
    import torch

    random = torch.Generator().manual_seed(3)
    weights = {name: weight.data for name, weight in runner.model.named_parameters() if weight.dim() > 1}
    for name, weight in weights.items():
        weight.normal_(0, 1.0 if "embed" in name or "lm_head" in name else 0.2, generator=random)
    drafter = getattr(runner, "speculator", None) or getattr(runner, "drafter", None)
    draft = getattr(drafter, "model", None)
    for name, weight in draft.named_parameters() if draft is not None else ():
        if weight.dim() > 1:
            weight.data.copy_(weights[name])


def _model(folder: Path, config: dict[str, Any]) -> str:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


class Prompts:
    """Random prompts; most begin with one of a few heads, so that they share prefixes."""

    def __init__(self, seed: int, *, longest: int = 120) -> None:
        self._random = random.Random(seed)
        self._longest = longest
        self._heads = [self._tokens(length) for length in (32, 48, 21)]

    def take(self, count: int) -> list[list[int]]:
        """Some prompts."""
        heads = [self._random.choice([*self._heads, []]) for _ in range(count)]
        return [(head + self._tokens(self._random.randrange(5, 60)))[: self._longest] for head in heads]

    def _tokens(self, count: int) -> list[int]:
        return [self._random.randrange(10, VOCABULARY) for _ in range(count)]


@dataclass
class Found:
    """What one watch said."""

    violations: list[ViolationDetected | OwnershipViolated] = field(default_factory=list)
    incidents: list[IncidentOpened] = field(default_factory=list)
    quarantined: list[RequestQuarantined] = field(default_factory=list)
    withdrawn: list[PagesQuarantined] = field(default_factory=list)
    epochs: list[int] = field(default_factory=list)
    last: SnapshotTaken | None = None
    facts: Counter[str] = field(default_factory=Counter)
    """page facts by the name of their event"""
    status: dict[str, Any] = field(default_factory=dict)
    heard: threading.Event = field(default_factory=threading.Event)

    def catch_up(self, canary: Any) -> None:
        """Wait until everything that happened so far was heard."""
        self.heard.clear()
        canary.flush(DEADLINE_S)
        canary.emit(FaultInjected(fault="none"))
        if not self.heard.wait(DEADLINE_S):
            raise TimeoutError("the listener heard nothing")

    @property
    def kinds(self) -> Counter[str]:
        """Violations by kind."""
        return Counter(event.kind for event in self.violations)

    def verified(self, check: str = "links") -> int:
        """Positions verified by one check, over all groups."""
        return sum(self.last.verified.get(check, {}).values()) if self.last is not None else 0

    def unverified(self) -> dict[str, int]:
        """What was not verified, by reason."""
        totals = {} if self.last is None else self.last.unverified
        return {reason: sum(groups.values()) for reason, groups in totals.items() if any(groups.values())}

    def summary(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "verified": {check: self.verified(check) for check in (self.last.verified if self.last else {})},
            "unverified": self.unverified(),
            "kinds": dict(self.kinds),
            "first": [str(event) for event in self.violations[:3]],
            "forwards": self.last.forward if self.last else 0,
        }


@contextmanager
def watched(llm: Any, mode: Mode = "log", **settings: Any) -> Iterator[tuple[Found, Any]]:
    """Watch an engine; what was found is complete when the block ends."""
    found = Found()

    @kvcanary.observer(queue=1 << 17)
    def listen(event: Heard) -> None:
        note(found, event)

    config = CanaryConfig(mode=mode, **{"scrub_mib_per_step": 0.25, "redact": False, **settings})
    with kvcanary.watch(llm, config=config, observers=[listen]) as watch:
        yield found, watch
        found.status = watch.status


ENVIRONMENT = {
    "KVCANARY_MODE": "log",
    "KVCANARY_OBSERVERS": f"{__name__}:listen",
    "KVCANARY_POISON": "sample",
    "KVCANARY_SCRUB_MIB_PER_STEP": "0.25",
    "KVCANARY_REDACT": "0",
}
"""The first watches every engine of a process, the second lets the process hear of it, the others look at more."""
_LISTENING = [Found()]


@kvcanary.observer(queue=1 << 17)
def listen(event: Heard) -> None:
    """Hear a watch that the environment began."""
    note(_LISTENING[0], event)


def listen_anew() -> Found:
    """What :func:`listen` hears from now on."""
    _LISTENING[0] = Found()
    return _LISTENING[0]


def note(found: Found, event: Event) -> None:
    """Sort an event in."""
    if isinstance(event, FaultInjected):
        found.heard.set()
    elif isinstance(event, SnapshotTaken):
        found.last = event
    elif isinstance(event, PagesFact):
        found.facts[event_name(event)] += sum(run.count for run in event.runs)
    elif isinstance(event, WeightsUpdated):
        found.epochs.append(event.epoch)
    elif isinstance(event, IncidentOpened):
        found.incidents.append(event)
    elif isinstance(event, PagesQuarantined):
        found.withdrawn.append(event)
    elif isinstance(event, RequestQuarantined):
        found.quarantined.append(event)
    elif isinstance(event, ViolationDetected | OwnershipViolated):
        found.violations.append(event)


class Traffic:
    """Requests of one engine, step by step."""

    def __init__(self, llm: Any) -> None:
        self.engine = llm.llm_engine
        self.core = self.engine.engine_core.engine_core
        self.answers: dict[str, list[int]] = {}
        self._count = 0

    @property
    def scheduler(self) -> Any:
        """The engine's scheduler."""
        return self.core.scheduler

    @property
    def runner(self) -> Any:
        """The worker's model runner."""
        return self.core.model_executor.driver_worker.worker.model_runner

    def add(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_tokens: int = 24,
        prefix: str = "r",
        salt: str | None = None,
        **sampling: Any,
    ) -> list[str]:
        """Queue prompts; returns their names."""
        from vllm import SamplingParams, TokensPrompt

        names = [f"{prefix}{self._count + i}" for i in range(len(prompts))]
        self._count += len(prompts)
        for name, prompt in zip(names, prompts, strict=True):
            parameters = SamplingParams(
                max_tokens=max_tokens, temperature=0, ignore_eos=True, detokenize=False, **sampling
            )
            given = TokensPrompt(prompt_token_ids=list(prompt))
            if salt is not None:
                given["cache_salt"] = salt
            self.engine.add_request(name, given, parameters)
        return names

    def step(self) -> None:
        """One step of the engine."""
        for output in self.engine.step():
            if output.finished:
                self.answers[output.request_id] = list(output.outputs[0].token_ids)

    def run(self, *, steps: int | None = None, until: Callable[[], bool] | None = None) -> int:
        """Step until nothing is left, or so many times, or until something holds; returns the steps made."""
        made = 0
        while self.engine.has_unfinished_requests() and made != steps and not (until is not None and until()):
            self.step()
            made += 1
        return made

    def reset(self) -> None:
        """Drop all requests and cached prefixes."""
        self.engine.abort_request(list(self.scheduler.requests))
        self.run()
        self.engine.reset_prefix_cache()


def start(*, runner: int = 2, asynchronous: bool = False) -> None:
    """Prepare this process; call before vLLM is imported."""
    os.environ.update(cpu.environ(runner=runner, asynchronous=asynchronous))
    cpu.register()
