"""What a run says of itself: the checks and launches that it names are those that it makes."""

from __future__ import annotations

from collections.abc import Callable

from kvcanary.events import RunStarted
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
