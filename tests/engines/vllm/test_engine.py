"""The adapter on the released engine: clean runs in silence, faults by their names, quarantine that heals.

Programs run in processes of their own, because vLLM's CPU runner replaces parts of torch: one for clean traffic and one
for all the rest, each once a model runner and both at the same time.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.engines.vllm import processes
from tests.engines.vllm.clean import MODES

pytest.importorskip("vllm", reason="needs vLLM: make test-engines")
# Twenty times what the longest program takes on a quiet machine.
pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(2000)]

FOLDER = Path(__file__).parents[3]
RUNNERS = (1, 2)
PARTS = ("attaching", "weights", "faults", "healed", "failed_load")
"""Fixtures that have a part of the same name"""
DEADLINE_S = 1800
ENOUGH = 250_000
"""positions that the clean runs verify together, at least"""


class Program:
    """A program of this folder in a process of its own; its JSON lines."""

    def __init__(self, module: str, *arguments: str, environ: dict[str, str] | None = None) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", f"tests.engines.vllm.{module}", *arguments],
            cwd=FOLDER,
            env={**_without_kvcanary(), "PYTHONPATH": str(FOLDER), **(environ or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def lines(self) -> list[dict[str, Any]]:
        """What it printed, once it is done."""
        try:
            output, errors = self._process.communicate(timeout=DEADLINE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            raise
        assert self._process.returncode == 0, errors[-4000:]
        return [json.loads(line) for line in output.splitlines() if line.startswith("{")]


def _without_kvcanary() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("KVCANARY_")}


def both(module: str, *arguments: str) -> dict[int, list[dict[str, Any]]]:
    """A program on both runners at the same time."""
    programs = {runner: Program(module, str(runner), *arguments) for runner in RUNNERS}
    return {runner: program.lines() for runner, program in programs.items()}


@pytest.fixture(scope="module")
def parts(request: pytest.FixtureRequest) -> dict[int, list[dict[str, Any]]]:
    """What :mod:`tests.engines.vllm.parts` says of the parts that the chosen tests ask for."""
    asked = {name for item in request.session.items for name in getattr(item, "fixturenames", ())}
    return both("parts", *(name for name in PARTS if name in asked))


def part(parts: dict[int, list[dict[str, Any]]], name: str) -> dict[int, list[dict[str, Any]]]:
    """The lines of one part, by runner."""
    lines = {runner: [line for line in parts[runner] if line["part"] == name] for runner in RUNNERS}
    failed = [f"runner {runner}: {line['failed']}" for runner in RUNNERS for line in lines[runner] if "failed" in line]
    assert not failed, "\n".join(failed)
    return lines


# --- clean runs ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def clean() -> dict[str, dict[str, Any]]:
    """By mode; watched by vLLM's own plugin entry point and the environment."""
    return {line["mode"]: line for lines in both("clean").values() for line in lines}


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
def test_the_engine_runs_in_the_mode_that_was_asked_for(clean: dict[str, dict[str, Any]], mode: Any) -> None:
    assert clean[mode.name]["asynchronous"] is mode.asynchronous


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
def test_clean_traffic_leaves_nothing_to_report(clean: dict[str, dict[str, Any]], mode: Any) -> None:
    line = clean[mode.name]
    assert line["kinds"] == {}, line["first"]
    assert line["healthy"]
    assert line["answers"] >= line["asked"] - 1  # one is aborted on purpose
    assert min(line["verified"][check] for check in ("links", "row_ends", "writes", "sealed", "written", "content")) > 0


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
def test_what_a_clean_run_does_not_verify_lies_out_of_a_window(clean: dict[str, dict[str, Any]], mode: Any) -> None:
    assert set(clean[mode.name]["unverified"]) == ({"out_of_window"} if mode.windows else set())


def test_the_clean_runs_verify_a_quarter_of_a_million_positions(clean: dict[str, dict[str, Any]]) -> None:
    assert sum(line["verified"]["links"] for line in clean.values()) >= ENOUGH


def test_the_clean_runs_reuse_prefixes_evict_and_preempt(clean: dict[str, dict[str, Any]]) -> None:
    for runner in RUNNERS:
        assert clean[f"prefix hits {runner}"]["facts"]["prefix.reused"] > 0
        assert clean[f"small pool {runner}"]["facts"]["prefix.evicted"] > 0
        assert clean[f"small pool {runner}"]["preempted"] > 0
        assert clean[f"async small pool {runner}"]["preempted"] > 0


