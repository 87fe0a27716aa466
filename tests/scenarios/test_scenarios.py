"""Every fault of the field, on purpose: each file is played, and so is its clean twin."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest
from msgspec.structs import replace

from kvcanary.events import IncidentOpened
from kvcanary.faults.scenario.parse import KINDS, REFUSALS, Scenario, load
from kvcanary.faults.scenario.play import play
from kvcanary.faults.scenario.verdict import Verdict, judge, watched_on
from kvcanary.observers.explain import docs_link

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
FILES = sorted(HERE.rglob("*.toml"))

CASES = {
    1: (
        "vllm-project/vllm-ascend#15417",
        "vllm-project/vllm#43810",
        "NVIDIA/TensorRT-LLM#15546",
        "flashinfer-ai/flashinfer#3136",
    ),
    2: (
        "vllm-project/vllm#45704",
        "vllm-project/vllm#47282",
        "NVIDIA/TensorRT-LLM#8813",
        "ai-dynamo/dynamo#15079",
        "sgl-project/sglang#22811",
    ),
    3: (
        "LMCache/LMCache#4086",
        "vllm-project/vllm#12621",
        "vllm-project/vllm#15297",
        "NVIDIA-NeMo/RL#4018",
        "InternLM/lmdeploy#4917",
    ),
    4: (
        "LMCache/LMCache#4463",
        "ai-dynamo/dynamo#14416",
        "sgl-project/sglang#23746",
        "ROCm/ATOM#2146",
        "vllm-project/vllm#37565",
    ),
    5: ("local-inference-lab/vllm#480", "sgl-project/sglang#24745"),
    6: (
        "vllm-project/vllm-ascend#13501",
        "vllm-project/vllm#47728",
        "sgl-project/sglang#8649",
        "huggingface/transformers#37574",
    ),
    7: (
        "sgl-project/sglang#25015",
        "sgl-project/sglang#26329",
        "sgl-project/sglang#26800",
        "NVIDIA/TensorRT-LLM#18295",
    ),
    8: (
        "vllm-project/tpu-inference#3449",
        "sgl-project/sglang#18803",
        "sgl-project/sglang#26380",
        "sgl-project/sglang#33547",
    ),
    9: (
        "sgl-project/sglang#24527",
        "sgl-project/sglang#32564",
        "sgl-project/sglang#35049",
        "vllm-project/vllm#44238",
        "sgl-project/sglang#22716",
    ),
    10: ("LMCache/LMCache#5005",),
    11: ("vllm-project/vllm#35219",),
    12: ("sgl-project/sglang#23346", "sgl-project/sglang#28254"),
    0: (
        "ggml-org/llama.cpp#3825",
        "vllm-project/vllm-ascend#15505",
        "SemiAnalysisAI/InferenceX#1944",
        "vllm-project/vllm#18777",
        "vllm-project/vllm#39146",
        "vllm-project/vllm#38606",
        "vllm-project/vllm#53257",
        "vllm-project/vllm#53298",
    ),
}
"""Public reports, by the kind of fault; 0: outside of the twelve kinds."""

READ_SIDE = {"flashinfer-ai/flashinfer#3136", "vllm-project/vllm#37565"}
"""Faults of kernels over good data, and of numerics: no check of records or bytes can see them."""


@cache
def scenario(path: Path) -> Scenario:
    return load(path)


@cache
def verdicts(path: Path) -> tuple[Verdict, ...]:
    return tuple(judge(scenario(path)))


def cases_of(path: Path) -> set[str]:
    return set(filter(None, re.split(r",\s*", scenario(path).document.case)))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(HERE).as_posix())
def test_what_a_file_expects_is_reported_and_nothing_else(path: Path) -> None:
    assert [problem for verdict in verdicts(path) for problem in verdict.problems] == []


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(HERE).as_posix())
def test_a_twin_is_silent_with_poison_too(path: Path) -> None:
    twin = scenario(path).twin
    if twin is not None:
        poisoned = replace(twin, settings={**twin.settings, "poison": "full"})
        assert play(scenario(path), watched_on(poisoned)).findings == ()


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(HERE).as_posix())
def test_every_incident_explains_itself(path: Path) -> None:
    told = [one for verdict in verdicts(path) for events in verdict.report.trace for one in events]
    for incident in [one for one in told if isinstance(one, IncidentOpened)]:
        likely, colon, words = incident.likely_cause.partition(": ")
        assert colon
        assert likely.islower()
        assert words
        assert incident.evidence
        assert incident.docs == docs_link(incident.kind)
        if incident.first is not None and incident.first.writer_forward:
            assert any("the record was written by" in clue for clue in incident.evidence)
        if incident.first is None and incident.page >= 0 and incident.group in {"full", "swa"}:
            assert any(re.search("holds the page|held the page", clue) for clue in incident.evidence)


@pytest.mark.parametrize(("kind", "case"), [(kind, case) for kind, cases in CASES.items() for case in cases])
def test_every_public_case_has_a_scenario_of_its_kind(kind: int, case: str) -> None:
    # A report that names two faults is written under both.
    assert kind in {scenario(path).document.kind for path in FILES if case in cases_of(path)}


@pytest.mark.parametrize("kind", [kind for kind in CASES if kind])
def test_every_case_of_the_twelve_kinds_is_caught_unless_it_is_one_of_reading(kind: int) -> None:
    caught = {case for path in FILES if scenario(path).wants for case in cases_of(path)}
    assert set(CASES[kind]) - READ_SIDE - caught == set()


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(HERE).as_posix())
def test_what_is_caught_has_a_clean_twin_and_what_is_not_says_why(path: Path) -> None:
    document = scenario(path).document
    assert (document.twin is not None) == bool(scenario(path).wants)
    if document.why:
        assert "blind_spots.md" in document.why
        assert (ROOT / "docs" / "blind_spots.md").exists()


def test_every_kind_that_can_be_reported_has_a_scenario() -> None:
    expected = {want.expected.kind for path in FILES for want in scenario(path).wants}
    assert set(KINDS) - set(REFUSALS) - expected == set()


def test_a_twin_differs_from_its_scenario() -> None:
    for path in FILES:
        twin = scenario(path).twin
        assert twin is None or twin != scenario(path).play
