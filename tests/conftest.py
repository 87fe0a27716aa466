"""Triton is loaded here, with its interpreter where there is no GPU, before any test can load it without."""

from __future__ import annotations

from tests.kernels import triton_rig  # noqa: F401
