from __future__ import annotations

import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import TypeVar

import anyio
import anyio.lowlevel
import anyio.to_thread
import pytest

from kvcanary import delivery
from kvcanary.bus import Bus, Subscription
from kvcanary.delivery import SinkReport
from kvcanary.events import Event, EventsDropped, ObserverFailed
from kvcanary.observers.base import ObserverSpec, observer
from tests.host.samples import started, ticks

SOON = 10.0
"""Seconds after which a test that waits for something has failed."""

T = TypeVar("T")


@pytest.fixture(
    params=[
        pytest.param(("asyncio", {}), id="asyncio"),
        pytest.param(("asyncio", {"use_uvloop": True}), id="uvloop"),
        pytest.param(("trio", {}), id="trio"),
    ]
)
def anyio_backend(request: pytest.FixtureRequest) -> object:
    return request.param


async def in_thread(function: Callable[[], T]) -> T:
    """Run in a thread, as the drain does, while the loop goes on."""
    return await anyio.to_thread.run_sync(function)


async def flush(bus: Bus) -> None:
    assert await in_thread(lambda: bus.flush(time.monotonic() + SOON))


@pytest.fixture
async def bus() -> AsyncIterator[Bus]:
    bus = Bus()
    yield bus
    await in_thread(lambda: bus.close(time.monotonic() + SOON))


def publish_from_thread(bus: Bus, batches: int, size: int) -> Callable[[], None]:
    def publish() -> None:
        if not bus.running:
            bus.begin_run(started())
        for _ in range(batches):
            bus.publish(ticks(size))

    return publish


async def test_an_async_sink_runs_on_the_loop_that_subscribed(bus: Bus) -> None:
    threads: set[int] = set()
    seen: list[int] = []

    @observer
    async def sink(event: Event) -> None:
        await anyio.lowlevel.checkpoint()
        threads.add(threading.get_ident())
        seen.append(event.seq)

    bus.subscribe(sink)
    await in_thread(publish_from_thread(bus, 20, 10))
    await flush(bus)
    assert threads == {threading.get_ident()}
    assert seen == list(range(1, 202))


async def test_an_async_batch_sink_gets_everything_in_order(bus: Bus) -> None:
    seen: list[int] = []

    @observer
    async def sink(events: Sequence[Event]) -> None:
        await anyio.lowlevel.checkpoint()
        seen.extend(event.seq for event in events)

    bus.subscribe(sink)
    await in_thread(publish_from_thread(bus, 50, 40))
    await flush(bus)
    assert seen == list(range(1, 2002))


async def test_a_sink_that_never_waits_leaves_the_loop_to_others(bus: Bus) -> None:
    laps = 0

    @observer(queue=100_000)
    async def busy(event: Event) -> None:
        time.sleep(0.0005)  # noqa: ASYNC251 - a handler that computes

    async def others() -> None:
        nonlocal laps
        while True:
            await anyio.lowlevel.checkpoint()
            laps += 1

    bus.begin_run(started())
    bus.publish(ticks(200))
    async with anyio.create_task_group() as group:
        bus.subscribe(busy)
        bus.publish(ticks(200))
        group.start_soon(others)
        await flush(bus)
        group.cancel_scope.cancel()
    assert laps > 10


async def test_a_sink_that_waits_for_ever_costs_the_others_nothing(bus: Bus) -> None:
    seen: list[int] = []
    entered, complete = anyio.Event(), anyio.Event()

    @observer(name="stuck", queue=5)
    async def stuck(event: Event) -> None:
        entered.set()
        await anyio.sleep_forever()

    @observer(name="good")
    async def good(event: Event) -> None:
        seen.append(event.seq)
        if event.seq == 102:
            complete.set()

    bus.subscribe(stuck)
    bus.begin_run(started())
    await entered.wait()
    bus.publish(ticks(1))
    bus.subscribe(good)
    await in_thread(publish_from_thread(bus, 10, 10))
    await complete.wait()
    assert seen == [1, *range(3, 103)]
    reports, abandoned = await in_thread(lambda: bus.close(time.monotonic() + 0.1))
    assert abandoned == ("kvcanary-sink-stuck",)
    assert reports["stuck"].undelivered == 6
    assert reports["stuck"].dropped == 102 - 6
    assert reports["good"] == SinkReport(delivered=101, state="closed")


