"""A checkpoint is a complete picture from which a reader goes on."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest

from kvcanary.events import Event, FactsLost, OwnershipCheckpointed, Ticked, json_codec
from tests.host.ownership_script import Script, group, told


def busy_engine() -> Script:
    engine = Script(group("full"), group("swa", window=8, shares="full"))
    engine.log.weights_updated(4)
    engine.alloc("a", *range(8))
    engine.publish("a", 0, 1)
    engine.alloc("b", 10, group="swa")
    engine.alloc("", 11)
    engine.alloc("gone", 12)
    engine.launch()
    engine.free(12)
    engine.copy_start("x", "b", 10)
    engine.launch()
    return engine


def resumed(after: str) -> Script:
    """Another reader, or the same one after a loss, that goes on from a checkpoint."""
    engine = busy_engine()
    point = json_codec().decode(json_codec().encode(engine.fold.checkpoint(Ticked(forward=2))))
    if after == "loss":
        engine.show(FactsLost(count=1))
        engine.show(point)
        return engine
    other = Script(group("full"), group("swa", window=8, shares="full"))
    other.show(point)
    other.forward = engine.forward
    return other


@pytest.mark.parametrize("after", ["loss", "start"])
def test_a_reader_goes_on_from_a_checkpoint(after: str) -> None:
    engine = resumed(after)
    engine.alloc("c", 5)
    engine.free(12)
    engine.alloc("c", 11)
    engine.free(0)
    engine.free(10, group="swa")
    engine.launch()
    assert told(engine.found) == [
        ("DOUBLE_ALLOC", 5, "c", "a"),
        ("DOUBLE_FREE", 12, "gone", ""),
        ("FREED_WHILE_PUBLISHED", 0, "a", ""),
    ]
    engine.alloc("d", 10)
    engine.log.weights_updated(5)
    engine.hit("d", 1)
    assert told(engine.launch()) == [("EARLY_REUSE", 10, "d", "b"), ("STALE_EPOCH", 1, "d", "a")]


@pytest.mark.parametrize("seed", range(12))
def test_who_goes_on_from_any_checkpoint_finds_what_the_first_reader_finds(seed: int) -> None:
    """Random calls, many of them wrong: every verdict after the checkpoint depends on what it holds."""
    rng = random.Random(seed)
    first, second = Script(), Script()
    follows = False
    found = failed = 0
    for _ in range(400):
        scribble(rng, first)
        events = take(first)
        here = verdicts(first, events)
        if follows:
            there = verdicts(second, events)
            assert there == here
            found += len(here)
            failed += sum(kind == "FAILED_LOAD_USED" for kind, *_ in here)
            assert second.fold.checkpoint(Ticked()) == first.fold.checkpoint(Ticked())
        if rng.random() < 0.1:
            point = first.fold.checkpoint(Ticked(forward=first.forward))
            second.show(json_codec().decode(json_codec().encode(point)))
            follows = True
    assert found > 50
    assert failed > 0


def take(engine: Script) -> list[Event]:
    engine.log.step(engine.forward, engine.forward - 1)
    engine.log.launched(engine.forward, engine.forward - 1, 1, 1, 1, {})
    engine.forward += 1
    return engine.log.take()


def verdicts(engine: Script, events: Sequence[Event]) -> list[tuple[str, int, str, str, str]]:
    engine.found = []
    return [(one.kind, one.page, one.request, one.other, one.detail) for one in engine.show(*events)]


def scribble(rng: random.Random, engine: Script) -> None:
    for _ in range(rng.randrange(1, 4)):
        scribble_once(rng, engine)


def scribble_once(rng: random.Random, engine: Script) -> None:
    request, other = rng.choice("abcd"), rng.choice("abcd")
    first = rng.randrange(10)
    pages = range(first, first + rng.randrange(1, 4))
    transfer = rng.choice("xyz")
    direction, ordered = rng.choice(("in", "out")), rng.random() < 0.3
    calls: list[Callable[[], object]] = [
        lambda: engine.alloc(request, *pages),
        lambda: engine.alloc(other, *pages),
        lambda: engine.free(*pages),
        lambda: engine.free(*pages, request=request),
        lambda: engine.publish(request, *pages),
        lambda: engine.hit(request, *pages),
        lambda: engine.evict(*pages),
        lambda: engine.admit(request),
        lambda: engine.finish(request),
        lambda: engine.preempt(request),
        lambda: engine.rewind(request, 3),
        lambda: engine.copy_start(transfer, request, *pages, direction=direction, ordered=ordered),
        lambda: engine.copy_start(transfer, request, *pages),
        lambda: engine.copy_land(transfer),
        lambda: engine.copy_fail(transfer),
        lambda: engine.log.moved("full", [first], [first + 5]),
    ]
    rng.choice(calls)()


def test_a_checkpoint_gives_the_checkpoint_that_it_came_from() -> None:
    engine = busy_engine()
    point = engine.fold.checkpoint(Ticked(forward=2))
    assert json_codec().decode(json_codec().encode(point)) == point
    other = Script(group("full"), group("swa", window=8, shares="full"))
    other.show(point)
    assert other.fold.checkpoint(Ticked(forward=2)) == point


def test_pages_that_changed_hands_together_are_one_line_of_a_checkpoint() -> None:
    engine = Script()
    engine.alloc("a", *range(500))
    engine.launch()
    assert engine.fold.checkpoint(Ticked()).state["pages"] == [
        ["full", 0, 500, 1, 1, 0, ["a"], None, [], None, "", None, [], []]
    ]


def test_something_that_is_no_checkpoint_is_an_error() -> None:
    with pytest.raises(ValueError, match="missing required field `epoch`"):
        Script().show(OwnershipCheckpointed(state={"pages": []}))
