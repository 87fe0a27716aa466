"""How a stream ends when nobody ends it: Ctrl-C, exits, forks, copies; each in a process of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest

TIMEOUT_S = 60.0

PRELUDE = """
import asyncio, os, sys, threading, time, warnings
from collections import deque
from kvcanary.bus import Bus
from kvcanary.events import Event, HazardCounted, Origin, RunStarted, RunStopped
from kvcanary.observers.base import observer
from kvcanary.pipeline import Drain

class Source:
    in_flight = False
    def __init__(self): self.runs, self.ready = deque([RunStarted(run="r", origin=Origin())]), deque()
    def collect(self): return [self.ready.popleft() for _ in range(len(self.ready))]
    def next_run(self): return self.runs.popleft() if self.runs else None

def say(*words): os.write(1, (" ".join(map(str, words)) + "\\n").encode())

class Counter:
    name, interests = "counter", (Event,)
    def __init__(self): self.seen = []
    def handle_batch(self, events):
        self.seen += [type(event).__name__ for event in events]
        if "RunStopped" in self.seen: say("counted", len(self.seen), events[-1].reason, events[-1].undelivered)

def tick(count): return [HazardCounted(hazard="x", count=n) for n in range(count)]

source, counter = Source(), Counter()
bus = Bus()
bus.subscribe(counter)
drain = Drain(source, bus)
drain.start()
"""


def script(body: str) -> str:
    return PRELUDE + textwrap.dedent(body)


def run(body: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", script(body)], capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )


def interrupt(body: str) -> tuple[int, list[str], str, float]:
    """Run until it says ``ready``, then press Ctrl-C; its status, words and errors, and how long it still took."""
    process = subprocess.Popen(
        [sys.executable, "-c", script(body)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    with process:
        try:
            assert process.stdout.readline() == "ready\n"
            began = time.monotonic()
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=TIMEOUT_S)
        finally:
            process.kill()
    return process.returncode, out.split("\n"), err, time.monotonic() - began


def test_ctrl_c_in_the_middle_of_everything_still_delivers_what_is_queued() -> None:
    status, out, err, _ = interrupt(
        """
        @observer(name="slow")
        def slow(event: HazardCounted) -> None:
            time.sleep(0.0005)

        bus.subscribe(slow)
        source.ready.extend(tick(500))
        drain.wake()
        drain.flush(10)
        say("ready")
        while True:
            for one in tick(8):
                source.ready.append(one)
                drain.wake()
            drain.flush(10)  # else it makes more than the slow one can take before the deadline
        """
    )
    assert status == -signal.SIGINT
    assert any(line.startswith("counted ") and line.endswith("stopped {}") for line in out)
    assert "KeyboardInterrupt" in err
    assert "Exception ignored" not in err


def test_ctrl_c_on_an_event_loop_ends_async_sinks_within_the_deadline() -> None:
    status, out, err, seconds = interrupt(
        """
        async def main():
            @observer(name="waits")
            async def waits(event: Event) -> None:
                await asyncio.Event().wait()
            bus.subscribe(waits)
            source.ready.extend(tick(50))
            drain.wake()
            await asyncio.to_thread(drain.flush, 10)
            say("ready")
            try:
                await asyncio.Event().wait()
            finally:
                say("cancelled")

        try:
            asyncio.run(main())
        finally:
            report = drain.stop(2.0)
            say("report", report.sinks["waits"].state, report.sinks["waits"].undelivered)
        """
    )
    assert status == -signal.SIGINT
    assert "cancelled" in out
    assert "report cancelled 51" in out
    assert any(line.startswith("counted 52 stopped") for line in out)
    assert "Task was destroyed" not in err
    assert seconds < 20


def test_ctrl_c_beside_a_sink_that_blocks_for_ever_keeps_the_deadline() -> None:
    status, out, _, seconds = interrupt(
        """
        gate = threading.Event()

        @observer(name="stuck")
        def stuck(event: Event) -> None:
            gate.wait(60)

        bus.subscribe(stuck)
        source.ready.extend(tick(3))
        drain.wake()
        drain.flush(10)
        try:
            try:
                say("ready")
                time.sleep(60)
            finally:
                drain.stop(2.0)
        except KeyboardInterrupt:
            say("interrupted")
        """
    )
    assert status == 0
    assert "interrupted" in out
    assert any(line.startswith("counted 5 stopped {'stuck':") for line in out)
    assert seconds < 10


def test_a_forgotten_drain_with_a_sink_that_blocks_for_ever_ends_within_its_deadline() -> None:
    began = time.monotonic()
    done = run(
        """
        @observer(name="stuck")
        def stuck(event: Event) -> None:
            threading.Event().wait()

        bus.subscribe(stuck)
        source.ready.extend(tick(3))
        drain.wake()
        drain.flush(10)
        """
    )
    assert done.returncode == 0
    assert "counted 5 stopped {'stuck': 4}" in done.stdout
    assert done.stderr == ""
    assert time.monotonic() - began < 40


def test_sys_exit_in_a_sink_ends_that_sink_and_nothing_else() -> None:
    done = run(
        """
        @observer(name="quits")
        def quits(event: HazardCounted) -> None:
            sys.exit(3)

        quitter = bus.subscribe(quits)
        source.ready.extend(tick(5))
        drain.wake()
        drain.flush(10)
        quitter.wait(10)
        source.ready.extend(tick(5))
        report = drain.stop(10)
        say("quits", report.sinks["quits"].state, report.sinks["quits"].delivered)
        """
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "quits cancelled 0" in done.stdout
    assert "counted 12 stopped" in done.stdout


def test_sys_exit_in_an_async_sink_does_not_end_the_servers_loop() -> None:
    done = run(
        """
        async def main():
            @observer(name="quits")
            async def quits(event: HazardCounted) -> None:
                raise SystemExit(3)
            subscription = bus.subscribe(quits, private=True)
            source.ready.extend(tick(5))
            drain.wake()
            await asyncio.to_thread(subscription.wait, 10)
            say("the loop goes on")

        asyncio.run(main())
        drain.stop(10)
        """
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "the loop goes on" in done.stdout


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this platform cannot fork")
def test_a_forked_child_says_once_that_it_does_nothing_and_exits_at_once() -> None:
    done = run(
        """
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
        if child == 0:
            drain.submit(tick(1)[0])
            drain.stop()
            say("child", drain.running, drain.flush(1))
            sys.exit(0)
        say("status", os.waitpid(child, 0)[1])
        source.ready.extend(tick(2))
        drain.wake()
        drain.flush(10)
        """
    )
    assert done.returncode == 0
    assert "child False False" in done.stdout
    assert "status 0" in done.stdout
    assert "counted 4 stopped {}" in done.stdout
    assert done.stderr.count("was forked from one with a running canary; its copy does nothing") == 1


def test_a_spawned_child_has_a_stream_of_its_own() -> None:
    """Nothing is inherited, so the child's run has its own first event and its own numbers."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.programs.spawned"], capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    parent, child = [line.split() for line in sorted(done.stdout.splitlines(), reverse=True)]
    assert parent[1:] == ["1", "2", "3", "4"]
    assert child[1:] == ["1", "2", "3"]


def test_a_sink_that_blocks_for_ever_cannot_keep_the_interpreter_from_its_other_exit_hooks() -> None:
    done = run(
        """
        import atexit

        @observer(name="stuck")
        def stuck(event: Event) -> None:
            threading.Event().wait()

        bus.subscribe(stuck)
        drain.flush(10)
        atexit.register(lambda: say("hook before"))
        drain.stop(0.3)
        atexit.register(lambda: say("hook after"))
        """
    )
    assert done.returncode == 0
    assert "hook before" in done.stdout
    assert "hook after" in done.stdout
