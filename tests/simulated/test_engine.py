from __future__ import annotations

import pytest
import torch

import kvcanary
from kvcanary.canary import Canary
from kvcanary.config import CanaryConfig
from kvcanary.engines.simulated import STYLES, SimulatedAdapter, SimulatedEngine, Style
from kvcanary.engines.simulated.rearranging import deduplicate, defragment
from kvcanary.errors import ConfigError
from kvcanary.events import OwnershipViolated, SnapshotTaken, ViolationDetected
from kvcanary.faults.programs import Inline
from kvcanary.testing import EventRecorder, assert_no_violations

FINDINGS = (ViolationDetected, OwnershipViolated)


def serve(engine: SimulatedEngine, requests: int = 4, steps: int = 30) -> None:
    for number in range(requests):
        engine.submit(engine.prompt(5 + number), 6)
    for _ in range(steps):
        engine.step()


def findings(inline: Inline) -> list[object]:
    return [event for event in inline.collect() if isinstance(event, FINDINGS)]


def watched(engine: SimulatedEngine, **settings: object) -> Inline:
    return Inline(engine, CanaryConfig(mode="log", key=3, **settings))  # type: ignore[arg-type]


@pytest.mark.parametrize("style", STYLES)
def test_a_watched_engine_of_each_style_serves_silently_and_everything_is_verified(style: str) -> None:
    events, engine = EventRecorder(), SimulatedEngine(style, seed=1)
    with kvcanary.watch(engine, mode="log", observers=[events]):
        serve(engine)
    assert engine.truth == []
    assert not engine.running
    assert_no_violations(events, checks=["links", "row_ends", "writes", "sealed", "content"])
    last = events.of(SnapshotTaken)[-1].unverified
    assert {reason for reason, groups in last.items() if any(groups.values())} <= {"out_of_window", "unsealed"}


def test_an_answer_is_not_a_function_of_the_prompt() -> None:
    engine = SimulatedEngine(seed=2)
    prompt = engine.prompt(6)
    one, two = engine.submit(prompt, 5), engine.submit(prompt, 5)
    for _ in range(12):
        engine.step()
    assert len(one.tokens) == len(two.tokens) == 11
    assert one.tokens[6:] != two.tokens[6:]


def test_the_same_seed_makes_the_same_run() -> None:
    def answers() -> list[list[int]]:
        engine = SimulatedEngine("overlapped", seed=5)
        requests = [engine.submit(engine.prompt(4), 5) for _ in range(3)]
        for _ in range(12):
            engine.step()
        return [request.tokens for request in requests]

    assert answers() == answers()


def test_the_oracle_sees_a_changed_byte_in_the_forward_that_reads_it() -> None:
    engine = SimulatedEngine(seed=3)
    request = engine.submit(engine.prompt(6), 8)
    engine.step()
    engine.memory["full"].kv[1, request.pages["full"][0], 2] ^= 1 << 9
    engine.step()
    (wrong,) = engine.truth
    assert (wrong.kind, wrong.request, wrong.position, wrong.forward) == ("content", request.name, 2, 2)


def test_the_oracle_sees_a_page_of_somebody_else_as_a_wrong_read() -> None:
    engine = SimulatedEngine(seed=3)
    one, two = engine.submit(engine.prompt(6), 8), engine.submit(engine.prompt(6), 8)
    engine.step()
    one.pages["full"][0] = two.pages["full"][0]
    engine.step()
    assert {(wrong.kind, wrong.request) for wrong in engine.truth} == {("read", one.name)}
    assert [wrong.position for wrong in engine.truth] == [0, 1, 2, 3]


def test_a_launched_forward_runs_only_when_somebody_waits_for_it() -> None:
    engine = SimulatedEngine("overlapped", seed=3)
    request = engine.submit(engine.prompt(3), 8)
    engine.step()
    assert engine.oracle.executing == 0
    assert request.pending == 1
    engine.settle()
    assert engine.oracle.executing == 1
    assert len(request.tokens) == 4


