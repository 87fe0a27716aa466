"""Transfers: writers and readers that no stream orders, loads that fail, copies on the device."""

from __future__ import annotations

import pytest

from tests.host.ownership_script import Script, told

# --- early reuse --------------------------------------------------------------------------------------------


def test_a_page_handed_on_while_a_load_still_enters_it_names_both_requests() -> None:
    engine = Script()
    engine.alloc("a", *range(14, 45))
    engine.copy_start("x", "a", *range(14, 45))
    engine.launch()
    engine.finish("a")
    engine.free(*range(14, 45))
    assert engine.launch() == []
    engine.alloc("b", *range(1, 33))
    (found,) = engine.launch()
    assert told([found]) == [("EARLY_REUSE", 14, "b", "a")]
    assert found.detail == (
        "pages 14..32: handed out in forward 3, while transfer x (in, which no stream orders, since forward 1) had "
        "neither landed nor failed"
    )
    engine.copy_land("x")
    assert engine.launch() == []


def test_to_free_a_page_that_a_transfer_still_uses_is_a_hazard() -> None:
    engine = Script()
    engine.alloc("a", 1)
    engine.copy_start("x", "a", 1, direction="out")
    engine.free(1)
    assert engine.launch() == []
    assert engine.hazards() == {"freed_during_transfer": 1}
    assert engine.hazards() == {}


@pytest.mark.parametrize("direction", ["in", "out"])
@pytest.mark.parametrize("ending", ["land", "fail"])
def test_a_page_handed_on_after_the_transfer_is_over_is_in_order(direction: str, ending: str) -> None:
    engine = Script()
    engine.alloc("a", 1)
    engine.copy_start("x", "a", 1, direction=direction)
    engine.launch()
    (engine.copy_land if ending == "land" else engine.copy_fail)("x")
    engine.finish("a")
    engine.free(1)
    engine.alloc("b", 1)
    engine.publish("b", 1)
    engine.launch()
    assert engine.all_found == []


def test_a_page_handed_on_while_it_is_still_stored_is_early_even_to_the_same_request() -> None:
    engine = Script()
    engine.alloc("a", 1)
    engine.copy_start("x", "a", 1, direction="out")
    engine.free(1)
    engine.preempt("a")
    engine.launch()
    engine.alloc("a", 1)
    assert told(engine.launch()) == [("EARLY_REUSE", 1, "a", "")]


def test_a_transfer_belongs_to_the_request_that_began_it_not_to_the_next_one_of_that_name() -> None:
    engine = Script()
    engine.alloc("a", 1)
    engine.copy_start("x", "a", 1, direction="out")
    engine.finish("a")
    engine.launch()
    engine.alloc("a", 1)
    assert told(engine.launch()) == [("EARLY_REUSE", 1, "a", "")]


def test_copies_in_stream_order_may_follow_the_free() -> None:
    engine = Script()
    engine.alloc("a", 1)
    engine.launch()
    engine.free(1)
    engine.copy_start("x", "a", 1, direction="out", ordered=True)
    engine.alloc("b", 1)
    engine.copy_start("y", "b", 1, ordered=True)
    engine.launch(retired=0)
    assert engine.all_found == []
    assert engine.hazards() == {}


def test_a_load_into_a_page_that_a_running_forward_may_still_read_is_found() -> None:
    engine = Script()
    engine.alloc("a", *range(8))
    engine.launch()
    engine.free(3)
    engine.alloc("b", 3)
    engine.copy_start("x", "b", 3)
    (found,) = engine.launch(retired=0)
    assert told([found]) == [("EARLY_REUSE", 3, "b", "a")]
    assert found.detail == (
        "page 3: transfer x (in, which no stream orders, since forward 2) enters what forward 1 may still use for an "
        "earlier owner; the last forward that had retired was 0"
    )


def test_a_load_may_begin_once_the_last_forward_of_the_earlier_owner_has_retired() -> None:
    engine = Script()
    engine.alloc("a", *range(8))
    engine.launch()
    engine.launch(retired=0)
    engine.finish("a")
    engine.free(*range(8))
    engine.launch(retired=1)
    engine.launch(retired=1)
    engine.alloc("b", 3)
    engine.retire(2)
    engine.copy_start("x", "b", 3)
    assert engine.launch() == []


