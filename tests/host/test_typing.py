"""What users write passes strict type checkers, and what is wrong does not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
USER_CODE = "tests/typing/user_code.py"
WRONG = """
from kvcanary.events import IncidentOpened
from kvcanary.observers.base import Observer, observer

@observer(on_full="block")
def wrong_option(event: IncidentOpened) -> None: ...

@observer
def two_arguments(event: IncidentOpened, more: int) -> None: ...

class NoInterests:
    def handle(self, event: IncidentOpened) -> None: ...

observers: list[Observer] = [NoInterests()]
"""


def check(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.timeout(300)
def test_user_code_passes_mypy_in_strict_mode() -> None:
    done = check("mypy", "--strict", "--follow-imports=silent", USER_CODE)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.timeout(300)
def test_user_code_passes_pyright_in_strict_mode() -> None:
    # A configuration in a folder above would take over otherwise.
    done = check("pyright", "--project", "pyproject.toml", USER_CODE)
    assert done.returncode == 0, done.stdout + done.stderr


def test_user_code_runs() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", USER_CODE],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (done.returncode, done.stdout) == (0, "7 1 1 [41.5]\n"), done.stderr
    assert '"event":"incident.opened"' in done.stderr


@pytest.mark.timeout(300)
def test_wrong_user_code_fails_pyright(tmp_path: Path) -> None:
    path = tmp_path / "wrong_user_code.py"
    path.write_text(f"# pyright: strict\n{WRONG.removeprefix(chr(10))}")
    done = check("pyright", "--pythonpath", sys.executable, str(path))
    refused = {int(line.split(":")[1]) for line in done.stdout.splitlines() if " - error:" in line}
    assert refused >= {5, 8, 14}, done.stdout


@pytest.mark.timeout(300)
def test_wrong_user_code_fails_mypy(tmp_path: Path) -> None:
    path = tmp_path / "wrong_user_code.py"
    path.write_text(WRONG)
    done = check("mypy", "--strict", "--follow-imports=silent", str(path))
    refused = {int(line.split(":")[1]) for line in done.stdout.splitlines() if ": error:" in line}
    assert refused == {5, 8, 14}, done.stdout
