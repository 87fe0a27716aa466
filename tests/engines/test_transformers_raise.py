"""``raise`` on the real engine: what is visible when, whoever swallows the exception."""

from __future__ import annotations

import asyncio
import pickle

import pytest

from kvcanary import KVCorruptionError, watch
from kvcanary.watching import Watch
from tests.engines.serving import Served, serve


def spoil(engine: Served) -> None:
    """Every slot of the pool gets other bytes while the loop is at rest."""
    with engine.manager.pause():
        engine.manager.batch_processor.cache.cache_tensor.bitwise_not_()


def run_into_it(engine: Served, watched: Watch) -> list[object]:
    engine.manager.start()
    engine.ask([engine.prompt(40) for _ in range(2)])
    assert watched.error is None
    spoil(engine)
    outputs: list[object] = engine.ask([engine.prompt(20) for _ in range(2)], new_tokens=200)
    return outputs


@pytest.mark.parametrize("asynchronous", [False, True])
def test_the_engine_stops_its_requests_fail_with_the_text_and_leaving_raises_it(asynchronous: bool) -> None:
    with serve(asynchronous=asynchronous) as engine:
        watched = watch(engine.manager, mode="raise")
        outputs: list[object] = []

        def serve_until_it_stops() -> None:
            with watched:
                outputs.extend(run_into_it(engine, watched))
                assert isinstance(watched.error, KVCorruptionError)
                assert not engine.manager.is_running()

        with pytest.raises(KVCorruptionError) as caught:
            serve_until_it_stops()
        assert caught.value is watched.error
    assert all(output is None or str(caught.value) in str(getattr(output, "error", "")) for output in outputs)
    assert any(output is not None for output in outputs)


def test_it_is_raised_at_check_and_at_stop_and_kept_for_ever() -> None:
    with serve() as engine:
        watched = watch(engine.manager, mode="raise").start()
        run_into_it(engine, watched)
        canary = watched.canary
        assert canary is not None
        for _ in range(2):
            with pytest.raises(KVCorruptionError):
                canary.check()
        with pytest.raises(KVCorruptionError):
            watched.stop()
        watched.stop()  # idempotent: it was said once
        assert isinstance(watched.error, KVCorruptionError)
        assert watched.status["healthy"] is False
        assert watched.status["error"] == str(watched.error)


def test_what_the_engine_raised_itself_stays_the_error_that_is_seen() -> None:
    with serve() as engine:
        watched = watch(engine.manager, mode="raise")

        def fail_in_it() -> None:
            with watched:
                run_into_it(engine, watched)
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            fail_in_it()
        assert isinstance(watched.error, KVCorruptionError)


def test_the_error_of_a_real_engine_survives_a_trip_through_a_pickle() -> None:
    with serve() as engine:
        watched = watch(engine.manager, mode="raise").start()
        run_into_it(engine, watched)
        with pytest.raises(KVCorruptionError) as caught:
            watched.stop()
    copy = pickle.loads(pickle.dumps(caught.value))
    assert (str(copy), copy.__dict__) == (str(caught.value), caught.value.__dict__)
    assert copy.details["incident"]


def test_a_server_that_catches_what_its_engine_raises_meets_it_again_at_every_later_step() -> None:
    """An engine of one's own whose loop swallows exceptions: each step raises, until it stops or somebody looks."""
    with serve() as engine:
        watched = watch(engine.manager, mode="raise").start()
        run_into_it(engine, watched)
        canary = watched.canary
        assert canary is not None
        swallowed = 0
        for _ in range(3):
            try:
                with canary.step():
                    pass
            except KVCorruptionError:
                swallowed += 1
        assert swallowed == 3
        with pytest.raises(KVCorruptionError):
            watched.stop()


def test_on_an_event_loop_no_task_is_cancelled_and_leaving_raises() -> None:
    ticks = 0

    async def beside(stop: asyncio.Event) -> str:
        nonlocal ticks
        while not stop.is_set():
            ticks += 1
            await asyncio.sleep(0.001)
        return "never cancelled"

    async def main(engine: Served) -> str:
        stop = asyncio.Event()
        task = asyncio.create_task(beside(stop))
        watched = watch(engine.manager, mode="raise")

        async def serve_until_it_stops() -> None:
            async with watched:
                await asyncio.to_thread(run_into_it, engine, watched)

        with pytest.raises(KVCorruptionError):
            await serve_until_it_stops()
        stop.set()
        return await task

    with serve() as engine:
        assert asyncio.run(main(engine)) == "never cancelled"
    assert ticks > 1
