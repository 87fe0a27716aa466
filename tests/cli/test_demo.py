from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvcanary.cli import main
from kvcanary.cli.report import POSITIONS, FaultJudged, PhaseEnded, Results, judge
from kvcanary.cli.scoreboard import alarms
from kvcanary.events import IncidentOpened, KernelStalled, ViolationDetected
from kvcanary.faults.injectors import FAULTS, Injection, fault
from kvcanary.faults.transformers_ops import OPERATIONS, Hit

DEADLINE_S = 280
"""Several times what it takes when the machine is idle."""
PROGRAM = [sys.executable, "-c", "import sys; from kvcanary.cli import main; sys.exit(main())", "demo"]
FLIPPED = Injection(fault=fault("flipped-bit"), forward=10, requests=("a",), detail="bit 1 flipped")


def environment() -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith("KVCANARY_")}
    return kept | {"HF_HUB_OFFLINE": "1", "TERM": "xterm-256color", "PYTHONPATH": str(Path(__file__).parents[2])}


def lines_of(output: bytes | str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in output.splitlines()]


def phase(**fields: Any) -> PhaseEnded:
    values: dict[str, Any] = {
        "model": "full",
        "phase": "clean",
        "forwards": 1,
        "requests": 1,
        "positions": POSITIONS,
        "reread": 1,
    }
    return PhaseEnded(**values | fields)


def verdict(*, passed: bool) -> FaultJudged:
    return FaultJudged(model="full", fault="flipped-bit", title="", passed=passed, headline="nothing was reported")


# --- judging ------------------------------------------------------------------------------------------------


def test_a_demo_with_silent_phases_and_named_faults_has_no_problem() -> None:
    assert Results([phase()], [verdict(passed=True)]).problems == ()


def test_an_alarm_in_a_clean_phase_is_a_problem() -> None:
    (problem,) = Results([phase(alarms=("CONTENT: ...",))], []).problems
    assert problem == "full, clean: 1 false alarms: CONTENT: ..."


def test_a_missed_fault_is_a_problem() -> None:
    assert Results([phase()], [verdict(passed=False)]).problems == ("full, flipped-bit: nothing was reported",)


def test_fewer_positions_than_promised_are_a_problem() -> None:
    assert Results([phase(positions=99_999)], []).problems == ("only 99,999 of 100,000 positions verified",)


def incident(**fields: Any) -> IncidentOpened:
    values: dict[str, Any] = {
        "incident": "1",
        "kind": "CONTENT",
        "headline": "CONTENT: ...",
        "requests": ("a",),
        "forward": 11,
    }
    return IncidentOpened(**values | fields)


def test_a_fault_is_named_by_its_incident_with_distance_and_request() -> None:
    judged = judge("full", FLIPPED, (incident(kind="DIGEST"), incident()), ())
    assert (judged.passed, judged.kind, judged.after, judged.request) == (True, "CONTENT", 1, "a")


def test_an_incident_of_another_request_does_not_name_a_fault() -> None:
    judged = judge("full", FLIPPED, (incident(requests=("b",)),), ())
    assert not judged.passed
    assert "not named; reported instead: CONTENT" in judged.headline


def test_a_fault_that_nobody_reported_is_missed() -> None:
    assert judge("full", FLIPPED, (), ()).headline == "nothing was reported"


def test_an_alarm_before_the_fault_spoils_its_verdict() -> None:
    judged = judge("full", FLIPPED, (incident(),), ("DIGEST in full",))
    assert (judged.passed, judged.headline) == (False, "reported before the fault was planted: DIGEST in full")


def test_a_stall_names_a_stalled_kernel_and_nothing_else() -> None:
    stall = KernelStalled(role="check", launches=3, expected=9, forward=15, detail="check did not run")
    stalled = Injection(fault=fault("stalled-kernel"), forward=10)
    assert judge("full", stalled, (stall,), ()).passed
    assert not judge("full", FLIPPED, (stall,), ()).passed


def test_single_violations_are_alarms_too() -> None:
    violation = ViolationDetected(kind="CONTENT", role="scrub", group="full_attention", slot=3, request="a")
    assert alarms([violation, incident()]) == ("CONTENT: ...", "CONTENT in full_attention slot 3 of a")


# --- calls --------------------------------------------------------------------------------------------------


