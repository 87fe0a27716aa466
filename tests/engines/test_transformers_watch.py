from __future__ import annotations

import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvcanary import CanaryConfig, watch
from kvcanary.events import (
    EventsDropped,
    IncidentOpened,
    KernelStalled,
    ObserverFailed,
    SnapshotTaken,
    StatsReported,
    ViolationDetected,
)
from kvcanary.observers.swa_divergence import find_last, parse
from kvcanary.testing import EventRecorder, assert_no_violations, assert_swa_divergence_observed
from tests.engines.serving import Served, serve


def work(engine: Served, requests: int = 6, length: int = 40) -> None:
    engine.manager.start()
    engine.ask([engine.prompt(length) for _ in range(requests)])


def test_the_window_path_of_a_mixed_model_is_proved_and_its_json_line_parses_back(tmp_path: Path) -> None:
    log, recorder = tmp_path / "canary.jsonl", EventRecorder()
    config = CanaryConfig(mode="log", swa_divergence_every=2, log=str(log))
    with serve("mixed") as engine, watch(engine.manager, config=config, observers=[recorder]):
        work(engine)
        observed = assert_swa_divergence_observed(recorder, timeout=10)
    assert observed in [parse(line) for line in log.read_text().splitlines()]
    last = find_last(log.read_text())
    assert last is not None
    assert last.verify_swa < last.verify_full


def test_a_mixed_model_with_padded_forwards_is_proved_too() -> None:
    recorder = EventRecorder()
    config = CanaryConfig(mode="log", swa_divergence_every=3)
    with serve("gemma", padded=True) as engine, watch(engine.manager, config=config, observers=[recorder]):
        work(engine)
        assert_swa_divergence_observed(recorder, timeout=10)
        assert_no_violations(recorder)


def test_stats_count_what_was_protected() -> None:
    recorder = EventRecorder()
    config = CanaryConfig(mode="log", stats_every=5)
    with serve() as engine, watch(engine.manager, config=config, observers=[recorder]):
        work(engine)
    stats = recorder.of(StatsReported)
    assert stats[-1].protected_tokens > 6 * 40
    assert stats[-1].verified["links"] > 0
    assert stats[-1].active_roles > 0


def test_a_kernel_whose_launches_stop_is_named_within_one_period() -> None:
    recorder = EventRecorder()
    config = CanaryConfig(mode="log", health_every=8, health_warmup=8)
    with serve() as engine, watch(engine.manager, config=config, observers=[recorder]) as watched:
        work(engine)
        canary = watched.canary
        assert canary is not None
        canary.suppress("check")
        since = canary.next_forward
        engine.ask([engine.prompt() for _ in range(4)], new_tokens=20)
    (stalled,) = recorder.of(KernelStalled)
    assert (stalled.role, stalled.forward - since <= 2 * 8) == ("check", True)


@pytest.mark.parametrize("mib", [0, 0.001])
def test_health_stays_quiet_when_the_scrub_is_off_or_slow(mib: float) -> None:
    recorder = EventRecorder()
    config = CanaryConfig(mode="log", health_every=5, health_warmup=5, scrub_mib_per_step=mib)
    with serve() as engine, watch(engine.manager, config=config, observers=[recorder]):
        work(engine)
    assert not recorder.of(KernelStalled)
    assert recorder.of(SnapshotTaken)


def forwards_ms(recorder: EventRecorder) -> float:
    return statistics.median(event.host_us for event in recorder.of(SnapshotTaken) if event.host_us)


def test_a_sink_that_sleeps_and_one_that_crashes_cost_the_engine_and_the_others_nothing() -> None:
    class Sleeper:
        name, interests, queue = "sleeper", (SnapshotTaken,), 2

        def handle(self, _event: SnapshotTaken) -> None:
            time.sleep(1.0)

    class Crasher:
        name, interests = "crasher", (SnapshotTaken,)

        def handle(self, event: SnapshotTaken) -> None:
            raise ValueError(f"cannot stand forward {event.forward}")

    alone, beside = EventRecorder(), EventRecorder()
    config = CanaryConfig(mode="log", stop_deadline_s=3.0)
    with serve() as engine, watch(engine.manager, config=config, observers=[alone]):
        work(engine)
    with serve() as engine, watch(engine.manager, config=config, observers=[beside, Sleeper(), Crasher()]) as watched:
        work(engine)
        end = time.monotonic() + 10
        while not any(event.observer == "sleeper" for event in beside.of(EventsDropped)):
            assert time.monotonic() < end, "the losses of the sleeping sink were never told"
            watched.canary.flush(1)  # type: ignore[union-attr]
    assert [type(event) for event in beside.of(SnapshotTaken)] == [type(event) for event in alone.of(SnapshotTaken)]
    assert any(event.observer == "crasher" and "cannot stand" in event.error for event in beside.of(ObserverFailed))
    # Generous, since the machine that runs this may be busy; a forward that waited would show a second here.
    assert forwards_ms(beside) < 3 * forwards_ms(alone) + 20_000


def test_log_mode_finds_the_corruption_and_lets_the_engine_go_on() -> None:
    recorder = EventRecorder()
    with serve() as engine, watch(engine.manager, mode="log", observers=[recorder]):
        work(engine)
        with engine.manager.pause():
            engine.manager.batch_processor.cache.cache_tensor.bitwise_not_()
        output = engine.ask([engine.prompt()])[0]
        assert output.error is None
    assert recorder.of(ViolationDetected)
    assert recorder.of(IncidentOpened)


def test_off_wraps_nothing_on_a_real_manager() -> None:
    with serve() as engine:
        before = dict(vars(engine.manager)), dict(vars(engine.model))
        with watch(engine.manager, mode="off") as watched:
            assert (dict(vars(engine.manager)), dict(vars(engine.model))) == before
            work(engine, requests=1)
            assert watched.error is None
            assert watched.status["watching"] is False


def test_off_imports_no_torch() -> None:
    program = (
        "import sys, kvcanary\n"
        "with kvcanary.watch(object(), mode='off') as w: pass\n"
        "assert kvcanary.install_canary(object(), kvcanary.CanaryConfig(mode='off')) is None\n"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules, sorted(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