async def test_what_an_overflowing_sink_lost_is_told_before_its_next_event(bus: Bus) -> None:
    seen: list[Event] = []
    entered, gate = anyio.Event(), anyio.Event()

    @observer(queue=2)
    async def slow(event: Event) -> None:
        entered.set()
        await gate.wait()
        seen.append(event)

    bus.subscribe(slow)
    bus.begin_run(started())
    await entered.wait()
    bus.publish(ticks(5))
    gate.set()
    await flush(bus)
    told = [event for event in seen if isinstance(event, EventsDropped)]
    assert [event.seq for event in seen] == [1, 4, 5, 6]
    assert [(event.count, event.first_seq, event.last_seq) for event in told] == [(3, 2, 4)]


async def test_an_async_crash_is_reported_and_the_sink_goes_on(bus: Bus) -> None:
    seen: list[int] = []

    @observer(name="shaky")
    async def shaky(event: Event) -> None:
        await anyio.lowlevel.checkpoint()
        if event.seq == 1:
            raise ValueError("boom")
        seen.append(event.seq)

    bus.subscribe(shaky)
    await in_thread(publish_from_thread(bus, 1, 3))
    await flush(bus)
    (failed,) = bus.pump()
    assert isinstance(failed, ObserverFailed)
    assert (failed.observer, failed.error, failed.action) == ("shaky", "ValueError: boom", "continued")
    assert seen == [2, 3, 4]


async def test_open_and_close_may_be_async_and_run_on_the_same_loop(bus: Bus) -> None:
    calls: list[tuple[str, int]] = []

    class Sink:
        name, interests = "sink", (Event,)

        async def open(self) -> None:
            await anyio.lowlevel.checkpoint()
            calls.append(("open", threading.get_ident()))

        def handle(self, event: Event) -> None:
            calls.append(("handle", threading.get_ident()))

        async def close(self) -> None:
            await anyio.lowlevel.checkpoint()
            calls.append(("close", threading.get_ident()))

    subscription = bus.subscribe(Sink())
    bus.begin_run(started())
    await flush(bus)
    subscription.close()
    assert await in_thread(lambda: subscription.wait(SOON))
    here = threading.get_ident()
    assert calls == [("open", here), ("handle", here), ("close", here)]


async def test_a_private_sink_has_a_loop_and_a_thread_of_its_own(bus: Bus) -> None:
    threads: list[int] = []

    @observer
    async def sink(event: Event) -> None:
        await anyio.lowlevel.checkpoint()
        threads.append(threading.get_ident())

    bus.subscribe(sink, private=True)
    bus.begin_run(started())
    assert bus.flush(time.monotonic() + SOON)  # this loop is blocked meanwhile, and that does not matter
    assert threads
    assert threading.get_ident() not in threads


async def test_the_loop_that_closes_the_bus_is_not_waited_for_by_itself(bus: Bus) -> None:
    seen: list[int] = []

    @observer
    async def sink(event: Event) -> None:
        seen.append(event.seq)

    subscription = bus.subscribe(sink)
    bus.begin_run(started())
    bus.publish(ticks(3))
    began = time.monotonic()
    reports, abandoned = bus.close(began + SOON, own_thread=threading.get_ident())
    assert time.monotonic() - began < SOON / 2
    assert abandoned == ()
    assert reports["test_the_loop_that_closes_the_bus_is_not_waited_for_by_itself.<locals>.sink"].undelivered == 4
    assert await in_thread(lambda: subscription.wait(SOON))
    assert seen == [1, 2, 3, 4]


async def test_subscribing_in_a_worker_thread_of_a_loop_gives_a_private_thread(bus: Bus) -> None:
    threads: list[int] = []

    @observer
    async def sink(event: Event) -> None:
        threads.append(threading.get_ident())

    await in_thread(lambda: bus.subscribe(sink))
    bus.begin_run(started())
    assert bus.flush(time.monotonic() + SOON)
    assert threads
    assert threading.get_ident() not in threads


