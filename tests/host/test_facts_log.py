from __future__ import annotations

import itertools
import subprocess
import sys
import threading
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcanary import facts as facts_module
from kvcanary.errors import ConfigError
from kvcanary.events import (
    Event,
    Fact,
    FactsLost,
    ForwardLaunched,
    PageRun,
    PagesAllocated,
    PagesFact,
    PagesFreed,
    PagesMoved,
    PrefixPublished,
    RequestsAdmitted,
    RequestsFinished,
    RequestsPreempted,
    RequestsRewound,
    TransferFailed,
    TransferLanded,
    TransferStarted,
    WeightsUpdated,
)
from kvcanary.facts import PAGE_KINDS, FactLog
from kvcanary.packing import pack, page_runs


@pytest.fixture
def log() -> FactLog:
    log = FactLog(1 << 16)
    log.enabled = True
    return log


def expand(fact: PagesFact) -> list[tuple[str, int]]:
    """Request and page, one by one."""
    return [(fact.requests[run.request], page) for run in fact.runs for page in range(run.first, run.first + run.count)]


def test_nothing_is_recorded_while_nobody_reads() -> None:
    log = FactLog(10)
    log.pages("alloc", "full", "a", [1])
    log.admitted("a", 0, 1, 0)
    log.step(1, 0)
    log.launched(1, 0, 1, 1, 1, {})
    assert log.queued == 0
    log.enabled = True
    log.launched(1, 0, 1, 1, 1, {})
    (event,) = log.take()
    assert isinstance(event, ForwardLaunched)
    assert event.joined == ()


def test_calls_of_a_step_become_one_fact_per_kind_and_group(log: FactLog) -> None:
    for n in range(100):
        log.pages("alloc", "full", f"r{n}", [n])
        log.pages("alloc", "swa", f"r{n}", [n])
    log.step(5, 3)
    full, swa = log.take()
    assert isinstance(full, PagesAllocated)
    assert isinstance(swa, PagesAllocated)
    assert (full.group, swa.group) == ("full", "swa")
    assert expand(full) == expand(swa) == [(f"r{n}", n) for n in range(100)]


def test_interleaved_kinds_are_joined_where_nothing_depends_on_their_order(log: FactLog) -> None:
    for n in range(50):
        log.pages("alloc", "full", f"r{n}", [1000 + n])
        log.pages("publish", "full", f"r{n}", [n])
    log.step(1, 0)
    assert [type(fact) for fact in log.take()] == [PagesAllocated, PrefixPublished]


def test_a_page_that_is_freed_and_handed_out_again_keeps_its_order(log: FactLog) -> None:
    log.pages("alloc", "full", "a", [5])
    log.pages("free", "full", "a", [5])
    log.pages("alloc", "full", "b", [5])
    log.step(1, 0)
    taken = log.take()
    assert [(type(fact), expand(fact)) for fact in taken if isinstance(fact, PagesFact)] == [
        (PagesAllocated, [("a", 5)]),
        (PagesFreed, [("a", 5)]),
        (PagesAllocated, [("b", 5)]),
    ]


def test_a_call_that_joined_an_earlier_fact_does_not_take_the_next_one_with_it(log: FactLog) -> None:
    log.rewound("a", 0, 0)
    log.pages("alloc", "full", "b", [0])
    log.rewound("a", 0, 0)
    log.rewound("b", 0, 0)
    log.step(1, 0)
    requests = [fact.requests for fact in log.take() if isinstance(fact, RequestsRewound | PagesAllocated)]
    assert requests == [("a", "a"), ("b",), ("b",)]


def test_groups_that_share_bytes_keep_the_order_of_pages_that_overlap(log: FactLog) -> None:
    log.spaces = {"full": ("arena", 1), "swa": ("arena", 4)}
    log.pages("alloc", "full", "a", [9])
    log.pages("free", "swa", "b", [8, 9, 10, 11])  # pages 8 to 11 of swa are page 2 of the arena
    log.pages("alloc", "full", "c", [2])
    log.pages("alloc", "full", "d", [3])
    log.step(1, 0)
    kinds = [(type(fact), [page for _, page in expand(fact)]) for fact in log.take() if isinstance(fact, PagesFact)]
    assert kinds == [(PagesAllocated, [9]), (PagesFreed, [8, 9, 10, 11]), (PagesAllocated, [2, 3])]


def test_a_fact_holds_from_the_forward_of_the_next_step_and_knows_what_had_finished(log: FactLog) -> None:
    log.retired = 7
    log.pages("alloc", "full", "a", [1])
    log.retired = 8
    log.pages("alloc", "full", "b", [2])
    before = time.time_ns()
    log.step(12, 9)
    taken = log.take()
    assert [(fact.forward, fact.retired) for fact in taken if isinstance(fact, Fact)] == [(12, 7), (12, 8)]
    assert all(before <= fact.time_ns <= time.time_ns() and fact.monotonic_ns for fact in taken)