def test_pages_handed_on_while_ordered_forwards_still_run_are_legal() -> None:
    engine = SimulatedEngine(Style(name="tight", pages=12, depth=1, rows=2, cache=False), seed=4)
    inline = watched(engine)
    handed, freed = 0, set[int]()
    for _ in range(8):
        engine.submit(engine.prompt(6), 3)
    while engine.step():
        waiting = engine.oracle.executing < engine.forwards
        handed += waiting and bool(freed & {page for request in engine.running for page in request.pages["full"]})
        freed |= set(engine.pools["full"].free)
    assert handed  # pages that were given back belong to others, while a forward over them has not begun
    assert engine.truth == []
    assert findings(inline) == []
    inline.stop()


def test_a_request_moves_to_another_engine_with_its_records() -> None:
    one, two = SimulatedEngine("overlapped", seed=6, name="a"), SimulatedEngine("overlapped", seed=7, name="b")
    watchers = [watched(one), watched(two)]
    request = one.submit(one.prompt(9), 6)
    one.step()
    one.step()
    one.tier.send(request, two)
    while one.step() or two.step():
        pass
    assert len(request.tokens) == 15
    assert two.oracle.reads > 0
    assert one.truth == two.truth == []
    assert [findings(watcher) for watcher in watchers] == [[], []]


def test_bytes_that_change_on_the_way_to_another_engine_are_found_there() -> None:
    one, two = SimulatedEngine("overlapped", seed=6, name="a"), SimulatedEngine("overlapped", seed=7, name="b")
    _, watcher = watched(one), watched(two)
    request = one.submit(one.prompt(9), 6)
    one.step()
    one.step()
    one.tier.send(request, two)
    while not two.tier.resting:
        one.step()
    two.tier.resting[0].saved["full"][1][0, 1, 2] += 1
    while two.step():
        pass
    assert {(event.kind, event.request) for event in findings(watcher)} == {("CONTENT", request.name)}  # type: ignore[attr-defined]


def test_a_picture_in_the_prompt_can_be_found_again_and_another_one_cannot() -> None:
    engine = SimulatedEngine(seed=8)
    inline = watched(engine)
    prompt = engine.prompt(9)
    first = engine.submit(prompt, 3, salts={1: 77})
    while engine.step():
        pass
    same, other = engine.submit(prompt, 3, salts={1: 77}), engine.submit(prompt, 3, salts={1: 78})
    engine.step()
    assert same.pages["full"][0] != other.pages["full"][0]
    while engine.step():
        pass
    assert len(first.tokens) == len(same.tokens) == 12
    assert findings(inline) == []


def test_leaving_the_watch_leaves_no_trace() -> None:
    engine = SimulatedEngine("null-block", seed=1)
    objects = [engine, engine.tier, *engine.pools.values()]
    before = [set(vars(one)) for one in objects]
    with kvcanary.watch(engine, mode="log"):
        serve(engine, steps=3)
    assert [set(vars(one)) for one in objects] == before


def test_a_second_canary_on_one_engine_is_refused() -> None:
    engine = SimulatedEngine()
    with kvcanary.watch(engine, mode="log"):
        canary = Canary(CanaryConfig(mode="log"))
        with pytest.raises(ConfigError, match="watched by another canary"):
            SimulatedAdapter().attach(engine, canary)


def test_a_watch_in_raise_mode_raises_what_was_found() -> None:
    engine = SimulatedEngine(seed=3)
    watch = kvcanary.watch(engine, mode="raise")
    assert watch.status["healthy"] is False, "it has not started"
    watch.start()
    request = engine.submit(engine.prompt(6), 8)
    engine.step()
    engine.memory["full"].scale[0, request.pages["full"][0], 1] += 1
    with pytest.raises(kvcanary.KVCorruptionError, match="CONTENT"):
        _serve_and_stop(engine, watch)


