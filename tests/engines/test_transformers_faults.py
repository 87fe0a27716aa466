from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch

import kvcanary
from kvcanary.config import CanaryConfig
from kvcanary.events import ViolationDetected
from kvcanary.testing import EventRecorder
from tests.engines.serving import Served, serve

pytestmark = pytest.mark.engine

Spoil = Callable[[dict[str, Any]], bool]


def spoil_once(engine: Served, spoil: Spoil) -> list[int]:
    """Let ``spoil`` edit the keywords of one forward, the first for which it returns True."""
    done: list[int] = []
    ios = engine.manager.batch_processor.inputs_and_outputs
    original = ios.get_model_kwargs

    def get_model_kwargs(*args: Any, **kwargs: Any) -> Any:
        keywords = original(*args, **kwargs)
        if not done and spoil(keywords):
            done.append(1)
        return keywords

    ios.get_model_kwargs = get_model_kwargs
    return done


def reads(keywords: dict[str, Any], kind: str, group: int) -> list[torch.Tensor]:
    """Read lists of the rows of a group; none before there is anything to read."""
    entries = keywords["read_index"][group]
    if entries.numel() == 0:
        return []
    ends = keywords["cu_seq_lens_k"][kind].tolist()
    return [entries[first:last] for first, last in pairwise(ends)]


def decoding(keywords: dict[str, Any]) -> bool:
    """Whether at least two rows decode one token each, with a page or more behind them."""
    positions, starts = keywords["position_ids"][0], keywords["cu_seq_lens_q"]
    return len(starts) > 2 and len(starts) - 1 == len(positions) and int(positions.min()) > 16


def swap_pages(kind: str, group: int) -> Spoil:
    def spoil(keywords: dict[str, Any]) -> bool:
        if not decoding(keywords):
            return False
        first, second = reads(keywords, kind, group)[:2]
        first[8:16], second[8:16] = second[8:16].clone(), first[8:16].clone()
        return True

    return spoil


def whole_foreign_table(keywords: dict[str, Any]) -> bool:
    if not decoding(keywords):
        return False
    first, second = reads(keywords, "full_attention", 0)[:2]
    if len(first) > len(second):
        first, second = second, first
    first[:-1] = second[: len(first) - 1]
    return True


def shift_window(keywords: dict[str, Any]) -> bool:
    if not decoding(keywords):
        return False
    row = reads(keywords, "sliding_attention", 0)[0]
    row[:10] = row[1:11].clone()
    return True


def stale_write(keywords: dict[str, Any]) -> bool:
    if not decoding(keywords):
        return False
    keywords["write_index"][0][0] -= 1
    return True


def one_slot_for_two(keywords: dict[str, Any]) -> bool:
    if not decoding(keywords):
        return False
    keywords["write_index"][0][0] = keywords["write_index"][0][1]
    return True


def wrong_position(keywords: dict[str, Any]) -> bool:
    if not decoding(keywords):
        return False
    keywords["position_ids"][0, 0] += 1
    return True


def out_of_the_pool(keywords: dict[str, Any]) -> bool:
    if not decoding(keywords):
        return False
    # Offset 8 of a block in one layer's view lies in another layer: index modulo stride reaches the page.
    reads(keywords, "full_attention", 0)[0][3] += 8
    return True


CASES = [
    ("full", swap_pages("full_attention", 0), {"DIGEST"}),
    ("full", whole_foreign_table, {"REQUEST_DIGEST"}),
    ("mixed", swap_pages("full_attention", 1), {"DIGEST"}),
    ("sliding", swap_pages("sliding_attention", 0), {"POSITION"}),
    ("sliding", shift_window, {"POSITION"}),
    ("full", stale_write, {"TABLE_MISMATCH"}),
    ("sliding", stale_write, {"TABLE_MISMATCH"}),
    ("full", one_slot_for_two, {"TABLE_MISMATCH", "WRITE_FOREIGN"}),
    ("sliding", one_slot_for_two, {"WRITE_FOREIGN"}),
    ("full", wrong_position, {"INPUT_POSITION"}),
    ("full", out_of_the_pool, {"SLOT_RANGE"}),
]


# The two modes differ in who fills the tensors and when, not in what is checked: a few cases tell.
ASYNC = [CASES[i] for i in (0, 5, 9)]


@pytest.mark.parametrize(
    ("asynchronous", "kind", "spoil", "expected"),
    [(False, *case) for case in CASES] + [(True, *case) for case in ASYNC],
)
def test_a_fault_in_the_tables_is_named_with_its_requests(
    asynchronous: bool, kind: str, spoil: Spoil, expected: set[str]
) -> None:
    found = run(kind, lambda engine: spoil_once(engine, spoil), asynchronous=asynchronous)
    assert expected <= {violation.kind for violation in found}
    first = min(violation.forward for violation in found)
    # What the tables say is judged in the very forward that has them.
    assert expected <= {violation.kind for violation in found if violation.forward == first}
    assert all(violation.request for violation in found if violation.forward == first)


def run(kind: str, break_it: Callable[[Served], list[int]], *, asynchronous: bool) -> list[ViolationDetected]:
    recorder = EventRecorder(ViolationDetected)
    config = CanaryConfig(mode="log", scrub_mib_per_step=1.0, redact=False)
    with (
        serve(kind, asynchronous=asynchronous) as engine,
        kvcanary.watch(engine.manager, config=config, observers=[recorder]) as watched,
    ):
        engine.manager.start()
        engine.ask([engine.prompt()])
        assert watched.canary is not None
        assert watched.canary.flush(5)
        assert not recorder.events
        done = break_it(engine)
        engine.ask([engine.prompt(30), engine.prompt(33)], new_tokens=8)
        assert done
    return recorder.of(ViolationDetected)


def test_a_lost_carry_over_is_seen_by_the_scheduler_s_own_ids() -> None:
    def lose(engine: Served) -> list[int]:
        ios = engine.manager.batch_processor.inputs_and_outputs

        def forget(keywords: dict[str, Any]) -> bool:
            if not decoding(keywords):
                return False
            ios.io_pairs[ios.current_pair].device_io.carry_over_ids.fill_(-1)
            return True

        return spoil_once(engine, forget)

    found = run("full", lose, asynchronous=True)
    assert {"INPUT_PLACEHOLDER", "INPUT_TOKEN"} & {violation.kind for violation in found}


@pytest.mark.parametrize("kind", ["full", "sliding", "mixed"])
def test_a_flipped_bit_is_found_by_the_scrub(kind: str) -> None:
    def flip(engine: Served) -> list[int]:
        def spoil(keywords: dict[str, Any]) -> bool:
            if not decoding(keywords):
                return False
            cache = engine.manager.batch_processor.cache
            allocator = next(iter(cache.cache_allocators.values()))
            block = next(iter(allocator.block_table.values()))[0]
            keys = allocator._kv_token_views[allocator.layer_indices[0]][1]
            row = keys[block * allocator.block_physical_stride + 3]
            row.view(torch.int32)[0, 5] ^= 1 << 17
            return True

        return spoil_once(engine, spoil)

    found = run(kind, flip, asynchronous=False)
    assert {violation.kind for violation in found} == {"CONTENT"}
    assert {violation.writer_request for violation in found} <= {"req_1", "req_2"}