def test_facts_within_a_step_hold_from_the_step_after_it(log: FactLog) -> None:
    log.step(3, 2)
    log.pages("free", "full", "a", [1])
    assert log.take() == []
    log.hurry()
    assert log.take() == []
    log.launched(3, 2, 4, 4, 2, {"mark": 3})
    freed, launched = log.take()
    assert (freed.forward, launched.forward) == (5, 3)
    assert isinstance(launched, ForwardLaunched)
    assert (launched.forwards, launched.rows, launched.due) == (2, 4, {"mark": 3})


def test_a_step_without_a_forward_lets_facts_go(log: FactLog) -> None:
    log.step(3, 2)
    log.pages("free", "full", "a", [1])
    log.launched_nothing()
    log.hurry()
    assert [fact.forward for fact in log.take()] == [3]


def test_what_waits_for_a_step_is_taken_in_a_hurry_or_after_a_while(
    log: FactLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    log.launched(3, 2, 1, 1, 1, {})
    log.pages("free", "full", "a", [1])
    assert [type(event) for event in log.take()] == [ForwardLaunched]
    assert log.queued == 1
    log.hurry()
    assert [(type(fact), fact.forward) for fact in log.take()] == [(PagesFreed, 4)]
    log.pages("free", "full", "a", [1])
    assert log.take() == []
    monkeypatch.setattr(facts_module, "PATIENCE_SECONDS", -1.0)
    assert [(type(fact), fact.forward) for fact in log.take()] == [(PagesFreed, 4)]


def test_at_the_last_everything_is_taken_even_within_a_step(log: FactLog) -> None:
    log.step(3, 2)
    log.pages("free", "full", "a", [1])
    assert [fact.forward for fact in log.take(everything=True)] == [4]
    log.pages("free", "full", "a", [1])
    log.enabled = False
    assert [fact.forward for fact in log.take()] == [4]


def test_a_launch_tells_who_joined_and_left_since_the_last_one(log: FactLog) -> None:
    log.admitted("a", 0, 1, 0)
    log.admitted("b", 1, 2, 0)
    log.step(1, 0)
    log.launched(1, 0, 2, 2, 1, {})
    log.finished("a", 1, 5)
    log.preempted("b", 2)
    log.step(2, 1)
    log.launched(2, 1, 0, 0, 1, {})
    first, second = [event for event in log.take() if isinstance(event, ForwardLaunched)]
    assert (first.joined, first.left) == (("a", "b"), ())
    assert (second.joined, second.left) == ((), ("a", "b"))


def test_requests_are_packed_as_columns(log: FactLog) -> None:
    log.admitted("a", 0, 11, 3, "ff")
    log.admitted("b", 1, 12, 0)
    log.rewound("a", 11, 2)
    log.finished("b", 12, 9, "aa")
    log.preempted("a", 11)
    log.step(1, 0)
    admitted, rewound, finished, preempted = log.take()
    assert isinstance(admitted, RequestsAdmitted)
    assert (admitted.requests, admitted.rows, admitted.tags) == (("a", "b"), (0, 1), (11, 12))
    assert (admitted.starts, admitted.base_digests) == ((3, 0), ("ff", ""))
    assert isinstance(rewound, RequestsRewound)
    assert (rewound.requests, rewound.tags, rewound.lengths) == (("a",), (11,), (2,))
    assert isinstance(finished, RequestsFinished)
    assert (finished.requests, finished.lengths, finished.digests) == (("b",), (9,), ("aa",))
    assert isinstance(preempted, RequestsPreempted)
    assert (preempted.requests, preempted.tags) == (("a",), (11,))


def test_moves_transfers_and_weights_are_facts_of_their_own_in_order(log: FactLog) -> None:
    log.pages("alloc", "full", "a", [1])
    log.transfer_started("t", "full", "a", [1, 2, 3], "in", ordered=True)
    log.transfer_landed("t")
    log.transfer_failed("u", "timeout")
    log.moved("full", [1], [9])
    log.weights_updated(4)
    log.pages("alloc", "full", "b", [2])
    log.step(1, 0)
    taken = log.take()
    assert [type(fact) for fact in taken] == [
        PagesAllocated,
        TransferStarted,
        TransferLanded,
        TransferFailed,
        PagesMoved,
        WeightsUpdated,
        PagesAllocated,
    ]
    assert {fact.forward for fact in taken} == {1}
    transfer = taken[1]
    assert isinstance(transfer, TransferStarted)
    assert (transfer.runs, transfer.direction, transfer.ordered) == ((PageRun(0, 1, 3),), "in", True)


def test_a_list_that_the_caller_goes_on_writing_into_is_not_followed(log: FactLog) -> None:
    pages = [1, 2]
    log.pages("alloc", "full", "a", pages)
    pages.append(99)
    log.step(1, 0)
    (fact,) = log.take()
    assert isinstance(fact, PagesAllocated)
    assert expand(fact) == [("a", 1), ("a", 2)]


def test_a_page_each_for_many_requests_is_one_call(log: FactLog) -> None:
    log.pages_each("alloc", "full", ["a", "b", "a"], [7, 3, 8])
    log.step(1, 0)
    (fact,) = log.take()
    assert isinstance(fact, PagesAllocated)
    assert (fact.requests, expand(fact)) == (("a", "b"), [("a", 7), ("b", 3), ("a", 8)])
    with pytest.raises(ConfigError, match="got 1 and 2"):
        log.pages_each("alloc", "full", ["a"], [1, 2])


def test_a_call_without_pages_is_no_fact(log: FactLog) -> None:
    log.pages("alloc", "full", "a", [])
    log.pages_each("alloc", "full", [], [])
    log.step(1, 0)
    assert log.take() == []


def test_an_unknown_kind_is_refused_with_those_that_exist(log: FactLog) -> None:
    with pytest.raises(ConfigError, match="'steal'; kinds are alloc, free, reuse, publish, evict, restamp"):
        log.pages("steal", "full", "a", [1])


def test_a_capacity_of_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="capacity of the fact queue is 0"):
        FactLog(0)


