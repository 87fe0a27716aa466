"""Requests and pages taken out of service on the real engine: the answers are those of a clean run."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import pytest
import torch

import kvcanary
from kvcanary.engines.transformers import quarantine
from kvcanary.events import (
    IncidentOpened,
    PagesQuarantined,
    QuarantineFailed,
    QuarantineRequested,
    RequestQuarantined,
)
from kvcanary.faults.transformers_batch import Batch, read_batch
from kvcanary.faults.transformers_ops import _token_bytes, foreign_table, swap_pages
from kvcanary.mailbox import Quarantine
from kvcanary.testing import EventRecorder
from tests.engines.serving import DEADLINE_S, Served, blocks_are_shared_by_groups, serve
from tests.engines.test_transformers_attach import traces

pytestmark = pytest.mark.skipif(blocks_are_shared_by_groups(), reason="5.17 cannot take a page out of its index")

PAGE = 8
MODES = [("full", False), ("full", True), ("mixed", False), ("mixed", True)]
Fault = Callable[[Batch], object]


class Rig:
    """A greedy engine in quarantine mode, with faults at chosen forwards."""

    def __init__(self, engine: Served, watched: kvcanary.Watch, recorder: EventRecorder) -> None:
        assert watched.canary is not None
        self.engine, self.watched, self.canary, self.recorder = engine, watched, watched.canary, recorder
        self.faults: list[Fault] = []
        self.at_once = True
        """whether the drain has seen a forward before the engine takes its tokens"""
        engine.manager.start()
        engine.ask([engine.prompt(5)], new_tokens=1)
        runner = engine.manager.batch_processor.model_runner
        original = runner.compute_batch

        def compute_batch(model: Any, batch_data: Any) -> Any:
            if self.faults:
                batch = read_batch(batch_data, engine.manager.batch_processor.inputs_and_outputs, self.canary)
                if self.faults[0](batch):
                    self.faults.pop(0)
            result = original(model, batch_data)
            if self.at_once:
                self.canary.flush(DEADLINE_S)
            return result

        runner.compute_batch = compute_batch

    def of(self, kind: Any) -> list[Any]:
        assert self.canary.flush(DEADLINE_S)
        assert self.canary.bus.flush(time.monotonic() + DEADLINE_S)
        return self.recorder.of(kind)

    def actions(self) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for event in self.of(RequestQuarantined):
            found.setdefault(event.request, []).append(event.action)
        return found


@contextmanager
def rig(kind: str = "full", *, asynchronous: bool = False, **options: Any) -> Iterator[Rig]:
    recorder = EventRecorder()
    config = kvcanary.CanaryConfig(mode="quarantine")
    with (
        serve(kind, asynchronous=asynchronous, sampled=False, **options) as engine,
        kvcanary.watch(engine.manager, config=config, observers=[recorder]) as watched,
    ):
        yield Rig(engine, watched, recorder)


def clean(kind: str, prompts: list[list[int]], *, new_tokens: int, **options: Any) -> list[list[int]]:
    """What an engine without any fault answers."""
    with serve(kind, sampled=False, **options) as engine:
        engine.manager.start()
        return [output.generated_tokens for output in engine.ask(prompts, new_tokens=new_tokens)]


def spoil(number: int, *, old: int, page: int = 0, group: int = 0) -> Callable[[Batch], bool]:
    """Turn the values of one token in a page of the ``number``-th row around, once it is ``old`` tokens long."""

    def fault(batch: Batch) -> bool:
        rows = [row for row in batch.rows if row.decodes and row.old >= old]
        if len(rows) <= number:
            return False
        view = batch.groups[group]
        entries = view.entries(rows[number])
        assert entries is not None
        spoil_slot(batch.canary, group, view.slot(int(entries[page * PAGE + 1])))
        return True

    return fault


def spoil_slot(canary: Any, group: int, slot: int) -> None:
    """What a stray write does: other values, all of them finite."""
    with torch.inference_mode():
        for source in canary.layout.groups[group].sources:
            _token_bytes(source, slot).view(torch.float32).mul_(-3.0)


def swap(batch: Batch) -> bool:
    """Two rows read one page of each other, in one forward."""
    return swap_pages(batch, random.Random(1), None) is not None


@pytest.mark.parametrize(("kind", "asynchronous"), MODES)
def test_a_spoilt_page_is_healed_and_the_answer_is_that_of_a_clean_run(kind: str, asynchronous: bool) -> None:
    with rig(kind, asynchronous=asynchronous) as it:
        prompts = [it.engine.prompt(20) for _ in range(4)]
        it.faults.append(spoil(1, old=24))
        answers = it.engine.ask(prompts, new_tokens=24)
        (healed,) = it.actions().items()
        assert healed[1] == ["healed"]
        assert not it.of(QuarantineFailed)
        assert it.of(QuarantineRequested)
    expected = clean(kind, prompts, new_tokens=24)
    assert [answer.error for answer in answers] == [None] * 4
    assert [answer.generated_tokens for answer in answers] == expected
    assert healed[0] == answers[1].request_id


@pytest.mark.parametrize(("kind", "asynchronous"), MODES)
def test_swapped_table_rows_are_healed_and_a_third_request_is_untouched(kind: str, asynchronous: bool) -> None:
    with rig(kind, asynchronous=asynchronous) as it:
        prompts = [it.engine.prompt(20) for _ in range(3)]
        it.faults.append(swap)
        answers = it.engine.ask(prompts, new_tokens=24)
        healed = it.actions()
        assert len(healed) == 2
    assert all(actions == ["healed"] for actions in healed.values())
    assert [answer.generated_tokens for answer in answers] == clean(kind, prompts, new_tokens=24)


def test_without_quarantine_the_same_fault_changes_the_answer() -> None:
    with serve("full", sampled=False) as engine, kvcanary.watch(engine.manager, mode="log") as watched:
        it = Rig(engine, watched, EventRecorder())
        prompts = [engine.prompt(20) for _ in range(4)]
        it.faults.append(spoil(1, old=24))
        answers = [answer.generated_tokens for answer in engine.ask(prompts, new_tokens=24)]
    assert answers != clean("full", prompts, new_tokens=24)


def test_a_fault_that_is_found_at_the_drains_own_pace_is_healed_too() -> None:
    with rig() as it:
        it.at_once = False
        prompts = [it.engine.prompt(20) for _ in range(2)]
        it.faults.append(spoil(0, old=22))
        answers = it.engine.ask(prompts, new_tokens=80)
        assert list(it.actions().values()) == [["healed"]]
        (event,) = it.of(RequestQuarantined)
    assert event.tokens_left == 0
    assert event.tokens_dropped > 0
    assert [answer.generated_tokens for answer in answers] == clean("full", prompts, new_tokens=80)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_two_faults_at_once_are_both_healed(asynchronous: bool) -> None:
    with rig(asynchronous=asynchronous) as it:
        prompts = [it.engine.prompt(20) for _ in range(4)]

        def both(batch: Batch) -> bool:
            return all(row.old >= 24 for row in batch.rows) and all(spoil(row, old=24)(batch) for row in (0, 2))

        it.faults.append(both)
        answers = it.engine.ask(prompts, new_tokens=24)
        healed = it.actions()
    assert healed == {answers[0].request_id: ["healed"], answers[2].request_id: ["healed"]}
    assert [answer.generated_tokens for answer in answers] == clean("full", prompts, new_tokens=24)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_shared_prefix_that_is_spoilt_heals_all_its_readers_and_nobody_else(asynchronous: bool) -> None:
    with rig(asynchronous=asynchronous) as it:
        prefix = it.engine.prompt(3 * PAGE)
        it.engine.ask([[*prefix, *it.engine.prompt(5)]], new_tokens=2)
        prompts = [[*prefix, *it.engine.prompt(5 + n)] for n in range(3)] + [it.engine.prompt(30)]
        it.faults.append(lambda batch: len(batch.rows) == 4 and spoil(1, old=30, page=1)(batch))
        answers = it.engine.ask(prompts, new_tokens=20)
        healed = it.actions()
        dropped = it.of(PagesQuarantined)
    assert healed == {answer.request_id: ["healed"] for answer in answers[:3]}
    assert dropped
    assert [answer.generated_tokens for answer in answers] == clean("full", prompts, new_tokens=20)


def test_an_idle_page_leaves_the_cache_and_is_not_served_again() -> None:
    with rig() as it:
        prompt = it.engine.prompt(4 * PAGE + 3)
        expected = it.engine.ask([prompt], new_tokens=8)[0].generated_tokens
        allocator = next(iter(it.engine.manager.batch_processor.cache.cache_allocators.values()))
        first, second, *_ = allocator.match_prefix_blocks(prompt)
        with it.engine.manager.pause():
            spoil_slot(it.canary, 0, second * PAGE + 2)
        it.engine.ask([it.engine.prompt(12)], new_tokens=8)
        assert allocator.match_prefix_blocks(prompt) == [first]
        assert not it.of(RequestQuarantined)
        assert second in it.of(PagesQuarantined)[0].pages
        assert it.engine.ask([prompt], new_tokens=8)[0].generated_tokens == expected
        assert len(it.of(IncidentOpened)) == 1


def test_pages_that_were_published_before_the_watch_began_leave_the_cache_with_all_that_may_follow_them() -> None:
    with serve("full", sampled=False) as engine:
        prompt = engine.prompt(4 * PAGE + 3)
        engine.manager.start()
        expected = engine.ask([prompt], new_tokens=8)[0].generated_tokens
        before = traces(engine.manager)
        with kvcanary.watch(engine.manager, mode="quarantine") as watched:
            allocator = next(iter(engine.manager.batch_processor.cache.cache_allocators.values()))
            first, *_ = allocator.match_prefix_blocks(prompt)
            assert watched.canary is not None
            watched.canary.mailbox.post(Quarantine("r#9", (), "full_attention", (first,), 10**6))
            engine.ask([engine.prompt(5)], new_tokens=2)
            assert allocator.match_prefix_blocks(prompt) == []
            assert engine.ask([prompt], new_tokens=8)[0].generated_tokens == expected
        assert traces(engine.manager) == before


def test_a_row_that_read_through_another_ones_table_is_healed_alone() -> None:
    with rig() as it:
        prompts = [it.engine.prompt(20) for _ in range(2)]
        it.faults.append(lambda batch: foreign_table(batch, random.Random(1), None) is not None)
        answers = it.engine.ask(prompts, new_tokens=24)
        healed = it.actions()
    assert len(healed) == 1
    assert [answer.generated_tokens for answer in answers] == clean("full", prompts, new_tokens=24)


def test_a_request_that_ended_meanwhile_is_told_as_failed() -> None:
    with rig() as it:
        (answer,) = it.engine.ask([it.engine.prompt(20)], new_tokens=4)
        it.canary.mailbox.post(Quarantine("r#9", (answer.request_id,), "full_attention", (), 10**6))
        it.engine.ask([it.engine.prompt(20)], new_tokens=4)
        (failed,) = it.of(QuarantineFailed)
    assert (failed.request, failed.incident) == (answer.request_id, "r#9")
    assert "had ended" in failed.error


def test_who_got_the_page_after_the_finding_is_left_alone() -> None:
    with rig() as it:
        allocator = next(iter(it.engine.manager.batch_processor.cache.cache_allocators.values()))

        def accuse(batch: Batch) -> bool:
            pages = tuple(allocator.block_table[batch.rows[0].request])
            it.canary.mailbox.post(Quarantine("r#9", (batch.rows[0].request,), "full_attention", pages, 1))
            return True

        it.faults.append(accuse)
        it.engine.ask([it.engine.prompt(20)], new_tokens=8)
        assert it.of(RequestQuarantined) == []


def test_a_request_whose_cache_is_found_wrong_again_and_again_is_aborted() -> None:
    with rig() as it:
        each_time = [lambda batch: batch.rows[0].old == 22 and spoil(0, old=22)(batch)] * (quarantine.MOST_HEALS + 1)
        it.faults += each_time
        (answer,) = it.engine.ask([it.engine.prompt(20)], new_tokens=24)
        assert it.actions() == {answer.request_id: ["healed"] * quarantine.MOST_HEALS + ["aborted"]}
        assert it.engine.ask([it.engine.prompt(20)], new_tokens=4)[0].error is None
    assert "kvcanary aborted request" in answer.error
    assert answer.generated_tokens == []


def test_an_engine_that_cannot_heal_has_the_request_aborted_and_goes_on() -> None:
    with rig() as it:
        scheduler = it.engine.manager.batch_processor.scheduler
        original = scheduler.add_waiting_request
        names = [it.engine.manager.add_request(it.engine.prompt(20), max_new_tokens=24) for _ in range(2)]

        def refuse(_: object) -> None:
            raise RuntimeError("the queue is closed")

        def after_all_came(batch: Batch) -> bool:
            if len(batch.rows) < 2 or not spoil(0, old=22)(batch):
                return False
            scheduler.add_waiting_request = refuse
            return True

        it.faults.append(after_all_came)
        outputs: dict[str, Any] = {}
        while len(outputs) < 2:
            output = it.engine.manager.get_result(timeout=DEADLINE_S)
            outputs[output.request_id] = output
        scheduler.add_waiting_request = original
        assert it.actions() == {names[0]: ["aborted"]}
        assert "the queue is closed" in outputs[names[0]].error
        assert outputs[names[1]].error is None
        assert it.engine.ask([it.engine.prompt(20)], new_tokens=4)[0].error is None


def test_what_raises_inside_the_engine_is_told_and_the_server_lives() -> None:
    with rig() as it:
        cache = it.engine.manager.batch_processor.cache
        original = cache.free_blocks

        def refuse(*_: object, **__: object) -> None:
            raise RuntimeError("the allocator is broken")

        def spoil_and_break(batch: Batch) -> bool:
            if not spoil(0, old=22)(batch):
                return False
            cache.free_blocks = refuse
            return True

        it.faults.append(spoil_and_break)
        it.engine.manager.add_request(it.engine.prompt(20), max_new_tokens=24)
        failed = it.recorder.wait_for(QuarantineFailed, timeout=DEADLINE_S)
        cache.free_blocks = original
        assert "the allocator is broken" in failed.error
        assert it.engine.ask([it.engine.prompt(20)], new_tokens=4)[0].error is None


def test_a_streamed_request_goes_on_from_what_has_left() -> None:
    with rig() as it:
        prompt = it.engine.prompt(20)
        it.faults.append(spoil(0, old=28))
        it.engine.manager.add_request(prompt, max_new_tokens=24, streaming=True)
        outputs: list[Any] = []
        while not outputs or not outputs[-1].is_finished():
            outputs.append(it.engine.manager.get_result(timeout=DEADLINE_S))
        (event,) = it.of(RequestQuarantined)
    assert (event.action, event.tokens_dropped) == ("healed", 0)
    assert 8 <= event.tokens_left <= 12
    tokens, left = outputs[-1].generated_tokens, event.tokens_left
    assert [tokens[left:]] == clean("full", [prompt + tokens[:left]], new_tokens=24 - left)
    for before, after in pairwise(outputs):
        assert after.generated_tokens[: len(before.generated_tokens)] == before.generated_tokens


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("swap_gib", [0.0, 0.001])
def test_under_memory_pressure_spoilt_requests_answer_as_in_a_clean_run(asynchronous: bool, swap_gib: float) -> None:
    options: dict[str, Any] = {"num_blocks": 24, "cpu_offload_space": swap_gib}
    with rig(asynchronous=asynchronous, **options) as it:
        prompts = [it.engine.prompt(20 + n) for n in range(8)]
        for old in (24, 28, 31, 35):
            it.faults.append(spoil(0, old=old, page=1))
        answers = it.engine.ask(prompts, new_tokens=24)
        assert it.of(RequestQuarantined)
        assert not it.of(QuarantineFailed)
    assert [answer.error for answer in answers] == [None] * 8
    assert [answer.generated_tokens for answer in answers] == clean("full", prompts, new_tokens=24)


def test_a_prompt_that_is_to_be_forked_is_healed_with_its_children_to_come() -> None:
    with rig() as it:
        prompt, manager = it.engine.prompt(20), it.engine.manager
        manager.num_return_sequences = 3

        def accuse(batch: Batch) -> bool:
            name = batch.rows[0].request
            if not manager.batch_processor.scheduler._requests_to_fork:
                return False
            it.canary.mailbox.post(Quarantine("r#9", (name,), "full_attention", (), 10**6))
            return True

        it.faults.append(accuse)
        name = manager.add_request(prompt, max_new_tokens=8)
        answers: dict[str, Any] = {}
        while len(answers) < 3:
            output = manager.get_result(timeout=DEADLINE_S)
            answers[output.request_id] = output.generated_tokens
        assert it.actions() == {name: ["healed"]}
    assert answers.keys() == {name, f"{name}__child#0", f"{name}__child#1"}
    assert list(answers.values()) == clean("full", [prompt], new_tokens=8) * 3


def test_what_is_asked_for_and_not_done_when_the_watch_ends_is_told() -> None:
    with rig() as it, it.engine.manager.pause():
        it.canary.mailbox.post(Quarantine("r#9", ("somebody",), "full_attention", (3,), 1))
        it.watched.stop()
    (failed,) = it.recorder.of(QuarantineFailed)
    assert "the watch was stopped" in failed.error
