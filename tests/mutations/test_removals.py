"""The removals follow the code; that each is noticed is for ``make mutations`` to show."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from kvcanary.observers.explain_ownership import LEDGER_KINDS
from kvcanary.record import Kind
from tests.mutations.__main__ import judged
from tests.mutations.removals import REMOVALS, TESTS, Removal

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "kvcanary"
REPORTING = {"report", "violated", "_overlap", "_unowned"}
"""Functions that report a violation."""


def called(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def named(tree: ast.Module) -> set[str]:
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}


def reports(path: Path) -> list[str]:
    source = path.read_text()
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call) and called(node) in REPORTING]
    return [ast.get_source_segment(source, call) or "" for call in calls]


@pytest.mark.parametrize("removal", REMOVALS, ids=lambda one: f"{one.kind}, {one.what}")
def test_a_removal_fits_the_code_as_it_is(removal: Removal) -> None:
    source = (PACKAGE / removal.module).read_text()
    before, after = ast.parse(source), ast.parse(removal.apply(source))
    assert ast.dump(after) != ast.dump(before)
    # A thread may swallow the error of a name that is not there, and then it looks as if the removal were noticed.
    assert named(after) <= named(before)


def test_a_piece_that_the_code_lost_or_has_twice_is_named() -> None:
    for source, count in (("", 0), (REMOVALS[0].piece * 2, 2)):
        with pytest.raises(ValueError, match=rf"must occur once in kvcanary/.*, and occurs {count} times"):
            REMOVALS[0].apply(source)


@pytest.mark.parametrize(
    ("replacement", "words"), [("lost", "must occur once in kvcanary/feed.py"), ("(", "'(' was never closed")]
)
def test_a_removal_that_cannot_be_applied_is_an_error_and_no_success(replacement: str, words: str) -> None:
    piece = "no such text" if replacement == "lost" else "import time"
    outcome = judged(Removal("FINAL_DIGEST", "any", "feed.py", piece, replacement))
    assert outcome.result == "error"
    assert words in outcome.detail


def test_every_kind_of_violation_has_a_removal() -> None:
    assert {removal.kind for removal in REMOVALS} == {*(kind.name for kind in Kind), *LEDGER_KINDS}


@pytest.mark.parametrize(
    "path",
    [*sorted((PACKAGE / "kernels").glob("ref_*.py")), *sorted((PACKAGE / "observers").glob("ownership*.py"))],
    ids=lambda path: path.stem,
)
def test_every_place_that_reports_a_violation_has_a_removal(path: Path) -> None:
    pieces = [one.piece for one in REMOVALS if PACKAGE / one.module == path]
    assert [call for call in reports(path) if not any(call in piece for piece in pieces)] == []


def test_removals_have_distinct_names_and_tests_that_exist() -> None:
    assert len({(one.kind, one.what, one.module) for one in REMOVALS}) == len(REMOVALS)
    for tests in TESTS.values():
        assert all((ROOT / test.partition("::")[0]).is_file() for test in tests)
