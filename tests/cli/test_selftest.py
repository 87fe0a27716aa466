from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from kvcanary.batch import ForwardBatch
from kvcanary.cli import selftest as command
from kvcanary.cli.selftest import as_json, compare, selftest
from kvcanary.cli.selftest_compare import Tally
from kvcanary.engines.simulated import STYLES
from kvcanary.errors import ConfigError
from kvcanary.kernels.reference import ReferenceKernels
from kvcanary.state import DeviceState

OPERATIONS = {
    "facts",
    "mark",
    "check",
    "seal",
    "seal and scrub",
    "scrub",
    "window",
    "abandon",
    "fingerprint",
    "export",
    "import",
}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def tally() -> Tally:
    return compare(ReferenceKernels(), "cpu", cases=18, forwards=6, seed=0)


def test_the_same_kernels_agree_and_every_operation_is_compared(tally: Tally) -> None:
    assert tally.differences == []
    assert set(tally.compared) == OPERATIONS
    assert tally.passed


def test_clean_cases_are_silent_and_broken_ones_are_not(tally: Tally) -> None:
    assert tally.clean_forwards == 6 * 6
    assert tally.false_alarms == 0
    assert len(tally.reported) >= 6


class WrongCheck(ReferenceKernels):
    """Checks one old position too few."""

    def check(self, state: DeviceState, batch: ForwardBatch, groups: Sequence[int]) -> None:
        fewer = ForwardBatch(
            **{
                name: getattr(batch, name)
                for name in ForwardBatch.__dataclass_fields__  # the contract's own fields
                if name != "context_lens"
            },
            context_lens=(batch.context_lens - 1).clamp_min(0),
        )
        super().check(state, fewer, groups)


class WrongFingerprint(ReferenceKernels):
    """Right but for one bit of one slot."""

    def fingerprint(self, state: DeviceState, group: int, part: str, slots: torch.Tensor) -> torch.Tensor:
        found = super().fingerprint(state, group, part, slots)
        found[-1] ^= 1 << 40
        return found


class Alarmist(ReferenceKernels):
    """Forgets that a row goes on, alike on both sides: nothing differs, but clean traffic is reported."""

    def seal(self, state: DeviceState, part: str, scrub_bytes: int, **rest: Any) -> None:
        super().seal(state, part, scrub_bytes, **rest)
        state.history += 1


@pytest.mark.parametrize(("wrong", "operation"), [(WrongCheck, "check"), (WrongFingerprint, "fingerprint")])
def test_a_wrong_kernel_is_found_and_named(wrong: type[ReferenceKernels], operation: str) -> None:
    tally = compare(wrong(), "cpu", cases=4, forwards=4, seed=0)
    assert tally.differing[operation] > 0
    assert operation in tally.differences[0]
    assert "expected" in tally.differences[0]
    assert not tally.passed


class Crashing(ReferenceKernels):
    """Cannot be launched."""

    def check(self, state: DeviceState, batch: ForwardBatch, groups: Sequence[int]) -> None:
        raise RuntimeError("no kernel image is available for execution on the device")


def test_a_kernel_that_raises_is_a_difference_and_no_traceback() -> None:
    tally = compare(Crashing(), "cpu", cases=2, forwards=2, seed=0)
    assert tally.differing == {"check": 2}
    assert "check: raised RuntimeError: no kernel image" in tally.differences[0]
    assert not tally.passed


def test_false_alarms_fail_the_selftest_even_if_both_sides_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvcanary.kernels.load_kernels", lambda *_: Alarmist())
    tally = compare(Alarmist(), "cpu", cases=1, forwards=6, seed=0)
    assert tally.false_alarms > 0
    assert not tally.passed
    assert as_json(tally)["passed"] is False


def test_a_difference_is_a_non_zero_exit_status(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "_candidate", lambda *_: WrongFingerprint())
    assert selftest(device="cpu", cases=3, forwards=3, only="kernels") == 1
    printed = capsys.readouterr().out
    assert "FAILED" in printed
    assert "fingerprint" in printed


def test_the_json_report_says_what_was_compared(capsys: pytest.CaptureFixture[str]) -> None:
    assert selftest(device="cpu", backend="reference", cases=4, forwards=4, only="kernels", json=True) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["passed"] is True
    assert report["backend"] == "reference"
    assert report["machine"]["versions"]["torch"] == torch.__version__
    assert {row["operation"] for row in report["operations"]} <= OPERATIONS
    assert all(row["differing"] == 0 for row in report["operations"])


def test_the_fault_matrix_is_a_table_with_a_line_for_each_fault(capsys: pytest.CaptureFixture[str]) -> None:
    assert selftest(device="cpu", faults="wild-entry,lost-translation") == 0
    printed = capsys.readouterr().out
    assert "wild-entry" in printed
    assert "SLOT_RANGE" in printed
    assert f"{len(STYLES)} of {len(STYLES)}" in printed
    assert "1 of 1" in printed
    assert f"{len(STYLES) + 1} cells" in printed


def test_the_fault_matrix_as_json_has_every_cell(capsys: pytest.CaptureFixture[str]) -> None:
    assert selftest(device="cpu", faults="stale-translation", json=True) == 0
    report = json.loads(capsys.readouterr().out)
    assert "operations" not in report
    (cell,) = report["matrix"]["cells"]
    assert cell["fault"] == "stale-translation"
    assert cell["style"] == "translated"
    assert cell["holds"]
    assert cell["clean_twin_silent"]


def test_a_cell_that_fails_is_a_non_zero_exit_status_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("kvcanary.kernels.ref_check.check", lambda *_: None)
    assert selftest(device="cpu", faults="lost-translation") == 1
    printed = capsys.readouterr().out
    assert "lost-translation in translated: not seen by WINDOW" in printed
    assert "FAILED" in printed


@pytest.mark.parametrize("option", [{"cases": 0}, {"forwards": 0}])
def test_a_selftest_of_nothing_is_refused(option: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="at least 1"):
        selftest(device="cpu", backend="reference", **option)  # type: ignore[arg-type]


@pytest.mark.timeout(300)
def test_the_triton_kernels_pass_under_their_interpreter() -> None:
    pytest.importorskip("triton")
    program = (
        "import sys; from kvcanary.cli.selftest import selftest; "
        "sys.exit(selftest(device='cpu', backend='triton', cases=1, forwards=2, seed=1, only='kernels', json=True))"
    )
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=280, check=False, env=environment
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    report = json.loads(done.stdout)
    assert report["interpreted"] is True


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_the_triton_kernels_pass_on_the_gpu() -> None:
    assert selftest(device="cuda", cases=12) == 0
