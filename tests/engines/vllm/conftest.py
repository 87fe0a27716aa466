"""Tests here need vLLM 0.33, which has an environment of its own: ``make test-engines``."""

from __future__ import annotations

import importlib.util
import os
import warnings

from tests.engines.vllm import cpu

if importlib.util.find_spec("vllm") is not None:
    os.environ.update(cpu.environ())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch and vLLM deprecate each other's functions
        import vllm.v1.worker.utils  # noqa: F401