@given(st.lists(st.integers(0, 40), max_size=60))
def test_runs_say_the_same_as_the_pages(pages: list[int]) -> None:
    runs = page_runs(3, tuple(pages))
    assert [page for run in runs for page in range(run.first, run.first + run.count)] == pages
    assert all(run.request == 3 and run.count > 0 for run in runs)
    assert all(one.first + one.count != two.first for one, two in itertools.pairwise(runs))


PAGES = st.tuples(
    st.sampled_from(["alloc", "free", "publish"]),
    st.sampled_from(["g", "h"]),
    st.sampled_from("ab"),
    st.lists(st.integers(0, 6), min_size=1, max_size=3),
)
LIVES = st.tuples(st.sampled_from(["admitted", "preempted"]), st.sampled_from("ab"))
RARE = st.tuples(st.sampled_from(["weights", "retire"]))


@settings(max_examples=300)
@given(st.lists(st.one_of(PAGES, PAGES, LIVES, PAGES, LIVES, RARE), max_size=30), st.booleans())
def test_however_calls_are_joined_each_page_and_request_keeps_its_history(
    calls: list[tuple[object, ...]], shared: bool
) -> None:
    log = FactLog(1000)
    log.enabled = True
    log.spaces = {"g": ("arena", 1), "h": ("arena", 2)} if shared else {}
    want: dict[object, list[object]] = {}

    def note(history: dict[object, list[object]], key: object, what: object) -> None:
        history.setdefault(key, []).append(what)

    def note_pages(history: dict[object, list[object]], kind: str, group: str, items: list[tuple[str, int]]) -> None:
        for request, page in items:
            note(history, (group, page), (kind, request))
            if shared:
                note(history, ("arena", page // (2 if group == "h" else 1)), (kind, group, request, page))
        for request in dict.fromkeys(request for request, _ in items):
            note(history, ("lives", request), "pages")

    for call in calls:
        match call:
            case (("alloc" | "free" | "publish") as kind, str(group), str(request), list(pages)):
                log.pages(kind, group, request, pages)
                note_pages(want, kind, group, [(request, page) for page in pages])
            case ("admitted", str(request)):
                log.admitted(request, 0, 0, 0)
                note(want, ("lives", request), "admitted")
            case ("preempted", str(request)):
                log.preempted(request, 0)
                note(want, ("lives", request), "preempted")
            case ("weights",):
                log.weights_updated(1)
                for history in want.values():
                    history.append("weights")
            case _:
                log.retired += 1
    log.step(1, 0)

    got: dict[object, list[object]] = {}
    names = {kind: name for name, kind in PAGE_KINDS.items()}
    for fact in log.take():
        if isinstance(fact, PagesFact):
            note_pages(got, names[type(fact)], fact.group, expand(fact))
        elif isinstance(fact, RequestsAdmitted | RequestsPreempted):
            for request in fact.requests:
                note(got, ("lives", request), "admitted" if isinstance(fact, RequestsAdmitted) else "preempted")
        else:
            for history in got.values():
                history.append("weights")

    def lives(history: list[object]) -> list[object]:
        """Facts about pages of one request commute with each other, so a row of them counts once."""
        return [what for n, what in enumerate(history) if what != "pages" or n == 0 or history[n - 1] != "pages"]

    assert got.keys() == want.keys()
    for key, history in want.items():
        trim = lives if isinstance(key, tuple) and key[0] == "lives" else list
        assert trim(got[key]) == trim(history), key


# --- loss ---------------------------------------------------------------------------------------------------


def test_a_full_queue_counts_what_it_loses_and_says_so_once_there_is_room() -> None:
    log = FactLog(3)
    log.enabled = True
    for n in range(5):
        log.pages("alloc", "full", f"r{n}", [n])
    log.step(1, 0)
    assert not [event for event in log.take() if isinstance(event, FactsLost)]
    log.pages("alloc", "full", "late", [9])
    log.step(2, 1)
    (lost,) = log.take()
    assert isinstance(lost, FactsLost)
    assert (lost.count, lost.first_forward, lost.last_forward, lost.forward) == (3, 1, 1, 2)
    log.pages("alloc", "full", "again", [9])
    log.step(3, 2)
    assert [type(event) for event in log.take()] == [PagesAllocated]


def test_a_reader_that_is_gone_costs_bounded_memory() -> None:
    log = FactLog(8)
    log.enabled = True
    for forward in range(1, 200):
        log.pages("alloc", "full", "a", [1])
        log.step(forward, 0)
        log.launched(forward, 0, 1, 1, 1, {})
    assert log.queued <= 10


@given(st.integers(1, 6), st.lists(st.sampled_from(["call", "step", "take"]), max_size=60))
def test_every_call_is_taken_or_counted_as_lost(capacity: int, schedule: list[str]) -> None:
    log = FactLog(capacity)
    log.enabled = True
    made, taken, lost, forward = 0, 0, 0, 0

    def take() -> None:
        nonlocal taken, lost
        for event in log.take():
            if isinstance(event, PagesFact):
                taken += len(expand(event))
            elif isinstance(event, FactsLost):
                lost += event.count

    for action in [*schedule, "take", "step", "take"]:
        if action == "call":
            log.pages("alloc", "full", "a", [made])
            made += 1
        elif action == "step":
            forward += 1
            log.step(forward, 0)
        else:
            take()
    assert taken + lost == made


def test_a_reader_on_another_thread_gets_every_fact_once_and_in_order(log: FactLog) -> None:
    done = threading.Event()
    taken: list[Event] = []

    def read() -> None:
        while not done.is_set():
            taken.extend(log.take())
        taken.extend(log.take(everything=True))

    reader = threading.Thread(target=read)
    reader.start()
    total = 0
    for forward in range(1, 300):
        for _ in range(10):
            log.pages("alloc", "full", "a", [total])
            total += 1
        log.step(forward, forward - 1)
        log.pages("alloc", "full", "a", [total])
        total += 1
        log.launched(forward, forward - 1, 1, 1, 1, {})
    done.set()
    reader.join()
    pages = [page for fact in taken if isinstance(fact, PagesAllocated) for _, page in expand(fact)]
    assert pages == list(range(total))
    launches = [fact.forward for fact in taken if isinstance(fact, ForwardLaunched)]
    assert launches == list(range(1, 300))


def test_a_new_run_starts_from_the_first_forward(log: FactLog) -> None:
    log.launched(40, 39, 1, 1, 1, {})
    log.take()
    log.new_run()
    log.pages("alloc", "full", "a", [1])
    log.hurry()
    (fact,) = log.take()
    assert isinstance(fact, PagesAllocated)
    assert (fact.forward, fact.retired) == (1, 0)


def test_recording_and_publishing_import_neither_torch_nor_numpy() -> None:
    program = (
        "import sys, kvcanary.facts, kvcanary.bus, kvcanary.pipeline; "
        "print([name for name in ('torch', 'numpy', 'triton') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


def test_facts_that_nobody_wants_are_not_packed_and_those_around_them_are(monkeypatch: pytest.MonkeyPatch) -> None:
    packed: list[object] = []
    log = FactLog(100)
    log.enabled = True
    log.wants = lambda kind: kind is PagesFreed

    def note_and_pack(calls: list[Any], *rest: Any) -> list[Event]:
        packed.extend(calls)
        return pack(calls, *rest)

    monkeypatch.setattr(facts_module, "pack", note_and_pack)
    log.pages("alloc", "full", "a", [1])
    log.pages("free", "full", "a", [2])
    log.step(1, 0)
    log.launched(1, 0, 1, 1, 1, {})
    assert [type(event) for event in log.take()] == [PagesFreed]
    assert len(packed) == 1
