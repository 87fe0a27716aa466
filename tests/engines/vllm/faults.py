"""Faults planted into the real engine while it serves, each in a watch of its own on an engine that goes on.

``python -m tests.engines.vllm.parts RUNNER faults`` prints a JSON line a fault: what one step found, and all that was
found.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from tests.engines.vllm import serving
from tests.engines.vllm.clean import Mode, engine


@dataclass
class Batch:
    """The index tensors of a forward of one group, before attention or the canary sees them."""

    requests: list[str]
    table: torch.Tensor
    slot_mapping: torch.Tensor


@contextmanager
def next_batch(runner: Any, edit: Callable[[Batch], None]) -> Iterator[None]:
    """Have ``edit`` change the index tensors of the next forward."""
    first = hasattr(runner, "input_batch")
    owner, name = (
        (runner.input_batch.block_table, "compute_slot_mapping")
        if first
        else (
            runner.block_tables,
            "compute_slot_mappings",
        )
    )
    original, done = getattr(owner, name), list[bool]()

    def compute(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        if not done:
            done.append(True)
            if first:
                batch = runner.input_batch
                table = batch.block_table.block_tables[0]
                edit(Batch(list(batch.req_ids), table.block_table.gpu, table.slot_mapping.gpu))
            else:
                names = [runner.req_states.index_to_req_id[row] for row in args[0].tolist()]
                edit(Batch(names, runner.block_tables.input_block_tables[0], result[0]))
        return result

    setattr(owner, name, compute)
    try:
        yield
    finally:
        delattr(owner, name)


class Injection:
    """One engine in the middle of its work, and the request that a fault hits."""

    def __init__(self, llm: Any) -> None:
        self.traffic = serving.Traffic(llm)
        self.victim = ""

    @property
    def manager(self) -> Any:
        """The scheduler's KV cache manager."""
        return self.traffic.scheduler.kv_cache_manager

    def choose(self, *, length: int = 0) -> str:
        """A running request whose newest block is its own and not full, and with so many blocks at least."""
        for request in self.traffic.scheduler.running:
            blocks = self.manager.coordinator.single_type_managers[0].req_to_blocks[request.request_id]
            own = blocks[-1].ref_cnt == 1 and blocks[-1].block_hash is None
            # Not at a block's edge, so that the next token goes into it, and not at the end of its answer.
            inside = 1 < request.num_computed_tokens % 16 < 12
            if own and inside and len(blocks) >= length and request.num_output_tokens < request.max_tokens - 6:
                self.victim = request.request_id
                return self.victim
        raise LookupError("no running request fits")

    def blocks(self, group: int = 0) -> list[int]:
        """The victim's blocks."""
        return list(self.manager.get_block_ids(self.victim)[group])


def swapped_rows(one: Injection) -> None:
    def edit(batch: Batch) -> None:
        one.victim = batch.requests[0]
        batch.table[[0, 1]] = batch.table[[1, 0]].clone()

    with next_batch(one.traffic.runner, edit):
        one.traffic.step()


def stale_row(one: Injection) -> None:
    def edit(batch: Batch) -> None:
        row, other = next(
            (row, other)
            for row in range(len(batch.requests))
            for other in range(len(batch.requests))
            if batch.table[row, 1] != batch.table[other, 1] and batch.table[row, 2] and batch.table[other, 2]
        )
        one.victim = batch.requests[row]
        batch.table[row, 1] = batch.table[other, 1]

    with next_batch(one.traffic.runner, edit):
        one.traffic.step()


def stale_slot_mapping(one: Injection) -> None:
    def edit(batch: Batch) -> None:
        row = batch.requests.index(one.victim)
        batch.slot_mapping[row] -= 1

    one.choose()
    with next_batch(one.traffic.runner, edit):
        one.traffic.step()


def extra_free(one: Injection) -> None:
    one.choose()
    pool = one.manager.block_pool
    pool.free_blocks([pool.blocks[one.blocks()[-1]]])
    one.traffic.step()


def flipped_bit(one: Injection) -> None:
    one.choose(length=2)
    layers = one.traffic.runner.compilation_config.static_forward_context
    _flip(layers["model.layers.2.self_attn.attn"].kv_cache, one.blocks()[0])
    one.traffic.run(steps=3)


def lost_draft_part(one: Injection) -> None:
    one.choose(length=2)
    layers = one.traffic.runner.compilation_config.static_forward_context
    (draft,) = [layer for name, layer in layers.items() if name.startswith("draft_model")]
    draft.kv_cache[one.blocks()[0]] = 0
    one.traffic.run(steps=3)


def wrong_token(one: Injection) -> None:
    """The newest token of the victim gets lost on its way from the sampler to the next forward."""
    one.choose()
    runner = one.traffic.runner
    if hasattr(runner, "input_batch"):
        row = runner.input_batch.req_id_to_index[one.victim]
        runner.input_batch.token_ids_cpu[row, runner.input_batch.num_tokens_no_spec[row] - 1] ^= 1
    else:
        runner.req_states.last_sampled_tokens[runner.req_states.req_id_to_index[one.victim]] ^= 1
    # The token goes in with the first step; in the second the scheduler is asked what it was.
    one.traffic.run(steps=2)


