"""The journal of a canary: switched on by settings, written before an error is seen, and ended with its process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvcanary.config import CanaryConfig
from kvcanary.errors import CanaryStalledError, ConfigError, KVCorruptionError
from kvcanary.events import IncidentOpened, RunStopped
from kvcanary.journal.gate import Gate
from kvcanary.journal.reader import JournalFile, find_files
from kvcanary.journal.sink import Journal
from kvcanary.mailbox import Mailbox, Raise
from tests.canary.conftest import Bench

ROOT = Path(__file__).parents[2]


@pytest.fixture
def make_bench(tmp_path: Path) -> Iterator[Callable[..., Bench]]:
    made: list[Bench] = []

    def make(**settings: Any) -> Bench:
        made.append(Bench(**{"journal": str(tmp_path / "journal"), **settings}))
        return made[-1]

    yield make
    for bench in made:
        bench.canary.stop(5)


def corrupt(bench: Bench) -> None:
    bench.engine.admit("a", 9)
    bench.engine.step()
    bench.engine.flip_bit("a", 3)
    for _ in range(2):
        bench.engine.step()


def incidents(folder: Path) -> list[str]:
    with JournalFile(*find_files(folder)) as file:
        return [event.kind for event in file.events() if isinstance(event, IncidentOpened)]


@pytest.mark.parametrize("level", ["incidents", "all"])
def test_the_journal_has_the_incident_when_the_error_is_seen(
    make_bench: Callable[..., Bench], tmp_path: Path, level: str
) -> None:
    bench = make_bench(mode="raise", journal_level=level)
    corrupt(bench)
    assert bench.canary.flush(10)
    error = bench.canary.error
    assert isinstance(error, KVCorruptionError)
    assert error.journal_flushed is True
    assert incidents(tmp_path / "journal") == [error.kind]
    (note,) = error.__notes__
    assert note == f"{bench.canary.status()['journal']} has what led to it"


def test_without_a_journal_an_error_says_nothing_of_one() -> None:
    bench = Bench(mode="raise")
    corrupt(bench)
    assert bench.canary.flush(10)
    error = bench.canary.error
    bench.canary.stop(5)
    assert isinstance(error, KVCorruptionError)
    assert error.journal_flushed is None


def test_a_disk_that_does_not_answer_delays_an_error_by_the_deadline_only(
    make_bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    blocked = threading.Event()
    monkeypatch.setattr("kvcanary.journal.store.Store.write", lambda *_: blocked.wait(30))
    bench = make_bench(mode="raise", flush_deadline_s=0.3)
    corrupt(bench)
    end = time.monotonic() + 20
    while bench.canary.error is None:
        assert time.monotonic() < end
        time.sleep(0.01)
    error = bench.canary.error
    blocked.set()
    assert isinstance(error, KVCorruptionError)
    assert error.journal_flushed is False
    assert "did not take, within 0.3 s, what led to it" in error.__notes__[0]


def test_an_error_that_is_found_while_stopping_is_seen_after_it(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench(mode="raise")
    corrupt(bench)
    bench.canary.stop(10)
    error = bench.canary.error
    assert isinstance(error, KVCorruptionError)
    assert error.journal_flushed is True


def test_flush_is_true_once_everything_is_on_disk(make_bench: Callable[..., Bench], tmp_path: Path) -> None:
    bench = make_bench(journal_level="all")
    bench.engine.admit("a", 9)
    bench.engine.step()
    assert bench.canary.flush(10)
    with JournalFile(*find_files(tmp_path / "journal")) as file:
        assert file.last_seq == bench.canary.bus.seq
        assert file.stopped is None


def test_stopping_writes_the_rest_and_ends_the_file(make_bench: Callable[..., Bench], tmp_path: Path) -> None:
    bench = make_bench(journal_level="all")
    bench.engine.admit("a", 9)
    bench.engine.step()
    report = bench.canary.stop(10)
    assert report.clean
    with JournalFile(*find_files(tmp_path / "journal")) as file:
        kept = list(file.events())
    assert isinstance(kept[-1], RunStopped)
    assert len(kept) == report.events == report.sinks["journal"].delivered


def test_a_directory_that_cannot_be_written_refuses_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="no directory that can be written"):
        Bench(journal=str(tmp_path / "file"))


def test_a_file_must_fit_its_directory() -> None:
    with pytest.raises(ConfigError, match=r"journal_file_mib is 10; expected at most journal_dir_mib, which is 5"):
        CanaryConfig(mode="log", journal_file_mib=10, journal_dir_mib=5)


def test_settings_come_from_the_environment() -> None:
    config = CanaryConfig.from_env(
        {
            "KVCANARY_MODE": "log",
            "KVCANARY_JOURNAL": "runs",
            "KVCANARY_JOURNAL_RING_MIB": "2",
            "KVCANARY_JOURNAL_LEVEL": "all",
        }
    )
    assert (config.journal, config.journal_ring_mib, config.journal_level) == ("runs", 2.0, "all")


def test_every_kind_of_error_is_held_and_keeps_its_order(tmp_path: Path) -> None:
    mailbox, journal = Mailbox(), Journal(tmp_path)
    gate = Gate(journal, mailbox, 10)
    first, second = CanaryStalledError("first"), CanaryStalledError("second")
    for error in (first, second):
        mailbox.post(Raise(error))
    seen = [mailbox.error]
    assert gate.holding
    end = time.monotonic() + 10
    while gate.settle():
        assert time.monotonic() < end
    seen.append(mailbox.error)
    assert seen == [None, first]
    journal.finish()
    assert journal.wait(time.monotonic() + 10)


def test_an_error_that_comes_with_the_last_event_is_seen_after_the_end(tmp_path: Path) -> None:
    mailbox, journal = Mailbox(), Journal(tmp_path)
    gate = Gate(journal, mailbox, 10)
    error = KVCorruptionError("late", kind="CONTENT")
    mailbox.post(Raise(error))
    journal.finish()
    assert journal.wait(time.monotonic() + 10)
    gate.release()
    assert (mailbox.error, error.journal_flushed, gate.holding) == (error, True, False)


# --- processes ------------------------------------------------------------------------------------------------

PREAMBLE = """
import os, signal, sys, time, warnings
from kvcanary.config import CanaryConfig
from tests.canary.conftest import Bench