def test_what_retires_after_the_load_began_does_not_excuse_it() -> None:
    engine = Script()
    engine.alloc("a", 3)
    engine.launch()
    engine.free(3)
    engine.alloc("b", 3)
    engine.copy_start("x", "b", 3)
    engine.retire(1)
    assert told(engine.launch(retired=1)) == [("EARLY_REUSE", 3, "b", "a")]


def test_a_request_that_ended_before_the_free_uses_nothing_after_its_end() -> None:
    engine = Script()
    engine.alloc("a", 3)
    engine.launch()
    engine.finish("a")
    engine.launch()
    engine.launch()
    engine.free(3)
    engine.alloc("b", 3)
    engine.retire(1)
    engine.log.retired = 1
    engine.copy_start("x", "b", 3)
    assert engine.launch(retired=1) == []


def test_a_page_that_was_handed_on_unused_has_no_running_reader() -> None:
    engine = Script()
    engine.launch(retired=0)
    engine.alloc("a", 3)
    engine.free(3)
    engine.alloc("b", 3)
    engine.copy_start("x", "b", 3)
    assert engine.launch(retired=0) == []


def test_a_load_may_be_told_before_the_allotment_that_it_is_for() -> None:
    engine = Script()
    engine.copy_start("x", "b", 3)
    engine.alloc("b", 3)
    engine.copy_land("x")
    assert engine.launch() == []


def test_a_load_for_another_request_than_the_one_that_gets_the_page_is_found() -> None:
    engine = Script()
    engine.copy_start("x", "a", 3)
    engine.alloc("b", 3)
    assert told(engine.launch()) == [("EARLY_REUSE", 3, "b", "a")]


# --- overlap ------------------------------------------------------------------------------------------------


def test_two_transfers_into_one_page_overlap() -> None:
    engine = Script()
    engine.alloc("a", 0)
    engine.copy_start("x", "a", 0)
    engine.copy_start("y", "a", 0, direction="out")
    (found,) = engine.launch()
    assert told([found]) == [("TRANSFER_OVERLAP", 0, "a", "")]
    assert found.detail == (
        "page 0: transfer y (out, which no stream orders, since forward 1) meets transfer x (in, which no stream "
        "orders, since forward 1)"
    )


def test_two_device_pages_sent_to_one_host_page_overlap() -> None:
    engine = Script()
    engine.copy_start("x", "a", 0)
    engine.copy_start("y", "b", 0)
    assert told(engine.launch()) == [("TRANSFER_OVERLAP", 0, "b", "a")]


@pytest.mark.parametrize("ordered", [True, False])
def test_transfers_that_only_read_or_that_one_stream_orders_do_not_overlap(ordered: bool) -> None:
    engine = Script()
    direction = "in" if ordered else "out"
    engine.alloc("a", 0)
    engine.copy_start("x", "a", 0, direction=direction, ordered=ordered)
    engine.copy_start("y", "a", 0, direction=direction, ordered=ordered)
    assert engine.launch() == []


def test_a_transfer_that_is_told_in_pieces_does_not_overlap_itself() -> None:
    engine = Script()
    engine.alloc("a", 0, 1)
    engine.copy_start("x", "a", 0)
    engine.copy_start("x", "a", 0, 1)
    engine.copy_land("x")
    engine.copy_start("y", "a", 0, 1)
    assert engine.launch() == []


def test_a_load_into_the_page_of_another_request_is_found() -> None:
    engine = Script()
    engine.admit("b")
    engine.alloc("a", 0)
    engine.copy_start("x", "b", 0)
    assert told(engine.launch()) == [("TRANSFER_OVERLAP", 0, "b", "a")]


