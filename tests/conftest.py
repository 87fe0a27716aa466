"""Triton is loaded here, with its interpreter where there is no GPU, before any test can load it without."""

from __future__ import annotations

import pytest

from tests.kernels import triton_rig  # noqa: F401


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--programs", type=int, default=1200, help="random programs on the simulated engine; 1200 without this option"
    )
