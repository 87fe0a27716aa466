"""A faulty run of the real engine is recorded, then replayed where neither the engine nor torch is installed."""

from __future__ import annotations

import json
import shutil
import sqlite3
import subprocess
from pathlib import Path
from typing import Any

import pytest

import kvcanary
from kvcanary.config import CanaryConfig
from kvcanary.journal.format import EventEncoder, Frame, Segment
from kvcanary.journal.reader import JournalFile, find_files
from tests.bare import make_bare
from tests.engines.serving import serve
from tests.engines.test_transformers_faults import spoil_once, swap_pages

pytestmark = pytest.mark.engine

MAIN = "import sys; from kvcanary.cli import main; sys.exit(main(sys.argv[1:]))"


@pytest.fixture(scope="module")
def bare_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_bare(tmp_path_factory.mktemp("bare") / "venv", "cli")


@pytest.fixture(scope="module", params=["all", "incidents"])
def recorded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory with the journal of a run in which two rows of a table were swapped."""
    folder = tmp_path_factory.mktemp("runs")
    config = CanaryConfig(
        mode="log",
        scrub_mib_per_step=1.0,
        stats_every=5,
        health_every=5,
        health_warmup=5,
        journal=str(folder),
        journal_level=request.param,
    )
    with serve("full") as engine, kvcanary.watch(engine.manager, config=config):
        engine.manager.start()
        engine.ask([engine.prompt()])
        done = spoil_once(engine, swap_pages("full_attention", 0))
        engine.ask([engine.prompt(30), engine.prompt(33)], new_tokens=8)
        assert done
    return folder


def call(python: Path, *words: object) -> subprocess.CompletedProcess[str]:
    """A command of kvcanary in the bare environment; isolated, so that nothing of this one leaks in."""
    return subprocess.run(
        [python, "-I", "-W", "error", "-c", MAIN, *map(str, words)],
        check=False,
        cwd=python.parent,
        capture_output=True,
        text=True,
        timeout=60,
    )


def lines(done: subprocess.CompletedProcess[str]) -> list[dict[str, Any]]:
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_the_environment_has_no_torch(bare_python: Path) -> None:
    done = subprocess.run([bare_python, "-I", "-c", "import torch"], check=False, capture_output=True, text=True)
    assert "No module named 'torch'" in done.stderr


def test_the_folds_derive_the_same_there(bare_python: Path, recorded: Path) -> None:
    done = call(bare_python, "replay", recorded, "--check")
    assert done.returncode == 0, done.stdout + done.stderr
    (verdict,) = lines(call(bare_python, "replay", recorded, "--check", "--json"))
    assert verdict["holds"]
    assert verdict["compared"] >= 6
    assert (verdict["different"], verdict["skipped"]) == (0, {})


def test_the_incident_is_found_with_its_requests_and_without_digests(bare_python: Path, recorded: Path) -> None:
    first, *_ = lines(call(bare_python, "journal", recorded, "--incidents", "--json"))
    assert first["kind"] == "DIGEST"
    assert first["requests"] == ["req_1"]
    assert (first["first"]["digest_found"], first["first"]["digest_expected"]) == ("", "")
    page = f"{first['group']}:{first['page']}"
    history = [event["type"] for event in lines(call(bare_python, "journal", recorded, "--page", page, "--json"))]
    assert history[0] == "pages.allocated"
    assert "violation.detected" in history
    request = [e["type"] for e in lines(call(bare_python, "journal", recorded, "--request", "req_1", "--json"))]
    assert {"requests.admitted", "requests.finished", "incident.opened"} <= set(request)


def test_a_recording_that_was_tampered_with_is_a_difference(bare_python: Path, recorded: Path, tmp_path: Path) -> None:
    (path,) = find_files(recorded)
    copy = Path(shutil.copy(path, tmp_path / path.name))
    with JournalFile(path) as file:
        (opened, *_) = file.findings(type="incident.opened")
    with sqlite3.connect(copy) as db:
        query = "SELECT first_seq, last_seq FROM frames WHERE first_seq <= ? AND last_seq >= ?"
        ((first, last),) = db.execute(query, (opened.seq, opened.seq))
        with JournalFile(path) as file:
            events = [event for event in file.events() if first <= event.seq <= last]
        kept = [event for event in events if event.seq != opened.seq - 1]  # the finding itself is taken out
        chunk = EventEncoder().encode([*kept, events[-1]])
        row = Frame(Segment(1, 1, ""), first, last, 0, 0, 0, 0, [chunk], len(chunk)).row()
        db.execute("UPDATE frames SET crc = ?, events = ? WHERE first_seq = ?", (row[7], row[10], first))
    db.close()
    done = call(bare_python, "replay", copy, "--check")
    assert done.returncode == 1
    assert "differ" in done.stdout
    assert "recorded: incident.opened" in done.stdout
