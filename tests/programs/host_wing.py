"""What an aggregator or a replay does, in an environment that has no torch: prints one JSON object for the test."""

from __future__ import annotations

import asyncio
import importlib
import json
import sys
import threading
import time
from pathlib import Path

import kvcanary

# The imports are the point: each of these must work without torch.
from kvcanary import bus, config, events, facts, mailbox, observers, streams, testing, wire  # noqa: F401
from kvcanary.observers import health, log, stats, swa_divergence, violations  # noqa: F401

HEAVY = ("numpy", "torch", "triton")
REQUEST = "chat-7"


def importable(module: str) -> bool:
    try:
        importlib.import_module(module)
    except ModuleNotFoundError:
        return False
    return True


def publish(the_bus: bus.Bus) -> None:
    """From a thread of its own, as a drain does."""
    the_bus.begin_run(events.RunStarted(run="r1", origin=events.Origin(engine="replay"), mode="log"))
    found = events.ViolationDetected(
        kind="CONTENT", role="seal", group="full", slot=5, page=1, request=REQUEST, forward=3
    )
    decoded = events.json_codec().decode(events.json_codec().encode(found))
    the_bus.publish([decoded])
    the_bus.end_run("done")


async def main(file: Path) -> dict[str, object]:
    seen: list[str] = []
    opened: list[events.IncidentOpened] = []

    @kvcanary.observer
    def note(event: events.Event) -> None:
        seen.append(events.event_name(event))

    @kvcanary.observer
    async def page_somebody(event: events.IncidentOpened) -> None:
        await asyncio.sleep(0)
        opened.append(event)

    recorder = testing.EventRecorder()
    the_bus = bus.Bus([violations.ViolationsFold("log", mailbox.Mailbox())])
    for sink in (note, page_somebody, recorder, log.LogSink(str(file))):
        the_bus.subscribe(sink)
    drain = threading.Thread(target=publish, args=(the_bus,))
    drain.start()
    drain.join()
    flushed = await asyncio.to_thread(the_bus.flush, time.monotonic() + 10)
    await asyncio.to_thread(the_bus.close, time.monotonic() + 10)

    return {
        "importable": [name for name in HEAVY if importable(name)],
        "flushed": flushed,
        "seen": seen,
        "recorded": [events.event_name(event) for event in recorder.events],
        "requests": [event.requests for event in opened],
        "violation": testing.assert_violation(recorder.events, kind="CONTENT").request,
        "origin": events.__file__,
    }


log_file = Path("events.jsonl")
result = asyncio.run(main(log_file))
result["log"] = [json.loads(line) for line in log_file.read_text("utf-8").splitlines()]
json.dump(result, sys.stdout)
