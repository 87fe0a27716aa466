from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch

from kvcanary.canary import Canary
from kvcanary.config import CanaryConfig
from kvcanary.errors import BatchError, ConfigError, LayoutError
from kvcanary.events import Event
from kvcanary.lifecycle import INLINE_BASE
from tests.canary.conftest import Bench
from tests.canary.hand import HandEngine

Call = Callable[[Canary], object]


def is_still_at_work(bench: Bench) -> bool:
    """Whether the engine goes on, unharmed and watched."""
    for _ in range(2):
        bench.engine.step()
    return bench.violations() == [] and bench.of("RunStopped") == [] and bench.of("ObserverFailed") == []


@pytest.mark.parametrize(
    "call",
    [
        lambda canary: canary.alloc("full", "a", [50.5]),
        lambda canary: canary.alloc("full", "a", torch.tensor([64])),
        lambda canary: canary.alloc("full", "a", torch.tensor([50.5])),
        lambda canary: canary.reuse("full", "a", [50] * 128 + [64]),
        lambda canary: canary.move("full", [1], torch.tensor([64])),
        lambda canary: canary.publish("full", [64]),
        lambda canary: canary.evict("full", [10**9]),
        lambda canary: canary.transfer("t", "start", pages=[64], direction="out"),
        lambda canary: canary.verify("full", cast("Any", [1.5])),
    ],
)
def test_a_page_that_does_not_exist_is_refused_by_the_call_that_names_it(bench: Bench, call: Call) -> None:
    bench.engine.admit("a", 6)
    with pytest.raises(BatchError, match=r"pages? (must be|64|1000000000)"):
        call(bench.canary)
    assert is_still_at_work(bench)


@pytest.mark.parametrize(
    "call",
    [
        lambda canary: canary.admit("b", tokens=[None, 2], start=1),
        lambda canary: canary.admit("b", start=1.5),
        lambda canary: canary.admit("b", start=2**63),
        lambda canary: canary.admit("b", identity="adapter"),
        lambda canary: canary.admit(7),
    ],
)
def test_a_refused_admission_leaves_no_request_behind(bench: Bench, call: Call) -> None:
    bench.engine.admit("a", 6)
    with pytest.raises(BatchError):
        call(bench.canary)
    assert len(bench.canary.registry) == 1
    assert is_still_at_work(bench)


def test_tokens_may_be_anything_that_stands_for_whole_numbers(bench: Bench) -> None:
    bench.engine.admit("a", 6)
    bench.engine.step()
    tokens = bench.engine.tokens["a"]
    bench.canary.finish("a", tokens=cast("Any", torch.tensor(tokens)), length=6)
    bench.engine.tokens.clear()
    bench.engine.admit("b", 3)
    assert is_still_at_work(bench)


def test_tokens_that_are_no_numbers_are_told_and_do_not_end_the_watch(bench: Bench) -> None:
    bench.canary.admit("b")
    bench.canary.finish("b", tokens=cast("Any", ["x", "y", "z"]))
    bench.engine.admit("a", 6)
    bench.engine.step()
    (failed,) = bench.of("ObserverFailed")
    assert failed.observer == "tokens of request b"
    assert bench.of("RunStopped") == []


def test_an_engine_may_go_on_changing_the_long_list_of_tokens_that_it_passed(bench: Bench) -> None:
    tokens = list(range(INLINE_BASE + 2))
    bench.canary.admit("b", tokens=tokens, start=INLINE_BASE + 1)
    tokens.clear()
    bench.engine.admit("a", 6)
    assert is_still_at_work(bench)


def test_records_of_another_shape_are_refused_by_the_import(bench: Bench) -> None:
    bench.engine.admit("a", 6)
    made = bench.canary.export_records("full", [50])
    forged = dataclasses.replace(made, words=torch.zeros(4, 99, dtype=torch.int64))
    for records in (forged, None):
        with pytest.raises(LayoutError):
            bench.canary.import_records("full", [50], cast("Any", records))
    assert is_still_at_work(bench)