def _serve_and_stop(engine: SimulatedEngine, watch: kvcanary.Watch) -> None:
    for _ in range(3):
        engine.step()
    watch.stop()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"drafts": 2, "depth": 1}, "depth must be 0"),
        ({"sliding": "ring"}, "cannot share prefixes"),
        ({"pages": 4}, "too few"),
    ],
)
def test_a_style_that_cannot_work_is_refused(settings: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Style(name="odd", **settings)  # type: ignore[arg-type]


def test_an_unknown_style_is_refused_with_those_that_exist() -> None:
    with pytest.raises(ConfigError, match="no style 'rings'; styles are paged"):
        SimulatedEngine("rings")


def test_bytes_can_be_verified_on_demand_once_the_device_is_done() -> None:
    engine = SimulatedEngine("overlapped", seed=1)
    with kvcanary.watch(engine, mode="log") as kv:
        engine.submit(engine.prompt(6), 8)
        engine.step()
        engine.settle()
        assert kv.canary is not None
        assert kv.canary.verify().verified == 6
        engine.memory["full"].kv[0, engine.running[0].pages["full"][0], 0] = torch.tensor([5])
        assert [found.position for found in kv.canary.verify().mismatches] == [0]


@pytest.mark.parametrize("style", STYLES)
def test_pages_that_move_while_forwards_read_them_are_legal(style: str) -> None:
    engine = SimulatedEngine(style, seed=8)
    inline, moved = watched(engine), 0
    shared = engine.prompt(9)
    for number in range(3):
        engine.submit([*shared, number], 8)
    for _ in range(8):
        engine.step()
        for request in list(engine.running):
            before = {group: list(pages) for group, pages in request.pages.items()}
            defragment(engine, request)
            moved += before != request.pages
    engine.settle()
    assert moved > 8
    assert engine.truth == []
    assert findings(inline) == []
    inline.stop()


def test_a_move_that_forgets_a_sharer_is_a_wrong_read_and_reported() -> None:
    engine = SimulatedEngine(Style(name="wide", chunk=12), seed=8)
    inline = watched(engine)
    prompt = engine.prompt(9)
    one = engine.submit(prompt, 8)
    engine.step()
    two = engine.submit(prompt, 8)
    engine.step()
    before = one.pages["full"][0]
    assert two.pages["full"][0] == before
    defragment(engine, one)
    assert two.pages["full"][0] == one.pages["full"][0] != before
    two.pages["full"][0] = before
    engine.submit(engine.prompt(24), 2)
    engine.pools["full"].free.insert(0, engine.pools["full"].free.pop(engine.pools["full"].free.index(before)))
    engine.step()
    engine.settle()
    assert {wrong.request for wrong in engine.truth} == {two.name}
    assert {found.request for found in findings(inline)} == {two.name}  # type: ignore[attr-defined]
    inline.stop()


def test_a_request_gives_up_its_own_copy_of_what_is_cached() -> None:
    engine = SimulatedEngine(Style(name="chunks", chunk=4, rows=2), seed=9)
    inline = watched(engine)
    prompt = engine.prompt(14)
    one = engine.submit(prompt, 4)
    engine.step()
    two = engine.submit(prompt, 4)
    for _ in range(3):
        engine.step()
    assert one.pages["full"][0] == two.pages["full"][0]
    assert one.pages["full"][2] != two.pages["full"][2]
    for request in (one, two):
        deduplicate(engine, request)
    assert one.pages["full"][:3] == two.pages["full"][:3]
    for _ in range(6):
        engine.step()
    assert len(two.tokens) == 18
    assert engine.truth == []
    assert findings(inline) == []
    inline.stop()


def test_the_oracle_sees_a_changed_byte_of_a_draft_model_and_so_does_the_canary() -> None:
    engine = SimulatedEngine("draft-layer", seed=3)
    inline = watched(engine)
    request = engine.submit(engine.prompt(6), 12)
    engine.step()
    engine.memory["full"].kv[2, request.pages["full"][0], 2] ^= 1 << 9
    for _ in range(3):
        engine.step()
    wrong = engine.truth[0]
    assert (wrong.kind, wrong.request, wrong.position, wrong.forward) == ("content", request.name, 2, 2)
    (found,) = [one for one in findings(inline) if isinstance(one, ViolationDetected)]
    assert (found.kind, found.part, found.request, found.position_expected) == ("CONTENT", "draft", request.name, 2)
    inline.stop()
