"""Packing many calls into few facts must not change what the ledger makes of them."""

from __future__ import annotations

import random
from typing import Any

import pytest

from kvcanary.events import OwnershipViolated
from kvcanary.memory_canary import MemoryCanary

Calls = list[tuple[Any, ...]]
BEFORE: Calls = [
    *(("admit", name) for name in "AQBC"),
    ("alloc", "full", "A", [5]),
    ("publish", "full", [5], "A"),
    ("alloc", "full", "Q", [1]),
    ("publish", "full", [1], "Q"),
    ("finish", "Q"),
    ("forward",),
]


def findings(calls: Calls, *, one_by_one: bool) -> set[tuple[str, str, int]]:
    with MemoryCanary() as canary:
        for name, *arguments in calls:
            getattr(canary, name)(*arguments)
            if one_by_one:
                canary.flush()
        canary.forward()
        found = [event for event in canary.events if isinstance(event, OwnershipViolated)]
    return {
        (one.kind, one.request, page)
        for one in found
        for first, count in one.page_runs
        for page in range(first, first + count)
    }


def test_a_page_that_its_last_holder_left_cached_can_be_handed_out_behind_another() -> None:
    calls = [
        ("evict", "full", [1]),
        ("alloc", "full", "B", [1]),
        ("finish", "A"),
        ("evict", "full", [5]),
        ("alloc", "full", "B", [5]),
    ]
    assert findings(BEFORE + calls, one_by_one=False) == set()


@pytest.mark.parametrize(
    ("call", "kind"),
    [(("alloc", "full", "B", [5]), "DOUBLE_ALLOC"), (("publish", "full", [5], "B"), "PUBLISHED_UNOWNED")],
)
def test_the_end_of_a_holder_is_not_moved_before_what_wronged_it(call: tuple[Any, ...], kind: str) -> None:
    calls = [("finish", "C"), ("evict", "full", [5]), call, ("finish", "A")]
    assert findings(BEFORE + calls, one_by_one=False) == {(kind, "B", 5)}


def random_calls(rng: random.Random) -> Calls:
    live: set[str] = set()
    calls: Calls = []
    for _ in range(30):
        name, page = rng.choice("ABC"), [rng.randrange(6)]
        if name not in live:
            live.add(name)
            calls.append(("admit", name))
            continue
        what = rng.choice(("finish", "preempt", "forward", "alloc", "alloc", "free", "publish", "evict", "reuse"))
        if what in {"finish", "preempt"}:
            live.discard(name)
            calls.append((what, name))
        else:
            of_page = {"alloc": ("full", name, page), "reuse": ("full", name, page), "evict": ("full", page)}
            calls.append((what, *(() if what == "forward" else of_page.get(what, ("full", page, name)))))
    return calls


@pytest.mark.parametrize("first_seed", range(0, 300, 50))
def test_packed_calls_are_judged_as_single_ones(first_seed: int) -> None:
    wrongs = 0
    for seed in range(first_seed, first_seed + 50):
        calls = random_calls(random.Random(seed))
        packed, single = (findings(calls, one_by_one=one) for one in (False, True))
        assert packed == single, f"seed {seed}: {calls}"
        wrongs += len(single)
    assert wrongs
