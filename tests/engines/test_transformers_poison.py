"""Poison in the real engine: silent on clean traffic, and a write that gets lost is named."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import kvcanary
from kvcanary.canary import Canary
from kvcanary.config import CanaryConfig
from kvcanary.events import RunStarted, SnapshotTaken, ViolationDetected
from kvcanary.testing import EventRecorder
from tests.engines.serving import Served, serve
from tests.kernels.pools import run_addresses, storage_bytes

pytestmark = pytest.mark.engine

Loss = Callable[[Served, Canary], list[int]]


def lose_a_write(engine: Served, canary: Canary) -> list[int]:
    """In one decoding forward, undo what every layer writes for the first token. Returns the forward."""
    cache = engine.manager.batch_processor.cache
    original = cache.update
    lost: list[int] = []

    def update(key: Any, value: Any, layer: int, *args: Any, **kwargs: Any) -> Any:
        slot = int(canary.state.scratch_slots[0, 0])
        decoding = int(canary.state.scratch_links[0, 0]) >> 32 > 16
        if not lost and decoding and slot >= 0 and layer == 0:
            lost.append(canary.next_forward)
        with torch.inference_mode():
            kept = []
            for source in canary.layout.groups[0].sources if lost == [canary.next_forward] else ():
                if source.layer == layer:
                    (start, size), raw = run_addresses(source, slot)[0], storage_bytes(source)
                    kept.append((raw[start : start + size], raw[start : start + size].clone()))
            result = original(key, value, layer, *args, **kwargs)
            for place, before in kept:
                place.copy_(before)
        return result

    cache.update = update
    return lost


def run(kind: str, poison: str, lose: Loss | None = None, **options: Any) -> tuple[EventRecorder, list[int]]:
    recorder = EventRecorder(ViolationDetected, SnapshotTaken, RunStarted)
    config = CanaryConfig(mode="log", scrub_mib_per_step=1.0, poison=poison)  # type: ignore[arg-type]
    with (
        serve(kind, **options) as engine,
        kvcanary.watch(engine.manager, config=config, observers=[recorder]) as watched,
    ):
        assert watched.canary is not None
        engine.manager.start()
        same = engine.prompt(40)
        engine.ask([same])
        engine.ask([same, engine.prompt(33)])
        lost = [] if lose is None else lose(engine, watched.canary)
        engine.ask([engine.prompt(30), engine.prompt(17)])
        assert watched.canary.flush(5)
    return recorder, lost


@pytest.mark.parametrize(
    ("kind", "poison", "options"),
    [
        ("full", "sample", {}),
        ("mixed", "sample", {}),
        ("full", "full", {}),
        ("full", "sample", {"asynchronous": True}),
        ("full", "full", {"asynchronous": True}),
    ],
)
def test_clean_traffic_overwrites_all_poison(kind: str, poison: str, options: dict[str, Any]) -> None:
    recorder, _ = run(kind, poison, **options)
    assert recorder.of(ViolationDetected) == []
    last = recorder.of(SnapshotTaken)[-1]
    # Every new token of a group that takes poison took some, but for the few that were rewritten as they were.
    assert last.verified["written"]["full_attention"] >= 0.9 * last.verified["sealed"]["full_attention"] > 100


def test_groups_that_take_none_are_named_when_the_run_starts() -> None:
    recorder, _ = run("mixed", "sample")
    started = recorder.of(RunStarted)[-1]
    assert "WRITE_MISSING" not in started.unarmed
    assert "read the old window before they write" in started.unarmed["WRITE_MISSING in sliding_attention"]


@pytest.mark.parametrize("poison", ["sample", "full"])
def test_a_write_that_gets_lost_is_named_with_its_request(poison: str) -> None:
    recorder, lost = run("full", poison, lose_a_write)
    found = recorder.of(ViolationDetected)
    assert {violation.kind for violation in found} == {"WRITE_MISSING"}
    assert [violation.forward for violation in found] == lost
    assert found[0].request.startswith("req_")


def test_without_poison_a_lost_write_goes_unseen() -> None:
    recorder, lost = run("full", "off", lose_a_write)
    assert lost
    assert recorder.of(ViolationDetected) == []
