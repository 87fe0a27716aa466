"""The host wing in an environment that holds the declared dependencies of the core, and nothing else."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.bare import make_bare

ROOT = Path(__file__).parents[1]
PROGRAM = ROOT / "tests" / "programs" / "host_wing.py"


@pytest.fixture(scope="module")
def bare_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment with the core alone."""
    return make_bare(tmp_path_factory.mktemp("bare") / "venv")


@pytest.fixture(scope="module")
def told(bare_python: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the program printed. It runs isolated, so that nothing of this environment leaks in."""
    done = subprocess.run(
        [bare_python, "-I", "-W", "error", PROGRAM],
        check=False,
        cwd=tmp_path_factory.mktemp("run"),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def test_the_environment_is_one_without_torch(told: dict[str, Any], bare_python: Path) -> None:
    assert told["importable"] == []
    assert Path(told["origin"]).is_relative_to(bare_python.parents[1])


@pytest.mark.parametrize(
    "imports",
    [
        "import kvcanary",
        "from kvcanary import bus, config, events, facts, mailbox, streams, testing, testing_plugin, watch, wire",
        "from kvcanary.observers import health, log, stats, swa_divergence, violations",
        "from kvcanary import replay; from kvcanary.journal import gate, reader, sink; from kvcanary.cli import replay",
    ],
)
def test_importing_it_loads_neither_torch_nor_numpy_where_both_could_be_had(imports: str) -> None:
    program = f"import sys; {imports}; print({{'torch', 'numpy'}} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], check=True, stdout=subprocess.PIPE, text=True, timeout=60)
    assert done.stdout == "set()\n"


def test_an_event_that_was_json_reaches_every_observer(told: dict[str, Any]) -> None:
    story = ["run.started", "violation.detected", "incident.opened", "run.stopped"]
    assert told["flushed"]
    assert told["seen"] == told["recorded"] == story


def test_an_async_observer_is_told_who_is_concerned(told: dict[str, Any]) -> None:
    assert told["requests"] == [["chat-7"]]


def test_the_test_kit_finds_the_violation(told: dict[str, Any]) -> None:
    assert told["violation"] == "chat-7"


def test_the_log_is_json_lines(told: dict[str, Any]) -> None:
    assert any("chat-7" in json.dumps(line) for line in told["log"])
