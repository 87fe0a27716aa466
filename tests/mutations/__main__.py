"""Takes each check out of a copy of the package, and sees whether a test fails: ``python -m tests.mutations``."""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, NamedTuple

from tests.mutations.removals import REMOVALS, Removal

ROOT = Path(__file__).parents[2]
COPIED = ("kvcanary", "tests", "pyproject.toml")
TIMEOUT_S = 300
EXAMPLES = """\
examples:
  python -m tests.mutations --jobs 4                 every check, four at a time
  python -m tests.mutations --only DIGEST            the checks of one kind
  python -m tests.mutations --json > mutations.json  for a program to read

The exit status is 1 if a check can be removed and no test fails, or if a removal cannot be judged.
"""

_FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+)(?: - (.*))?$", re.MULTILINE)
_BROKEN = re.compile(r"(?:Name|UnboundLocal|Import|ModuleNotFound|Syntax)Error\b")
"""Failures that show a removal which does not run, not one that was noticed."""


class Outcome(NamedTuple):
    """What became of one removal, or of the tests alone. ``detail``: the test that failed, or what went wrong."""

    kind: str
    what: str
    module: str
    result: Literal["passed", "killed", "survived", "error"]
    detail: str
    seconds: float


def judged(removal: Removal) -> Outcome:
    """Run the tests that should notice, on a copy without the check."""
    began = time.monotonic()
    with _copy() as root:
        path = root / "kvcanary" / removal.module
        try:
            changed = removal.apply(path.read_text())
            compile(changed, removal.module, "exec")
        except (OSError, ValueError, SyntaxError) as error:
            return Outcome(*removal[:3], "error", str(error), 0.0)
        path.write_text(changed)
        for stale in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
            stale.unlink()
        code, text = _pytest(root, removal.tests)
    seconds = time.monotonic() - began
    failed = _FAILED.search(text)
    if code == 0:
        return Outcome(*removal[:3], "survived", f"all pass: {' '.join(removal.tests)}", seconds)
    if code == 1 and failed and not _BROKEN.search(failed[2] or ""):
        return Outcome(*removal[:3], "killed", failed[1], seconds)
    return Outcome(*removal[:3], "error", f"pytest ended with {code}: {text[-500:].strip()}", seconds)


def baseline(tests: tuple[str, ...]) -> Outcome:
    """Run tests on a copy as it is: they have to pass, or their failing says nothing."""
    began = time.monotonic()
    with _copy() as root:
        code, text = _pytest(root, tests)
    passed = code == 0
    detail = " ".join(tests) if passed else f"fails without any change: {text[-500:].strip()}"
    return Outcome("", "nothing removed", "", "passed" if passed else "error", detail, time.monotonic() - began)


@contextmanager
def _copy() -> Iterator[Path]:
    """A copy of what the tests need. Compiled files come along: with their times kept, they count."""
    with tempfile.TemporaryDirectory(prefix="kvcanary-mutation-") as name:
        root = Path(name)
        for part in COPIED:
            if (ROOT / part).is_dir():
                shutil.copytree(ROOT / part, root / part)
            else:
                shutil.copy2(ROOT / part, root / part)
        yield root


def _pytest(root: Path, tests: tuple[str, ...]) -> tuple[int, str]:
    """Exit status and output of the tests in a copy, up to the first that fails."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--tb=no", "-p", "no:cacheprovider", *tests]
    # The path comes before an installation of the package, which is the original.
    env = os.environ | {"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    try:
        done = subprocess.run(
            command, cwd=root, env=env, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return -1, f"no end after {TIMEOUT_S} s"
    return done.returncode, done.stdout + done.stderr


def run(removals: Sequence[Removal], jobs: int, told: Callable[[Outcome, int, int], None]) -> list[Outcome]:
    """Judge the tests alone, then all removals, ``jobs`` at a time.

    ``told`` gets each outcome when it is there, how many there are by then, and how many there will be.
    """
    sets = list(dict.fromkeys(removal.tests for removal in removals))
    with ThreadPoolExecutor(jobs) as pool:
        futures = [pool.submit(baseline, tests) for tests in sets] + [pool.submit(judged, one) for one in removals]
        for number, future in enumerate(as_completed(futures), 1):
            told(future.result(), number, len(futures))
    return [future.result() for future in futures]


def main() -> int:
    """Run it."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.mutations",
        description="Remove each check of kvcanary from a copy, and see that a test fails.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    kinds = sorted({removal.kind for removal in REMOVALS})
    parser.add_argument("--only", action="append", choices=kinds, metavar="KIND", help="of one kind; may be repeated")
    parser.add_argument("--jobs", type=int, default=min(2, os.cpu_count() or 1), help="at a time; default: %(default)s")
    parser.add_argument("--json", action="store_true", help="print one JSON object, and the progress on stderr")
    arguments = parser.parse_args()
    if arguments.jobs < 1:
        parser.error(f"--jobs {arguments.jobs}: must be at least 1")
    out = sys.stderr if arguments.json else sys.stdout

    def told(one: Outcome, number: int, count: int) -> None:
        out.write(f"[{number:>3}/{count}] {one.result:<8} {one.kind:<21} {one.what} ({one.seconds:.1f} s)\n")
        out.flush()

    began = time.monotonic()
    chosen = [one for one in REMOVALS if arguments.only is None or one.kind in arguments.only]
    outcomes = run(chosen, arguments.jobs, told)
    seconds = time.monotonic() - began
    counts = Counter(one.result for one in outcomes)
    if arguments.json:
        rows = [one._asdict() for one in outcomes]
        sys.stdout.write(
            json.dumps({"seconds": round(seconds, 1), "counts": counts, "outcomes": rows}, indent=2) + "\n"
        )
    else:
        sys.stdout.write("\n" + table(outcomes))
        sys.stdout.write(
            f"\n{len(chosen)} removals: {counts['killed']} noticed, {counts['survived']} survive, "
            f"{counts['error']} errors; {seconds:.0f} s\n"
        )
    return 1 if counts["survived"] or counts["error"] else 0


def table(outcomes: Sequence[Outcome]) -> str:
    """What became of each removal; what needs a person comes last, in full."""
    good = [one for one in outcomes if one.result == "killed"]
    bad = [one for one in outcomes if one.result in {"survived", "error"}]
    lines = [f"{one.kind:<21} {one.what:<48} {one.result:<8} {one.detail}" for one in good]
    lines += [f"{one.kind:<21} {one.what:<48} {one.result:<8} {one.module}: {one.detail}" for one in bad]
    return "".join(f"{line}\n" for line in lines)


if __name__ == "__main__":
    sys.exit(main())
