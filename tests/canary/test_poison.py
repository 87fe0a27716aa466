"""Poison in a whole canary: a write that never came is named, and nothing else is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from kvcanary.canary import Canary
from kvcanary.config import CanaryConfig
from kvcanary.events import RunStarted
from kvcanary.kernels import FactOp
from kvcanary.testing import EventRecorder
from tests.canary.conftest import Bench
from tests.canary.hand import PAGE, HandEngine

DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int8,
    torch.uint8,
)
MODES = ("sample", "full")


@pytest.fixture
def make(make_bench: Callable[..., Bench]) -> Callable[..., Bench]:
    def made(*, poison: str, dtype: torch.dtype = torch.float32, **engine: Any) -> Bench:
        bench = make_bench(poison=poison)
        if engine or dtype != torch.float32:
            bench.engine = HandEngine(bench.canary, dtype=dtype, **engine)
        return bench

    return made


def serve(engine: HandEngine, steps: int = 4) -> None:
    engine.admit("a", 9)
    engine.admit("b", 14)
    for _ in range(steps):
        engine.step()


@pytest.mark.parametrize("poison", MODES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_dropped_write_is_named_in_its_forward_and_its_clean_twin_is_silent(
    dtype: torch.dtype, poison: str, make: Callable[..., Bench]
) -> None:
    bench = make(poison=poison, dtype=dtype)
    engine = bench.engine
    serve(engine)
    assert bench.violations() == []
    assert bench.of("SnapshotTaken")[-1].verified["written"]["full"] == 9 + 14 + 2 * 3
    engine._grow("b")
    position = len(engine.tokens["b"])
    engine.tokens["b"] += engine.new_tokens(1)
    engine._grow("b")
    engine.dropped = {engine.slot("b", position)}
    forward = bench.canary.next_forward
    engine.step()
    (found,) = bench.violations()
    assert (found.kind, found.request, found.forward, found.role) == ("WRITE_MISSING", "b", forward, "seal")
    assert (found.slot, found.position_expected) == (engine.slot("b", position), position)
    assert found.token_expected == engine.tokens["b"][position]
    assert found.part == "target"


def test_an_incident_says_that_the_write_was_skipped(make: Callable[..., Bench]) -> None:
    bench = make(poison="sample")
    serve(bench.engine)
    bench.engine.tokens["a"] += bench.engine.new_tokens(1)
    bench.engine._grow("a")
    bench.engine.dropped = {bench.engine.slot("a", len(bench.engine.tokens["a"]) - 1)}
    bench.engine.step(["a"])
    (incident,) = bench.of("IncidentOpened")
    assert "found the poison that was put there" in incident.headline
    assert "never written" in incident.likely_cause


@pytest.mark.parametrize("poison", MODES)
def test_rewinds_forks_and_reuse_stay_silent(poison: str, make: Callable[..., Bench]) -> None:
    bench = make(poison=poison)
    engine = bench.engine
    serve(engine)
    engine.cached["b"] -= 2
    engine.canary.rewind("b", engine.cached["b"], tokens=engine.tokens["b"])
    engine.step(["b"])
    engine.admit("c", 0, pages=engine.pages["a"][:2], tokens=engine.tokens["a"][: 2 * PAGE] + engine.new_tokens(3))
    engine.step()
    engine.finish("a")
    engine.admit("d", 11)
    engine.step()
    assert bench.violations() == []


@pytest.mark.parametrize("how", ["transfer", "move", "import"])
def test_pages_that_are_loaded_before_the_next_step_are_not_filled(how: str, make: Callable[..., Bench]) -> None:
    bench = make(poison="full")
    engine, canary = bench.engine, bench.canary
    serve(engine)
    source, target, other = engine.pages["a"][0], *engine.free_pages[-2:]
    records = canary.export_records("full", [source])
    engine.step()
    canary.alloc("full", "a", [target, other])
    engine.pool[:, :, target] = engine.pool[:, :, source]
    if how == "transfer":
        canary.transfer("t", "start", group="full", pages=[target], request="a")
    elif how == "move":
        canary.move("full", [source], [target], request="a")
    else:
        canary.import_records("full", [target], records, request="a")
    engine.step()
    assert torch.equal(engine.pool[:, :, target], engine.pool[:, :, source])
    filled = engine.pool[:, :, other].view(torch.uint8)
    assert bool(((filled & 1) == 1).all())
    assert bench.violations() == []


def test_pages_in_device_tensors_are_not_filled(make: Callable[..., Bench]) -> None:
    bench = make(poison="full")
    serve(bench.engine)
    bench.canary.alloc("full", "a", torch.tensor([40]).to("meta"))
    assert [fact.op for fact in bench.canary._pending] == [FactOp.ALLOC]
    bench.canary._pending.clear()


def test_an_engine_that_writes_before_the_entry_gets_none_and_says_so(make: Callable[..., Bench]) -> None:
    bench = make(poison="sample", unarmed={"WRITE_MISSING": "the engine writes before its forward begins"})
    serve(bench.engine)
    assert bench.of("SnapshotTaken")[-1].verified["written"]["full"] == 0
    assert bench.of("RunStarted")[-1].unarmed["WRITE_MISSING"] == "the engine writes before its forward begins"


@pytest.fixture
def started() -> Iterator[Callable[..., dict[str, str]]]:
    made: list[Canary] = []

    def start(**settings: Any) -> dict[str, str]:
        recorder = EventRecorder()
        canary = Canary(CanaryConfig(mode="log", **settings), observers=[recorder]).start()
        made.append(canary)
        HandEngine(canary)
        unarmed: dict[str, str] = recorder.wait_for(RunStarted).unarmed
        return unarmed

    yield start
    for canary in made:
        canary.stop(5)


def test_what_poison_covers_is_said_when_a_run_starts(started: Callable[..., dict[str, str]]) -> None:
    assert started()["WRITE_MISSING"] == "poison is off"
    assert "WRITE_MISSING" not in started(poison="sample")
