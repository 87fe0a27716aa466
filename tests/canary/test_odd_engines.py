"""Engines that are odd and right, and must be believed; and what looks like them and is wrong."""

from __future__ import annotations

import pytest
import torch

from kvcanary.errors import BatchError
from kvcanary.events import CanaryArmed, CanaryDisarmed, Event, OwnershipViolated, PagesAllocated, ViolationDetected
from tests.canary.conftest import Bench
from tests.canary.hand import PAGE


def two_forwards_in_one_step(bench: Bench) -> None:
    """The second one's request is admitted, and gets its row and pages from one that has just ended, in between."""
    engine = bench.engine
    with bench.canary.step():
        engine.admit("a", 6)
        engine.step(["a"])
        engine.finish("a")
        engine.free_pages.sort()
        engine.admit("b", 6)
        engine.step(["b"])


def test_facts_that_are_told_within_a_step_hold_from_its_next_forward(bench: Bench) -> None:
    two_forwards_in_one_step(bench)
    for _ in range(2):
        bench.engine.step()
    assert bench.kinds() == set()
    assert {fact.requests: fact.forward for fact in bench.of_kind(PagesAllocated)} == {("a",): 1, ("b",): 2}
    assert not any(counts["full"] for counts in bench.of("SnapshotTaken")[-1].unverified.values())


def test_a_page_that_is_handed_on_within_a_step_is_not_the_former_owners_to_read(bench: Bench) -> None:
    engine = bench.engine
    engine.admit("a", 6)
    engine.admit("b", 3)
    with bench.canary.step():
        engine.step(["a"])
        stolen = engine.pages["a"][0]
        bench.canary.free("full", [stolen], "a")
        engine.free_pages.insert(0, stolen)
        engine.step(["b"])
        engine.step(["a"])
    found = bench.of_kind(ViolationDetected)
    assert {one.request for one in found} == {"a"}
    assert {one.page for one in found if one.kind != "REQUEST_DIGEST"} == {stolen}


def test_one_call_arms_and_tells_which_pages_are_free(bench: Bench) -> None:
    engine = bench.engine
    bench.canary.arm(free={"full": engine.free_pages})
    engine.admit("a", 6)
    engine.step()
    engine.pages["a"][0] = engine.free_pages[0]
    engine.step()
    assert "UNWRITTEN" in bench.kinds()


def test_a_free_page_that_does_not_exist_is_refused_and_nothing_is_forgotten(bench: Bench) -> None:
    engine = bench.engine
    engine.admit("a", 6)
    engine.step()
    with pytest.raises(BatchError, match="page 64 lies outside the pool"):
        bench.canary.arm(free={"full": [1, 64]})
    engine.step()
    assert bench.of("SnapshotTaken")[-1].verified["links"]["full"] == 6


def test_an_audit_of_fewer_tokens_than_the_cache_holds_is_refused(bench: Bench) -> None:
    engine = bench.engine
    engine.admit("a", 6)
    engine.step()
    with pytest.raises(BatchError, match="got 5 tokens for length 6"):
        bench.canary.finish("a", tokens=engine.tokens["a"][:5], length=6)
    assert bench.canary.is_live("a")
    bench.canary.finish("a", tokens=engine.tokens["a"], length=6)
    bench.canary.finish("a", tokens=[], length=6)  # it has gone: ignored, as always


def test_a_page_that_forty_requests_share_may_be_given_back_by_each(bench: Bench) -> None:
    engine = bench.engine
    engine.admit("a", 9)
    engine.step()
    shared = engine.pages["a"][:2]
    names = ["a", *[f"b{number}" for number in range(20)]]
    for name in names[1:]:
        engine.admit(name, 0, pages=shared, tokens=[*engine.tokens["a"][: 2 * PAGE], *engine.new_tokens(2)])
    for part in (names[1:11], names[11:]):
        engine.step(part)
    for name in names:
        bench.canary.finish(name)
        bench.canary.free("full", engine.pages.pop(name), name)
        del engine.tokens[name]
    engine.free_pages[:0] = shared
    for name in "xyz":
        engine.admit(name, 9)
        engine.step()
        engine.finish(name)
    engine.admit("last", 2)
    engine.step()
    assert bench.of("OwnershipViolated") == []
    assert bench.kinds() == set()


def compact(bench: Bench, *, copies: bool) -> None:
    """All pages of a request move down by one, each onto the next one's old place, in one call."""
    engine = bench.engine
    engine.admit("a", 12)
    engine.step()
    sources = engine.pages["a"][::-1]
    targets = [engine.free_pages.pop(0), *sources[:-1]]
    bench.canary.alloc("full", "a", targets[:1])
    bench.canary.move("full", sources, targets, "a")
    if copies:
        engine.pool[:, :, targets] = engine.pool[:, :, torch.tensor(sources)].clone()
    bench.canary.free("full", sources[-1:], "a")
    engine.pages["a"] = targets[::-1]
    for _ in range(3):
        engine.step()


def test_pages_that_move_onto_one_another_in_one_call_keep_their_records(bench: Bench) -> None:
    compact(bench, copies=True)
    assert bench.kinds() == set()


def test_pages_whose_bytes_did_not_move_along_are_found(bench: Bench) -> None:
    compact(bench, copies=False)
    assert bench.kinds() == {"CONTENT"}


def test_a_second_request_that_reads_a_broken_link_is_counted_and_one_whose_end_is_wrong_is_named(bench: Bench) -> None:
    engine = bench.engine
    prompts = {name: engine.new_tokens(2 * PAGE) for name in "ab"}
    for name, prompt in prompts.items():
        engine.admit(name, 0, tokens=prompt)
    engine.step()
    mixed = [engine.pages["a"][0], engine.pages["b"][1]]  # the second page is right, what goes before it is another's
    for number in range(2):
        more = engine.new_tokens(1)
        engine.admit(f"c{number}", 0, pages=mixed, tokens=[*prompts["b"], *more])
        engine.step([f"c{number}"])
    engine.admit("d", 0, pages=mixed, tokens=[*prompts["a"], *engine.new_tokens(1)])
    engine.step(["d"])
    assert [(one.kind, one.request) for one in bench.violations()] == [("DIGEST", "c0"), ("REQUEST_DIGEST", "d")]
    assert bench.of("SnapshotTaken")[-1].violations_repeated == 2


@pytest.mark.parametrize("steps", [0, 1])
def test_what_was_held_before_a_pause_is_not_held_against_what_follows_it(bench: Bench, steps: int) -> None:
    canary = bench.canary
    bench.engine.admit("a", 5)
    canary.arm(free={"full": [1, 2, 3]})
    canary.alloc("full", "X", [50])
    for _ in range(steps):
        bench.engine.step()
    canary.disarm("a pause")
    canary.arm(free={"full": [3, 4, 5]})
    canary.alloc("full", "Y", [50])
    bench.engine.step()
    assert bench.of_kind(OwnershipViolated) == []
    told = [event for event in bench.of_kind(Event) if isinstance(event, (CanaryArmed, CanaryDisarmed, PagesAllocated))]
    assert [type(event) for event in told[-3:]] == [CanaryDisarmed, CanaryArmed, PagesAllocated]


def test_a_page_handed_out_twice_since_the_last_arming_is_found(bench: Bench) -> None:
    bench.engine.admit("a", 5)
    bench.canary.arm()
    bench.canary.alloc("full", "X", [50])
    bench.canary.alloc("full", "Y", [50])
    bench.engine.step()
    assert [found.kind for found in bench.of_kind(OwnershipViolated)] == ["DOUBLE_ALLOC"]