def test_what_is_no_event_cannot_enter_the_stream(bench: Bench) -> None:
    for nothing in (None, "x", Event):
        with pytest.raises(ConfigError, match="only events"):
            bench.canary.emit(cast("Any", nothing))


@pytest.mark.parametrize(
    ("field", "value"),
    [("input_ids", None), ("input_ids", [1]), ("request_rows", torch.tensor(1)), ("last_ids", [1]), ("groups", (5,))],
)
def test_a_batch_of_other_things_than_tensors_is_refused(bench: Bench, field: str, value: object) -> None:
    bench.engine.admit("a", 6)
    bench.engine.step()
    changes: dict[str, Any] = {field: value}
    with pytest.raises(BatchError):
        bench.canary.enter(dataclasses.replace(bench.engine.batch, **changes))
    assert is_still_at_work(bench)


def test_a_part_that_no_source_has_is_refused_since_nothing_would_be_sealed(bench: Bench) -> None:
    bench.engine.admit("a", 6)
    bench.engine.step()
    with pytest.raises(BatchError, match="draft"):
        bench.canary.enter(bench.engine.batch, part="draft")


def test_nested_steps_count_once(bench: Bench) -> None:
    bench.engine.admit("a", 6)
    bench.engine._grow("a")  # a fact holds from the step that follows it
    with bench.canary.step():
        bench.engine.step()
    assert bench.canary.next_forward == 2
    assert is_still_at_work(bench)


def test_a_canary_that_is_stopped_within_a_forward_lets_it_end(bench: Bench) -> None:
    bench.engine.admit("a", 6)
    model = bench.engine._model

    def stopping() -> None:
        model()
        bench.canary.stop(3)

    bench.engine._model = stopping  # type: ignore[method-assign]
    bench.engine.step()


def test_steps_that_nobody_reads_fill_no_memory() -> None:
    canary = Canary(CanaryConfig(mode="log"))
    engine = HandEngine(canary)
    engine.admit("a", 3)
    for _ in range(100):
        engine.step()
    assert canary.feed.in_flight
    assert canary._ring.in_flight < canary.config.snapshots
    assert canary._ring.skipped > 0


def test_a_pool_that_comes_while_the_drain_is_held_up_is_read_all_the_same(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench(flush_deadline_s=0.05)
    feed, held, go_on = bench.canary.feed, threading.Event(), threading.Event()
    collect = feed.collect

    def slow() -> list[Event]:
        held.set()
        go_on.wait(5)
        return collect()

    feed.collect = slow  # type: ignore[method-assign]
    bench.canary.drain.wake()
    assert held.wait(5)
    engine = HandEngine(bench.canary)
    feed.collect = collect  # type: ignore[method-assign]
    go_on.set()
    engine.admit("b", 3)
    for _ in range(3):
        engine.step()
    assert max(event.forward for event in bench.of("SnapshotTaken")) == 3


def test_a_start_that_fails_leaves_no_thread_behind() -> None:
    def handler_without_a_filter(event):  # type: ignore[no-untyped-def]
        del event

    def fine(event: Event) -> None:
        del event

    before = set(threading.enumerate())
    with pytest.raises(ConfigError, match="annotation"):
        Canary(CanaryConfig(mode="log"), observers=[fine, handler_without_a_filter]).start()
    for thread in set(threading.enumerate()) - before:
        thread.join(5)
        assert not thread.is_alive()


def test_a_request_that_is_no_string_is_refused_by_the_call_and_does_not_end_the_watch(
    make_bench: Callable[..., Bench],
) -> None:
    bench = make_bench()
    request: Any = 5
    with pytest.raises(BatchError, match="request 5: ids must be strings"):
        bench.canary.free(0, [1], request=request)
    bench.engine.admit("a", 6)
    bench.engine.step()
    assert bench.violations() == []
    assert bench.canary.stop(5).reason == "stopped"
