"""Programs of the tests that people run by hand still run."""

from __future__ import annotations

import pytest

from tests.kernels.triton_rig import CUDA  # before triton can be loaded

# isort: split
from tests.programs import kernels_under_sanitizer


@pytest.mark.skipif(CUDA, reason="the interpreter needs a machine without a GPU")
def test_the_program_for_the_sanitizer_runs_every_kernel(capsys: pytest.CaptureFixture[str]) -> None:
    assert kernels_under_sanitizer.main(["--device", "cpu", "--seconds", "0"]) == 0
    assert "pool 2 (poison full): 1 forwards" in capsys.readouterr().out
