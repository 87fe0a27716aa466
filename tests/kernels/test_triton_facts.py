"""What facts and window counts do, once more with Triton's kernels: the reference's own tests, on a CPU."""

from __future__ import annotations

import pytest

from tests.kernels.triton_rig import CUDA, make_kernels  # before triton can be loaded

# isort: split
from tests.kernels import rig, test_reference_window
from tests.kernels.test_reference_facts import *  # noqa: F403
from tests.kernels.test_reference_window import *  # noqa: F403

pytestmark = pytest.mark.skipif(CUDA, reason="these worlds live on the CPU")


@pytest.fixture(autouse=True)
def triton(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (rig, test_reference_window):
        monkeypatch.setattr(module, "ReferenceKernels", make_kernels)
