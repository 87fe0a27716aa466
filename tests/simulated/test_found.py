"""What the random programs found in the canary, as small cases of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvcanary.config import CanaryConfig
from kvcanary.engines.base import Patches
from kvcanary.engines.simulated import SimulatedEngine
from kvcanary.errors import ConfigError
from kvcanary.events import OwnershipViolated, QuarantineRequested, ViolationDetected
from kvcanary.faults.programs import Inline
from kvcanary.mailbox import Mailbox
from kvcanary.observers.violations import ViolationsFold
from tests.host.ownership_script import Script


def freed_while_published() -> OwnershipViolated:
    script = Script()
    script.alloc("a", 3, 4, 9)
    script.publish("a", 3, 4, 9)
    script.launch()
    script.free(3, 4, 9)
    script.launch()
    (violated,) = script.found
    return violated


def test_a_broken_rule_carries_all_pages_that_it_concerns() -> None:
    violated = freed_while_published()
    assert (violated.kind, violated.page) == ("FREED_WHILE_PUBLISHED", 3)
    assert violated.page_runs == ((3, 2), (9, 1))


def test_quarantine_asks_for_all_pages_of_a_broken_rule_once() -> None:
    fold = ViolationsFold("quarantine", Mailbox())
    violated = freed_while_published()
    asked = [event for event in fold.handle(violated) if isinstance(event, QuarantineRequested)]
    assert [event.pages for event in asked] == [(3, 4, 9)]
    again = [event for event in fold.handle(violated) if isinstance(event, QuarantineRequested)]
    assert again == []


def read_a_page_that_nobody_ever_had(*, told: bool) -> list[Any]:
    """A table leads to a page that was free when the canary was attached."""
    engine = SimulatedEngine(seed=2)
    inline = Inline(engine, CanaryConfig(mode="log"))
    if not told:
        with inline.canary.step():
            pass
        engine.device.run()
        inline.canary.arm()  # forgets what the adapter told of free pages
    request = engine.submit(engine.prompt(6), 8)
    engine.step()
    page = request.pages["full"][0]
    request.pages["full"][0] = engine.pools["full"].free[0]
    engine.step()
    request.pages["full"][0] = page
    assert engine.truth
    return [event for event in inline.collect() if isinstance(event, ViolationDetected)]


def test_a_read_of_a_page_that_was_free_at_attach_is_unwritten() -> None:
    assert {found.kind for found in read_a_page_that_nobody_ever_had(told=True)} == {"UNWRITTEN"}


def test_a_read_of_a_page_of_which_nothing_was_told_claims_nothing() -> None:
    assert read_a_page_that_nobody_ever_had(told=False) == []


class Thing:
    """Has a method."""

    def add(self, one: int, two: int = 1) -> int:
        """Add."""
        return one + two


def test_a_call_is_told_after_it_is_done_with_its_result_and_arguments() -> None:
    thing, patches, told = Thing(), Patches(), list[Any]()
    patches.after(thing, "add", lambda result, *args, **kwargs: told.append((result, args, kwargs)))
    assert thing.add(2, two=3) == 5
    patches.undo()
    assert thing.add(1) == 2
    assert told == [(5, (2,), {"two": 3})]
    assert vars(thing) == {}


def test_what_raises_is_not_told() -> None:
    thing, patches, told = Thing(), Patches(), list[Any]()
    fail: Callable[..., Any] = lambda *args: told.append(args)  # noqa: E731
    patches.after(thing, "add", fail)
    with pytest.raises(TypeError):
        thing.add("a")  # type: ignore[arg-type]
    assert told == []
    with pytest.raises(ConfigError, match="no method 'subtract'"):
        patches.after(thing, "subtract", fail)
