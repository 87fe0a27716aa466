"""What the pages name exists: settings, commands and their options, make's targets, files, modules."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from kvcanary.config import CanaryConfig

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
EVERY_PAGE = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
KUBERNETES = {"KVCANARY_SERVICE_HOST", "KVCANARY_PORT_9464_TCP"}
SETTINGS = {f"KVCANARY_{name.upper()}" for name in CanaryConfig.__struct_fields__}


def commands() -> dict[str, set[str]]:
    """Each command's options, as the made reference has them."""
    page = (ROOT / "docs" / "reference" / "cli.md").read_text("utf-8")
    sections = re.split(r"^## kvcanary (\w+)$", page, flags=re.MULTILINE)[1:]
    return {
        name: set(re.findall(r"^\| `(--[\w-]+)", body, re.MULTILINE))
        for name, body in zip(sections[::2], sections[1::2], strict=True)
    }


COMMANDS = commands()


@EVERY_PAGE
def test_every_setting_that_a_page_names_exists(page: Path) -> None:
    named = set(re.findall(r"\bKVCANARY_[A-Z0-9_]*[A-Z0-9]\b", page.read_text("utf-8")))
    assert named - KUBERNETES <= SETTINGS


@EVERY_PAGE
def test_every_command_and_option_that_a_page_shows_exists(page: Path) -> None:
    text = page.read_text("utf-8")
    shown = re.findall(r"`kvcanary (?!watches )([a-z]\w*)([^\n`]*)`", text)  # that one is a line of a log
    for fence in re.findall(r"^```(?:bash|console|text)?\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        shown += re.findall(r"^(?:\$ )?kvcanary ([a-z]\w*)([^\n#]*)", fence, re.MULTILINE)
    wrong = [
        (name, word)
        for name, rest in shown
        for word in [name, *re.findall(r"(?<!\S)--[\w-]+", rest)]
        if name not in COMMANDS or (word != name and word not in COMMANDS[name])
    ]
    assert wrong == []


@EVERY_PAGE
def test_every_target_of_make_that_a_page_shows_exists(page: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))
    shown = re.findall(r"(?:^|`)make ([a-z][a-z-]*)(?=[ `\n])", page.read_text("utf-8"), re.MULTILINE)
    assert set(shown) <= targets


@EVERY_PAGE
def test_every_file_of_the_repository_that_a_page_names_exists(page: Path) -> None:
    named = set(re.findall(r"`((?:kvcanary|tests|docs)/[\w/.-]+)`", page.read_text("utf-8")))
    assert {name for name in named if not (ROOT / name).exists()} == set()


@EVERY_PAGE
def test_every_module_and_name_of_the_package_that_a_page_imports_exists(page: Path) -> None:
    lines = re.findall(r"^ *from (kvcanary[\w.]*) import ([\w, ]+)$", page.read_text("utf-8"), re.MULTILINE)
    named = {(module, name.strip().split()[0]) for module, names in lines for name in names.split(",")}
    missing = {
        (module, name)
        for module, name in named
        if not hasattr(importlib.import_module(module), name) and not has_module(f"{module}.{name}")
    }
    assert missing == set()


def has_module(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


def test_the_reference_lists_options_for_these_tests_to_know() -> None:
    assert {"demo", "selftest", "simulate", "bench", "journal", "replay"} <= set(COMMANDS)
    assert "--check" in COMMANDS["replay"]
