"""Random requests through the real engine on a CPU, in every mode, under watch.

``python -m tests.engines.soak`` runs all of it and prints one line a run. A clean engine must leave no violation, and
everything that was not verified must have a reason.
"""

from __future__ import annotations

import logging
import random
import sys
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import torch

import kvcanary
from kvcanary.config import CanaryConfig
from kvcanary.events import Event, OwnershipViolated, RunStarted, SnapshotTaken, ViolationDetected
from tests.engines.models import KINDS, VOCABULARY, make_model
from tests.engines.serving import batching, blocks_are_shared_by_groups, pool_groups
from tests.engines.transformers_cpu import cpu_stand_ins

DEADLINE_S = 60.0
"""Known faults of the engine make it hang; nothing here waits longer than this."""


@dataclass(frozen=True, slots=True)
class Mode:
    """One way to run the engine. ``models``: those that it makes sense for."""

    name: str
    models: tuple[str, ...] = KINDS
    asynchronous: bool = False
    page: int = 8
    batch_tokens: int = 256
    roomy: bool = True
    offload_gib: float = 0.0
    sharing: bool = True
    families: int = 3
    sessions: int = 1
    padded: bool = False
    fast_decode: bool = False
    children: int = 0
    cancel: float = 0.0
    scheduler: str = "fifo"
    through: str = "manager"
    """how the engine is reached: ``manager``, ``model`` (``generate_batch``), ``context``, ``running``"""
    inference: bool = False


_BASE = Mode("sync")
_ASYNC = replace(_BASE, name="async", asynchronous=True)
_SMALL = replace(_BASE, roomy=False, batch_tokens=96)
_SMALL_ASYNC = replace(_SMALL, asynchronous=True)
MODES = (
    _BASE,
    _ASYNC,
    replace(_BASE, name="sync chunked", batch_tokens=32),
    replace(_ASYNC, name="async chunked", batch_tokens=48),
    replace(_SMALL, name="soft reset"),
    replace(_SMALL_ASYNC, name="async soft reset"),
    replace(_SMALL, name="offload", offload_gib=0.01),
    replace(_SMALL_ASYNC, name="async offload", offload_gib=0.01),
    replace(_BASE, name="no sharing", models=("full",), sharing=False),
    replace(_ASYNC, name="async no sharing", models=("full",), sharing=False),
    replace(_BASE, name="one family", models=("full",), families=1),
    replace(_ASYNC, name="async one family", models=("full",), families=1),
    replace(_BASE, name="sessions", models=("full", "mixed"), sessions=3),
    replace(_ASYNC, name="async sessions", models=("full", "mixed"), sessions=3),
    replace(_BASE, name="padded", padded=True),
    replace(_ASYNC, name="async padded", padded=True),
    replace(_BASE, name="block table", models=("full",), fast_decode=True),
    replace(_ASYNC, name="async block table", models=("full",), fast_decode=True),
    replace(_ASYNC, name="async padded block table", models=("full",), fast_decode=True, padded=True),
    replace(_SMALL_ASYNC, name="async block table offload", models=("full",), fast_decode=True, offload_gib=0.01),
    replace(_BASE, name="forks", children=2),
    replace(_ASYNC, name="async forks", children=2),
    replace(_SMALL, name="forks offload", children=2, offload_gib=0.01),
    replace(_SMALL_ASYNC, name="async forks offload", children=2, offload_gib=0.01),
    replace(_BASE, name="cancel", cancel=0.2),
    replace(_ASYNC, name="async cancel", cancel=0.2, sharing=False),
    replace(_BASE, name="prefill first", scheduler="prefill_first", batch_tokens=48),
    replace(_ASYNC, name="async prefill first", scheduler="prefill_first", batch_tokens=48),
    replace(_BASE, name="page 4", models=("full", "odd"), page=4),
    replace(_ASYNC, name="async page 4", models=("full", "odd"), page=4),
    replace(_ASYNC, name="generate_batch", models=("full", "mixed"), through="model", padded=True),
    replace(_BASE, name="context manager", models=("full", "sliding"), through="context"),
    replace(_BASE, name="attach while running", models=("full", "mixed"), through="running"),
    replace(_ASYNC, name="async attach while running", models=("full", "mixed"), through="running"),
    replace(_ASYNC, name="inference mode", models=("full", "mixed"), inference=True),
)


@dataclass(slots=True)
class Outcome:
    """What one run found."""

    requests: int = 0
    finished: int = 0
    failed: int = 0
    cancelled: int = 0
    forwards: int = 0
    verified: Counter[str] = field(default_factory=Counter)
    unverified: Counter[str] = field(default_factory=Counter)
    violations: list[Event] = field(default_factory=list)
    errors: Counter[str] = field(default_factory=Counter)
    hung: bool = False

    @property
    def kinds(self) -> Counter[str]:
        """Violations by kind."""
        return Counter(getattr(event, "kind", "") for event in self.violations)


