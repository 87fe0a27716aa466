"""Each fault on the real engine: done to somebody, and named as its description promises."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import kvcanary
from kvcanary.cli.models import ModelName, Prompts, make_manager, make_model
from kvcanary.errors import ConfigError, LayoutError
from kvcanary.events import Event, FaultInjected, IncidentOpened, IncidentUpdated, KernelStalled
from kvcanary.faults.injectors import FAULTS, Fault, Injection, fault
from kvcanary.faults.transformers_faults import TransformersInjector
from kvcanary.faults.transformers_ops import OPERATIONS

pytestmark = pytest.mark.engine

DEADLINE_S = 30.0
GROUPS = [("full", None), ("mixed", "full_attention"), ("mixed", "sliding_attention")]


class Rig:
    """A watched engine with one thread's worth of traffic, and what it reported."""

    def __init__(self, manager: Any, kv: kvcanary.Watch, events: list[Event]) -> None:
        canary = kv.canary
        assert canary is not None
        self.manager, self.canary, self.events = manager, canary, events
        self.seeds = itertools.count(1)
        self.refresh()

    def refresh(self) -> int:
        """Other prefixes from now on, away from pages that a fault has damaged; returns how much was reported."""
        self.prompts = Prompts.make(next(self.seeds))
        return len(self.events)

    def answer(self, requests: int) -> None:
        """Serve so many requests to their ends."""
        for _ in range(requests):
            prompt, new = self.prompts.next()
            self.manager.add_request(prompt, max_new_tokens=new)
        for _ in range(requests):
            output = self.manager.get_result(timeout=DEADLINE_S)
            assert output is not None
            assert output.error is None
        assert self.canary.flush(DEADLINE_S)

    def wait_for(self, condition: Callable[[], bool]) -> bool:
        """Events reach a sink a moment after the folds are done."""
        deadline = time.monotonic() + DEADLINE_S
        while not condition() and time.monotonic() < deadline:
            time.sleep(0.01)
        return condition()


@contextmanager
def running(model: ModelName) -> Iterator[Rig]:
    torch.set_num_threads(1)
    manager = make_manager(make_model(model))
    events: list[Event] = []

    @kvcanary.observer
    def keep(event: IncidentOpened | IncidentUpdated | KernelStalled | FaultInjected) -> None:
        events.append(event)

    config = kvcanary.CanaryConfig(mode="log", health_every=10, health_warmup=10)
    with kvcanary.watch(manager, config=config, observers=[keep]) as kv:
        manager.start()
        try:
            rig = Rig(manager, kv, events)
            rig.answer(1)
            yield rig
        finally:
            manager.stop(block=True, timeout=DEADLINE_S, hard_stop=True)


@pytest.fixture(scope="module")
def full() -> Iterator[Rig]:
    with running("full") as rig:
        yield rig


@pytest.fixture(scope="module")
def mixed() -> Iterator[Rig]:
    with running("mixed") as rig:
        yield rig


@pytest.fixture
def rig(full: Rig) -> Rig:
    full.refresh()
    return full


def named(event: Event, injection: Injection) -> bool:
    if isinstance(event, KernelStalled):
        return injection.fault.stalls
    return isinstance(event, (IncidentOpened, IncidentUpdated)) and injection.named_by(event)


def cases() -> Iterator[tuple[str, str | None, Fault]]:
    for item in FAULTS:
        for model, group in GROUPS:
            # The first token of a long prompt goes to a ring's trash on purpose, so nothing expects all its writes.
            if not (item.name == "dropped-write" and group == "sliding_attention"):
                yield model, group, item


@pytest.mark.parametrize(("model", "group", "item"), list(cases()), ids=lambda value: getattr(value, "name", value))
def test_a_fault_is_named_in_time_with_a_request_that_it_hit(
    model: str, group: str | None, item: Fault, request: pytest.FixtureRequest
) -> None:
    rig: Rig = request.getfixturevalue(model)
    seen = rig.refresh()
    with TransformersInjector(rig.manager, rig.canary, seed=3) as injector:
        done = injector.plant(item, group=group)
        rig.answer(8)
        injection = done.result(timeout=DEADLINE_S)
        rig.answer(2 if not item.stalls else 6)
    rig.canary.suppress("check", suppressed=False)
    rig.answer(1)
    assert rig.wait_for(lambda: any(named(event, injection) for event in rig.events[seen:])), rig.events[seen:]
    alarms = [event for event in rig.events[seen:] if isinstance(event, (IncidentOpened, KernelStalled))]
    assert not [event for event in alarms if event.forward < injection.forward]


def test_a_planted_fault_is_in_the_stream_with_what_must_see_it(rig: Rig) -> None:
    seen = len(rig.events)
    with TransformersInjector(rig.manager, rig.canary) as injector:
        done = injector.plant("flipped-bit")
        rig.answer(8)
    injection = done.result(timeout=DEADLINE_S)

    def told() -> list[tuple[object, ...]]:
        found = [event for event in rig.events[seen:] if isinstance(event, FaultInjected)]
        return [(event.fault, event.expects, event.forward, event.request, event.slot) for event in found]

    assert rig.wait_for(lambda: bool(told()))
    assert told() == [("flipped-bit", ("CONTENT",), injection.forward, injection.requests[0], injection.slot)]


def test_without_a_planted_fault_the_injector_changes_nothing(rig: Rig) -> None:
    seen = len(rig.events)
    with TransformersInjector(rig.manager, rig.canary):
        rig.answer(8)
    assert rig.events[seen:] == []


def test_leaving_the_injector_takes_its_hook_out_and_cancels_what_waits(rig: Rig) -> None:
    runner = rig.manager.batch_processor.model_runner
    before = dict(vars(runner))
    with TransformersInjector(rig.manager, rig.canary) as injector:
        waiting = injector.plant("stale-slot")
        assert vars(runner) != before
    assert vars(runner) == before
    with pytest.raises(CancelledError):
        waiting.result(timeout=0)


def test_a_fault_that_cannot_be_done_fails_its_future_and_not_the_engine(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("nothing to break")

    monkeypatch.setitem(OPERATIONS, "stale-slot", refuse)
    with TransformersInjector(rig.manager, rig.canary) as injector:
        done = injector.plant("stale-slot")
        rig.answer(2)
    with pytest.raises(RuntimeError, match="nothing to break"):
        done.result(timeout=DEADLINE_S)


def test_an_engine_that_was_not_started_cannot_be_broken() -> None:
    manager = make_manager(make_model("full"))
    with kvcanary.watch(manager, mode="log") as kv:
        assert kv.canary is not None
        with pytest.raises(ConfigError, match="call start"):
            TransformersInjector(manager, kv.canary)


def test_an_unknown_group_is_refused(rig: Rig) -> None:
    with (
        TransformersInjector(rig.manager, rig.canary) as injector,
        pytest.raises(LayoutError, match="no attention group"),
    ):
        injector.plant(fault("stale-slot"), group="sliding_attention")
