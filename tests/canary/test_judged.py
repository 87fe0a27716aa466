"""Pages whose numbers the host does not know: told in device tensors, judged by the owner table."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from kvcanary.errors import BatchError
from tests.canary.conftest import Bench


def pages(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers)


def test_a_double_free_is_found_at_the_next_step_and_names_the_last_owner(bench: Bench) -> None:
    bench.engine.admit("a", 6)
    bench.engine.step()
    for _ in range(2):
        bench.canary.free("full", pages(bench.engine.pages["a"][0]), judged=True)
    bench.engine.admit("b", 3)
    bench.engine.step(["b"])
    found = bench.violations()
    assert [(v.kind, v.request, v.page) for v in found] == [("DOUBLE_FREE", "a", bench.engine.pages["a"][0])]


def test_a_double_allotment_names_the_holder(bench: Bench) -> None:
    bench.engine.admit("a", 6)
    bench.engine.step()
    bench.canary.alloc("full", "", pages(bench.engine.pages["a"][0]), judged=True)
    bench.engine.admit("b", 3)
    bench.engine.step(["b"])
    assert [(v.kind, v.request) for v in bench.violations()] == [("DOUBLE_ALLOC", "a")]


def test_a_row_that_reads_a_page_that_was_freed_is_found_at_its_next_forward(bench: Bench) -> None:
    bench.engine.admit("a", 6)
    bench.engine.step()
    bench.canary.free("full", pages(bench.engine.pages["a"][0]), judged=True)
    bench.engine.step()
    found = bench.violations()
    assert {(v.kind, v.request, v.owner_state) for v in found} == {("UNWRITTEN", "a", "freed")}
    assert len(found) == 4


def test_a_page_for_nobody_belongs_to_whoever_writes_into_it_first(bench: Bench) -> None:
    bench.canary.alloc("full", "", pages(*bench.engine.free_pages[:4]), judged=True)
    for name in ("a", "b"):
        bench.engine.admit(name, 6)
        own, bench.engine.free_pages = bench.engine.free_pages[:2], bench.engine.free_pages[2:]
        bench.engine.pages[name] = own
    bench.engine.step()
    assert bench.violations() == []
    bench.engine.pages["b"][1] = bench.engine.pages["a"][1]
    bench.engine.step(["b"])
    assert ("WRITE_FOREIGN", "b", "a") in {(v.kind, v.request, v.owner_request) for v in bench.violations()}


def test_records_go_along_with_judged_moves(bench: Bench) -> None:
    bench.engine.admit("a", 4)
    bench.engine.step()
    source, target = bench.engine.pages["a"][0], 40
    bench.canary.alloc("full", "a", pages(target), judged=True)
    bench.canary.move("full", pages(source), pages(target), judged=True)
    bench.engine.pool[:, :, target] = bench.engine.pool[:, :, source]
    bench.engine.pages["a"][0] = target
    bench.engine.step()
    assert bench.violations() == []


def test_the_ledger_learns_nothing_of_judged_pages(bench: Bench) -> None:
    bench.engine.admit("a", 4)
    bench.canary.alloc("full", "a", pages(30), judged=True)
    bench.canary.reuse("full", "a", pages(30), judged=True)
    bench.canary.own("full", "a", pages(30), judged=True)
    bench.canary.free("full", pages(30), judged=True)
    bench.engine.step()
    told = [event for name in ("PagesAllocated", "PrefixReused", "PagesFreed") for event in bench.of(name)]
    # The one page that the engine needs for its own token.
    assert [(type(event).__name__, [run.first for run in event.runs]) for event in told] == [("PagesAllocated", [1])]


@pytest.mark.parametrize("wrong", [[1, 2], (3,), torch.tensor([[1]]), torch.tensor([1.0])])
@pytest.mark.parametrize("call", ["alloc", "free", "own", "reuse", "move"])
def test_judged_pages_must_be_a_tensor_of_numbers(bench: Bench, call: str, wrong: Any) -> None:
    calls: dict[str, Callable[[], object]] = {
        "alloc": lambda: bench.canary.alloc("full", "", wrong, judged=True),
        "free": lambda: bench.canary.free("full", wrong, judged=True),
        "own": lambda: bench.canary.own("full", "", wrong, judged=True),
        "reuse": lambda: bench.canary.reuse("full", "", wrong, judged=True),
        "move": lambda: bench.canary.move("full", wrong, wrong, judged=True),
    }
    with pytest.raises(BatchError, match="judged pages must be an int32 or int64 tensor"):
        calls[call]()
