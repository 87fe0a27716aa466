from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any, Literal

import pytest
import torch

import kvcanary
from kvcanary.config import CanaryConfig
from kvcanary.errors import ConfigError, KVCorruptionError
from kvcanary.events import CanaryArmed, Event, RunStarted, SnapshotTaken, ViolationDetected
from kvcanary.testing import EventRecorder
from tests.engines.serving import serve

pytestmark = pytest.mark.engine


def watch(engine: Any, recorder: EventRecorder | None = None, mode: Literal["log", "raise"] = "log") -> kvcanary.Watch:
    config = CanaryConfig(mode=mode, scrub_mib_per_step=1.0)
    return kvcanary.watch(engine, config=config, observers=[] if recorder is None else [recorder])


def objects(manager: Any) -> Iterator[Any]:
    """Everything that the adapter may touch."""
    yield manager
    yield manager.model
    processor = manager.batch_processor
    if processor is None:
        return
    yield from (processor, processor.scheduler, processor.offloading_manager, processor.model_runner)
    yield from (processor.inputs_and_outputs, processor.cache)
    if hasattr(processor.cache, "pool"):
        yield processor.cache.pool
        for allocator in processor.cache.cache_allocators.values():
            yield from (allocator, allocator.ledger)
    else:
        yield processor.cache._block_manager
        yield from processor.cache.group_cache_managers


def traces(manager: Any) -> list[dict[str, Any]]:
    """Names of all attributes, with those that are callable or hook tables as they are."""
    return [
        {
            name: (value if callable(value) else dict(value) if name.startswith("_forward") else None)
            for name, value in vars(item).items()
        }
        for item in objects(manager)
    ]


def test_undoing_leaves_no_trace_on_an_engine_that_did_not_start() -> None:
    with serve() as engine:
        before = traces(engine.manager)
        with watch(engine.manager):
            assert traces(engine.manager) != before
        assert traces(engine.manager) == before


def test_undoing_leaves_no_trace_on_an_engine_that_runs() -> None:
    with serve(asynchronous=True) as engine:
        engine.manager.start()
        engine.ask([engine.prompt()])
        before = traces(engine.manager)
        with watch(engine.manager):
            assert traces(engine.manager) != before
            engine.ask([engine.prompt()])
        assert traces(engine.manager) == before
        assert engine.ask([engine.prompt()])[0].error is None


def test_undoing_leaves_no_trace_on_a_model() -> None:
    with serve() as engine:
        before = {name: value for name, value in vars(engine.model).items() if callable(value)}
        with watch(engine.model):
            engine.manager = engine.new_manager()
            engine.manager.start()
            engine.ask([engine.prompt()])
        assert {name: value for name, value in vars(engine.model).items() if callable(value)} == before
        assert not engine.model._forward_hooks
        assert not engine.model._forward_pre_hooks
        assert engine.ask([engine.prompt()])[0].error is None


def test_a_second_canary_on_one_manager_is_refused() -> None:
    with serve() as engine, watch(engine.manager):
        before = traces(engine.manager)
        with pytest.raises(ConfigError, match="watched by another canary"):
            watch(engine.manager).start()
        assert traces(engine.manager) == before


def test_a_second_manager_is_refused_while_the_first_one_runs() -> None:
    with serve() as engine, watch(engine.model):
        engine.manager = engine.new_manager()
        engine.manager.start()
        with pytest.raises(ConfigError, match="second continuous batching manager while the first one runs"):
            engine.new_manager()
        assert engine.ask([engine.prompt()])[0].error is None


def test_each_new_pool_is_a_new_run() -> None:
    recorder = EventRecorder()
    with serve() as engine, watch(engine.model, recorder):
        for _ in range(2):
            engine.manager = engine.new_manager()
            engine.manager.start()
            engine.ask([engine.prompt()])
            engine.manager.stop(block=True, timeout=10)
    runs = {event.run for event in recorder.of(RunStarted)}
    assert len(runs) == 2
    assert {event.origin.engine for event in recorder.of(RunStarted)} == {"transformers"}


def test_a_pool_that_the_engine_dropped_is_let_go() -> None:
    with serve() as engine, watch(engine.manager):
        engine.manager.start()
        engine.ask([engine.prompt()])
        pool = weakref.ref(engine.manager.batch_processor.cache)
        engine.manager.stop(block=True, timeout=10)
        gc.collect()
        assert pool() is None


def test_a_release_that_is_too_old_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with serve() as engine:
        before = traces(engine.manager)
        monkeypatch.setattr("transformers.__version__", "5.16.4")
        with pytest.raises(ConfigError, match=r"transformers 5\.16\.4 is too old.*transformers>=5\.17"):
            watch(engine.manager).start()
        assert traces(engine.manager) == before


def test_quarantine_is_refused_with_a_release_that_cannot_drop_a_page(monkeypatch: pytest.MonkeyPatch) -> None:
    with serve() as engine:
        before = traces(engine.manager)
        monkeypatch.setattr("transformers.__version__", "5.17.0")
        with pytest.raises(ConfigError, match=r"mode 'quarantine': transformers 5\.17\.0 .*transformers>=5\.18"):
            kvcanary.watch(engine.manager, mode="quarantine").start()
        assert traces(engine.manager) == before


def test_a_newer_release_is_warned_of_and_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = EventRecorder()
    with serve() as engine:
        monkeypatch.setattr("transformers.__version__", "5.31.0")
        watched = watch(engine.manager, recorder)
        with pytest.warns(UserWarning, match=r"transformers 5\.31\.0 is newer than 5\.24"):
            watched.start()
        with watched:
            engine.manager.start()
            engine.ask([engine.prompt()])
    assert recorder.of(SnapshotTaken)