class _Listener:
    """Adds up what the runs of one watch say; counters of a run are cumulative, so its last snapshot counts."""

    def __init__(self, outcome: Outcome) -> None:
        self._outcome = outcome
        self._last: SnapshotTaken | None = None

    def observer(self) -> Any:
        """A function for ``observers=``."""

        @kvcanary.observer(queue=1 << 17)
        def listen(event: ViolationDetected | OwnershipViolated | SnapshotTaken | RunStarted) -> None:
            if isinstance(event, SnapshotTaken):
                self._last = event
            elif isinstance(event, RunStarted):
                self.close()
            else:
                self._outcome.violations.append(event)

        return listen

    def close(self) -> None:
        """Add the last snapshot of the run that ended."""
        last, self._last = self._last, None
        if last is None:
            return
        self._outcome.forwards += last.forward
        for totals, found in ((last.verified, self._outcome.verified), (last.unverified, self._outcome.unverified)):
            for name, groups in totals.items():
                found[name] += sum(groups.values())


class Prompts:
    """Random prompts in families that share prefixes, some of them repeated to the token, in whole pages or not."""

    def __init__(self, seed: int, families: int, page: int, longest: int, *, whole_pages: bool = True) -> None:
        self._random = random.Random(seed)
        self._longest = longest
        lengths = [page * 2, page * 3 + 3, page * 5] if whole_pages else [page * 2 + 1, page * 3 + 3, page * 5 + 2]
        self._heads = [self._tokens(lengths[i % len(lengths)]) for i in range(families)]

    def next(self) -> list[int]:
        """One prompt."""
        head = self._random.choice(self._heads)
        if self._random.random() < 0.3:
            return head[: self._longest]
        return (head + self._tokens(self._random.randrange(1, 40)))[: self._longest]

    def _tokens(self, count: int) -> list[int]:
        return [self._random.randrange(30, VOCABULARY) for _ in range(count)]


def run(
    mode: Mode, kind: str, *, requests: int, seed: int = 0, prompts: Callable[[], list[int]] | None = None
) -> Outcome:
    """Run ``requests`` requests in ``mode`` on a model of ``kind`` under watch, and say what was found."""
    torch.set_num_threads(1)
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.CRITICAL)
    outcome = Outcome(requests=requests)
    listener = _Listener(outcome)
    config = CanaryConfig(mode="log", scrub_mib_per_step=1.0, redact=False, fact_queue=1 << 20)
    with ExitStack() as stack:
        stack.enter_context(
            cpu_stand_ins(asynchronous=mode.asynchronous, padded=mode.padded, fast_decode=mode.fast_decode)
        )
        model = make_model(kind, seed)
        # 5.17 mixes caches of prompts in whole pages when it is asynchronous: a test of its own shows that.
        whole = not (mode.asynchronous and blocks_are_shared_by_groups())
        source = prompts or Prompts(seed, mode.families, mode.page, 90 if mode.roomy else 60, whole_pages=whole).next
        _Runner(mode, model, outcome, seed).run(source, config, listener.observer())
    listener.close()
    return outcome


