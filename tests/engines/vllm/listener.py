"""A sink that vLLM's processes find by its name (``KVCANARY_OBSERVERS``): one JSON line an event, a file a process."""

from __future__ import annotations

import os
from pathlib import Path

import kvcanary
from kvcanary.events import (
    CanaryArmed,
    IncidentOpened,
    OwnershipViolated,
    RunStarted,
    RunStopped,
    SnapshotTaken,
    ViolationDetected,
    json_codec,
)

_CODEC = json_codec()


@kvcanary.observer(queue=1 << 16)
def record(
    event: RunStarted
    | CanaryArmed
    | IncidentOpened
    | OwnershipViolated
    | SnapshotTaken
    | ViolationDetected
    | RunStopped,
) -> None:
    """Append the event to a file of this process."""
    with (Path(os.environ["TEST_VLLM_OUT"]) / f"{os.getpid()}.jsonl").open("ab") as lines:
        lines.write(_CODEC.encode(event) + b"\n")
