"""What a run says of itself: the checks and launches that it names are those that it makes."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import torch

from kvcanary.events import RunStarted
from kvcanary.journal.reader import open_files
from tests.canary.conftest import Bench
from tests.canary.hand import HandEngine


def started(bench: Bench) -> RunStarted:
    return bench.of_kind(RunStarted)[-1]


def test_a_run_that_seals_no_bytes_names_both_checks_that_need_them(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench(fingerprint="off")
    assert started(bench).unarmed["CONTENT"] == "fingerprint is off"
    assert started(bench).unarmed["NONFINITE"] == "fingerprint is off: the bytes of new tokens are not read"


def test_an_engine_s_reason_for_a_missing_check_stays(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench(fingerprint="off", check_nonfinite=False)
    HandEngine(bench.canary, unarmed={"CONTENT": "bytes are elsewhere", "NONFINITE": "whole numbers"})
    given = {kind: started(bench).unarmed[kind] for kind in ("CONTENT", "NONFINITE")}
    assert given == {"CONTENT": "bytes are elsewhere", "NONFINITE": "whole numbers"}


def test_a_window_without_its_full_group_is_no_role(make_bench: Callable[..., Bench]) -> None:
    assert "window" not in started(make_bench(swa_divergence_every=1)).roles


def test_versions_and_ranks_that_are_more_than_words_and_numbers_reach_the_journal(
    make_bench: Callable[..., Bench], tmp_path: Path
) -> None:
    canary = make_bench(journal=str(tmp_path)).canary
    HandEngine(canary, engine_version=torch.__version__, ranks={"tp_rank": torch.tensor(1)})
    assert canary.flush(5)
    assert canary.bus.flush(time.monotonic() + 5)
    canary.stop(5)
    with open_files(tmp_path) as files:
        origins = {(file.started.origin.engine_version, file.started.origin.tp_rank) for file in files}
    assert (str(torch.__version__), 1) in origins
