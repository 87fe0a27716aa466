"""A flood of one kind hides no other kind, and nothing of it is lost from the counts."""

from __future__ import annotations

import time

import torch

from kvcanary.batch import ForwardBatch, GroupBatch, PageTable
from kvcanary.canary import Canary
from kvcanary.config import CanaryConfig
from kvcanary.events import IncidentOpened, IncidentUpdated, SnapshotTaken, ViolationDetected
from kvcanary.layout import AttentionGroup, KVSource, PoolLayout
from kvcanary.testing import EventRecorder

SLOTS = 1 << 20
QUOTA = 64


class Flood:
    """A pool of a million slots, full of one request's tokens."""

    def __init__(self) -> None:
        self.recorder = EventRecorder(ViolationDetected, SnapshotTaken, IncidentOpened, IncidentUpdated)
        self.canary = Canary(CanaryConfig(mode="log", ring_quota_per_kind=QUOTA), observers=[self.recorder]).start()
        self.pool = torch.zeros(SLOTS, 1, 4, dtype=torch.uint8)
        group = AttentionGroup("full", "full", SLOTS, 1, (KVSource.from_view("kv", self.pool),))
        self.canary.bind(PoolLayout((group,)), max_tokens=SLOTS, max_batch_rows=2, max_rows=2)
        self.canary.arm()
        self.row = self.canary.admit("a")
        self.canary.alloc("full", "a", torch.arange(SLOTS))
        self.slots = torch.arange(SLOTS - 1)
        with self.canary.step(), self.canary.forward(self.batch(0, self.slots)):
            pass

    def batch(self, context: int, writes: torch.Tensor) -> ForwardBatch:
        return ForwardBatch(
            input_ids=torch.ones(len(writes), dtype=torch.int64),
            query_start_loc=torch.tensor([0, len(writes)]),
            context_lens=torch.tensor([context]),
            request_rows=torch.tensor([self.row]),
            groups=(GroupBatch(slot_mapping=writes, table=PageTable(entries=self.slots[None, :], unit="slot")),),
        )

    def decode(self) -> None:
        context = SLOTS - 1
        self.slots = torch.arange(SLOTS)
        with self.canary.step(), self.canary.forward(self.batch(context, self.slots[-1:])):
            pass


def test_a_million_violations_of_one_kind_do_not_hide_one_of_another() -> None:
    flood = Flood()
    canary, state = flood.canary, flood.canary.state
    state.groups[0].links[1:-1, 0] += 1 << 32  # every record claims the position after its own, but the first ...
    state.groups[0].links[0] = 0  # ... whose is gone
    flood.decode()
    assert canary.flush(30)
    assert canary.bus.flush(time.monotonic() + 30)
    counts = flood.recorder.of(SnapshotTaken)[-1].violations
    assert counts == {"POSITION": SLOTS - 2, "UNWRITTEN": 1}
    told = [violation.kind for violation in flood.recorder.of(ViolationDetected)]
    assert told.count("UNWRITTEN") == 1
    assert told.count("POSITION") == QUOTA
    assert flood.recorder.of(SnapshotTaken)[-1].violations_dropped == SLOTS - 2 - QUOTA
    canary.stop(5)
