"""The documentation's examples: those marked ``python test`` are run, all others compile, and links lead somewhere."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
FENCE = re.compile(
    r"^(?P<indent> *)(?P<fence>`{3,})(?P<info>[^`\n]*)\n(?P<body>.*?)^(?P=indent)(?P=fence) *$",
    re.MULTILINE | re.DOTALL,
)
LINK = re.compile(r"\[[^\]\n]*\]\((?P<target>[^)\s]+)\)")


class Example(NamedTuple):
    page: str
    line: int
    tags: frozenset[str]
    code: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def examples(page: str, text: str) -> Iterator[Example]:
    """The ```python blocks of a page; ``line`` is where the code begins."""
    for block in FENCE.finditer(text):
        language, *tags = block["info"].split() or [""]
        if language == "python":
            line = text.count("\n", 0, block.start("body")) + 1
            yield Example(page, line, frozenset(tags), textwrap.dedent(block["body"]))


def all_examples() -> list[Example]:
    return [found for page in PAGES for found in examples(str(page.relative_to(ROOT)), page.read_text("utf-8"))]


def compile_example(example: Example) -> None:
    """Compile it on its own lines, so that a traceback points into the page."""
    code = "\n" * (example.line - 1) + example.code
    compile(code, str(ROOT / example.page), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)


def run_example(example: Example, folder: Path) -> None:
    """Run it in a process and a folder of its own, warnings being errors, without the caller's settings.

    Raises:
        AssertionError: with what it printed, if it fails.
    """
    program = folder / "example.py"
    program.write_text("\n" * (example.line - 1) + example.code, "utf-8")
    settings = {key: value for key, value in os.environ.items() if not key.startswith("KVCANARY_")}
    settings |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "error", program],
        check=False,
        cwd=folder,
        env=settings,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, f"{example} ended with {done.returncode}:\n{done.stdout}"


@pytest.mark.parametrize("example", all_examples(), ids=str)
def test_an_example_compiles_and_runs_if_it_is_marked_so(example: Example, tmp_path: Path) -> None:
    compile_example(example)
    if "test" in example.tags:
        run_example(example, tmp_path)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_to_files_lead_somewhere(page: Path) -> None:
    targets = {link["target"].partition("#")[0] for link in LINK.finditer(FENCE.sub("", page.read_text("utf-8")))}
    local = {target for target in targets if target and ":" not in target}
    assert {target for target in local if not (page.parent / target).exists()} == set()


PAGE = """
Text, `inline`, and

```python test
print("runs")
```

- nested:

  ```python
  await nothing()
  ```

````markdown
```python test
inside another block
```
````

```text
not python
```
"""


def test_only_python_blocks_are_found_with_their_tags_and_lines() -> None:
    found = list(examples("page.md", PAGE))
    assert [(example.line, set(example.tags)) for example in found] == [(5, {"test"}), (11, set())]
    assert found[1].code == "await nothing()\n"


def test_a_broken_example_fails_to_compile() -> None:
    with pytest.raises(SyntaxError):
        compile_example(Example("page.md", 1, frozenset(), "def broken(:\n"))


def test_an_example_that_fails_is_shown_with_its_page_and_output(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"page\.md:7 ended with 1:[^$]*line 7[^$]*KeyError"):
        run_example(Example("page.md", 7, frozenset({"test"}), "{}['absent']\n"), tmp_path)