async def test_an_abandoned_async_sink_ends_when_it_comes_back(bus: Bus) -> None:
    entered, gate = anyio.Event(), anyio.Event()
    seen: list[int] = []

    async def wait_then_note(event: Event) -> None:
        entered.set()
        await gate.wait()
        seen.append(event.seq)

    subscription = bus.subscribe(ObserverSpec("late", (Event,), wait_then_note, is_async=True))
    bus.begin_run(started())
    await entered.wait()
    bus.publish(ticks(3))
    await in_thread(lambda: bus.close(time.monotonic()))
    gate.set()
    assert await in_thread(lambda: subscription.wait(SOON))
    assert seen == [1]
    assert subscription.report() == SinkReport(delivered=1, undelivered=4, state="abandoned")


def test_a_loop_that_ends_cancels_its_sink_and_that_is_no_failure(anyio_backend: tuple[str, dict[str, object]]) -> None:
    bus = Bus()
    closed: list[str] = []
    subscriptions: list[Subscription] = []

    async def close() -> None:
        await anyio.lowlevel.checkpoint()
        closed.append("closed")

    async def main() -> None:
        entered = anyio.Event()

        async def handle(_: Event) -> None:
            entered.set()
            await anyio.sleep_forever()

        spec = ObserverSpec("sink", (Event,), handle, is_async=True, close=close)
        subscriptions.append(bus.subscribe(spec))
        bus.begin_run(started())
        bus.publish(ticks(3))
        await entered.wait()

    anyio.run(main, backend=anyio_backend[0], backend_options=anyio_backend[1])
    (subscription,) = subscriptions
    assert subscription.wait(SOON)
    assert subscription.report() == SinkReport(undelivered=4, state="cancelled")
    assert closed == ["closed"]
    bus.publish(ticks(2))
    assert bus.pump() == []
    assert subscription.report().undelivered == 4
    bus.close(time.monotonic() + SOON)


def test_without_a_loop_an_async_sink_gets_a_thread_with_one() -> None:
    bus = Bus()
    seen: list[int] = []

    @observer
    async def sink(event: Event) -> None:
        await anyio.lowlevel.checkpoint()
        seen.append(event.seq)

    bus.subscribe(sink)
    bus.begin_run(started())
    bus.publish(ticks(100))
    _, abandoned = bus.close(time.monotonic() + SOON)
    assert abandoned == ()
    assert seen == list(range(1, 102))


async def test_an_async_sink_rests_after_a_failure_without_holding_up_its_loop(
    bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delivery, "FIRST_REST_SECONDS", 100 * SOON)
    monkeypatch.setattr(delivery, "LONGEST_REST_SECONDS", 100 * SOON)
    seen: list[int] = []
    failed = anyio.Event()

    async def handle(event: Event) -> None:
        await anyio.lowlevel.checkpoint()
        if event.seq == 1:
            failed.set()
            raise OSError("disk full")
        seen.append(event.seq)

    subscription = bus.subscribe(ObserverSpec("disk", (Event,), handle, is_async=True, restart="restart"))
    bus.begin_run(started())
    await failed.wait()
    bus.publish(ticks(2))
    await anyio.lowlevel.checkpoint()
    assert seen == []
    subscription.close()
    assert await in_thread(lambda: subscription.wait(SOON))
    assert seen == [2, 3]


async def test_cancelling_the_scope_that_subscribed_leaves_other_sinks_and_the_bus_alone(bus: Bus) -> None:
    seen: list[int] = []
    entered = anyio.Event()

    @observer(name="good")
    async def good(event: Event) -> None:
        seen.append(event.seq)

    @observer(name="waits")
    async def waits(event: Event) -> None:
        entered.set()
        await anyio.sleep_forever()

    bus.subscribe(good)
    async with anyio.create_task_group() as group:
        bus.subscribe(waits)
        bus.begin_run(started())
        await entered.wait()
        group.cancel_scope.cancel()
    await in_thread(publish_from_thread(bus, 2, 5))
    reports, abandoned = await in_thread(lambda: bus.close(time.monotonic() + 0.2))
    assert seen == list(range(1, 12))
    assert abandoned == ("kvcanary-sink-waits",)
    assert reports["waits"].undelivered == 11