def test_a_page_copied_on_the_device_while_a_load_enters_it_is_found() -> None:
    engine = Script()
    engine.alloc("a", 0)
    engine.copy_start("x", "a", 0)
    engine.alloc("b", 1)
    engine.log.moved("full", [0], [1])
    assert told(engine.launch()) == [("TRANSFER_OVERLAP", 0, "a", "")]


def test_a_page_copied_on_the_device_while_it_is_stored_is_in_order() -> None:
    engine = Script()
    engine.alloc("a", 0)
    engine.copy_start("x", "a", 0, direction="out")
    engine.alloc("b", 1)
    engine.log.moved("full", [0], [1])
    assert engine.launch() == []


# --- failed loads -------------------------------------------------------------------------------------------


def failed_load() -> Script:
    engine = Script()
    engine.alloc("b", 4, 5)
    engine.copy_start("x", "b", 4, 5)
    engine.launch()
    engine.copy_fail("x")
    engine.launch()
    return engine


def test_a_failed_load_that_is_called_landed_is_found() -> None:
    engine = failed_load()
    engine.copy_land("x")
    (found,) = engine.launch()
    assert told([found]) == [("FAILED_LOAD_USED", 4, "b", "")]
    assert found.detail == "pages 4..5: called landed, though transfer x failed in forward 2"


def test_records_imported_for_a_failed_load_are_found() -> None:
    engine = failed_load()
    engine.alloc("b", 4, 5)
    assert told(engine.launch()) == [("FAILED_LOAD_USED", 4, "b", "")]


def test_a_failed_load_that_is_published_is_found_once() -> None:
    engine = failed_load()
    engine.publish("b", 4, 5)
    engine.hit("c", 4, 5)
    assert told(engine.launch()) == [("FAILED_LOAD_USED", 4, "b", "")]


def test_a_failed_load_that_another_request_takes_is_found() -> None:
    engine = failed_load()
    engine.finish("b")
    engine.hit("c", 4)
    assert told(engine.launch()) == [("FAILED_LOAD_USED", 4, "c", "b")]


def test_a_failure_travels_with_a_copy_of_its_page() -> None:
    engine = failed_load()
    engine.alloc("b", 6)
    engine.log.moved("full", [4], [6])
    engine.publish("b", 6)
    assert told(engine.launch()) == [("FAILED_LOAD_USED", 6, "b", "")]


def test_a_page_copied_over_a_failed_load_is_good_again() -> None:
    engine = failed_load()
    engine.alloc("b", 6)
    engine.log.moved("full", [6], [4])
    engine.publish("b", 4)
    assert engine.launch() == []


@pytest.mark.parametrize("how", ["rewind", "admit", "again", "anew", "restamp"])
def test_pages_that_were_computed_or_loaded_after_all_are_in_order(how: str) -> None:
    engine = failed_load()
    if how == "rewind":
        engine.rewind("b", 0)
    elif how == "admit":
        engine.admit("b")
    elif how == "again":
        engine.copy_start("x", "b", 4, 5)
        engine.copy_land("x")
    elif how == "anew":
        engine.free(4, 5)
        engine.alloc("b", 4, 5)
    else:
        engine.log.pages("restamp", "full", "", [4, 5])
    engine.launch()
    engine.publish("b", 4, 5)
    engine.hit("c", 4, 5)
    assert engine.launch() == []


def test_a_failed_store_leaves_the_pages_as_they_are() -> None:
    engine = Script()
    engine.alloc("a", 1)
    engine.copy_start("x", "a", 1, direction="out")
    engine.copy_fail("x")
    engine.publish("a", 1)
    assert engine.launch() == []


def test_a_hit_on_a_page_that_is_still_being_loaded_is_a_hazard() -> None:
    engine = Script()
    engine.alloc("a", 1)
    engine.copy_start("x", "a", 1)
    engine.publish("a", 1)
    engine.hit("b", 1)
    assert engine.launch() == []
    assert engine.hazards() == {"reused_during_load": 1}


def test_the_end_of_a_transfer_that_nobody_saw_begin_is_ignored() -> None:
    engine = Script()
    engine.copy_land("x")
    engine.copy_fail("y")
    assert engine.launch() == []
