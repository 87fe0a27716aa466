"""Memory of the engine outside of the pool: host blocks, staging, places of metadata."""

from __future__ import annotations

import pytest

from kvcanary.events import FactsLost, Ticked, json_codec
from tests.host.ownership_script import Script


def started(script: Script, transfer: str, request: str, page: int, block: int, direction: str = "out") -> None:
    """A copy between a page and a host block, as :meth:`kvcanary.canary.Canary.transfer` tells it."""
    other = "in" if direction == "out" else "out"
    script.log.transfer_started(transfer, "full", request, (page,), direction)
    script.log.transfer_started(transfer, "host", request, (block,), other)


def kinds(script: Script) -> list[tuple[str, str, str]]:
    return [(found.kind, found.group, found.other) for found in script.found]


@pytest.fixture
def script() -> Script:
    script = Script()
    for name, page in (("a", 1), ("b", 5), ("c", 9)):
        script.admit(name)
        script.alloc(name, page)
    script.launch()
    return script


def test_two_stores_into_one_block_meet_there(script: Script) -> None:
    started(script, "x", "a", 1, 0)
    started(script, "y", "b", 5, 0)
    script.launch()
    assert kinds(script) == [("TRANSFER_OVERLAP", "host", "a")]


def test_a_load_from_a_block_that_is_still_being_stored_meets_the_store(script: Script) -> None:
    started(script, "x", "a", 1, 0)
    started(script, "z", "c", 9, 0, "in")
    script.launch()
    assert kinds(script) == [("TRANSFER_OVERLAP", "host", "a")]


def test_one_end_after_the_other_is_legal(script: Script) -> None:
    started(script, "x", "a", 1, 0)
    script.log.transfer_landed("x")
    started(script, "y", "b", 5, 0)
    script.log.transfer_landed("y")
    started(script, "z", "c", 9, 0, "in")
    script.launch()
    assert script.found == []


def test_a_block_handed_on_while_a_store_is_under_way_is_early(script: Script) -> None:
    script.alloc("a", 0, group="host")
    started(script, "x", "a", 1, 0)
    script.free(0, request="a", group="host")
    script.alloc("b", 0, group="host")
    script.launch()
    assert kinds(script) == [("EARLY_REUSE", "host", "a")]


def test_forwards_that_are_still_running_do_not_hold_a_block(script: Script) -> None:
    script.alloc("a", 0, group="host")
    script.launch()
    script.free(0, request="a", group="host")
    script.alloc("b", 0, group="host")
    started(script, "x", "b", 5, 0)
    script.launch()
    assert script.found == []


def test_a_block_that_is_freed_twice_is_told(script: Script) -> None:
    script.alloc("a", 0, group="host")
    script.free(0, request="a", group="host")
    script.free(0, request="a", group="host")
    script.launch()
    assert kinds(script) == [("DOUBLE_FREE", "host", "")]


def test_a_load_that_failed_ends_at_both_places(script: Script) -> None:
    started(script, "z", "c", 9, 0, "in")
    script.log.transfer_failed("z")
    started(script, "x", "a", 1, 0)
    script.launch()
    assert script.found == []


def test_a_transfer_that_goes_on_meets_every_later_holder_until_it_lands(script: Script) -> None:
    script.copy_start("x", "a", 1)
    for old, new in (("a", "b"), ("b", "a")):
        script.free(1, request=old)
        script.finish(old)
        script.admit(new)
        script.alloc(new, 1)
        script.launch()
        assert [(found.kind, found.request) for found in script.found] == [("EARLY_REUSE", new)]
    script.copy_land("x")
    script.free(1, request="a")
    script.alloc("b", 1)
    script.launch()
    assert script.found == []


def test_a_checkpoint_keeps_both_ends_of_a_copy(script: Script) -> None:
    started(script, "x", "a", 1, 0)
    script.launch()
    point = json_codec().decode(json_codec().encode(script.fold.checkpoint(Ticked(forward=2))))
    script.show(FactsLost(count=1), point)
    started(script, "y", "b", 5, 0)
    script.launch()
    assert kinds(script) == [("TRANSFER_OVERLAP", "host", "a")]
    script.log.transfer_landed("x")
    script.log.transfer_landed("y")
    started(script, "z", "c", 9, 0, "in")
    script.launch()
    assert script.found == []
