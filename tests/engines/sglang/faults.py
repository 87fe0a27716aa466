"""Faults, planted into a running scheduler between two turns of its loop, or right before a forward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tests.engines.sglang.rig import Rig

_TURN = 15
"""By then all requests decode."""


@dataclass(frozen=True)
class Fault:
    """``plant`` returns the requests that it hurts; ``early``: right before the forward, with its batch."""

    plant: Callable[[Injection], list[str]]
    configurations: frozenset[str]
    early: bool = False


class Injection:
    """One fault in one run."""

    def __init__(self, rig: Rig, fault: str, turns: int = _TURN) -> None:
        self.rig = rig
        self._turns = turns
        self.fault = FAULTS[fault]
        self.victims: list[str] = []
        self.forward = -1
        self.batch: Any = None
        self.canary: Any = None
        self._began = rig.turns
        self._undo: Callable[[], None] | None = None

    @property
    def table(self) -> torch.Tensor:
        found: torch.Tensor = self.rig.scheduler.req_to_token_pool.req_to_token
        return found

    @property
    def running(self) -> list[Any]:
        """Requests that decode, with at least 20 tokens in the cache."""
        return [req for req in self.rig.scheduler.running_batch.reqs if req.kv.req_pool_idx is not None]

    def slots(self, req: Any, start: int, end: int) -> torch.Tensor:
        return self.table[req.kv.req_pool_idx, start:end].to(torch.int64)

    def start(self, canary: Any) -> None:
        """Watch for the moment."""
        self.canary = canary
        runner = self.rig.scheduler.tp_worker.model_runner
        watched = runner.forward

        def forward(forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
            self.batch = forward_batch
            if self.fault.early and self._due(forward_batch.forward_mode.is_decode()):
                self._plant()
            return watched(forward_batch, *args, **kwargs)

        runner.forward = forward
        self._undo = lambda: setattr(runner, "forward", watched)

    def end(self) -> None:
        if self._undo is not None:
            self._undo()

    def turn(self) -> bool:
        """Between two turns of the loop."""
        if not self.fault.early and self._due(decoding=True):
            self._plant()
        return True

    def report(self) -> dict[str, Any]:
        return {"victims": self.victims, "planted": self.forward}

    def _due(self, decoding: bool) -> bool:
        return self.forward < 0 and decoding and self.rig.turns - self._began >= self._turns and len(self.running) >= 3

    def _plant(self) -> None:
        self.forward = self.canary.next_forward
        self.victims = [req.rid if not isinstance(req, str) else req for req in self.fault.plant(self)]


def _extra_free(at: Injection) -> list[Any]:
    victim = at.running[0]
    page = at.rig.scheduler.page_size
    at.rig.scheduler.token_to_kv_pool_allocator.free(at.slots(victim, page, page + 1).clone())
    return [victim]


def _free_twice(at: Injection) -> list[Any]:
    victim = at.running[0]
    page = at.rig.scheduler.page_size
    for _ in range(2):
        at.rig.scheduler.token_to_kv_pool_allocator.free(at.slots(victim, page, page + 1).clone())
    return [victim]


def _stale_entry(at: Injection) -> list[Any]:
    victim, other = at.running[:2]
    at.table[victim.kv.req_pool_idx, 20] = at.table[other.kv.req_pool_idx, 20]
    return [victim]


def _swapped_rows(at: Injection) -> list[Any]:
    one, two = at.running[:2]
    rows = [one.kv.req_pool_idx, two.kv.req_pool_idx]
    at.table[rows] = at.table[rows[::-1]].clone()
    return [one, two]


def _stale_mapping(at: Injection) -> list[Any]:
    victim, other = at.running[:2]
    at.batch.out_cache_loc = at.batch.out_cache_loc.clone()
    at.batch.out_cache_loc[0] = at.slots(other, 20, 21)[0]
    return [victim]


def _wrong_token(at: Injection) -> list[Any]:
    at.batch.input_ids = at.batch.input_ids.clone()
    at.batch.input_ids[0] += 1
    return at.running[:1]


def _shifted_position(at: Injection) -> list[Any]:
    at.batch.positions = at.batch.positions.clone()
    at.batch.positions[0] += 1
    return at.running[:1]


def _flipped_bit(at: Injection) -> list[Any]:
    victim = at.running[1]
    pool = at.rig.scheduler.tp_worker.model_runner.token_to_kv_pool
    pool = getattr(pool, "full_kv_pool", pool)
    pool.v_buffer[-1][at.slots(victim, 20, 21), 1, 3:4].view(torch.int32)
    words = pool.v_buffer[-1][int(at.slots(victim, 20, 21)), 1].view(torch.int32)
    words[3] ^= 1 << 7
    return [victim]


def _lost_draft(at: Injection) -> list[Any]:
    """The draft model's part of a token goes back to what it was before it was written."""
    victim = at.running[1]
    pool = at.rig.scheduler.draft_worker.draft_worker.draft_runner.token_to_kv_pool
    for buffer in (*pool.k_buffer, *pool.v_buffer):
        buffer[at.slots(victim, 20, 21)] = 0
    return [victim]


def _window_freed(at: Injection) -> list[Any]:
    victim = at.running[0]
    length = len(victim.origin_input_ids) + len(victim.output_ids)
    at.rig.scheduler.token_to_kv_pool_allocator.free_swa(at.slots(victim, length - 10, length - 9).clone())
    return [victim]


def _moved_slot(at: Injection) -> list[Any]:
    """No fault: a token moves to another slot, as SGLang moves the accepted ones of a draft tree."""
    req, scheduler = at.running[0], at.rig.scheduler
    place = len(req.origin_input_ids) + 2  # the prompt is the prefix tree's, too
    old, new = at.slots(req, place, place + 1).clone(), scheduler.token_to_kv_pool_allocator.alloc(1).clone()
    scheduler.tp_worker.model_runner.token_to_kv_pool.move_kv_cache(new, old)
    at.table[req.kv.req_pool_idx, place] = new[0]
    scheduler.token_to_kv_pool_allocator.free(old)
    return [req]


def _nothing(_: Injection) -> list[Any]:
    """No fault."""
    return []


def _unscheduled(at: Injection) -> list[Any]:
    """No fault: the model runs without a scheduled batch, as it does for warm-up and graph capture."""
    at.rig.scheduler.tp_worker.model_runner.forward(at.batch)
    return [] if at.forward == at.canary.next_forward else at.running


_ALL = frozenset({"tokens", "pages", "window"})
FAULTS: dict[str, Fault] = {
    "extra_free": Fault(_extra_free, frozenset({"tokens", "pages"})),
    "free_twice": Fault(_free_twice, frozenset({"tokens", "pages"})),
    "stale_entry": Fault(_stale_entry, _ALL),
    "swapped_rows": Fault(_swapped_rows, frozenset({"tokens", "pages"})),
    "stale_mapping": Fault(_stale_mapping, frozenset({"tokens", "pages"}), early=True),
    "wrong_token": Fault(_wrong_token, frozenset({"tokens"}), early=True),
    "shifted_position": Fault(_shifted_position, frozenset({"tokens"}), early=True),
    "flipped_bit": Fault(_flipped_bit, _ALL | {"drafts"}),
    "lost_draft": Fault(_lost_draft, frozenset({"drafts"})),
    "moved_slot": Fault(_moved_slot, frozenset({"tokens"})),
    "none": Fault(_nothing, frozenset()),
    "unscheduled": Fault(_unscheduled, frozenset({"tokens"})),
    "window_freed": Fault(_window_freed, frozenset({"window"})),
}