def test_a_renamed_method_is_named_with_the_release_and_nothing_is_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    with serve() as engine:
        engine.manager.start()
        engine.ask([engine.prompt()])
        before = traces(engine.manager)
        monkeypatch.delattr("transformers.generation.continuous_batching.cache_allocators.CacheAllocator.copy_blocks")
        with pytest.raises(ConfigError, match=r"transformers 5\.\d+\.\d+ lacks .*'full_attention'\]\.copy_blocks\b"):
            watch(engine.manager).start()
        monkeypatch.undo()
        assert traces(engine.manager) == before
        assert engine.ask([engine.prompt()])[0].error is None


def test_a_renamed_parameter_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def finish_request(self: Any, name: str) -> None: ...

    with serve() as engine:
        engine.manager.start()
        engine.ask([engine.prompt()])
        monkeypatch.setattr(type(engine.manager.batch_processor.scheduler), "finish_request", finish_request)
        with pytest.raises(ConfigError, match=r"scheduler\.finish_request\(request_id\)"):
            watch(engine.manager).start()


def test_a_cache_that_is_laid_out_in_another_way_is_found_by_the_sentinel() -> None:
    with serve() as engine:
        engine.manager.start()
        engine.ask([engine.prompt()])
        allocator = engine.manager.batch_processor.cache.cache_allocators["full_attention"]
        keys, values = allocator._kv_token_views[1]
        allocator._kv_token_views[1] = values, keys
        before = engine.manager.batch_processor.cache.cache_tensor.clone()
        with pytest.raises(ConfigError, match=r"layer 1 of group 'full_attention'.*layer1\.k, layer1\.v of slot"):
            watch(engine.manager).start()
        assert torch.equal(engine.manager.batch_processor.cache.cache_tensor, before), "it is left as it was"
        allocator._kv_token_views[1] = keys, values


@pytest.mark.parametrize("kind", ["full", "sliding", "odd"])
def test_the_sentinel_puts_the_old_bytes_back(kind: str) -> None:
    with serve(kind) as engine:
        engine.manager.start()
        engine.ask([engine.prompt()])
        with engine.manager.pause():
            arena = engine.manager.batch_processor.cache.cache_tensor
            arena[:] = torch.randint(0, 256, arena.shape, dtype=torch.uint8)
            before = arena.clone()
        with watch(engine.manager):
            assert torch.equal(arena, before)


def test_what_is_compiled_into_one_graph_is_refused() -> None:
    from transformers.generation.configuration_utils import CompileConfig

    with (
        serve(varlen_compile_config=CompileConfig(fullgraph=True)) as engine,
        watch(engine.manager),
        pytest.raises(ConfigError, match="varlen_compile_config asks for fullgraph=True"),
    ):
        engine.manager.warmup()


def test_a_forward_that_raises_is_abandoned_and_the_engine_still_says_why() -> None:
    recorder = EventRecorder()

    def fail(*_: Any) -> None:
        raise ValueError("out of luck")

    with serve() as engine, watch(engine.manager, recorder) as watched:
        engine.manager.start()
        engine.ask([engine.prompt()])
        engine.model.model.layers[1].register_forward_pre_hook(fail)
        output = engine.ask([engine.prompt()])[0]
        assert "out of luck" in output.error
        assert watched.canary is not None
        assert watched.canary.flush(5)
    assert recorder.of(SnapshotTaken)[-1].abandoned == 1
    assert not recorder.of(ViolationDetected)


def test_warm_up_is_not_judged_and_the_canary_arms_after_it() -> None:
    recorder = EventRecorder(Event)
    with serve(padded=True) as engine, watch(engine.manager, recorder) as watched:
        engine.manager.warmup()
        assert watched.canary is not None
        assert watched.canary.armed
        assert engine.manager.batch_processor.cache is not None
        engine.manager.start()
        engine.ask([engine.prompt() for _ in range(4)])
    assert not recorder.of(ViolationDetected)
    assert len(recorder.of(CanaryArmed)) == 2
    assert recorder.of(SnapshotTaken)[-1].verified["writes"]["full_attention"] > 0


def test_the_model_may_be_used_elsewhere_in_a_pause() -> None:
    recorder = EventRecorder()
    with serve() as engine, watch(engine.manager, recorder) as watched:
        engine.manager.start()
        engine.ask([engine.prompt()])
        assert watched.canary is not None
        with engine.manager.pause(), torch.no_grad():
            forward = watched.canary.next_forward
            engine.model(input_ids=torch.tensor([engine.prompt()]), use_cache=False)
            assert watched.canary.next_forward == forward
        engine.ask([engine.prompt()])
    assert not recorder.of(ViolationDetected)


def test_raise_mode_stops_the_engine_and_raises_when_the_watch_ends() -> None:
    with serve() as engine:
        watched = watch(engine.manager, mode="raise").start()
        engine.manager.start()
        engine.ask([engine.prompt()])
        with engine.manager.pause():
            # Cached prefixes lie in the arena; turning every byte over hits them all.
            engine.manager.batch_processor.cache.cache_tensor.bitwise_not_()
        output = engine.ask([engine.prompt()], new_tokens=100)[0]
        assert watched.error is not None
        assert output.error == str(watched.error)
        with pytest.raises(KVCorruptionError) as found:
            watched.stop()
        assert found.value.kind in ("CONTENT", "NULL_DIRTY")
