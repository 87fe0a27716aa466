"""A canary that stops singing is noticed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from kvcanary.errors import CanaryStalledError
from kvcanary.events import (
    CanaryArmed,
    CanaryDisarmed,
    Event,
    ForwardLaunched,
    HealthChecked,
    KernelStalled,
    Origin,
    RunStarted,
    SnapshotTaken,
    Ticked,
)
from kvcanary.mailbox import Mailbox
from kvcanary.observers.health import HealthFold

ROLES = ("facts", "mark", "check", "seal", "scrub")


class Engine:
    """Counts launches as the device does, and what was due as the host does."""

    def __init__(self) -> None:
        self.forward = 0
        self.due = dict.fromkeys(ROLES, 0)
        self.launches = dict.fromkeys(ROLES, 0)
        self.suppressed: set[str] = set()
        self.idle: set[str] = {"facts"}
        self.behind = 0

    def run(self, forwards: int, **fields: Any) -> Iterator[Event]:
        for _ in range(forwards):
            self.forward += 1
            for role in set(ROLES) - self.idle:
                self.due[role] += 1
                self.launches[role] += role not in self.suppressed
            yield ForwardLaunched(forward=self.forward, due=dict(self.due))
            yield SnapshotTaken(
                forward=self.forward - self.behind,
                host_forward=self.forward,
                launches=dict(self.launches),
                due=dict(self.due),
                **fields,
            )


def fold(mode: str = "log", every: int = 100, warmup: int = 100) -> tuple[HealthFold, Mailbox]:
    mailbox = Mailbox()
    guard = HealthFold(every, warmup, mode, mailbox)
    guard.handle(RunStarted(run="r", origin=Origin(), roles=ROLES))
    return guard, mailbox


def feed(guard: HealthFold, events: Iterator[Event] | list[Event]) -> list[Event]:
    return [derived for event in events for derived in guard.handle(event)]


def stalls(events: list[Event]) -> list[KernelStalled]:
    return [event for event in events if isinstance(event, KernelStalled)]


def checks(events: list[Event]) -> list[HealthChecked]:
    return [event for event in events if isinstance(event, HealthChecked)]


def test_a_healthy_engine_is_checked_once_a_period_after_the_warm_up() -> None:
    guard, mailbox = fold("raise")
    found = feed(guard, Engine().run(450))
    assert [event.forward for event in found] == [200, 300, 400]
    assert all(check.healthy and set(check.active_roles) == set(ROLES) - {"facts"} for check in checks(found))
    assert not mailbox.pending


@pytest.mark.parametrize("role", ["mark", "check", "seal", "scrub"])
@pytest.mark.parametrize("begin", [0, 120, 199, 200, 250])
def test_a_suppressed_kernel_is_named_within_one_period(role: str, begin: int) -> None:
    guard, _ = fold()
    engine = Engine()
    feed(guard, engine.run(begin))
    engine.suppressed = {role}
    found = stalls(feed(guard, engine.run(250)))
    assert [stall.role for stall in found] == [role]
    assert found[0].forward <= max(begin, 100) + 100
    assert found[0].since_forward == begin + 1
    assert found[0].expected > found[0].launches == begin


def test_a_stall_is_named_once_and_again_after_a_recovery() -> None:
    guard, _ = fold()
    engine = Engine()
    feed(guard, engine.run(150))
    engine.suppressed = {"check"}
    assert len(stalls(feed(guard, engine.run(300)))) == 1
    engine.suppressed = set()
    assert not stalls(feed(guard, engine.run(300)))
    engine.suppressed = {"check"}
    assert len(stalls(feed(guard, engine.run(300)))) == 1


def test_a_check_is_unhealthy_while_a_role_is_stalled_and_healthy_after() -> None:
    guard, _ = fold()
    engine = Engine()
    feed(guard, engine.run(150))
    engine.suppressed = {"seal"}
    (sick, _) = checks(feed(guard, engine.run(200)))
    assert not sick.healthy
    assert "seal was due 25 more times and did not run since forward 150" in sick.problems[0]
    assert "seal" in sick.active_roles
    engine.suppressed = set()
    assert checks(feed(guard, engine.run(100)))[0].healthy


def test_a_role_that_is_not_due_is_quiet() -> None:
    guard, _ = fold()
    engine = Engine()
    engine.idle = {"facts", "scrub"}
    found = feed(guard, engine.run(500))
    assert not stalls(found)
    assert all(check.healthy for check in checks(found))


def test_a_role_that_is_off_in_this_run_is_quiet() -> None:
    guard, _ = fold()
    guard.handle(RunStarted(run="r", origin=Origin(), roles=("mark", "check", "seal")))
    engine = Engine()
    engine.suppressed = {"scrub"}
    assert not stalls(feed(guard, engine.run(500)))


def test_a_role_that_is_due_but_seldom_is_missed_at_the_end_of_its_period() -> None:
    guard, _ = fold()
    engine = Engine()
    feed(guard, engine.run(150))
    engine.due["facts"] += 1
    found = feed(guard, engine.run(250))
    assert [(stall.role, stall.forward) for stall in stalls(found)] == [("facts", 200)]


def test_nothing_is_judged_during_the_warm_up() -> None:
    guard, _ = fold(warmup=300)
    engine = Engine()
    engine.suppressed = {"check"}
    assert not feed(guard, engine.run(299))
    assert stalls(feed(guard, engine.run(100)))


def test_a_period_of_zero_switches_it_off() -> None:
    guard, _ = fold(every=0)
    engine = Engine()
    engine.suppressed = {"check"}
    assert not feed(guard, engine.run(500))


def test_short_periods_name_a_stall_too() -> None:
    guard, _ = fold(every=1, warmup=0)
    engine = Engine()
    assert not stalls(feed(guard, engine.run(5)))
    engine.suppressed = {"mark"}
    found = stalls(feed(guard, engine.run(3)))
    assert [(stall.role, stall.forward) for stall in found] == [("mark", 6)]


def test_raise_mode_posts_a_stall_which_is_no_corruption() -> None:
    guard, mailbox = fold("raise")
    engine = Engine()
    engine.suppressed = {"check"}
    feed(guard, engine.run(250))
    assert isinstance(mailbox.error, CanaryStalledError)
    assert "check was due" in str(mailbox.error)


def test_log_and_quarantine_mode_post_nothing() -> None:
    for mode in ("log", "quarantine"):
        guard, mailbox = fold(mode)
        engine = Engine()
        engine.suppressed = {"check"}
        assert stalls(feed(guard, engine.run(250)))
        assert not mailbox.pending


def test_a_device_that_counts_otherwise_than_the_host_has_stalled() -> None:
    guard, _ = fold()
    engine = Engine()
    feed(guard, engine.run(150))
    engine.behind = 3
    found = stalls(feed(guard, engine.run(60)))
    assert [stall.role for stall in found] == ["forward"]
    assert "the device is at forward 149, the host at 152" in found[0].detail


def test_one_odd_snapshot_is_no_drift() -> None:
    guard, _ = fold()
    engine = Engine()
    feed(guard, engine.run(150))
    engine.behind = 1
    found = feed(guard, engine.run(1))
    engine.behind = 0
    assert not stalls(found + feed(guard, engine.run(100)))


def test_a_device_that_stands_still_is_named_although_its_number_does_not_grow() -> None:
    guard, _ = fold()
    engine = Engine()
    feed(guard, engine.run(150))
    still = SnapshotTaken(forward=150, launches=dict(engine.launches))
    events: list[Event] = []
    for forward in range(151, 260):
        due = {role: count + forward - 150 for role, count in engine.due.items() if role != "facts"}
        events.append(
            SnapshotTaken(forward=150, host_forward=forward, launches=still.launches, due=due),
        )
    found = feed(guard, events)
    assert {stall.role for stall in stalls(found)} == {"mark", "check", "seal", "scrub", "forward"}
    assert [check.healthy for check in checks(found)] == [False]


def launched_in_silence(guard: HealthFold) -> None:
    engine = Engine()
    feed(guard, engine.run(150))
    feed(guard, [ForwardLaunched(forward=forward) for forward in range(151, 160)])


def test_silence_while_forwards_are_launched_is_a_stall_once() -> None:
    guard, mailbox = fold("raise")
    launched_in_silence(guard)
    assert not feed(guard, [Ticked(seconds_since_snapshot=29.0)])
    found = feed(guard, [Ticked(seconds_since_snapshot=31.0), Ticked(seconds_since_snapshot=32.0)])
    assert [stall.role for stall in stalls(found)] == ["snapshot"]
    assert [check.healthy for check in checks(found)] == [False]
    assert isinstance(mailbox.error, CanaryStalledError)


def test_a_device_that_is_still_busy_is_unhealthy_but_no_stall_of_ours() -> None:
    guard, mailbox = fold("raise")
    launched_in_silence(guard)
    found = feed(guard, [Ticked(seconds_since_snapshot=31.0, in_flight=3)])
    assert not stalls(found)
    assert not checks(found)[0].healthy
    assert not mailbox.pending


def test_an_idle_engine_is_not_silent() -> None:
    guard, _ = fold()
    feed(guard, Engine().run(150))
    assert not feed(guard, [Ticked(seconds_since_snapshot=3600.0)])


def test_a_high_share_of_unverified_positions_is_unhealthy() -> None:
    guard, _ = fold()
    engine = Engine()
    feed(guard, engine.run(100))
    gone = {"verified": {"links": {"full": 1000}}, "unverified": {"unknown_record": {"full": 3000}}}
    (check,) = checks(feed(guard, engine.run(100, **gone)))
    assert not check.healthy
    assert check.unverified_share == 0.75
    assert "75% of old positions could not be verified" in check.problems[0]


def test_positions_out_of_the_window_are_no_gap() -> None:
    guard, _ = fold()
    engine = Engine()
    feed(guard, engine.run(100))
    fine = {"verified": {"links": {"swa": 1000}}, "unverified": {"out_of_window": {"swa": 90000}}}
    (check,) = checks(feed(guard, engine.run(100, **fine)))
    assert check.healthy


def test_lag_above_the_limit_is_unhealthy() -> None:
    guard, _ = fold()
    engine = Engine()
    feed(guard, engine.run(150))
    (check,) = checks(feed(guard, engine.run(50, lag_us=6_000_000.0)))
    assert not check.healthy
    assert check.lag_ms == 6000.0
    assert "6000 ms after its step" in check.problems[0]


def test_a_new_run_starts_from_scratch() -> None:
    guard, _ = fold()
    engine = Engine()
    engine.suppressed = {"check"}
    feed(guard, engine.run(250))
    guard.handle(RunStarted(run="s", origin=Origin(), roles=ROLES))
    assert not stalls(feed(guard, Engine().run(450)))


def test_a_disarmed_canary_is_unhealthy_at_once_and_in_each_check_until_it_is_armed() -> None:
    guard, mailbox = fold("raise")
    engine = Engine()
    assert feed(guard, [CanaryArmed(forward=1)]) == []
    feed(guard, engine.run(150))
    during = checks(feed(guard, [CanaryDisarmed(forward=151, reason="a beam search runs"), *engine.run(100)]))
    assert [check.problems for check in during] == [("nothing is checked since forward 151: a beam search runs",)] * 2
    after = checks(feed(guard, [CanaryArmed(forward=251), *engine.run(100)]))
    assert [check.healthy for check in after] == [True, True]
    assert not mailbox.pending