def test_all_groups_of_a_hybrid_model_are_verified(clean: dict[str, dict[str, Any]]) -> None:
    assert [clean[f"windows {runner}"]["groups"] for runner in RUNNERS] == [3, 3]


# --- faults -------------------------------------------------------------------------------------------------

SOON = {
    "swapped_rows": {"TABLE_MISMATCH", "REQUEST_DIGEST"},
    "stale_row": {"DIGEST"},
    "stale_slot_mapping": {"TABLE_MISMATCH"},
    "flipped_bit": {"CONTENT"},
    "dropped_write": {"WRITE_MISSING"},
    "wrong_token": {"INPUT_TOKEN"},
    "other_salt": {"DIGEST"},
    "unused_block": {"UNWRITTEN"},
    "lost_draft_part": {"CONTENT"},
    "window_freed_early": {"WINDOW_FREED_EARLY"},
    "extra_free": {"WRITE_FOREIGN", "UNWRITTEN"},
}
"""Kinds that name the victim within one step; for bytes within three: the scrub's bound here, and a second look"""


@pytest.fixture(scope="module")
def faults(parts: dict[int, list[dict[str, Any]]]) -> dict[int, dict[str, dict[str, Any]]]:
    return {runner: {line["fault"]: line for line in lines} for runner, lines in part(parts, "faults").items()}


@pytest.mark.parametrize("fault", SOON)
@pytest.mark.parametrize("runner", RUNNERS)
def test_a_fault_is_named_with_its_request(faults: dict[int, dict[str, Any]], runner: int, fault: str) -> None:
    line = faults[runner][fault]
    assert line["before"] == []
    assert {kind for kind, request, _ in line["soon"] if request == line["victim"]} >= SOON[fault]


@pytest.mark.parametrize("runner", RUNNERS)
def test_a_lost_draft_part_is_told_from_the_target_model(faults: dict[int, dict[str, Any]], runner: int) -> None:
    assert {part for *_, part in faults[runner]["lost_draft_part"]["soon"]} == {"draft"}
    assert {part for *_, part in faults[runner]["flipped_bit"]["soon"]} == {"target"}


@pytest.mark.parametrize("runner", RUNNERS)
def test_a_block_that_was_freed_once_too_often_is_a_double_free_in_the_end(
    faults: dict[int, dict[str, Any]], runner: int
) -> None:
    assert "DOUBLE_FREE" in faults[runner]["extra_free"]["end"]


# --- quarantine ---------------------------------------------------------------------------------------------


ENGINES = [f"{runner}{scheduling}" for runner in RUNNERS for scheduling in ("", " async")]


@pytest.fixture(scope="module")
def healed(parts: dict[int, list[dict[str, Any]]]) -> dict[str, dict[str, dict[str, Any]]]:
    """By engine and fault."""
    lines = [line for lines in part(parts, "healed").values() for line in lines]
    return {name: {line["fault"]: line for line in lines if line["engine"] == name} for name in ENGINES}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("fault", ["stale_row", "flipped_bit"])
def test_a_quarantined_request_answers_as_if_nothing_had_been(
    healed: dict[str, dict[str, Any]], engine: str, fault: str
) -> None:
    line = healed[engine][fault]
    assert line["differs"] == []
    assert line["victim"] in {request for request, action, _ in line["quarantined"] if action == "healed"}
    assert line["incidents"]
    assert line["error"] is None


@pytest.mark.parametrize("engine", ENGINES)
def test_without_quarantine_the_stale_row_changes_an_answer(healed: dict[str, dict[str, Any]], engine: str) -> None:
    assert healed[engine]["none"]["broken"]


# --- weights ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def weights(parts: dict[int, list[dict[str, Any]]]) -> dict[int, dict[str, dict[str, Any]]]:
    return {runner: {line["way"]: line for line in lines} for runner, lines in part(parts, "weights").items()}


@pytest.mark.parametrize("way", ["in_place", "by_the_model"])
@pytest.mark.parametrize("runner", RUNNERS)
def test_a_prefix_that_older_weights_made_is_found_when_it_is_used(
    weights: dict[int, dict[str, Any]], runner: int, way: str
) -> None:
    assert weights[runner][way]["kept"] == ["STALE_EPOCH"]
    assert weights[runner][way]["dropped"] == []


