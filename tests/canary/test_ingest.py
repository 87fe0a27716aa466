"""A scheduler in another process: its canary's calls have the same effect here as if they had been made here."""

from __future__ import annotations

import inspect
import multiprocessing
import typing
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from kvcanary.canary import Canary
from kvcanary.errors import BatchError, ConfigError
from kvcanary.events import (
    CanaryArmed,
    CanaryDisarmed,
    Event,
    Fact,
    FactsLost,
    ForwardLaunched,
    HealthChecked,
    PagesFact,
)
from kvcanary.wire import CallName, FactWriter
from tests.canary.conftest import Bench
from tests.programs import scheduler
from tests.programs.scheduler import Plan

SETTINGS: dict[str, Any] = {"key": 20261130}


def play(bench: Bench, plans: Iterator[Plan]) -> None:
    engine = bench.engine
    for plan in plans:
        engine.tokens, engine.pages, engine.cached = plan.tokens, plan.pages, dict(plan.cached)
        for source, target in plan.copies:
            engine.pool[:, :, target] = engine.pool[:, :, source]
        engine.step()
    with bench.canary.step():
        """The last facts reach the device with the step that follows."""


def from_elsewhere(canary: Canary, story: str) -> Iterator[Plan]:
    """The plans of a scheduler in a process of its own; its facts go in before the step that they came with."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=scheduler.serve, args=(theirs, story))
    process.start()
    theirs.close()
    try:
        while True:
            assert ours.poll(60), "the scheduler sent nothing"
            facts, plan = ours.recv()
            canary.ingest(facts)
            if plan is None:
                break
            yield plan
        assert ours.recv() == [], "the scheduler loaded what it does not need"
    finally:
        ours.close()
        process.join(60)
    assert process.exitcode == 0


def memory(bench: Bench) -> dict[str, Any]:
    """All that the device knows of pages and rows."""
    state = bench.canary.state
    (records,) = state.groups
    kept = {"links": records.links, "seals": records.seals, "owner": records.owner, "rows": state.rows}
    return {name: tensor.clone() for name, tensor in (kept | {"history": state.history}).items()}


def told(bench: Bench) -> list[tuple[Any, ...]]:
    """The facts, in order, without times."""
    left_out = {"seq", "time_ns", "monotonic_ns", "retired"}
    facts = [event for event in bench.of_kind(Fact) if not isinstance(event, ForwardLaunched)]
    return [
        (type(fact), *(getattr(fact, name) for name in fact.__struct_fields__ if name not in left_out))
        for fact in facts
    ]


@pytest.fixture(scope="module")
def both() -> Iterator[tuple[Bench, Bench]]:
    here, elsewhere = Bench(**SETTINGS), Bench(**SETTINGS)
    play(here, scheduler.clean_story(here.canary))
    play(elsewhere, from_elsewhere(elsewhere.canary, "clean_story"))
    yield here, elsewhere
    for bench in (here, elsewhere):
        bench.canary.stop(5)


def test_a_clean_story_is_clean_wherever_it_is_told(both: tuple[Bench, Bench]) -> None:
    for bench in both:
        assert bench.kinds() == set()
        assert bench.of("OwnershipViolated") == []
        assert max(sum(s.verified["links"].values()) for s in bench.of("SnapshotTaken")) > 40


@pytest.mark.parametrize("what", ["links", "seals", "owner", "rows", "history"])
def test_the_device_holds_the_same_as_if_the_calls_had_been_made_here(both: tuple[Bench, Bench], what: str) -> None:
    here, elsewhere = (memory(bench)[what] for bench in both)
    assert torch.count_nonzero(here) > 0
    assert torch.equal(here, elsewhere)


def test_the_ledger_hears_the_same(both: tuple[Bench, Bench]) -> None:
    here, elsewhere = (told(bench) for bench in both)
    assert len({kind for kind, *_ in here}) >= 12
    assert here == elsewhere


def test_a_page_given_twice_in_another_process_is_named_by_device_and_ledger(
    make_bench: Callable[..., Bench],
) -> None:
    bench = make_bench(**SETTINGS)
    play(bench, from_elsewhere(bench.canary, "faulty_story"))
    (twice,) = bench.of("OwnershipViolated")
    assert (twice.kind, twice.page, twice.request, twice.other) == ("DOUBLE_ALLOC", 3, "b", "a")
    foreign = next(found for found in bench.violations() if found.kind == "WRITE_FOREIGN")
    assert (foreign.request, foreign.page, foreign.owner_request) == ("a", 3, "b")


def test_after_lost_facts_nothing_is_checked_until_the_canary_is_armed_again(bench: Bench) -> None:
    writer = FactWriter(capacity=2)
    for page in range(1, 6):
        writer.alloc("full", "a", [page])
    bench.canary.ingest(writer.pack())
    (lost,) = bench.of_kind(FactsLost)
    assert lost.count == 3
    assert not bench.canary.armed
    assert not bench.canary.status()["healthy"]
    (disarmed,) = bench.of_kind(CanaryDisarmed)
    assert disarmed.reason == "3 lifecycle calls were lost on their way from the engine"
    (told,) = bench.of_kind(HealthChecked)
    assert told.problems == (f"nothing is checked since forward {disarmed.forward}: {disarmed.reason}",)
    bench.canary.arm()
    assert bench.canary.status()["healthy"]
    assert len(bench.of_kind(CanaryArmed)) == 2


def test_a_refused_call_is_named_and_keeps_no_other_from_being_made(bench: Bench) -> None:
    writer = FactWriter()
    writer.alloc("full", "a", [64])
    writer.admit("a")
    writer.alloc("full", "a", [3])
    with pytest.raises(BatchError, match="page 64 lies outside the pool"):
        bench.canary.ingest(writer.pack())
    assert bench.canary.is_live("a")
    (allocated,) = bench.of("PagesAllocated")
    assert isinstance(allocated, PagesFact)
    assert (allocated.requests, allocated.runs[0].first) == (("a",), 3)


def test_bytes_that_are_no_facts_change_nothing(bench: Bench) -> None:
    before = len(bench.of_kind(Event))
    with pytest.raises(ConfigError, match="no packed facts"):
        bench.canary.ingest(b"\x00\x01")
    assert len(bench.of_kind(Fact)) == 0 <= before


@pytest.mark.parametrize("name", typing.get_args(CallName))
def test_writer_and_canary_take_the_same_calls(name: str) -> None:
    ours, theirs = (inspect.signature(getattr(kind, name)).parameters for kind in (FactWriter, Canary))
    # Pages that only the device knows cannot be told from another process.
    assert [(p.name, p.kind, p.default) for p in ours.values()] == [
        (p.name, p.kind, p.default) for p in theirs.values() if p.name != "judged"
    ]