def other_salt(one: Injection) -> None:
    """A request reads a block of another one with the same tokens, from which its cache salt separates it."""
    prompt = serving.Prompts(7).take(1)[0] + list(range(10, 60))
    for salt in ("a", "b"):
        one.traffic.add([prompt], prefix=f"salt-{salt}", salt=salt)
    one.traffic.run(steps=2)

    def edit(batch: Batch) -> None:
        row, other = (
            next(place for place, name in enumerate(batch.requests) if name.startswith(f"salt-{salt}"))
            for salt in ("a", "b")
        )
        one.victim = batch.requests[row]
        batch.table[row, 1] = batch.table[other, 1]

    with next_batch(one.traffic.runner, edit):
        one.traffic.step()


def unused_block(one: Injection) -> None:
    """A table row leads to a block that nobody has been given since the watch began."""
    one.choose(length=2)
    blocks = one.manager.block_pool.blocks
    free = next(block for block in reversed(blocks) if block.ref_cnt == 0 and block.block_hash is None)

    def edit(batch: Batch) -> None:
        batch.table[batch.requests.index(one.victim), 0] = free.block_id

    with next_batch(one.traffic.runner, edit):
        one.traffic.step()


def dropped_write(one: Injection) -> None:
    """The first request's new token is written by no layer."""
    from tests.engines.vllm.attention import Attention

    update = Attention.do_kv_cache_update

    def without_the_first(self: Any, layer: Any, key: Any, value: Any, kv_cache: Any, slot_mapping: Any) -> None:
        slot_mapping = slot_mapping.clone()
        slot_mapping[0] = -1
        update(self, layer, key, value, kv_cache, slot_mapping)

    def note(batch: Batch) -> None:
        one.victim = batch.requests[0]

    Attention.do_kv_cache_update = without_the_first  # type: ignore[method-assign]
    try:
        with next_batch(one.traffic.runner, note):
            one.traffic.step()
    finally:
        Attention.do_kv_cache_update = update  # type: ignore[method-assign]


def window_freed_early(one: Injection) -> None:
    managers = one.manager.coordinator.single_type_managers
    window = next(m for m in managers if type(m).__name__ == "SlidingWindowManager")
    request = max(one.traffic.scheduler.running, key=lambda request: request.num_computed_tokens)
    one.victim = request.request_id
    window._remove_blocks_in_range(one.victim, 0, len(window.req_to_blocks[one.victim]) - 1)
    # The pool hands the newest freed blocks out first: a new prompt is written over them in the next forward.
    one.traffic.add(serving.Prompts(99).take(1), prefix="new")
    one.traffic.step()


def _flip(cache: torch.Tensor, block: int) -> None:
    cache[block, 1, 3].view(torch.int32)[7] ^= 1 << 12


FAULTS = {
    "swapped_rows": swapped_rows,
    "stale_row": stale_row,
    "stale_slot_mapping": stale_slot_mapping,
    "flipped_bit": flipped_bit,
    "dropped_write": dropped_write,
    "wrong_token": wrong_token,
    "other_salt": other_salt,
    "unused_block": unused_block,
}


def inject(llm: Any, fault: Callable[[Injection], None]) -> dict[str, Any]:
    """Serve, plant a fault, say what one step found, serve on to the end."""
    one = Injection(llm)
    # All sealed bytes are read again each step, and a suspicion needs a second look.
    with serving.watched(llm, scrub_mib_per_step=64.0, poison="sample") as (found, watch):
        one.traffic.add(serving.Prompts(5).take(6), max_tokens=14)
        one.traffic.run(steps=4)
        found.catch_up(watch.canary)
        before = list(found.violations)
        fault(one)
        found.catch_up(watch.canary)
        soon = list(found.violations)
        one.traffic.run()
        one.traffic.core.step()
    one.traffic.reset()
    return {
        "fault": fault.__name__,
        "victim": one.victim,
        "before": [event.kind for event in before],
        "soon": sorted({(event.kind, event.request, getattr(event, "part", "")) for event in soon}),
        "end": sorted(found.kinds),
        "answers": len(one.traffic.answers),
    }


def run_all(runner: int) -> Iterator[dict[str, Any]]:
    """All faults on engines of one runner."""
    for mode, faults in (
        (Mode("faults", runner=runner), FAULTS),
        (Mode("draft", runner=runner, draft=True), {"lost_draft_part": lost_draft_part}),
        (
            Mode("windows", runner=runner, windows=True, settings={"enable_prefix_caching": False}),
            {"window_freed_early": window_freed_early},
        ),
        # With prefix caching the engine stumbles over the block that it hands out twice before it is done.
        (Mode("no cache", runner=runner, settings={"enable_prefix_caching": False}), {"extra_free": extra_free}),
    ):
        with engine(mode) as llm:
            for fault in faults.values():
                yield inject(llm, fault)
