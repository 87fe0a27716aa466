"""The likely fault, in words."""

from __future__ import annotations

from typing import Any

import pytest

from kvcanary.events import OwnershipViolated, ViolationDetected
from kvcanary.observers.explain import docs_link, explain, flipped_bit
from kvcanary.observers.explain_ownership import explain_ownership
from kvcanary.observers.ledger import Life, Owner
from kvcanary.record import Kind, fingerprint_bytes, hex64

MINE = {"request": "a", "tag": 1}
BY_B = {"writer_tag": 2, "writer_request": "b", "writer_forward": 30}
OF_B = {"owner_state": "held", "owner_tag": 2, "owner_request": "b", "owner_as_of": 30}
FREED = {"owner_state": "freed", "owner_tag": 2, "owner_request": "b", "owner_as_of": 30}
OWN_FREED = {"owner_state": "freed", "owner_tag": 1, "owner_request": "a", "owner_as_of": 30}


def violation(kind: str, **fields: Any) -> ViolationDetected:
    given: dict[str, Any] = {"role": "check", "group": "full", "forward": 40, **MINE}
    return ViolationDetected(kind=kind, **given | fields)


@pytest.mark.parametrize(
    ("cause", "kind", "fields"),
    [
        ("stale slot", "WRITE_FOREIGN", {**OF_B, "owner_as_of": 40}),
        ("foreign write", "WRITE_FOREIGN", OF_B),
        ("foreign write", "WRITE_FOREIGN", {"owner_state": "null"}),
        ("stale slot", "WRITE_FREED", FREED),
        ("freed too early", "WRITE_FREED", OWN_FREED),
        ("shifted position", "TABLE_MISMATCH", {"slot": 17, "position_found": 16}),
        ("stale slot", "TABLE_MISMATCH", {"slot": 17, "position_found": 160}),
        ("lost carry-over", "INPUT_TOKEN", {}),
        ("lost carry-over", "INPUT_PLACEHOLDER", {}),
        ("shifted position", "INPUT_POSITION", {"position_found": 9, "position_expected": 8}),
        ("stale slot", "SLOT_RANGE", {}),
        ("shifted position", "POSITION", {"position_found": 9, "position_expected": 8, "writer_tag": 1}),
        ("stale slot", "POSITION", OF_B),
        ("foreign write", "POSITION", BY_B),
        ("foreign write", "POSITION", {"writer_forward": 30}),
        ("shifted position", "POSITION", {"request": "b", "tag": 3, **BY_B, **OF_B}),
        ("stale row", "POSITION", {"request": "", "tag": 0, "row": 4, **BY_B, **OF_B}),
        ("stale row", "DIGEST", {"request": "", "tag": 0, "row": 4, **BY_B, **OF_B}),
        ("swapped rows", "DIGEST", OF_B),
        ("foreign write", "DIGEST", BY_B),
        ("other identity", "DIGEST", {**OF_B, **BY_B, "position_expected": 0}),
        ("swapped rows", "REQUEST_DIGEST", {**OF_B, **BY_B}),
        ("lost carry-over", "REQUEST_DIGEST", {"writer_tag": 1}),
        ("lost carry-over", "FINAL_DIGEST", {}),
        ("never written", "UNWRITTEN", {"owner_state": "held", "owner_tag": 1, "owner_as_of": 3}),
        ("freed too early", "UNWRITTEN", OWN_FREED),
        ("freed too early", "WINDOW", {}),
        ("never written", "WRITE_MISSING", {}),
        ("foreign write", "NULL_DIRTY", {}),
        ("freed too early", "CONTENT", FREED),
        ("foreign write", "CONTENT", {}),
        ("foreign write", "CONTENT", {**OF_B, "writer_tag": 1, "writer_forward": 29}),
        ("incomplete copy", "CONTENT", {**OF_B, "writer_tag": 1, "writer_forward": 30}),
    ],
)
def test_the_likely_fault_is_named(cause: str, kind: str, fields: dict[str, Any]) -> None:
    assert explain(violation(kind, **fields)).cause.startswith(f"{cause}:")


@pytest.mark.parametrize("kind", [kind.name for kind in Kind])
def test_every_kind_has_words_of_its_own(kind: str) -> None:
    words = explain(violation(kind))
    assert words.headline.startswith(f"{kind}: request a, group full")
    assert words.headline.endswith("forward 40")
    assert "unknown" not in words.cause
    assert words.found
    assert words.expected
    assert "\n" not in words.headline


