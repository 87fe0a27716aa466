"""What mark, check and seal do, once more with Triton's kernels: the reference's own tests, on a CPU."""

from __future__ import annotations

import pytest

from tests.kernels.triton_rig import CUDA, make_kernels  # before triton can be loaded

# isort: split
from tests.kernels import rig
from tests.kernels.test_reference_check import *  # noqa: F403
from tests.kernels.test_reference_exit import *  # noqa: F403
from tests.kernels.test_reference_mark import *  # noqa: F403

# In which order one launch reports several kinds is the reference's own.
del test_an_index_that_the_translation_lacks_is_outside_and_an_unmapped_one_is_missing  # noqa: F821

pytestmark = [pytest.mark.slow, pytest.mark.skipif(CUDA, reason="these worlds live on the CPU")]


@pytest.fixture(autouse=True)
def triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rig, "ReferenceKernels", make_kernels)
