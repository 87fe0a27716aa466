"""The reference follows the code: made pages are up to date, and nothing that can be reported is without a word."""

from __future__ import annotations

import inspect
import json
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from kvcanary.engines import base
from kvcanary.observers import explain_ownership, ownership, ownership_evidence, ownership_transfers
from kvcanary.observers.explain import docs_link
from kvcanary.record import Kind

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted([*ROOT.glob("*.md"), *DOCS.rglob("*.md")])
FENCE = re.compile(r"^ *(?P<fence>`{3,}).*?^ *(?P=fence) *$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\((?P<page>[^)\s#:]*)#(?P<anchor>[^)\s]+)\)")


def text(page: Path) -> str:
    return FENCE.sub("", page.read_text("utf-8"))


def anchors(page: Path) -> set[str]:
    """The anchors that a host of Markdown gives to a page's headings."""
    headings = re.findall(r"^#+ (.+?) *$", text(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def section(page: Path, heading: str) -> str:
    pattern = rf"^#+ {re.escape(heading)}\n(?P<body>.*?)(?=^#|\Z)"
    found = re.search(pattern, text(page), re.MULTILINE | re.DOTALL)
    assert found is not None, f"{page.name} has no section {heading}"
    return found["body"]


LEDGER = (ownership, ownership_evidence, ownership_transfers)


def in_sources(modules: tuple[ModuleType, ...], pattern: str) -> set[str]:
    """What a pattern finds in sources: names that stand there as literals and nowhere else."""
    return {name for module in modules for name in re.findall(pattern, inspect.getsource(module), re.MULTILINE)}


def ownership_kinds() -> set[str]:
    """Kinds that the ledger reports, and kinds that it has words for."""
    reported = in_sources(LEDGER, r"violated\(\s*\"([A-Z_]+)\"")
    assert reported
    return reported | in_sources((explain_ownership,), r"^    \"([A-Z_]+)\": \(")


KINDS = sorted({kind.name for kind in Kind} | ownership_kinds())


def test_made_pages_and_shown_examples_are_up_to_date() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "docs.generate", "--check"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.stderr == ""
    assert done.stdout == "", "run `python -m docs.generate`"
    assert done.returncode == 0


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_has_a_section_where_its_incidents_point(kind: str) -> None:
    page, _, anchor = docs_link(kind).partition("#")
    assert anchor in anchors(DOCS / page)
    body = section(DOCS / page, kind)
    assert [word for word in ("**Means.**", "**Usual causes.**", "**Look next.**") if word not in body] == []


def test_checks_names_every_kind_role_count_and_reason() -> None:
    from kvcanary.state import Check, Reason, Role

    page = text(DOCS / "reference" / "checks.md")
    words = {item.name.lower() for names in (Role, Check, Reason) for item in names}
    assert {word for word in words if f"`{word}`" not in page} == set()
    assert {kind for kind in KINDS if f"[{kind}](../violations.md#{kind.lower()})" not in page} == set()


def test_checks_names_every_fact_and_what_needs_it() -> None:
    body = section(DOCS / "reference" / "checks.md", "What needs which facts")
    assert {fact for fact in base.FACTS if f"`{fact}`" not in body} == set()
    rows = [line for line in body.splitlines() if line.startswith("| [")]
    told = {
        kind: set(re.findall(r"`(\w+)`", row.split("|")[2]))
        for row in rows
        for kind in re.findall(r"\[([A-Z_]+)\]", row)
    }
    assert told == {kind: set(facts) for kind, facts in base._NEEDS.items()}


def test_checks_names_every_hazard() -> None:
    hazards = in_sources(LEDGER, r"hazard\(\s*\"(\w+)\"")
    body = section(DOCS / "reference" / "checks.md", "Hazards")
    assert set(re.findall(r"^\| `(\w+)` \|", body, re.MULTILINE)) == hazards


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_to_sections_lead_somewhere(page: Path) -> None:
    links = [(link["page"], link["anchor"]) for link in LINK.finditer(text(page))]
    targets = {(page.parent / name if name else page, anchor) for name, anchor in links}
    assert {anchor for target, anchor in targets if anchor not in anchors(target)} == set()


def test_every_page_is_on_the_map() -> None:
    index = text(DOCS / "index.md")
    names = {page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md")} - {"index.md"}
    assert {name for name in names if f"({name})" not in index} == set()


def test_the_schema_describes_every_event_that_a_log_or_a_journal_can_hold() -> None:
    schema = json.loads((DOCS / "reference" / "events.schema.json").read_text("utf-8"))
    events = text(DOCS / "reference" / "events.md")
    tags = {
        item["$ref"].rpartition("/")[2]: schema["$defs"][item["$ref"].rpartition("/")[2]] for item in schema["anyOf"]
    }
    assert tags
    for name, definition in tags.items():
        (tag,) = definition["properties"]["type"]["enum"]
        assert f"### {name}\n\n`{tag}`" in events
