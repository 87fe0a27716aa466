"""transformers 5.17.0 mixes the caches of different requests, silently; 5.18 mended it. The watch must tell."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.engines.make_env import make_env

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

ROOT = Path(__file__).parents[2]
WHOLE_PAGES, NOT_WHOLE = 16, 17


@pytest.fixture(scope="module")
def faulty() -> Path:
    """The interpreter of an environment with 5.17.0; `make test` has made it, so nothing is downloaded here."""
    return make_env("5.17.0", ROOT / ".venv-tf517")


def ask(python: Path | str, prompt_length: int) -> dict[str, Any]:
    program = [str(python), "-m", "tests.engines.same_prompt", str(prompt_length)]
    done = subprocess.run(program, capture_output=True, text=True, check=True, timeout=200, cwd=ROOT)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert found["finished"] == 40
    return found


def test_the_watch_names_the_requests_that_5_17_0_answered_wrongly(faulty: Path) -> None:
    found = ask(faulty, WHOLE_PAGES)
    assert found["version"] == "5.17.0"
    # A plain forward of the same tokens says otherwise than the engine did: the fault is real ...
    assert found["wrong"]
    # ... and who suffered is named, by a write that was not theirs and by what they read.
    assert found["wrong"].keys() <= set(found["named"])
    assert {"WRITE_FOREIGN", "DIGEST"} <= found["kinds"].keys()


def test_the_watch_is_silent_where_5_17_0_is_right(faulty: Path) -> None:
    found = ask(faulty, NOT_WHOLE)
    assert found["version"] == "5.17.0"
    assert not found["wrong"]
    assert not found["kinds"]


def test_the_block_pool_of_5_17_0_is_watched_without_a_false_alarm(faulty: Path) -> None:
    program = [str(faulty), "-m", "tests.engines.soak", "async offload"]
    done = subprocess.run(program, capture_output=True, text=True, check=False, timeout=280, cwd=ROOT)
    assert done.returncode == 0, done.stdout
    assert "0 bad runs" in done.stdout


def test_the_watch_is_silent_on_the_release_that_is_installed() -> None:
    found = ask(sys.executable, WHOLE_PAGES)
    assert found["version"] != "5.17.0"
    assert not found["wrong"]
    assert not found["kinds"]
