"""Triton is loaded here, with its interpreter where there is no GPU, before any test can load it without."""

from __future__ import annotations

import pytest

from tests.kernels import triton_rig  # noqa: F401


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--programs", type=int, default=1500, help="random programs on the simulated engine; 1500 without this option"
    )
