"""What the drain may ask of the engine."""

from __future__ import annotations

import threading

from kvcanary.mailbox import Mailbox, Quarantine, Raise


def test_a_new_mailbox_has_nothing_pending() -> None:
    mailbox = Mailbox()
    assert not mailbox.pending
    assert mailbox.error is None
    assert mailbox.take_quarantines() == []


def test_the_first_error_stays() -> None:
    mailbox = Mailbox()
    first, second = RuntimeError("first"), RuntimeError("second")
    mailbox.post(Raise(first))
    mailbox.post(Raise(second))
    mailbox.take_quarantines()
    assert mailbox.error is first
    assert mailbox.pending


def test_quarantines_are_taken_once_and_in_order() -> None:
    mailbox = Mailbox()
    one, two = Quarantine("i1", ("a",), "full", (1,)), Quarantine("i2", ("b",), "full", (2,))
    mailbox.post(one)
    mailbox.post(two)
    assert mailbox.take_quarantines() == [one, two]
    assert mailbox.take_quarantines() == []
    mailbox.post(two)
    mailbox.take_quarantines()
    assert not mailbox.pending


def test_quarantines_of_one_incident_are_merged_until_they_are_taken() -> None:
    mailbox = Mailbox()
    mailbox.post(Quarantine("i1", ("a",), "full", (1,)))
    mailbox.post(Quarantine("i1", ("a", "b"), "full", (2, 1)))
    mailbox.post(Quarantine("i1", (), "swa", (9,)))
    assert mailbox.take_quarantines() == [
        Quarantine("i1", ("a", "b"), "full", (1, 2)),
        Quarantine("i1", (), "swa", (9,)),
    ]


def test_no_quarantine_is_lost_between_threads() -> None:
    mailbox = Mailbox()
    taken: list[Quarantine] = []
    done = threading.Event()

    def post() -> None:
        for number in range(2000):
            mailbox.post(Quarantine(f"i{number}"))
        done.set()

    poster = threading.Thread(target=post)
    poster.start()
    while not (done.is_set() and not mailbox.pending):
        if mailbox.pending:
            taken += mailbox.take_quarantines()
    poster.join()
    assert [quarantine.incident for quarantine in taken] == [f"i{number}" for number in range(2000)]
