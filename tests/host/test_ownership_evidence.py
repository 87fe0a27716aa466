"""Rules that the device shows to be broken, and the owners that explain a violation."""

from __future__ import annotations

from typing import Any

import pytest

from kvcanary.config import CanaryConfig
from kvcanary.events import Event, IncidentOpened, Ticked, ViolationDetected
from kvcanary.folding import Folding
from kvcanary.mailbox import Mailbox
from kvcanary.observers import default_folds
from kvcanary.observers.ownership import OwnershipFold
from tests.host.ownership_script import Script, group, told


def violation(kind: str, page: int, request: str, forward: int, **fields: Any) -> ViolationDetected:
    given: dict[str, Any] = {"role": "check", "group": "full", "slot": 16 * page, "position_expected": 31}
    return ViolationDetected(kind=kind, page=page, request=request, forward=forward, **given | fields)


# --- published, never written -------------------------------------------------------------------------------


def published() -> Script:
    engine = Script()
    engine.alloc("a", 1)
    engine.publish("a", 1)
    engine.launch()
    engine.hit("b", 1)
    engine.launch()
    return engine


def test_a_published_page_that_is_read_unwritten_names_who_published_it_and_who_reads_it() -> None:
    engine = published()
    (found,) = engine.show(violation("UNWRITTEN", 1, "b", 2))
    assert told([found]) == [("PUBLISHED_UNWRITTEN", 1, "a", "b")]
    assert found.detail == "page 1: published in forward 1, and a forward retired without the write"
    assert found.forward == 2


def test_a_published_page_is_called_unwritten_once() -> None:
    engine = published()
    engine.show(violation("UNWRITTEN", 1, "b", 2), violation("UNWRITTEN", 1, "c", 3))
    assert len(engine.found) == 1


def test_a_published_page_whose_write_never_came_is_found_whichever_comes_first() -> None:
    engine = published()
    assert told(engine.show(violation("WRITE_MISSING", 1, "a", 2, role="seal"))) == [
        ("PUBLISHED_UNWRITTEN", 1, "a", "")
    ]
    late = Script()
    late.alloc("a", 1)
    late.launch()
    late.show(violation("WRITE_MISSING", 1, "a", 1, role="seal"))
    late.publish("a", 1)
    assert told(late.launch()) == [("PUBLISHED_UNWRITTEN", 1, "a", "")]


def test_a_page_that_is_not_published_is_the_request_s_own_affair() -> None:
    engine = Script()
    engine.alloc("a", 1)
    engine.launch()
    assert engine.show(violation("UNWRITTEN", 1, "a", 1)) == []


def test_what_an_older_forward_found_is_not_laid_to_a_younger_publication() -> None:
    engine = Script()
    engine.alloc("a", 1)
    engine.launch()
    engine.launch()
    engine.publish("a", 1)
    engine.launch()
    assert engine.show(violation("UNWRITTEN", 1, "a", 2)) == []


# --- failed loads, windows ----------------------------------------------------------------------------------


def test_a_failed_load_that_a_forward_reads_is_found() -> None:
    engine = Script()
    engine.alloc("b", 4)
    engine.copy_start("x", "b", 4)
    engine.launch()
    engine.copy_fail("x")
    engine.admit("b", start=16)
    engine.launch()
    assert told(engine.show(violation("UNWRITTEN", 4, "b", 2))) == [("FAILED_LOAD_USED", 4, "b", "")]
    assert len(engine.show(violation("UNWRITTEN", 4, "b", 3))) == 1


def windowed() -> Script:
    engine = Script(group("full", window=128))
    engine.admit("a")
    engine.alloc("a", 0, 1)
    engine.launch()
    engine.free(0)
    engine.alloc("b", 0)
    engine.launch()
    return engine


def test_a_page_freed_while_the_window_still_reaches_it_names_who_got_it() -> None:
    engine = windowed()
    (found,) = engine.show(violation("DIGEST", 0, "a", 2))
    assert told([found]) == [("WINDOW_FREED_EARLY", 0, "a", "b")]
    assert found.detail == "page 0: freed in forward 2, but forward 2 still reads position 31 there"


def test_a_forward_that_was_launched_before_the_free_may_read_the_page() -> None:
    engine = windowed()
    assert engine.show(violation("DIGEST", 0, "a", 1)) == []


@pytest.mark.parametrize("case", ["another group", "another request", "ended"])
def test_other_misreadings_are_no_matter_of_the_window(case: str) -> None:
    engine = windowed() if case != "another group" else Script(group("full"))
    if case == "another group":
        engine.alloc("a", 0)
        engine.launch()
        engine.free(0)
        engine.launch()
    if case == "ended":
        engine.preempt("a")
        engine.admit("a")
        engine.launch()
    reader = "c" if case == "another request" else "a"
    assert engine.show(violation("DIGEST", 0, reader, engine.forward - 1)) == []


def test_findings_without_a_page_are_left_alone() -> None:
    engine = windowed()
    assert engine.show(violation("WINDOW", -1, "a", 2)) == []


# --- owners -------------------------------------------------------------------------------------------------


def handed_on() -> Script:
    engine = Script()
    for request in "abc":
        engine.alloc(request, 7)
        engine.launch()
        engine.launch()
        engine.finish(request)
        engine.free(7)
    engine.alloc("d", 7)
    engine.launch()
    return engine


def owners(fold: OwnershipFold, forward: int) -> list[tuple[str, int, int]]:
    return [(owner.request, owner.since, owner.until) for owner in fold.owners("full", 7, forward)]


def test_the_last_owners_of_a_page_are_told_newest_first() -> None:
    fold = handed_on().fold
    assert owners(fold, 7) == [("d", 7, 0), ("c", 5, 7), ("b", 3, 5)]


def test_owners_are_those_that_the_forward_knew() -> None:
    fold = handed_on().fold
    assert owners(fold, 4) == [("b", 3, 5)]
    assert owners(fold, 6) == [("c", 5, 7), ("b", 3, 5)]


def test_a_page_without_facts_has_no_owners() -> None:
    fold = handed_on().fold
    assert fold.owners("full", 8, 9) == ()
    assert fold.owners("elsewhere", 1, 9) == ()
    assert fold.owners("full", -1, 9) == ()


def test_an_incident_tells_the_last_two_owners_of_the_page() -> None:
    folding = Folding(default_folds(CanaryConfig(mode="log"), Mailbox()))
    log = handed_on().log
    events: list[Event] = []
    log.pages("alloc", "full", "a", [7])
    log.step(1, 0)
    log.pages("free", "full", "", [7])
    log.pages("alloc", "full", "b", [7])
    log.step(2, 1)
    events += log.take()
    out = folding.run([*events, violation("DIGEST", 7, "a", 2), Ticked()])
    (opened,) = [event for event in out if isinstance(event, IncidentOpened)]
    assert opened.evidence[-2:] == (
        "request b holds the page too",
        "request a held the page from forward 1 until it was taken back for forward 2",
    )
