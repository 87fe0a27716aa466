"""Parts of the adapter that need no vLLM."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from kvcanary.batch import ForwardBatch, GroupBatch
from kvcanary.canary import Canary
from kvcanary.config import CanaryConfig
from kvcanary.engines.base import find_adapter
from kvcanary.engines.vllm.contract import check, check_version
from kvcanary.engines.vllm.installation import _Finder
from kvcanary.engines.vllm.layout import DRAFT_PART, CoveredGroup, Pool
from kvcanary.engines.vllm.replay import Replay
from kvcanary.engines.vllm.rows import Known, Rows
from kvcanary.engines.vllm.wire import (
    ATTRIBUTE,
    NO_GROUP,
    Admitted,
    Blocks,
    Copied,
    Finished,
    Healed,
    KnownIds,
    Preempted,
    Told,
    Wanted,
    Withdrawn,
    pack,
    pack_wanted,
    take,
    take_wanted,
)
from kvcanary.engines.vllm.worker import WorkerWatch
from kvcanary.errors import BatchError, ConfigError
from kvcanary.events import OwnershipViolated, PagesFreed
from kvcanary.layout import Arena, AttentionGroup, KVSource, PoolLayout
from kvcanary.testing import EventRecorder, assert_violation

_HEAVY = ("torch", "numpy", "msgspec", "vllm", "kvcanary.config", "kvcanary.canary", "kvcanary.engines.base")


# --- the plugin ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [None, "off", " OFF "])
def test_the_plugin_imports_nothing_while_the_mode_is_off(mode: str | None) -> None:
    program = (
        "import json, sys\n"
        "from kvcanary.engines.vllm.plugin import register\n"
        "register()\n"
        f"print(json.dumps([name for name in {_HEAVY!r} if name in sys.modules]))\n"
        "print(len([finder for finder in sys.meta_path if 'kvcanary' in type(finder).__module__]))\n"
    )
    environ = {"PYTHONPATH": str(Path(__file__).parents[3]), **({} if mode is None else {"KVCANARY_MODE": mode})}
    done = subprocess.run([sys.executable, "-c", program], env=environ, capture_output=True, text=True, check=True)
    imported, finders = done.stdout.splitlines()
    assert json.loads(imported) == []
    assert finders == "0"


def test_the_plugin_costs_a_process_nothing_while_the_mode_is_off() -> None:
    """As vLLM finds and calls it. Its own start takes ten seconds, so a tenth of one is noise."""
    program = (
        "import importlib.metadata, json, sys, time\n"
        "(entry,) = importlib.metadata.entry_points(group='vllm.general_plugins', name='kvcanary')\n"
        "before, began = set(sys.modules), time.perf_counter()\n"
        "entry.load()()\n"
        "print(time.perf_counter() - began)\n"
        "print(json.dumps(sorted({name.partition('.')[0] for name in set(sys.modules) - before})))\n"
    )
    environ = {"PYTHONPATH": str(Path(__file__).parents[3])}
    runs = [
        subprocess.run([sys.executable, "-c", program], env=environ, capture_output=True, text=True, check=True)
        for _ in range(3)
    ]
    assert min(float(run.stdout.splitlines()[0]) for run in runs) < 0.1
    assert {run.stdout.splitlines()[1] for run in runs} == {'["__future__", "kvcanary"]'}


def test_a_class_is_patched_when_somebody_else_imports_its_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "late_module.py").write_text("class Runner:\n    pass\n")
    patched: list[ModuleType] = []
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", [_Finder({"late_module": patched.append}), *sys.meta_path])
    module = importlib.import_module("late_module")
    monkeypatch.delitem(sys.modules, "late_module")
    assert patched == [module]
    assert module.Runner.__qualname__ == "Runner"
    assert module.__spec__ is not None
    assert module.__spec__.loader is not None
    assert "class Runner" in str(module.__spec__.loader.get_source("late_module"))  # type: ignore[attr-defined]


# --- what scheduler and worker tell each other --------------------------------------------------------------


def test_what_the_scheduler_told_arrives_in_order() -> None:
    told: list[Told] = [
        Preempted("a"),
        Blocks("free", 0, "", (3, 4)),
        Admitted("b", 32, b"adapter", ((2, 6, -5),)),
        KnownIds(b"\x07\0\0\0"),
        Blocks("alloc", 1, "b", (3,)),
        Copied(0, (1,), (2,)),
        Finished("c", (1, 2, 3)),
        Finished("d", None),
        Healed("i-1", "e", 4, "why"),
        Withdrawn("i-1", 0, (7, 8)),
    ]
    message = SimpleNamespace(**{ATTRIBUTE: pack(told)})
    assert take(message) == told
    assert not vars(message)


def test_a_step_without_facts_is_told_from_one_without_a_scheduler_half() -> None:
    assert take(SimpleNamespace(**{ATTRIBUTE: pack([])})) == []
    assert take(SimpleNamespace()) is None


def test_facts_of_another_version_are_refused() -> None:
    with pytest.raises(ConfigError, match="same kvcanary"):
        take(SimpleNamespace(**{ATTRIBUTE: b"\x91\x92\xa7unknown\x01"}))


def test_what_the_worker_wants_arrives_once() -> None:
    wanted = [Wanted("i-1", ("a", "b"), 0, (7,))]
    output = SimpleNamespace(kvcanary_wanted=pack_wanted(wanted))
    assert take_wanted(output) == wanted
    assert take_wanted(output) == []


# --- what is refused ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", ["0.32.1", "0.34.0", "1.0", "dev"])
def test_other_releases_are_refused_with_the_range(version: str) -> None:
    with pytest.raises(ConfigError, match=f"{version}.*>=0.33,<0.34"):
        check_version(version)


@pytest.mark.parametrize("version", ["0.33.0", "0.33.2.post1"])
def test_supported_releases_pass(version: str) -> None:
    check_version(version)


def test_a_renamed_method_and_a_lost_parameter_are_named() -> None:
    runner = SimpleNamespace(prepare_attn=lambda other: other)
    with pytest.raises(ConfigError, match=r"runner.prepare_attn\(input_batch\), runner.speculator"):
        check(runner, {"prepare_attn": ("input_batch",), "speculator": None}, "runner", "0.33.0")


def test_an_engine_whose_scheduler_is_elsewhere_says_how_to_watch_it() -> None:
    vllm = type("LLM", (), {"__module__": "vllm.entrypoints.llm"})
    assert find_adapter(vllm()).name == "vllm"


# --- groups that are not covered ----------------------------------------------------------------------------


def _hybrid() -> tuple[Replay, Canary, EventRecorder]:
    """Two covered groups and one that is not, over the same bytes, each with a different size of page."""
    pool = torch.randn(8, 4, 3)
    sources = [KVSource.from_view("layer", pool.view(8 * split, 4 // split, 3), layer=0) for split in (1, 2)]
    groups = tuple(
        AttentionGroup(f"full.{i}", "full", 32, 4 // split, (source,), arena=Arena("pool", split))
        for i, (split, source) in enumerate(zip((1, 2), sources, strict=True))
    )
    layout, events = PoolLayout(groups), EventRecorder()
    canary = Canary(CanaryConfig(mode="log", scrub_mib_per_step=0), observers=[events]).start()
    canary.bind(layout, max_tokens=16, max_batch_rows=4, max_rows=4)
    canary.arm()
    covered = tuple(CoveredGroup(i, f"full.{i}", split) for i, split in enumerate((1, 2)))
    return Replay(canary, Pool(layout, covered, frozenset({2}), draft=False), 4), canary, events


def _tell(replay: Replay, canary: Canary, *told: Told) -> None:
    empty = SimpleNamespace(req_ids=[], num_computed_tokens=[], all_token_ids={})
    replay.apply(told, SimpleNamespace(scheduled_new_reqs=[], scheduled_cached_reqs=empty, num_scheduled_tokens={}))
    with canary.step():
        pass


def test_blocks_of_a_group_that_is_not_covered_come_and_go_in_silence() -> None:
    replay, canary, events = _hybrid()
    for _ in range(2):
        _tell(replay, canary, Blocks("alloc", 2, "a", (3, 4)), Blocks("free", 2, "", (3, 4)))
    canary.stop()
    assert [event for event in events if isinstance(event, OwnershipViolated)] == []
    assert [event.runs[0].count for event in events if isinstance(event, PagesFreed)] == [2, 2]


def test_a_block_that_was_free_when_the_watch_began_is_free_to_the_ledger() -> None:
    replay, canary, events = _hybrid()
    _tell(replay, canary, Blocks("free", NO_GROUP, "", (3, 4)))
    _tell(replay, canary, Blocks("free", 0, "", (3,)))
    canary.stop()
    assert_violation(events, kind="DOUBLE_FREE")


# --- drafts -------------------------------------------------------------------------------------------------


@pytest.fixture
def canary() -> Any:
    pool = torch.randn(2, 8, 4, 3)
    sources = tuple(
        KVSource.from_view(part, pool[i], layer=i, part=part) for i, part in enumerate(("target", DRAFT_PART))
    )
    canary = Canary(CanaryConfig(mode="log", scrub_mib_per_step=0))
    canary.bind(
        PoolLayout((AttentionGroup("full.0", "full", 32, 4, sources),)), max_tokens=16, max_batch_rows=4, max_rows=4
    )
    canary.arm()
    return canary


def _batch(canary: Canary, *, tokens: int) -> ForwardBatch:
    return Rows(4, 16, torch.device("cpu")).batch(
        Known([canary.admit("a", tokens=(), start=0), canary.admit("b", tokens=(), start=0)], [-1, -1]),
        input_ids=torch.arange(2 * tokens),
        positions=torch.arange(2 * tokens) % tokens,
        query_start_loc=torch.tensor([0, tokens, 2 * tokens], dtype=torch.int32),
        seq_lens=torch.full((2,), tokens, dtype=torch.int32),
        slot_mappings=[torch.arange(2 * tokens)],
        tables=[torch.tensor([[0], [1]])],
    )


def test_rejected_drafts_are_sealed_for_the_target_and_not_for_the_draft_model(canary: Canary) -> None:
    watch = WorkerWatch(SimpleNamespace(max_num_tokens=16), canary, "0.33.0", kernel_tables=False)
    batch = _batch(canary, tokens=4)
    with canary.step():
        canary.enter(batch)
        canary.turn_to("")
        watch._leave_out(torch.tensor([0, 3]))
        canary.turn_to(DRAFT_PART)
        canary.leave()
    target, draft = (canary.state.groups[0].seals[part, :8, 1] != 0 for part in range(2))
    assert target.tolist() == [True] * 8
    assert draft.tolist() == [True] * 5 + [False] * 3


def test_a_draft_forward_that_never_came_seals_nothing(canary: Canary) -> None:
    with canary.step():
        canary.enter(_batch(canary, tokens=4))
        canary.turn_to("")
        canary.leave()
    target, draft = (canary.state.groups[0].seals[part, :8, 1] != 0 for part in range(2))
    assert target.all()
    assert not draft.any()


def test_turning_to_a_part_that_does_not_exist_is_refused(canary: Canary) -> None:
    with canary.step():
        canary.enter(_batch(canary, tokens=4))
        with pytest.raises(BatchError, match="turn_to"):
            canary.turn_to("scales")


def test_turning_outside_of_a_forward_is_refused(canary: Canary) -> None:
    with pytest.raises(BatchError, match="between enter"):
        canary.turn_to(DRAFT_PART)


def test_health_sees_the_seals_of_both_parts(canary: Canary) -> None:
    with canary.step():
        canary.enter(_batch(canary, tokens=4))
        canary.turn_to(DRAFT_PART)
        canary.leave()
    from kvcanary.state import Role, Word

    assert int(canary.state.counters[Word.LAUNCHES + Role.SEAL]) == canary._due["seal"] == 2


def test_context_lengths_follow_the_device() -> None:
    rows = Rows(4, 16, torch.device("cpu"))
    batch = rows.batch(
        Known([2, -1], [7, -1]),
        input_ids=torch.zeros(5, dtype=torch.int32),
        positions=torch.zeros(5, dtype=torch.int64),
        query_start_loc=torch.tensor([0, 1, 5], dtype=torch.int32),
        seq_lens=torch.tensor([9, 6], dtype=torch.int32),
        slot_mappings=[],
        tables=[],
    )
    assert batch.context_lens.tolist() == [8, 2]
    assert batch.request_rows.tolist() == [2, -1]
    assert batch.last_ids is not None
    assert batch.last_ids.tolist() == [7, -1]
    assert batch.token_salts is None
    assert isinstance(batch.groups, tuple)
    assert not any(isinstance(group, GroupBatch) for group in batch.groups)