@pytest.mark.parametrize("runner", RUNNERS)
def test_weights_that_come_in_pieces_are_one_update(weights: dict[int, dict[str, Any]], runner: int) -> None:
    assert weights[runner]["by_the_model"]["epochs"] == [1]


# --- attaching ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def attaching(parts: dict[int, list[dict[str, Any]]]) -> dict[int, dict[str, Any]]:
    return {runner: line for runner, (line,) in part(parts, "attaching").items()}


@pytest.mark.parametrize(
    ("what", "expected"),
    [
        ("twice", "watched by another canary already"),
        ("renamed", "scheduler._preempt_request"),
        ("version", ">=0.33,<0.34"),
    ],
)
@pytest.mark.parametrize("runner", RUNNERS)
def test_what_cannot_be_watched_is_refused_with_a_reason(
    attaching: dict[int, dict[str, Any]], runner: int, what: str, expected: str
) -> None:
    assert expected in attaching[runner][what]


@pytest.mark.parametrize("runner", RUNNERS)
def test_a_watch_leaves_no_trace_on_the_engine(attaching: dict[int, dict[str, Any]], runner: int) -> None:
    line = attaching[runner]
    assert line["hooked"] > 15
    assert line["left"] == []
    assert line["same_after"]
    assert line["matches"] == "vllm"


@pytest.mark.parametrize("runner", RUNNERS)
def test_a_watched_engine_answers_as_if_nobody_watched(attaching: dict[int, dict[str, Any]], runner: int) -> None:
    assert attaching[runner]["same_watched"]


@pytest.mark.parametrize("runner", RUNNERS)
def test_a_plugin_that_is_merely_installed_touches_nothing(attaching: dict[int, dict[str, Any]], runner: int) -> None:
    line = attaching[runner]
    assert line["plugin"]  # vLLM called it
    assert line["touched"] == []


# --- processes ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def separate(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """What the front process said, and the events of all processes."""
    folder = tmp_path_factory.mktemp("processes")
    watched = {"KVCANARY_MODE": "log", "KVCANARY_OBSERVERS": "tests.engines.vllm.listener:record"}
    (answer,) = Program("processes", environ={**processes.environ(folder, runner=1), **watched}).lines()
    return answer, _events(folder)


def _events(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for path in sorted(folder.glob("*.jsonl")) for line in path.read_text().splitlines()]


def test_the_environment_alone_watches_an_engine_in_processes_of_its_own(
    separate: tuple[dict[str, Any], list[dict[str, Any]]],
) -> None:
    answer, events = separate
    kinds = [event["type"] for event in events]
    assert answer["answers"] == 16
    assert kinds.count("run.started") == 1
    assert "violation.detected" not in kinds
    assert "ownership.violated" not in kinds
    assert events[0]["origin"]["pid"] != answer["pid"]
    last = [event for event in events if event["type"] == "snapshot.taken"][-1]
    assert last["verified"]["links"]["full.0"] > 5000
    assert not any(sum(groups.values()) for groups in last["unverified"].values())


def test_the_last_event_of_a_worker_is_heard_when_the_engine_shuts_down(
    separate: tuple[dict[str, Any], list[dict[str, Any]]],
) -> None:
    assert separate[1][-1]["type"] == "run.stopped"


def test_a_process_that_runs_no_model_imports_no_runner(
    separate: tuple[dict[str, Any], list[dict[str, Any]]],
) -> None:
    assert separate[0]["runners"] == []


# --- a suspected fault of the engine ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def failed_load(parts: dict[int, list[dict[str, Any]]]) -> dict[int, dict[str, Any]]:
    return {runner: line for runner, (line,) in part(parts, "failed_load").items()}


def test_the_new_runner_writes_into_the_null_block_after_a_failed_load(failed_load: dict[int, dict[str, Any]]) -> None:
    assert failed_load[1]["kinds"] == {}
    assert failed_load[1]["same_answers"]
    assert {"WRITE_FOREIGN", "TABLE_MISMATCH"} <= set(failed_load[2]["kinds"])
    assert not failed_load[2]["same_answers"]
