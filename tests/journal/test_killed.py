"""A process that is killed loses nothing that was acknowledged, and leaves no silent gap."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from kvcanary.events import IncidentOpened, ViolationDetected
from kvcanary.journal.reader import JournalError, JournalFile, find_files

PROGRAM = Path(__file__).parents[1] / "programs" / "journal_writer.py"
MOMENTS = 50
MOST_LINES = 8
LATEST_S = 0.02


class Told(NamedTuple):
    acknowledged: int
    raised: list[str]
    finished: bool


@pytest.fixture(scope="module")
def writers() -> Iterator[subprocess.Popen[str]]:
    """The process that forks writers; it has imported everything once."""
    with subprocess.Popen(
        [sys.executable, PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    ) as process:
        yield process
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(20) == 0


def kill_one(process: subprocess.Popen[str], folder: Path, lines_more: int, delay: float) -> Told:
    """Start a writer, kill it ``delay`` seconds after it said ``lines_more`` lines; what it had said until then."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(f"{folder}\n")
    child, lines = 0, []
    for line in process.stdout:
        word, _, rest = line.strip().partition(" ")
        if word == "P":
            child = int(rest)
        elif word == "Z":
            break
        else:
            lines.append((word, rest))
        if child and len(lines) > lines_more:
            time.sleep(delay)  # a random moment is the point
            os.kill(child, signal.SIGKILL)
            child = 0
    acknowledged = max((int(rest) for word, rest in lines if word == "A"), default=0)
    return Told(acknowledged, [rest for word, rest in lines if word == "R"], ("E", "") in lines)


def test_whatever_was_acknowledged_or_raised_is_in_the_journal_of_a_killed_process(
    writers: subprocess.Popen[str], tmp_path: Path
) -> None:
    chosen = random.Random(7)
    acknowledged = raised = 0
    for moment in range(MOMENTS):
        folder = tmp_path / str(moment)
        told = kill_one(writers, folder, chosen.randrange(MOST_LINES), chosen.uniform(0, LATEST_S))
        assert not told.finished
        acknowledged += told.acknowledged > 0
        raised += len(told.raised)
        check(folder, told)
    # Otherwise the moments were all too early to show anything.
    assert acknowledged > MOMENTS // 2
    assert raised > MOMENTS // 4


def check(folder: Path, told: Told) -> None:
    try:
        (path,) = find_files(folder)
        file = JournalFile(path)
    except JournalError:  # killed before the first commit
        assert told.acknowledged == 0
        assert not told.raised
        return
    with file:
        assert file.gaps() == []
        seqs = [event.seq for event in file.events()]
        assert seqs == list(range(1, len(seqs) + 1))
        assert len(seqs) >= told.acknowledged
        assert file.stopped is None
        if told.raised:
            assert told.raised == ["r1 True"]
            (opened,) = file.findings(type="incident.opened")
            kept = [e for e in file.events() if isinstance(e, (ViolationDetected, IncidentOpened))]
            assert [type(event) for event in kept[:2]] == [ViolationDetected, IncidentOpened]
            assert kept[1].seq == opened.seq
