"""The entry point costs nothing while it is not wanted. Needs no SGLang."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

_LOOK = """
import sys
before = set(sys.modules)
from kvcanary.plugins.sglang import register
register()
print(sorted({name.partition(".")[0] for name in set(sys.modules) - before} & {"torch", "sglang", "numpy", "msgspec"}))
"""


@pytest.mark.parametrize("mode", [None, "", "off", " OFF ", "log", "raise"])
def test_a_process_without_a_scheduler_loads_neither_torch_nor_sglang(mode: str | None) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "KVCANARY_MODE"}
    if mode is not None:
        environment["KVCANARY_MODE"] = mode
    done = subprocess.run(
        [sys.executable, "-c", _LOOK], env=environment, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "[]"
