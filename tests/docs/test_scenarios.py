"""The notation of scenarios is documented whole, and its examples hold."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import pytest

from kvcanary.faults.scenario import parse
from kvcanary.faults.scenario.notation import FORMS
from kvcanary.faults.scenario.verdict import judge

DOCS = Path(__file__).parents[2] / "docs"
PAGE = DOCS / "reference" / "scenarios.md"
TOML = re.compile(r"^```toml test\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL)
EXAMPLES = [
    (page, found["body"])
    for page in (PAGE, DOCS / "how-to" / "report_a_bug.md")
    for found in TOML.finditer(page.read_text("utf-8"))
]


@pytest.mark.parametrize(("page", "text"), EXAMPLES, ids=lambda value: value.name if isinstance(value, Path) else "")
def test_the_examples_of_the_pages_hold(page: Path, text: str, tmp_path: Path) -> None:
    path = tmp_path / f"{page.stem}.toml"
    path.write_text(textwrap.dedent(text), "utf-8")
    verdicts = judge(parse.load(path))
    assert [verdict.problems for verdict in verdicts if not verdict.holds] == []
    assert verdicts[0].outcome == "caught"


def test_both_pages_have_an_example() -> None:
    assert {page for page, _ in EXAMPLES} == {PAGE, DOCS / "how-to" / "report_a_bug.md"}


@pytest.mark.parametrize("word", FORMS)
def test_every_event_is_explained(word: str) -> None:
    assert re.search(rf"`{word}\b", PAGE.read_text("utf-8"))


@pytest.mark.parametrize("struct", [parse.Document, parse.Group, parse.Source, parse.Request, parse.Expected])
def test_every_key_is_explained(struct: type) -> None:
    page = PAGE.read_text("utf-8")
    names: tuple[str, ...] = struct.__struct_fields__  # type: ignore[attr-defined]
    assert [name for name in names if not re.search(rf"[`{{, ]{name}(`| = )", page)] == []


def test_every_verdict_is_explained() -> None:
    page = PAGE.read_text("utf-8")
    assert all(f"| {outcome} |" in page for outcome in ("caught", "silent", "unseen", "FAILED"))