bench = Bench(journal=sys.argv[1], journal_level="all")
bench.engine.admit("a", 9)
bench.engine.step()
"""


def run(folder: Path, program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", PREAMBLE + textwrap.dedent(program), folder],
        check=False,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=100,
    )


def complete(folder: Path) -> bool:
    with JournalFile(*find_files(folder)) as file:
        kept = [event.seq for event in file.events()]
        return file.stopped is not None and file.gaps() == [] and kept == list(range(1, len(kept) + 1))


def test_a_forked_child_leaves_the_file_to_its_parent(tmp_path: Path) -> None:
    done = run(
        tmp_path,
        """
        warnings.simplefilter("ignore")
        child = os.fork()
        if child == 0:
            bench.canary.stop()
            print(bench.canary.flush(1))
            sys.exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        for _ in range(20):
            bench.engine.step()
        print(bench.canary.flush(20), bench.canary.stop(20).clean)
        """,
    )
    assert (done.returncode, done.stdout.split()) == (0, ["False", "True", "True"]), done.stderr
    assert complete(tmp_path)


def test_a_keyboard_interrupt_loses_nothing(tmp_path: Path) -> None:
    done = run(
        tmp_path,
        """
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        signal.signal(signal.SIGALRM, signal.default_int_handler)
        try:
            while True:
                bench.engine.step()
                bench.canary.flush(20)
        except KeyboardInterrupt:
            print(bench.canary.flush(20))
        """,
    )
    assert (done.returncode, done.stdout.split()) == (0, ["True"]), done.stderr
    assert complete(tmp_path)  # the exit of the interpreter stopped it


def test_a_killed_process_leaves_a_journal_without_an_end(tmp_path: Path) -> None:
    done = run(tmp_path, "print(bench.canary.flush(20), flush=True); os.kill(os.getpid(), signal.SIGKILL)")
    assert (done.returncode, done.stdout.split()) == (-signal.SIGKILL, ["True"])
    with JournalFile(*find_files(tmp_path)) as file:
        assert file.stopped is None
        assert file.gaps() == []
        assert any(type(event).__name__ == "ForwardRetired" for event in file.events())