def test_help_shows_options_and_examples(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--help"]) == 0
    printed = capsys.readouterr().out
    for words in ("--seconds", "--seed", "--json", "--model", "--faults", "kvcanary demo --json > demo.jsonl"):
        assert words in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--faults", "flipped-bits"], "did you mean 'flipped-bit'?"),
        (["--seconds", "0"], "--seconds is 0.0; expected more than 0"),
    ],
)
def test_a_wrong_argument_is_refused_in_words(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["demo", *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.engine
def test_a_demo_that_the_environment_switches_off_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KVCANARY_MODE", "off")
    assert main(["demo", "--json"]) == 2
    assert "KVCANARY_MODE=off is set" in capsys.readouterr().err


# --- the whole thing ----------------------------------------------------------------------------------------


@pytest.mark.engine
@pytest.mark.timeout(300)
def test_the_whole_demo_names_every_fault_and_is_silent_otherwise() -> None:
    done = subprocess.run(PROGRAM, capture_output=True, timeout=DEADLINE_S, env=environment(), check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr
    assert done.stderr == b""
    lines = lines_of(done.stdout)
    judged = [line for line in lines if line["event"] == "demo.fault_judged"]
    assert [line["fault"] for line in judged] == 2 * [item.name for item in FAULTS]
    assert all(line["passed"] for line in judged)
    assert all(line["request"] for line in judged if line["fault"] != "stalled-kernel")
    assert [line["alarms"] for line in lines if line["event"] == "demo.phase_ended"] == 4 * [[]]
    assert lines[-1]["event"] == "demo.ended"
    assert lines[-1]["positions"] >= POSITIONS


@pytest.mark.engine
def test_a_fault_that_is_not_done_is_missed_and_the_demo_fails(
    monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    monkeypatch.setitem(OPERATIONS, "stale-slot", lambda batch, _rng, _group: Hit((batch.rows[0].request,)))
    assert main(["demo", "--json", "--model", "full", "--seconds", "0.3", "--faults", "stale-slot"]) == 1
    last = lines_of(capfdbinary.readouterr().out)[-1]
    assert (last["passed"], last["problems"]) == (False, ["full, stale-slot: nothing was reported"])


@pytest.mark.engine
def test_damage_in_a_clean_phase_fails_the_demo(
    monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    from torch import nn

    from kvcanary.cli import session
    from kvcanary.cli.models import make_model

    def make_broken_model(*arguments: Any, **options: Any) -> nn.Module:
        model: nn.Module = make_model(*arguments, **options)
        forwards = 0

        def spoil(_module: nn.Module, _args: Any, kwargs: Any) -> None:
            nonlocal forwards
            forwards += 1
            if forwards == 40:
                kwargs["read_index"][0][:2] = kwargs["read_index"][0][:2].flip(0)

        model.register_forward_pre_hook(spoil, with_kwargs=True)
        return model

    monkeypatch.setattr(session, "make_model", make_broken_model)
    assert main(["demo", "--json", "--model", "full", "--seconds", "0.3", "--faults", "none"]) == 1
    (problem,) = lines_of(capfdbinary.readouterr().out)[-1]["problems"]
    assert problem.startswith("full, clean before: ")
    assert "POSITION" in problem


@pytest.mark.engine
def test_ctrl_c_ends_it_at_once_with_130_and_no_traceback() -> None:
    with started("--json", "--seconds", "60", stdout=subprocess.PIPE) as running:
        assert running.stdout is not None
        assert json.loads(running.stdout.readline())["run"]
        running.send_signal(signal.SIGINT)
        _, errors = running.communicate(timeout=60)
    assert (running.returncode, errors) == (130, b"")


@pytest.mark.engine
def test_on_a_terminal_it_draws_a_view_and_ctrl_c_gives_the_cursor_back() -> None:
    ours, theirs = pty.openpty()
    with started("--model", "full", "--seconds", "60", stdout=theirs) as running:
        os.close(theirs)
        drawn = read_until(ours, b"clean before")
        running.send_signal(signal.SIGINT)
        drawn += read_until(ours, None)
        _, errors = running.communicate(timeout=60)
    os.close(ours)
    assert (running.returncode, errors) == (130, b"")
    assert drawn.rindex(b"\x1b[?25h") > drawn.rindex(b"\x1b[?25l")


@pytest.mark.engine
def test_a_reader_that_leaves_is_no_traceback() -> None:
    arguments = ("--json", "--model", "full", "--seconds", "0.5", "--faults", "none")
    with started(*arguments, stdout=subprocess.PIPE) as running:
        assert running.stdout is not None
        running.stdout.readline()
        running.stdout.close()
        running.wait(100)
        assert running.stderr is not None
        assert running.stderr.read() == b""
    assert running.returncode == 141  # as a shell says of a SIGPIPE


@contextmanager
def started(*arguments: str, stdout: int) -> Iterator[subprocess.Popen[bytes]]:
    """The demo in a process of its own, which does not outlive a failing test."""
    command = [*PROGRAM, *arguments]
    with subprocess.Popen(command, stdout=stdout, stderr=subprocess.PIPE, env=environment()) as running:
        try:
            yield running
        finally:
            running.kill()


def read_until(terminal: int, words: bytes | None) -> bytes:
    """What is drawn until ``words`` appear, or until the other end is closed."""
    drawn = b""
    while words is None or words not in drawn:
        try:
            drawn += os.read(terminal, 65536)
        except OSError:  # the other end is closed
            break
    return drawn
