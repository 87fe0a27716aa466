"""The canary without a device: real facts, folds and observers, one call at a time."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from kvcanary.config import CanaryConfig
from kvcanary.errors import BatchError, CanaryStalledError, ConfigError, KVCorruptionError
from kvcanary.events import (
    CanaryArmed,
    Event,
    ForwardLaunched,
    IncidentOpened,
    IncidentUpdated,
    OwnershipViolated,
    PagesAllocated,
    RunStarted,
    RunStopped,
    SnapshotTaken,
    StatsReported,
    ViolationDetected,
    event_name,
)
from kvcanary.observers.base import observer
from kvcanary.testing import (
    DeterministicClock,
    EventRecorder,
    MemoryCanary,
    assert_no_violations,
    assert_swa_divergence_observed,
    assert_violation,
)
from kvcanary.wire import FactWriter


def names(canary: MemoryCanary) -> list[str]:
    return [event_name(event) for event in canary.events]


def test_a_run_begins_armed_and_ends() -> None:
    with MemoryCanary() as canary:
        canary.forward()
    kinds = [type(event) for event in canary.events]
    assert kinds[:2] == [RunStarted, CanaryArmed]
    assert [event.seq for event in canary.events] == list(range(1, len(canary.events) + 1))
    recorder = EventRecorder()
    with MemoryCanary(observers=[recorder]):
        pass
    assert isinstance(recorder.events[-1], RunStopped)


def test_an_observer_has_handled_what_a_call_brought_when_it_returns() -> None:
    seen: list[str] = []

    @observer
    def tell_me(event: IncidentOpened) -> None:
        seen.append(event.kind)

    @observer
    async def tell_me_too(event: IncidentOpened | IncidentUpdated) -> None:
        seen.append(event.headline)

    with MemoryCanary(observers=[tell_me, tell_me_too]) as canary:
        canary.forward()
        canary.find("CONTENT", request="chat-7", slot=2069)
        short, long = sorted(seen, key=len)
        assert short == "CONTENT"
        assert "request chat-7, group full, slot 2069" in long
    assert assert_violation(canary.events, kind="CONTENT", request="chat-7").forward == 1


def test_lifecycle_calls_become_facts_that_hold_from_the_next_forward() -> None:
    with MemoryCanary() as canary:
        canary.forward()
        canary.admit("a", tokens=[1, 2, 3])
        canary.alloc("full", "a", [4, 5])
        canary.forward(rows=1, tokens=3)
    (allocated,) = [event for event in canary.events if isinstance(event, PagesAllocated)]
    launched = [event for event in canary.events if isinstance(event, ForwardLaunched)]
    assert (allocated.forward, allocated.requests) == (2, ("a",))
    assert (launched[1].joined, launched[1].tokens) == (("a",), 3)


def test_the_ledger_judges_a_scheduler() -> None:
    with MemoryCanary(groups=["full", "swa"]) as canary:
        canary.admit("a")
        canary.alloc(1, "a", [4, 5])
        canary.forward()
        canary.free("swa", [4, 5], "a")
        canary.forward()
        canary.free("swa", [5], "a")
        canary.flush()
    found = assert_violation(canary.events, kind="DOUBLE_FREE", group="swa", request="a")
    assert isinstance(found, OwnershipViolated)
    assert found.page == 5


def test_every_call_of_a_scheduler_can_be_made() -> None:
    with MemoryCanary(observers=[]) as canary:
        canary.admit("a", tokens=[1, 2], start=1)
        canary.alloc("full", "a", [1, 2])
        canary.publish("full", [1], "a")
        canary.admit("b")
        canary.reuse("full", "b", [1])
        canary.own("full", "b", [1])
        canary.rewind("a", 1)
        canary.transfer("t", "start", group="full", pages=[2], direction="out", ordered=True, request="a")
        canary.transfer("t", "landed")
        canary.transfer("u", "failed", error="link down")
        canary.move("full", [2], [3], "a")
        canary.restamp("full", [2])
        canary.preempt("b")
        canary.evict("full", [1])
        canary.weights_updated(2)
        canary.finish("a", tokens=[1, 2, 3])
        canary.finish("a")
        canary.facts_lost(1)
        canary.forward()
    told = set(names(canary))
    assert told >= {"requests.admitted", "requests.rewound", "requests.preempted", "requests.finished", "facts.lost"}
    assert told >= {"pages.allocated", "pages.moved", "prefix.published", "prefix.reused", "prefix.evicted"}
    assert told >= {"transfer.started", "transfer.landed", "transfer.failed", "records.restamped", "weights.updated"}


def test_facts_of_another_process_are_taken() -> None:
    writer = FactWriter()
    writer.admit("a")
    writer.alloc("full", "a", [4])
    with MemoryCanary() as canary:
        canary.ingest(writer.pack())
        canary.forward()
    assert "pages.allocated" in names(canary)


@pytest.mark.parametrize("mode", ["log", "raise"])
def test_a_guard_that_fails_stops_the_engine_in_raise_mode_only(mode: Any) -> None:
    canary = MemoryCanary(CanaryConfig(mode=mode)).start()
    broken: Any = None
    canary.emit(SnapshotTaken(due=broken))
    with pytest.raises(CanaryStalledError, match="health") if mode == "raise" else nullcontext():
        canary.forward()
    canary.stop()


def test_in_raise_mode_the_next_forward_raises_and_so_does_leaving() -> None:
    canary = MemoryCanary(CanaryConfig(mode="raise")).start()
    canary.forward()
    canary.find("DIGEST", request="a", slot=3)
    with pytest.raises(KVCorruptionError, match="DIGEST: request a"):
        canary.forward()
    assert isinstance(canary.error, KVCorruptionError)
    with pytest.raises(KVCorruptionError), canary:
        pass


def test_silence_proves_nothing_until_a_device_is_said_to_have_verified() -> None:
    with MemoryCanary() as canary:
        canary.forward()
        with pytest.raises(AssertionError, match="nothing was verified"):
            assert_no_violations(canary.events)
        canary.forward(verified={"links": {"full": 16}})
    assert_no_violations(canary.events, checks=["links"])


def test_the_configured_folds_and_sinks_are_at_work(tmp_path: Path) -> None:
    path = tmp_path / "kv.jsonl"
    with MemoryCanary(CanaryConfig(mode="log", stats_every=1, log=str(path))) as canary:
        canary.forward(verified={"links": {"full": 16}})
        canary.find("CONTENT", request="a")
        canary.find("CONTENT", request="a")
        canary.find("CONTENT", request="a")
        canary.tick()
    assert any(isinstance(event, StatsReported) for event in canary.events)
    logged = [json.loads(line)["event"] for line in path.read_text().splitlines()]
    assert [name for name in logged if name != "incident.updated"] == [
        "run.started",
        "canary.armed",
        "stats.reported",
        "incident.opened",
        "run.stopped",
    ]


def story(canary: MemoryCanary) -> list[Event]:
    with canary:
        canary.admit("a")
        canary.alloc("full", "a", [1, 2, 9])
        canary.forward()
        canary.find("CONTENT", request="a", slot=17)
    return canary.events


def test_with_a_deterministic_clock_every_run_is_the_same() -> None:
    first, second = (story(MemoryCanary(clock=DeterministicClock())) for _ in range(2))
    assert first == second
    assert len({event.time_ns for event in first}) > 3


def test_a_window_that_was_not_looked_at_is_not_observed() -> None:
    with MemoryCanary() as canary:
        canary.forward()
    with pytest.raises(AssertionError, match="is swa_divergence_every set"):
        assert_swa_divergence_observed(canary.events, timeout=0)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda c: c.alloc("swa", "a", [1]), r"no attention group 'swa'; this canary has \['full'\]"),
        (lambda c: c.alloc(3, "a", [1]), "no attention group 3"),
        (lambda c: c.rewind("ghost", 3), "'ghost' is not live"),
        (lambda c: c.alloc("full", "a", ["x"]), "must be whole numbers"),
        (lambda c: c.transfer("t", "began"), "event must be 'start', 'landed' or 'failed', got 'began'"),
    ],
)
def test_a_wrong_call_is_refused(call: Any, message: str) -> None:
    with MemoryCanary() as canary, pytest.raises(BatchError, match=message):
        call(canary)


def test_before_it_starts_and_in_off_mode_it_is_refused() -> None:
    with pytest.raises(BatchError, match="has no run; use it as a context manager"):
        MemoryCanary().forward()
    with pytest.raises(ConfigError, match="mode 'off' makes no canary"):
        MemoryCanary(CanaryConfig(mode="off"))


def test_it_needs_neither_torch_nor_numpy() -> None:
    program = """
import sys
from kvcanary.testing import MemoryCanary
with MemoryCanary() as canary:
    canary.alloc("full", "a", [1])
    canary.forward()
print([name for name in ("torch", "numpy", "triton", "pytest") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", program], check=True, stdout=subprocess.PIPE, text=True, timeout=60)
    assert done.stdout == "[]\n"


def test_violations_that_a_test_makes_up_have_the_fields_of_real_ones() -> None:
    with MemoryCanary() as canary:
        canary.find("WRITE_FOREIGN", role="mark", request="a", owner_request="b", owner_state="held", page=3)
    (found,) = [event for event in canary.events if isinstance(event, ViolationDetected)]
    assert (found.role, found.owner_request) == ("mark", "b")
    (incident,) = [event for event in canary.events if isinstance(event, IncidentOpened)]
    assert incident.requests == ("a", "b")
