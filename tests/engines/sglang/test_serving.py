"""A real scheduler on the CPU, watched: silent when all is well, and each planted fault named."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

Served = Callable[[str], dict[str, Any]]
pytestmark = pytest.mark.timeout(600)


@pytest.mark.parametrize("configuration", ["tokens", "pages", "window", "drafts"])
def test_a_clean_run_reports_nothing_and_leaves_nothing_unverified(served: Served, configuration: str) -> None:
    clean = served(configuration)["clean"]
    assert (clean["violations"], clean["ownership"]) == ([], [])
    unverified = {reason: counts for reason, counts in clean["unverified"].items() if any(counts.values())}
    assert set(unverified) <= {"out_of_window"}
    assert clean["verified"]["writes"]["full"] == clean["verified"]["sealed"]["full"] > 50
    assert clean["events"]["CanaryArmed"] == 2, "a flushed pool starts anew"


def test_clean_runs_verify_a_quarter_of_a_million_positions(served: Served) -> None:
    runs = [served(name)["clean"] for name in ("tokens", "pages", "window", "drafts")]
    assert sum(sum(run["verified"]["links"].values()) for run in runs) > 250_000


@pytest.mark.parametrize("configuration", ["tokens", "pages", "window"])
def test_the_ledger_follows_the_prefix_tree(served: Served, configuration: str) -> None:
    clean = served(configuration)["clean"]
    assert min(clean["events"][name] for name in ("PrefixPublished", "PrefixReused", "PrefixEvicted")) > 10
    assert clean["events"].get("FactsLost", 0) == 0


def test_a_prefix_that_older_weights_made_is_told(served: Served) -> None:
    updated = served("tokens")["updated"]
    assert (updated["events"]["WeightsUpdated"], updated["ownership"]) == (1, ["STALE_EPOCH"])
    assert updated["violations"] == []


def test_the_overlap_loop_was_the_one_that_ran(served: Served) -> None:
    assert served("tokens")["clean"]["overlap"]


def test_requests_were_retracted_and_resumed(served: Served) -> None:
    clean = served("pages")["clean"]
    assert clean["events"]["RequestsPreempted"] > 1
    assert [clean["finished"][f"r{i:02}"] for i in range(2, 30)] == [30 + i for i in range(2, 30)]


def test_window_layers_are_checked_through_their_own_slots(served: Served) -> None:
    clean = served("window")["clean"]
    assert clean["groups"] == ["full", "swa"]
    assert 10_000 < clean["verified"]["links"]["swa"] < clean["verified"]["links"]["full"]
    assert clean["unverified"]["out_of_window"]["swa"] > 10_000


def test_rounds_of_drafts_are_verified_with_the_draft_models_own_part(served: Served) -> None:
    drafts, tokens = served("drafts")["clean"], served("tokens")["clean"]
    assert drafts["verified"]["links"]["full"] > 50
    assert drafts["uncovered"] == []
    assert (drafts["parts"], tokens["parts"]) == ([["target", "draft"]], [["target"]])


def test_a_lost_draft_part_is_told_from_the_target_model(served: Served) -> None:
    faults = served("drafts")["faults"]
    assert {v["part"] for v in faults["lost_draft"]["violations"]} == {"draft"}
    assert {v["part"] for v in faults["flipped_bit"]["violations"]} == {"target"}


def test_checks_without_facts_are_told_as_unarmed(served: Served) -> None:
    unarmed = served("tokens")["clean"]["unarmed"]
    assert {"EARLY_REUSE", "WINDOW_FREED_EARLY", "TRANSFER_OVERLAP", "FAILED_LOAD_USED"} <= set(unarmed)
    assert {"DOUBLE_FREE", "FREED_WHILE_PUBLISHED", "STALE_EPOCH", "UNWRITTEN", "FINAL_DIGEST"}.isdisjoint(unarmed)


@pytest.mark.parametrize(
    ("configuration", "fault", "kind", "within"),
    [
        ("tokens", "extra_free", "UNWRITTEN", 0),
        ("tokens", "free_twice", "DOUBLE_FREE", 0),
        ("tokens", "stale_entry", "DIGEST", 0),
        ("tokens", "swapped_rows", "REQUEST_DIGEST", 0),
        ("tokens", "stale_mapping", "TABLE_MISMATCH", 0),
        ("tokens", "stale_mapping", "WRITE_FOREIGN", 0),
        ("tokens", "wrong_token", "INPUT_TOKEN", 1),
        ("tokens", "shifted_position", "INPUT_POSITION", 0),
        ("tokens", "flipped_bit", "CONTENT", 2),
        ("pages", "extra_free", "UNWRITTEN", 0),
        ("pages", "free_twice", "DOUBLE_FREE", 0),
        ("pages", "stale_entry", "DIGEST", 0),
        ("pages", "swapped_rows", "WRITE_FOREIGN", 0),
        ("pages", "stale_mapping", "TABLE_MISMATCH", 0),
        ("pages", "flipped_bit", "CONTENT", 2),
        ("window", "stale_entry", "DIGEST", 0),
        ("window", "flipped_bit", "CONTENT", 2),
        ("window", "window_freed", "WINDOW", 0),
        ("drafts", "flipped_bit", "CONTENT", 2),
        ("drafts", "lost_draft", "CONTENT", 2),
    ],
)
def test_a_planted_fault_is_named_with_its_request(
    served: Served, configuration: str, fault: str, kind: str, within: int
) -> None:
    report = served(configuration)["faults"][fault]
    assert report["planted"] > 0
    assert min(v["forward"] for v in report["violations"]) >= report["planted"]
    found = [v for v in report["violations"] if v["kind"] == kind]
    assert {v["request"] for v in found} >= set(report["victims"])
    assert min(v["forward"] for v in found) <= report["planted"] + within


def test_a_slot_that_is_freed_while_it_is_read_is_told_as_freed(served: Served) -> None:
    found = served("tokens")["faults"]["extra_free"]["violations"]
    assert [(v["kind"], v["owner_state"]) for v in found] == [("UNWRITTEN", "freed")]


@pytest.mark.parametrize("configuration", ["tokens", "pages"])
def test_a_page_that_is_freed_while_the_prefix_tree_holds_it_is_told(served: Served, configuration: str) -> None:
    assert "FREED_WHILE_PUBLISHED" in served(configuration)["faults"]["extra_free"]["ownership"]


def test_records_follow_a_token_that_moves(served: Served) -> None:
    moved = served("tokens")["faults"]["moved_slot"]
    assert moved["planted"] > 0
    assert (moved["violations"], moved["ownership"]) == ([], [])


def test_a_forward_that_no_scheduler_asked_for_is_not_judged(served: Served) -> None:
    unscheduled = served("tokens")["faults"]["unscheduled"]
    assert unscheduled["planted"] > 0
    assert (unscheduled["victims"], unscheduled["violations"], unscheduled["ownership"]) == ([], [], [])


def test_prefixes_that_extra_keys_and_salts_keep_apart_are_told_apart(served: Served) -> None:
    clean, mixed = served("tokens")["salted"][""], served("tokens")["salted"]["stale_entry"]
    assert (clean["violations"], clean["ownership"], clean["events"].get("PrefixReused", 0)) == ([], [], 0)
    assert {(v["kind"], v["request"]) for v in mixed["violations"]} == {("DIGEST", "salted-0")}


def test_raise_mode_ends_the_loop_with_the_first_corruption(served: Served) -> None:
    assert served("tokens")["raised"] == {"kind": "DIGEST", "request": "raise-0", "finished": False}


def test_quarantine_heals_so_that_answers_equal_those_of_a_clean_run(served: Served) -> None:
    healed = served("tokens")["healed"]
    answers = healed["answers"]
    assert answers["log"] != answers["clean"], "the fault must hurt, or healing proves nothing"
    assert answers["quarantine"] == answers["clean"]
    assert healed["quarantine"]["quarantined"] == [["quarantine-0", "healed", 13], ["quarantine-1", "healed", 13]]


def test_quarantine_leaves_a_pool_without_findings(served: Served) -> None:
    run = served("tokens")["healed"]["quarantine"]
    assert {v["kind"] for v in run["violations"]} == {"REQUEST_DIGEST"}
    assert run["events"]["CanaryArmed"] == 2
