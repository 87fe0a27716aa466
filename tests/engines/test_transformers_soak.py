from __future__ import annotations

import itertools

import pytest

from tests.engines.soak import MODES, Mode, run

pytestmark = pytest.mark.engine

EVERY = [(mode, kind) for mode in MODES for kind in mode.models]
# One model for each mode, another one from mode to mode.
SHORT = [(mode, mode.models[number % len(mode.models)]) for mode, number in zip(MODES, itertools.count())]


def name(case: tuple[Mode, str]) -> str:
    return f"{case[0].name}, {case[1]}"


def check(mode: Mode, kind: str, requests: int) -> None:
    outcome = run(mode, kind, requests=requests, seed=MODES.index(mode))
    assert not outcome.hung, f"the engine hung: {outcome}"
    assert not outcome.violations
    assert not outcome.errors
    assert outcome.finished >= requests * (1 + mode.children) - outcome.cancelled * (1 + mode.children)
    verified = ("links", "row_ends", "writes", "sealed", "content")
    assert all(outcome.verified[name] > 0 for name in verified), outcome.verified
    # Nothing is left out without a reason that this mode explains.
    explained = {"out_of_window"} if kind != "full" else set()
    if mode.offload_gib:
        explained.add("unsealed")  # a token that was in flight at the offload is fed again before it is read again
    if mode.through == "running":
        explained |= {"unknown_record", "unknown_owner", "unlinked", "unsealed", "unarmed_row"}
    assert {reason for reason, count in outcome.unverified.items() if count} <= explained, outcome.unverified


@pytest.mark.parametrize("case", SHORT, ids=name)
def test_a_clean_engine_leaves_no_violation_and_no_gap(case: tuple[Mode, str]) -> None:
    check(*case, requests=12)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("case", EVERY, ids=name)
def test_a_clean_engine_leaves_no_violation_and_no_gap_in_any_mode_on_any_model(case: tuple[Mode, str]) -> None:
    check(*case, requests=32)
