"""The test kit: its assertions hold when they should, and fail when they should."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvcanary.events import (
    CanaryArmed,
    CanaryDisarmed,
    Event,
    IncidentOpened,
    KernelStalled,
    OwnershipViolated,
    SnapshotTaken,
    SwaDivergenceObserved,
    ViolationDetected,
    json_codec,
)
from kvcanary.observers.base import as_observer
from kvcanary.observers.log import LogSink
from kvcanary.testing import (
    DeterministicClock,
    EventRecorder,
    assert_no_violations,
    assert_swa_divergence_observed,
    assert_violation,
)

VERIFIED = SnapshotTaken(verified={"links": {"full": 9}, "sealed": {"full": 3}, "content": {"full": 0}})
FOUND = ViolationDetected(kind="CONTENT", role="scrub", group="full", slot=3, request="a")
GOOD: dict[str, Any] = {
    "forward_ct": 4,
    "verify_full": 9,
    "verify_swa": 4,
    "swa_full_idx_divergence": 1,
    "swa_out_of_window_tokens": 1,
}


def observed(**fields: int) -> SwaDivergenceObserved:
    return SwaDivergenceObserved(**GOOD | fields)


def test_a_clean_run_in_which_something_was_verified_has_no_violations() -> None:
    assert_no_violations([CanaryArmed(), VERIFIED])
    assert_no_violations([VERIFIED], checks=("links", "sealed"))


@pytest.mark.parametrize(
    "events", [[], [CanaryArmed()], [SnapshotTaken()], [SnapshotTaken(verified={"links": {"full": 0}})]]
)
def test_a_run_in_which_nothing_was_verified_proves_nothing(events: list[Event]) -> None:
    with pytest.raises(AssertionError, match="nothing was verified by any check, so this proves nothing"):
        assert_no_violations(events)


def test_a_run_that_ends_disarmed_does_not_pass() -> None:
    stopped = CanaryDisarmed(forward=7, reason="facts were lost")
    assert_no_violations([stopped, CanaryArmed(), VERIFIED])
    with pytest.raises(AssertionError, match=r"stopped and not taken up again: since forward 7: facts were lost"):
        assert_no_violations([CanaryArmed(), VERIFIED, stopped])


def test_a_check_that_was_asked_for_must_have_verified_something() -> None:
    with pytest.raises(AssertionError, match="nothing was verified by content"):
        assert_no_violations([VERIFIED], checks=("links", "content"))


@pytest.mark.parametrize(
    ("event", "message"),
    [
        (FOUND, "1 violations: CONTENT request='a'"),
        (OwnershipViolated(kind="EARLY_REUSE", page=3), "1 violations: EARLY_REUSE"),
        (IncidentOpened(incident="i", kind="CONTENT", headline="the headline"), "1 violations: the headline"),
        (KernelStalled(role="check", launches=1, expected=5), "stalled kernels, so checks are missing: check"),
        (SnapshotTaken(violations={"CONTENT": 2}), "the device counted violations: {'CONTENT': 2}"),
    ],
)
def test_a_finding_of_any_sort_is_refused(event: Event, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        assert_no_violations([VERIFIED, event])


def test_an_expected_violation_is_returned() -> None:
    other = ViolationDetected(kind="CONTENT", role="scrub", group="swa", slot=4)
    ledger = OwnershipViolated(kind="EARLY_REUSE", group="full")
    assert assert_violation([other, FOUND], kind="CONTENT", group="full", slot=3, request="a") is FOUND
    assert assert_violation([other, FOUND, ledger], kind="CONTENT") is other
    assert assert_violation([FOUND, ledger], kind="EARLY_REUSE") is ledger


def test_a_missing_violation_names_those_that_were_found() -> None:
    with pytest.raises(AssertionError, match="no violation with kind='DIGEST', slot=3; found: CONTENT request='a'"):
        assert_violation([FOUND], kind="DIGEST", slot=3)
    with pytest.raises(AssertionError, match="found: none at all; there were no events"):
        assert_violation([], kind="DIGEST")


def test_a_recorder_keeps_what_it_is_interested_in() -> None:
    recorder = EventRecorder(CanaryArmed, ViolationDetected)
    spec = as_observer(recorder)
    assert spec.wants(CanaryArmed)
    assert not spec.wants(SnapshotTaken)
    spec.call([CanaryArmed(seq=1), FOUND])
    assert list(recorder) == [CanaryArmed(seq=1), FOUND]
    assert recorder.of(ViolationDetected) == [FOUND]
    assert len(recorder) == 2
    recorder.clear()
    assert recorder.events == []


def test_a_recorder_is_bounded_and_counts_what_it_dropped() -> None:
    recorder = EventRecorder(limit=3)
    recorder.handle_batch([CanaryArmed(seq=seq) for seq in range(5)])
    assert [event.seq for event in recorder] == [2, 3, 4]
    assert recorder.dropped == 2


def test_waiting_ends_when_the_event_comes() -> None:
    recorder = EventRecorder()

    def post() -> None:
        for seq in range(5):
            recorder.handle_batch([CanaryArmed(seq=seq)])

    poster = threading.Thread(target=post)
    poster.start()
    assert recorder.wait_for(CanaryArmed, lambda event: event.seq == 4, timeout=20).seq == 4
    poster.join()


def test_waiting_in_vain_says_what_came() -> None:
    recorder = EventRecorder()
    recorder.handle_batch([CanaryArmed()])
    with pytest.raises(
        AssertionError, match=r"no fitting violation.detected within 0.01 s; events: {'canary.armed': 1}"
    ):
        recorder.wait_for(ViolationDetected, timeout=0.01)


def test_a_deterministic_clock_moves_only_when_read_or_told_to() -> None:
    clock = DeterministicClock(start_ns=1000, step_ns=10)
    assert (clock.monotonic_ns(), clock.monotonic_ns(), clock.time_ns()) == (0, 10, 1020)
    clock.advance(1.5)
    assert clock.monotonic_ns() == 1_500_000_030


def from_events(one: SwaDivergenceObserved, _: Path) -> Any:
    return [CanaryArmed(), one]


def from_a_recorder(one: SwaDivergenceObserved, _: Path) -> Any:
    recorder = EventRecorder()
    recorder.handle_batch([one])
    return recorder


def from_a_log(one: SwaDivergenceObserved, folder: Path) -> Any:
    path = folder / "kv.jsonl"
    sink = LogSink(path)
    sink.handle_batch([CanaryArmed(), one])
    sink.close()
    return path


def from_lines(one: SwaDivergenceObserved, _: Path) -> Any:
    stream = io.BytesIO()
    LogSink(stream, profile="ecs").handle_batch([one])
    return iter(stream.getvalue().splitlines())


SOURCES = [from_events, from_a_recorder, from_a_log, from_lines]
Make = Callable[[SwaDivergenceObserved, Path], Any]


@pytest.mark.parametrize("make", SOURCES)
def test_an_observed_divergence_is_found_in_every_source(make: Make, tmp_path: Path) -> None:
    assert assert_swa_divergence_observed(make(observed(), tmp_path), timeout=0) == observed()


@pytest.mark.parametrize("make", SOURCES)
@pytest.mark.parametrize(
    ("fields", "lacks"),
    [
        ({"swa_out_of_window_tokens": 0}, r"swa_out_of_window_tokens >= 1 \(is 0\)"),
        ({"swa_full_idx_divergence": 0}, r"swa_full_idx_divergence >= 1 \(is 0\)"),
        ({"verify_swa": 9}, r"verify_swa < verify_full \(is 9 and 9\)"),
    ],
)
def test_an_observation_that_proves_nothing_is_refused(
    make: Make, fields: dict[str, int], lacks: str, tmp_path: Path
) -> None:
    with pytest.raises(AssertionError, match=f"1 observations .* lacks: {lacks};"):
        assert_swa_divergence_observed(make(observed(**fields), tmp_path), timeout=0)


def test_the_conditions_must_hold_in_one_observation() -> None:
    halves = [observed(swa_out_of_window_tokens=0), observed(swa_full_idx_divergence=0)]
    with pytest.raises(AssertionError, match="2 observations"):
        assert_swa_divergence_observed(halves, timeout=0)
    assert assert_swa_divergence_observed([*halves, observed(), *halves], timeout=0) == observed()


def test_without_any_observation_the_switch_is_named(tmp_path: Path) -> None:
    nowhere: list[Any] = [tmp_path / "no such file", [], EventRecorder()]
    for nothing in nowhere:
        with pytest.raises(AssertionError, match="is swa_divergence_every set"):
            assert_swa_divergence_observed(nothing, timeout=0)


def test_a_file_that_is_still_being_written_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "kv.jsonl"
    line = json_codec().encode(observed())
    path.write_bytes(line[:20])
    looked = threading.Event()

    def finish() -> None:
        looked.wait(20)
        with path.open("ab") as stream:
            stream.write(line[20:] + b"\n")

    writer = threading.Thread(target=finish)
    writer.start()
    with pytest.raises(AssertionError, match="no swa"):
        assert_swa_divergence_observed(path, timeout=0)
    looked.set()
    assert assert_swa_divergence_observed(str(path), timeout=20, interval=0.001) == observed()
    writer.join()


def test_the_pytest_fixture_is_a_recorder_of_its_own_for_each_test(tmp_path: Path) -> None:
    (tmp_path / "test_user.py").write_text(
        "from kvcanary.events import CanaryArmed\n"
        "from kvcanary.testing import EventRecorder\n"
        "def test_one(kv_events):\n"
        "    assert isinstance(kv_events, EventRecorder)\n"
        "    kv_events.handle_batch([CanaryArmed()])\n"
        "def test_two(kv_events):\n"
        "    assert len(kv_events) == 0\n"
    )
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    }
    command = [sys.executable, "-m", "pytest", "-q", "-p", "kvcanary.testing_plugin", "-c", os.devnull, str(tmp_path)]
    done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "2 passed" in done.stdout, done.stdout + done.stderr
