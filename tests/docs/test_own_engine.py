"""The guide to an engine of one's own: its adapter is short, right, and wrong in the way that the page says."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import kvcanary
from kvcanary.engines.simulated import SimulatedEngine
from kvcanary.errors import BatchError, ConfigError
from kvcanary.events import IncidentOpened, RunStarted, SnapshotTaken
from kvcanary.testing import EventRecorder, assert_no_violations

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "docs" / "examples"
PAGE = ROOT / "docs" / "how-to" / "own_engine.md"
ADAPTER = re.compile(r"^class SmallAdapter:\n.*", re.MULTILINE | re.DOTALL)
SILENT = "nothing"


@pytest.fixture
def guard(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module("guard_own_engine")


def forgotten() -> dict[str, str]:
    """Each method of the page's table whose call is not told, with what the page says that this brings."""
    text = PAGE.read_text("utf-8").partition("### What a forgotten fact looks like\n")[2].partition("\n### ")[0]
    rows = re.findall(r"^\| (`.*) \| (.*) \|$", text, re.MULTILINE)
    return {name: told for names, told in rows for name in re.findall(r"`(\w+)`", names)}


def leaving_out(guard: Any, method: str, left_out: list[str]) -> Any:
    """The small adapter, except that the calls of one method are not told."""

    class Forgetful(guard.SmallAdapter):  # type: ignore[misc]
        def tell(self, engine: Any, pool: Any, canary: Any, after: Callable[..., None]) -> None:
            def tell(owner: Any, name: str, function: Callable[..., object]) -> None:
                if name == method:
                    left_out.append(name)
                else:
                    after(owner, name, function)

            super().tell(engine, pool, canary, tell)

    return Forgetful()


def test_the_adapter_is_as_short_as_the_page_says_and_under_sixty_lines() -> None:
    found = ADAPTER.search((EXAMPLES / "small_adapter.py").read_text("utf-8"))
    assert found is not None
    lines = sum(bool(line.strip()) for line in found[0].splitlines())
    assert lines < 60
    assert re.search(rf"\b{lines} lines", PAGE.read_text("utf-8"))


def test_the_program_is_silent_on_clean_traffic_and_names_each_planted_fault() -> None:
    settings = {key: value for key, value in os.environ.items() if not key.startswith("KVCANARY_")}
    settings |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    program = EXAMPLES / "guard_own_engine.py"
    done = subprocess.run(
        [sys.executable, "-W", "error", program], capture_output=True, text=True, check=False, timeout=100, env=settings
    )
    assert done.stderr == ""
    assert done.returncode == 0
    told = dict(line.split(": ", 1) for line in done.stdout.splitlines())
    assert all(told[style].startswith("silent") for style in ("paged", "overlapped", "slots", "drafts"))
    named = {fault: told[fault].partition(":")[0] for fault in ("flip_a_bit", "swap_two_pages", "free_too_early")}
    assert named == {"flip_a_bit": "CONTENT", "swap_two_pages": "DIGEST", "free_too_early": "PUBLISHED_UNOWNED"}
    assert "did not run" in told["lose_a_kernel"]


@pytest.mark.parametrize("style", ["overlapped", "drafts"])
def test_clean_traffic_leaves_nothing_unverified(guard: Any, style: str) -> None:
    events, _ = guard.serve(style)
    unverified = events.of(SnapshotTaken)[-1].unverified
    assert sum(count for groups in unverified.values() for count in groups.values()) == 0


@pytest.mark.parametrize(("method", "told"), forgotten().items())
def test_a_forgotten_fact_looks_as_the_page_says(guard: Any, method: str, told: str) -> None:
    left_out: list[str] = []
    adapter = leaving_out(guard, method, left_out)
    if told.startswith("`BatchError`"):
        with pytest.raises(BatchError, match="is not live"):
            guard.serve("drafts", adapter=adapter)
    else:
        events, _ = guard.serve("drafts", adapter=adapter)
        found = {event.kind for event in events.of(IncidentOpened)}
        named = set(re.findall(r"`(\w+)`", told))
        assert named <= found
        assert bool(found) is (told != SILENT)
    assert left_out == [method]


def test_every_fact_of_the_adapter_is_in_the_table_of_forgotten_ones() -> None:
    calls = re.findall(r"after\(\w+, \"(\w+)\"", (EXAMPLES / "small_adapter.py").read_text("utf-8"))
    assert set(calls) == set(forgotten())


def test_a_style_that_it_does_not_know_is_refused_and_left_as_it_was(guard: Any) -> None:
    engine = SimulatedEngine("ring")
    before = set(vars(engine))
    canary = kvcanary.Canary(kvcanary.CanaryConfig(mode="log"))
    with pytest.raises(ConfigError, match="'ring' has a window group"):
        guard.SmallAdapter().attach(engine, canary)
    assert set(vars(engine)) == before


def test_a_second_canary_is_refused_and_the_first_goes_on(guard: Any) -> None:
    engine = SimulatedEngine("paged")
    first, second = (kvcanary.Canary(kvcanary.CanaryConfig(mode="log")) for _ in range(2))
    undo = guard.SmallAdapter().attach(engine, first)
    with pytest.raises(ConfigError, match="watched by another canary"):
        guard.SmallAdapter().attach(engine, second)
    assert first.bound
    undo()
    assert not first.bound


def test_watch_finds_the_adapter_once_it_is_registered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "registered_adapter.py").write_text((EXAMPLES / "small_adapter.py").read_text("utf-8"), "utf-8")
    info = tmp_path / "registered_adapter-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: registered_adapter\nVersion: 1\n", "utf-8")
    (info / "entry_points.txt").write_text("[kvcanary.engines]\nmine = registered_adapter:SmallAdapter\n", "utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    engine = SimulatedEngine("paged")
    before = {name: set(vars(part)) for name, part in (("engine", engine), ("pool", engine.pools["full"]))}
    recorder = EventRecorder()
    with kvcanary.watch(engine, mode="raise", observers=[recorder]):
        engine.submit(engine.prompt(9))
        while engine.step():
            pass
    assert {name: set(vars(part)) for name, part in (("engine", engine), ("pool", engine.pools["full"]))} == before
    assert recorder.of(RunStarted)[0].origin.engine == "small"
    assert_no_violations(recorder, checks=["links", "row_ends"])
