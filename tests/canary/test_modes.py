from __future__ import annotations

import pickle
import traceback
from collections.abc import Callable

import pytest

from kvcanary.canary import Canary
from kvcanary.config import CanaryConfig
from kvcanary.errors import CanaryStalledError, ConfigError, KVCorruptionError
from tests.canary.conftest import Bench


def corrupt(bench: Bench) -> None:
    bench.engine.admit("a", 9)
    bench.engine.step()
    bench.engine.flip_bit("a", 3)
    for _ in range(2):
        bench.engine.step()
    assert bench.canary.flush(5)


def test_log_mode_never_stops_the_engine(bench: Bench) -> None:
    corrupt(bench)
    bench.engine.step()
    assert bench.canary.error is None
    assert bench.of("IncidentOpened")


def test_raise_mode_raises_at_the_next_step_and_at_every_later_one(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench(mode="raise")
    corrupt(bench)
    for _ in range(2):
        with pytest.raises(KVCorruptionError):
            bench.engine.step()
    with pytest.raises(KVCorruptionError):
        bench.canary.check()


def test_an_engine_that_swallows_the_error_does_not_make_it_grow(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench(mode="raise")
    corrupt(bench)
    lengths: list[int] = []
    for _ in range(5):
        with pytest.raises(KVCorruptionError) as caught:
            bench.engine.step()
        lengths.append(len(traceback.extract_tb(caught.value.__traceback__)))
    assert len(set(lengths)) == 1


def test_the_error_names_request_slot_position_found_and_expected(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench(mode="raise")
    corrupt(bench)
    error = bench.canary.error
    assert isinstance(error, KVCorruptionError)
    assert (error.kind, error.request, error.group, error.position) == ("CONTENT", "a", "full", 3)
    assert error.slot == bench.engine.slot("a", 3)
    assert error.found
    assert error.expected
    assert error.found != error.expected


def test_the_error_survives_pickling(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench(mode="raise")
    corrupt(bench)
    error = bench.canary.error
    assert isinstance(error, KVCorruptionError)
    copy = pickle.loads(pickle.dumps(error))
    assert (str(copy), copy.__dict__) == (str(error), error.__dict__)


def test_quarantine_is_refused_without_a_hand_to_do_it(make_bench: Callable[..., Bench]) -> None:
    with pytest.raises(ConfigError, match="quarantine"):
        make_bench(mode="quarantine")


def test_off_makes_no_canary() -> None:
    with pytest.raises(ConfigError, match="off"):
        Canary(CanaryConfig(mode="off"))


def test_a_suppressed_kernel_is_named_within_one_check_period(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench(health_every=10, health_warmup=10)
    bench.engine.admit("a", 5)
    for _ in range(20):
        bench.engine.step()
    bench.canary.suppress("check")
    for _ in range(20):
        bench.engine.step()
    stalled = bench.of("KernelStalled")
    assert [event.role for event in stalled] == ["check"]
    assert 20 < stalled[0].forward <= 40


def test_health_stays_quiet_with_the_scrub_off(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench(health_every=5, health_warmup=5, scrub_mib_per_step=0)
    bench.engine.admit("a", 5)
    for _ in range(30):
        bench.engine.step()
    assert bench.of("HealthChecked")
    assert bench.of("KernelStalled") == []


def test_a_stall_is_an_error_of_its_own_in_raise_mode(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench(mode="raise", health_every=5, health_warmup=5)
    bench.engine.admit("a", 5)
    for _ in range(10):
        bench.engine.step()
    bench.canary.suppress("scrub")

    def go_on() -> None:
        for _ in range(30):
            bench.engine.step()
            bench.canary.flush(5)

    with pytest.raises(CanaryStalledError, match="scrub"):
        go_on()


def test_stop_is_idempotent_and_reports_what_was_delivered(bench: Bench) -> None:
    bench.engine.admit("a", 5)
    bench.engine.step()
    bench.canary.stop(5)
    bench.canary.stop(5)
    assert [type(event).__name__ for event in bench.recorder.events][-1] == "RunStopped"


def test_a_canary_that_is_started_again_has_its_observers_and_a_run_of_its_own(bench: Bench) -> None:
    from tests.canary.hand import HandEngine

    bench.engine.admit("a", 5)
    bench.engine.step()
    bench.canary.stop(5)
    bench.canary.start()
    again = HandEngine(bench.canary)
    again.admit("b", 5)
    again.step()
    bench.canary.stop(5)
    names = [type(event).__name__ for event in bench.recorder.events]
    assert [name for name in names if name.startswith("Run")] == ["RunStarted", "RunStopped"] * 2
    second = bench.recorder.events[names.index("RunStopped") + 1 :]
    assert [event.seq for event in second] == list(range(1, len(second) + 1))
    assert "SnapshotTaken" in {type(event).__name__ for event in second}


def test_a_new_pool_begins_a_new_run_with_its_own_numbers(bench: Bench) -> None:
    from tests.canary.hand import HandEngine

    bench.engine.admit("a", 5)
    bench.engine.step()
    HandEngine(bench.canary).admit("b", 5)
    assert bench.canary.flush(5)
    starts = bench.of("RunStarted")
    assert len({event.run for event in starts}) == 2
    assert [event.seq for event in starts] == [1, 1]
