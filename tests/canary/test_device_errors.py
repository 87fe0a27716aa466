"""A CUDA error is data: what is known is told, the run ends with the reason, and nothing hangs."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from kvcanary.errors import CanaryStalledError
from kvcanary.events import RunStopped
from tests.canary.conftest import Bench

CUDA_ERROR = torch.AcceleratorError("CUDA error: an illegal memory access was encountered")


def break_device(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next forward never ends, and whoever asks its event gets the error that torch raises then."""
    ring = bench.canary._ring

    def query(*_: object) -> bool:
        raise CUDA_ERROR

    monkeypatch.setattr(ring, "_header", lambda _: [0] * 64)
    monkeypatch.setattr(ring, "_gave_up", query)


def last_run(bench: Bench) -> list[Any]:
    deadline = time.monotonic() + 10
    while not bench.of("RunStopped") and time.monotonic() < deadline:
        time.sleep(0.001)
    return bench.recorder.events


def test_an_error_of_the_device_ends_the_run_after_all_that_the_host_knows(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.engine.admit("a", 9)
    bench.engine.step()
    assert bench.of("SnapshotTaken")
    break_device(bench, monkeypatch)
    bench.engine.step()
    bench.canary.free("full", [60], "nobody")
    events = last_run(bench)
    names = [type(event).__name__ for event in events]
    assert names[-1] == "RunStopped"
    assert [event.forward for event in events if type(event).__name__ == "ForwardLaunched"] == [1, 2]
    assert (events[-1].clean, "illegal memory access" in events[-1].reason) == (False, True)


def test_in_raise_mode_the_engine_is_told_that_nothing_is_checked(
    make_bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = make_bench(mode="raise")
    bench.engine.admit("a", 9)
    bench.engine.step()
    break_device(bench, monkeypatch)
    bench.engine.step()
    last_run(bench)
    with pytest.raises(CanaryStalledError, match="illegal memory access") as caught:
        bench.canary.check()
    assert caught.value.__cause__ is CUDA_ERROR


def test_stopping_is_not_held_up_by_launches_that_fail(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.engine.admit("a", 9)
    bench.engine.step()

    def fail(*_: object) -> None:
        raise CUDA_ERROR

    monkeypatch.setattr(bench.canary.kernels, "facts", fail)
    bench.canary.free("full", [60], "nobody")
    report = bench.canary.stop(5)
    assert not report.clean
    assert "illegal memory access" in report.reason
    (stopped,) = [event for event in bench.recorder.events if isinstance(event, RunStopped)]
    assert stopped.reason == report.reason
    assert [type(event).__name__ for event in bench.recorder.events].count("PagesFreed") == 1


def test_what_was_read_before_the_error_is_not_lost_with_it(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.canary.drain.stop(5)
    bench.engine.admit("a", 9)
    ring = bench.canary._ring
    header = ring._header

    def fail(*_: object) -> bool:
        raise CUDA_ERROR

    monkeypatch.setattr(ring, "_header", lambda forward: header(1) if forward == 1 else [0] * 64)
    monkeypatch.setattr(ring, "_gave_up", fail)
    bench.engine.step()
    bench.engine.step()
    assert [snapshot.fence.forward for snapshot in ring.poll()] == [1]
    with pytest.raises(torch.AcceleratorError):
        ring.poll()