@pytest.mark.parametrize(
    "kind",
    [
        "EARLY_REUSE",
        "DOUBLE_FREE",
        "DOUBLE_ALLOC",
        "FREED_WHILE_PUBLISHED",
        "PUBLISHED_UNOWNED",
        "PUBLISHED_UNWRITTEN",
        "WINDOW_FREED_EARLY",
        "TRANSFER_OVERLAP",
        "STALE_EPOCH",
        "FAILED_LOAD_USED",
    ],
)
def test_every_rule_of_ownership_has_words_of_its_own(kind: str) -> None:
    words = explain_ownership(OwnershipViolated(kind=kind, group="full", page=5, request="b", other="a", forward=9))
    assert words.headline.startswith(f"{kind}: request b, group full, page 5: found ")
    assert words.cause != "unknown"
    assert words.evidence == ("request a is the other party",)


def test_a_broken_rule_tells_the_last_owners_of_its_page() -> None:
    owners = (Owner(Life("c"), 9), Owner(Life("b"), 5, 9), Owner(Life("a"), 2, 5))
    event = OwnershipViolated(kind="DOUBLE_FREE", group="full", page=5, request="b", forward=9)
    assert explain_ownership(event, owners).evidence == (
        "request c holds the page since forward 9",
        "request b held the page from forward 5 until it was taken back for forward 9",
        "request a held the page from forward 2 until it was taken back for forward 5",
    )


@pytest.mark.parametrize("bit", [0, 1, 13, 31])
@pytest.mark.parametrize("word", [0, 3, 63])
def test_a_flipped_bit_is_told_from_the_fingerprints(bit: int, word: int) -> None:
    data = bytearray(range(256))
    before = fingerprint_bytes(99, bytes(data))
    data[4 * word + bit // 8] ^= 1 << bit % 8
    after = fingerprint_bytes(99, bytes(data))
    assert flipped_bit(hex64(before), hex64(after)) == bit
    words = explain(violation("CONTENT", fingerprint_expected=hex64(before), fingerprint_found=hex64(after)))
    assert words.cause.startswith("flipped bits")
    assert f"bit {bit} of one 32-bit word" in words.evidence[0]


def test_overwritten_bytes_are_not_taken_for_a_flipped_bit() -> None:
    before = fingerprint_bytes(99, bytes(range(256)))
    after = fingerprint_bytes(99, bytes(reversed(range(256))))
    assert flipped_bit(hex64(before), hex64(after)) is None
    assert flipped_bit(hex64(before), hex64(before)) is None
    assert flipped_bit("", "") is None


def test_the_evidence_names_writer_owner_and_taint() -> None:
    evidence = " | ".join(explain(violation("DIGEST", tainted=True, **OF_B, **BY_B)).evidence)
    assert "written by request b in forward 30" in evidence
    assert "belongs to request b since forward 30" in evidence
    assert "already had a wrong digest" in evidence


@pytest.mark.parametrize("kind", ["UNWRITTEN", "POSITION", "DIGEST"])
def test_a_page_that_was_taken_from_its_reader_is_told_from_one_that_is_shared(kind: str) -> None:
    found = violation(kind, position_expected=4, **OF_B)
    taken = (Owner(Life("b"), 30), Owner(Life("a"), 5, 30))
    shared = (Owner(Life("b"), 30), Owner(Life("a"), 30), Owner(Life("a"), 5, 30))
    assert explain(found, taken).cause.startswith("freed too early: the page was taken from request a,")
    assert not explain(found, shared).cause.startswith("freed too early")


def test_a_writer_that_nobody_knows_is_no_request() -> None:
    evidence = explain(violation("POSITION", writer_forward=30)).evidence
    assert "the record was written by a row that no live request has in forward 30" in evidence


def test_a_request_whose_name_is_forgotten_goes_by_its_tag() -> None:
    assert "request with tag 9," in explain(violation("DIGEST", request="", tag=9)).headline
    assert "no request," in explain(violation("CONTENT", request="", tag=0)).headline


def test_links_are_relative_to_the_docs() -> None:
    assert docs_link("WRITE_FOREIGN") == "violations.md#write_foreign"
