"""From violations to incidents, errors and quarantines."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from kvcanary.errors import KVCorruptionError
from kvcanary.events import (
    Event,
    IncidentOpened,
    IncidentUpdated,
    Origin,
    OwnershipViolated,
    QuarantineRequested,
    RunStarted,
    Ticked,
    ViolationDetected,
)
from kvcanary.mailbox import Mailbox, Quarantine, Raise
from kvcanary.observers.violations import MAX_KEYS, RECENT_FORWARDS, ViolationsFold


def fold(mode: str = "log") -> tuple[ViolationsFold, Mailbox]:
    mailbox = Mailbox()
    guard = ViolationsFold(mode, mailbox)
    assert guard.handle(RunStarted(run="r", origin=Origin())) == []
    return guard, mailbox


def violation(kind: str = "CONTENT", **fields: Any) -> ViolationDetected:
    given: dict[str, Any] = {"seq": 7, "forward": 40, "role": "check", "group": "full", "request": "a", "tag": 1}
    return ViolationDetected(kind=kind, **given | fields)


def feed(guard: ViolationsFold, *events: Event) -> list[Event]:
    return [derived for event in events for derived in guard.handle(event)]


def test_a_violation_opens_an_incident_that_says_it_all_in_one_line() -> None:
    guard, _ = fold()
    first = violation("POSITION", slot=12, page=3, position_expected=5, position_found=9, time_ns=11, monotonic_ns=12)
    (opened,) = feed(guard, first)
    assert isinstance(opened, IncidentOpened)
    assert opened.headline == (
        "POSITION: request a, group full, slot 12, page 3, position 5: found a record of position 9, "
        "expected position 5, forward 40"
    )
    assert (opened.cause, opened.by, opened.forward, opened.time_ns, opened.monotonic_ns) == (
        7,
        "violations",
        40,
        11,
        12,
    )
    assert (opened.kind, opened.requests, opened.slot, opened.page) == ("POSITION", ("a",), 12, 3)
    assert opened.first == first
    assert opened.docs == "violations.md#position"


def test_log_mode_posts_nothing() -> None:
    guard, mailbox = fold("log")
    feed(guard, violation(), OwnershipViolated(kind="EARLY_REUSE", page=1))
    assert not mailbox.pending


def test_repeats_at_a_slot_belong_to_one_incident() -> None:
    guard, _ = fold()
    opened, updated = feed(
        guard,
        violation("WRITE_FOREIGN", request="b", tag=2, slot=12, page=3),
        violation("DIGEST", request="a", slot=12, page=3, forward=41),
    )
    assert isinstance(opened, IncidentOpened)
    assert isinstance(updated, IncidentUpdated)
    assert updated.incident == opened.incident
    assert updated.kinds == {"WRITE_FOREIGN": 1, "DIGEST": 1}
    assert updated.requests == ("b", "a")
    assert updated.count == 2


def test_two_slots_of_one_page_have_one_cause() -> None:
    guard, _ = fold()
    events = feed(guard, violation(slot=12, page=3), violation(slot=13, page=3, request="b", tag=2))
    assert [type(event) for event in events] == [IncidentOpened, IncidentUpdated]


def test_one_request_and_family_have_one_cause() -> None:
    guard, _ = fold()
    events = feed(guard, violation("POSITION", slot=12, page=3), violation("DIGEST", slot=80, page=20))
    assert [type(event) for event in events] == [IncidentOpened, IncidentUpdated]


def test_other_requests_other_pages_and_other_groups_are_other_incidents() -> None:
    guard, _ = fold()
    events = feed(
        guard,
        violation(slot=12, page=3),
        violation(slot=80, page=20, request="b", tag=2),
        violation(slot=12, page=3, group="swa", request="c", tag=3),
    )
    assert [type(event) for event in events] == [IncidentOpened] * 3
    assert len({event.incident for event in events if isinstance(event, IncidentOpened)}) == 3


def test_another_family_of_the_same_request_is_another_incident() -> None:
    guard, _ = fold()
    events = feed(guard, violation("CONTENT", slot=12, page=3), violation("INPUT_TOKEN"))
    assert [type(event) for event in events] == [IncidentOpened, IncidentOpened]


def test_what_a_tainted_row_shows_follows_from_what_tainted_it() -> None:
    guard, _ = fold()
    events = feed(guard, violation("INPUT_TOKEN"), violation("DIGEST", slot=80, page=20, tainted=True))
    assert [type(event) for event in events] == [IncidentOpened, IncidentUpdated]


def test_a_wrong_final_digest_belongs_to_what_happened_to_the_request() -> None:
    guard, _ = fold()
    events = feed(guard, violation("WRITE_CONFLICT", slot=4, page=1), violation("FINAL_DIGEST", role="facts"))
    assert [type(event) for event in events] == [IncidentOpened, IncidentUpdated]


def test_the_victim_of_a_foreign_write_belongs_to_its_incident() -> None:
    guard, _ = fold()
    foreign = violation(
        "WRITE_FOREIGN", request="b", tag=2, slot=12, page=3, owner_state="held", owner_request="a", owner_tag=1
    )
    opened, updated = feed(guard, foreign, violation("REQUEST_DIGEST", request="a"))
    assert isinstance(opened, IncidentOpened)
    assert opened.requests == ("b", "a")
    assert isinstance(updated, IncidentUpdated)


def test_the_same_slot_much_later_is_a_new_incident() -> None:
    guard, _ = fold()
    events = feed(guard, violation(slot=12, page=3), violation(slot=12, page=3, forward=41 + RECENT_FORWARDS))
    assert [type(event) for event in events] == [IncidentOpened, IncidentOpened]


def test_a_flood_is_told_a_few_times_only_and_in_full_at_the_next_tick() -> None:
    guard, _ = fold()
    events = feed(guard, *[violation(slot=slot, page=3) for slot in range(1000)])
    assert len(events) == 10
    (last,) = feed(guard, Ticked(seq=99))
    assert isinstance(last, IncidentUpdated)
    assert last.count == 1000
    assert feed(guard, Ticked()) == []


def test_memory_is_bounded_in_slots_and_requests() -> None:
    guard, _ = fold()
    for number in range(MAX_KEYS):
        feed(guard, violation(slot=number, page=number, request=f"r{number}", tag=number + 1))
    assert len(guard._by_key) <= MAX_KEYS
    feed(guard, *[violation(slot=5, page=5, request=f"q{number}", forward=41) for number in range(200)])
    (update, *_) = feed(guard, Ticked())
    assert isinstance(update, IncidentUpdated)
    assert len(update.requests) <= 64


def test_raise_mode_posts_one_error_that_says_everything() -> None:
    guard, mailbox = fold("raise")
    feed(guard, violation("INPUT_TOKEN", position_expected=5, token_expected=17, token_found=18, slot=3))
    first = mailbox.error
    feed(guard, violation("CONTENT", slot=80, page=20, request="b"))
    assert mailbox.error is first
    assert isinstance(first, KVCorruptionError)
    assert (first.kind, first.request, first.group, first.slot) == ("INPUT_TOKEN", "a", "full", 3)
    assert (first.position, first.found, first.expected, first.forward) == (5, "token 18", "token 17", 40)
    assert first.details["token_found"] == 18
    assert first.details["likely_cause"].startswith("lost carry-over")
    assert "likely lost carry-over" in str(first)
    assert pickle.loads(pickle.dumps(first)).details == first.details


def test_raise_mode_posts_once_however_many_incidents_follow() -> None:
    class Counting(Mailbox):
        posts = 0

        def post(self, message: Raise | Quarantine) -> None:
            self.posts += 1
            super().post(message)

    mailbox = Counting()
    guard = ViolationsFold("raise", mailbox)
    feed(guard, *[violation(slot=slot, page=slot, request=f"r{slot}") for slot in range(9)])
    assert mailbox.posts == 1


def test_raise_mode_raises_for_ownership_as_well() -> None:
    guard, mailbox = fold("raise")
    (opened,) = feed(
        guard,
        OwnershipViolated(kind="EARLY_REUSE", group="full", page=5, request="b", other="a", detail="in forward 9"),
    )
    assert isinstance(opened, IncidentOpened)
    assert opened.likely_cause.startswith("freed too early")
    assert opened.requests == ("b", "a")
    assert opened.first is None
    assert "in forward 9" in opened.evidence
    assert isinstance(mailbox.error, KVCorruptionError)
    assert mailbox.error.kind == "EARLY_REUSE"
    assert mailbox.error.slot is None


def test_a_new_run_raises_anew() -> None:
    guard, mailbox = fold("raise")
    feed(guard, violation(slot=3))
    guard._mailbox = second = Mailbox()
    feed(guard, RunStarted(run="s", origin=Origin()), violation(slot=3))
    assert second.error is not None
    assert mailbox.error is not second.error


def test_quarantine_asks_for_the_request_its_victim_and_the_page_once() -> None:
    guard, mailbox = fold("quarantine")
    foreign = violation(
        "WRITE_FOREIGN", request="b", tag=2, slot=12, page=3, owner_state="held", owner_request="a", owner_tag=1
    )
    opened, asked = feed(guard, foreign)
    assert isinstance(opened, IncidentOpened)
    assert isinstance(asked, QuarantineRequested)
    assert (asked.requests, asked.group, asked.pages) == (("b", "a"), "full", (3,))
    assert mailbox.error is None
    assert mailbox.take_quarantines() == [Quarantine(opened.incident, ("b", "a"), "full", (3,), foreign.forward)]
    assert not [e for e in feed(guard, foreign) if isinstance(e, QuarantineRequested)]
    assert not mailbox.pending


def test_quarantine_follows_an_incident_that_grows() -> None:
    guard, mailbox = fold("quarantine")
    feed(guard, violation("POSITION", slot=12, page=3))
    mailbox.take_quarantines()
    feed(guard, violation("DIGEST", slot=80, page=20))
    (more,) = mailbox.take_quarantines()
    assert (more.requests, more.pages) == ((), (20,))


def test_idle_bytes_are_quarantined_by_their_page_alone() -> None:
    guard, mailbox = fold("quarantine")
    feed(guard, violation("CONTENT", request="", tag=0, slot=12, page=3))
    (wanted,) = mailbox.take_quarantines()
    assert (wanted.requests, wanted.pages) == ((), (3,))


def test_a_replay_of_the_same_events_derives_the_same_incidents() -> None:
    events = [violation(slot=slot, page=slot // 4, request=f"r{slot % 3}") for slot in range(50)]
    one, two = feed(fold()[0], *events), feed(fold()[0], *events)
    assert one == two
    assert one


@pytest.mark.parametrize("kind", ["SOMETHING_NEW", "CONTENT"])
def test_an_unknown_kind_still_opens_an_incident(kind: str) -> None:
    guard, _ = fold()
    (opened,) = feed(guard, violation(kind))
    assert isinstance(opened, IncidentOpened)
    assert opened.kind == kind