class _Runner:
    def __init__(self, mode: Mode, model: Any, outcome: Outcome, seed: int) -> None:
        from transformers import GenerationConfig

        self._mode, self._model, self._outcome = mode, model, outcome
        self._random = random.Random(seed + 1)
        self._deadline = time.monotonic() + DEADLINE_S
        self._batching = batching(
            mode.page,
            num_blocks=(400 if mode.roomy else 20) * pool_groups(model.config),
            max_batch_tokens=mode.batch_tokens,
            max_requests_per_batch=48,
            max_blocks_per_request=32 if mode.fast_decode else 0,
            allow_block_sharing=mode.sharing,
            use_async_batching=mode.asynchronous,
            cpu_offload_space=mode.offload_gib,
            scheduler_type=mode.scheduler,
            q_padding_interval_size=16,
            kv_padding_interval_size=64,
        )
        # About one token in twenty ends an answer.
        ends = self._random.sample(range(30, VOCABULARY), VOCABULARY // 20)
        self._generation = GenerationConfig(
            max_new_tokens=40,
            do_sample=True,
            eos_token_id=ends,
            pad_token_id=0,
            num_return_sequences=1 + mode.children,
        )

    def run(self, prompts: Callable[[], list[int]], config: CanaryConfig, observer: Any) -> None:
        mode = self._mode
        with torch.inference_mode(mode=mode.inference):
            if mode.through == "model":
                with kvcanary.watch(self._model, config=config, observers=[observer]):
                    self._generate(prompts)
                return
            if mode.through == "context":
                with kvcanary.watch(self._model, config=config, observers=[observer]):
                    self._in_context(prompts)
                return
            manager = self._manager()
            try:
                if mode.through == "running":
                    manager.start()
                    self._session(manager, prompts, self._outcome.requests // 3)
                with kvcanary.watch(manager, config=config, observers=[observer]):
                    self._sessions(manager, prompts)
            finally:
                manager.stop(block=True, timeout=5, hard_stop=True)

    def _manager(self) -> Any:
        return self._model.init_continuous_batching(
            generation_config=self._generation, continuous_batching_config=self._batching
        )

    def _generate(self, prompts: Callable[[], list[int]]) -> None:
        outputs = self._model.generate_batch(
            [prompts() for _ in range(self._outcome.requests)],
            generation_config=self._generation,
            continuous_batching_config=self._batching,
        )
        for output in outputs.values():
            self._count(output)

    def _in_context(self, prompts: Callable[[], list[int]]) -> None:
        with self._model.continuous_batching_context_manager(
            generation_config=self._generation, continuous_batching_config=self._batching, block=True, timeout=10
        ) as manager:
            self._session(manager, prompts, self._outcome.requests)

    def _sessions(self, manager: Any, prompts: Callable[[], list[int]]) -> None:
        sessions = self._mode.sessions
        for number in range(sessions):
            if not manager.is_running():
                manager = self._manager() if number else manager  # the kept one; switches its attention on again
                if self._mode.padded and number == 0:
                    manager.warmup()
                manager.start()
            self._session(manager, prompts, self._outcome.requests // sessions)
            last = number == sessions - 1
            manager.stop(block=True, timeout=10, keep_for_next_session=not last, hard_stop=self._outcome.hung)

    def _session(self, manager: Any, prompts: Callable[[], list[int]], count: int) -> None:
        waiting: set[str] = set()
        for wave in self._waves(count):
            for _ in range(wave):
                name = manager.add_request(prompts(), max_new_tokens=self._random.randrange(2, 40))
                if name is None:
                    self._outcome.errors["the engine is down"] += 1
                    return
                waiting.update([name, *(f"{name}__child#{i}" for i in range(self._mode.children))])
            self._collect(manager, waiting, leave=self._random.randrange(8))
            self._cancel(manager, waiting)
        self._collect(manager, waiting, leave=0)

    def _waves(self, count: int) -> Iterator[int]:
        while count > 0:
            wave = min(count, self._random.randrange(4, 17))
            yield wave
            count -= wave

    def _cancel(self, manager: Any, waiting: set[str]) -> None:
        for name in sorted(waiting):
            if self._random.random() < self._mode.cancel:
                manager.cancel_request(name)
                waiting.discard(name)
                self._outcome.cancelled += 1

    def _collect(self, manager: Any, waiting: set[str], *, leave: int) -> None:
        while len(waiting) > leave and not self._outcome.hung:
            output = manager.get_result(timeout=0.1)
            if output is not None and output.is_finished():
                waiting.discard(output.request_id)
                self._count(output)
            elif output is None and not manager.is_running():
                self._outcome.errors["the engine stopped"] += 1
                return
            self._outcome.hung = time.monotonic() > self._deadline

    def _count(self, output: Any) -> None:
        if output.error is None:
            self._outcome.finished += 1
        else:
            self._outcome.failed += 1
            self._outcome.errors[output.error[:200]] += 1


def main(names: list[str]) -> int:
    """Run all modes (or those named) on all their models; the number of runs that found something."""
    bad, requests = 0, 0
    for mode in MODES:
        if names and mode.name not in names:
            continue
        for kind in mode.models:
            began = time.monotonic()
            outcome = run(mode, kind, requests=24, seed=zlib.crc32(f"{mode.name} {kind}".encode()))
            requests += outcome.finished
            wrong = bool(outcome.violations or outcome.failed or outcome.hung or outcome.errors)
            bad += wrong
            reasons = {reason: count for reason, count in outcome.unverified.items() if count}
            line = (
                f"{'BAD ' if wrong else 'ok  '}{mode.name:28} {kind:8} {outcome.finished:4} requests "
                f"{outcome.forwards:5} forwards {time.monotonic() - began:5.1f} s verified {dict(outcome.verified)} "
                f"unverified {reasons} {dict(outcome.kinds)} {dict(outcome.errors)}"
            )
            print(line, flush=True)  # noqa: T201
            for event in outcome.violations[:3]:
                print("    ", event, flush=True)  # noqa: T201
    print(f"{requests} requests, {bad} bad runs")  # noqa: T201
    return bad


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]) != 0)
