"""SGLang lives in an environment of its own (``make test-engines``); elsewhere its tests are skipped, and say so."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
INSTALLED = importlib.util.find_spec("sglang") is not None
WITHOUT = frozenset({"test_plugin.py"})
"""Tests that need no SGLang."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    missing = pytest.mark.skip(reason="sglang is not installed here; `make test-engines` has an environment with it")
    for item in items:
        if item.path.is_relative_to(HERE) and item.path.name not in WITHOUT:
            item.add_marker(pytest.mark.engine)
            if not INSTALLED:
                item.add_marker(missing)


@pytest.fixture(scope="session")
def environment() -> dict[str, str]:
    """Variables of a process that serves on the CPU."""
    ours = {key: value for key, value in os.environ.items() if not key.startswith("KVCANARY_")}
    path = f"{HERE / 'cpu'}{os.pathsep}{ROOT}"
    return {**ours, "PYTHONPATH": path, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


@pytest.fixture(scope="session")
def served(environment: dict[str, str]) -> Callable[[str], dict[str, Any]]:
    """What the program reports of a configuration; each is served once a session."""
    reports: dict[str, dict[str, Any]] = {}

    def serve(configuration: str) -> dict[str, Any]:
        if configuration not in reports:
            command = [sys.executable, "-m", "tests.engines.sglang.program", configuration]
            done = subprocess.run(
                command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600, check=False
            )
            lines = [line for line in done.stdout.splitlines() if line.startswith("REPORT ")]
            assert lines, f"{command} ended with {done.returncode}:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
            reports[configuration] = json.loads(lines[0].removeprefix("REPORT "))
        return reports[configuration]

    return serve


@pytest.fixture(scope="session")
def on_cpu() -> None:
    """SGLang can be imported in this process, and its kernels run in Triton's interpreter."""
    os.environ["TRITON_INTERPRET"] = "1"
    site = importlib.util.spec_from_file_location("sglang_cpu_site", HERE / "cpu" / "sitecustomize.py")
    assert site is not None
    assert site.loader is not None
    site.loader.exec_module(importlib.util.module_from_spec(site))
