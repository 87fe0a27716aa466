"""Rules of allotment and of the prefix index: each broken in its smallest case, and kept in its clean twin."""

from __future__ import annotations

from kvcanary.events import CanaryArmed, FactsLost, Origin, RunStarted
from tests.host.ownership_script import Script, group, told

# --- two owners ---------------------------------------------------------------------------------------------


def test_a_page_freed_twice_is_a_double_free() -> None:
    engine = Script()
    engine.alloc("a", 3)
    engine.free(3)
    engine.launch()
    engine.free(3)
    (found,) = engine.launch()
    assert told([found]) == [("DOUBLE_FREE", 3, "a", "")]
    assert found.detail == "page 3: freed in forward 1 and again in forward 2"


def test_a_page_listed_twice_in_one_free_is_a_double_free() -> None:
    engine = Script()
    engine.alloc("a", 3)
    engine.free(3, 3)
    assert told(engine.launch()) == [("DOUBLE_FREE", 3, "a", "")]


def test_whoever_frees_the_page_of_another_a_second_time_is_named_with_the_one_who_had_it() -> None:
    engine = Script()
    engine.alloc("a", 3)
    engine.free(3, request="a")
    engine.free(3, request="b")
    assert told(engine.launch()) == [("DOUBLE_FREE", 3, "b", "a")]


def test_a_page_is_freed_once_for_each_time_that_it_is_handed_out() -> None:
    engine = Script()
    for request in "abc":
        engine.alloc(request, 3)
        engine.free(3)
    assert engine.launch() == []


def test_a_page_handed_out_twice_is_a_double_allotment_and_both_are_named() -> None:
    engine = Script()
    engine.alloc("b", 3)
    engine.launch()
    engine.alloc("c", 3)
    (found,) = engine.launch()
    assert told([found]) == [("DOUBLE_ALLOC", 3, "c", "b")]
    assert found.detail == "page 3: held since forward 1 and never freed, handed out again in forward 2"


def test_a_page_in_the_free_list_twice_is_found_at_each_end() -> None:
    engine = Script()
    engine.alloc("a", 3)
    engine.free(3)
    engine.free(3)
    engine.alloc("b", 3)
    engine.alloc("c", 3)
    assert told(engine.launch()) == [("DOUBLE_FREE", 3, "a", ""), ("DOUBLE_ALLOC", 3, "c", "b")]


def test_a_run_of_pages_is_one_finding() -> None:
    engine = Script()
    engine.alloc("a", *range(10, 20), 30)
    engine.alloc("b", *range(8, 15), 30)
    (found,) = engine.launch()
    assert found.page == 10
    assert found.detail.startswith("pages 10..14, 30: held since")


def test_an_allotment_to_the_holder_itself_is_a_restore() -> None:
    engine = Script()
    engine.alloc("a", 3, 4)
    engine.launch()
    engine.alloc("a", 3, 4)
    assert engine.launch() == []


def test_pages_allotted_to_nobody_are_taken_over_by_whoever_names_them() -> None:
    engine = Script()
    engine.alloc("", 3, 4)
    engine.launch()
    engine.alloc("a", 3, 4)
    assert engine.launch() == []
    engine.alloc("b", 3)
    assert told(engine.launch()) == [("DOUBLE_ALLOC", 3, "b", "a")]


def test_an_allotment_to_nobody_claims_nothing_of_a_page_that_somebody_holds() -> None:
    engine = Script()
    engine.alloc("a", 3)
    engine.alloc("", 3)
    assert engine.launch() == []
    engine.alloc("b", 3)
    assert told(engine.launch()) == [("DOUBLE_ALLOC", 3, "b", "a")]


def test_one_of_several_holders_that_nobody_named_may_let_go() -> None:
    engine = Script()
    engine.alloc("", 3)
    engine.free(3, request="a")
    assert engine.launch() == []
    assert engine.hazards() == {}


def test_a_request_that_ended_holds_nothing() -> None:
    engine = Script()
    engine.admit("a")
    engine.alloc("a", 3)
    engine.launch()
    engine.finish("a")
    engine.alloc("b", 3)
    assert engine.launch() == []
    assert engine.hazards() == {"allotted_without_free": 1}


def test_a_request_of_the_same_name_is_another_request_once_the_first_has_ended() -> None:
    engine = Script()
    engine.alloc("a", 3)
    engine.finish("a")
    engine.free(3)
    engine.alloc("a", 4)
    engine.alloc("b", 3)
    engine.alloc("b", 4)
    assert told(engine.launch()) == [("DOUBLE_ALLOC", 4, "b", "a")]


def test_a_preempted_request_has_lost_its_pages_and_may_get_others() -> None:
    engine = Script()
    engine.alloc("a", 3)
    engine.free(3)
    engine.preempt("a")
    engine.launch()
    engine.alloc("b", 3)
    engine.alloc("a", 5)
    engine.free(3, 5)
    assert engine.launch() == []


# --- several holders ----------------------------------------------------------------------------------------


def test_a_free_that_names_one_of_several_holders_ends_only_that_hold() -> None:
    engine = Script()
    engine.alloc("a", 3)
    engine.publish("a", 3)
    engine.hit("b", 3)
    engine.launch()
    engine.free(3, request="a")
    assert engine.launch() == []
    engine.alloc("c", 3)
    assert told(engine.launch()) == [("DOUBLE_ALLOC", 3, "c", "b")]


def test_the_last_named_holder_frees_the_page() -> None:
    engine = Script()
    engine.alloc("a", 3)
    engine.hit("b", 3)
    engine.free(3, request="a")
    engine.free(3, request="b")
    engine.alloc("c", 3)
    assert engine.launch() == []


def test_two_holders_that_end_in_one_step_may_both_name_themselves() -> None:
    engine = Script()
    engine.alloc("a", 3)
    engine.hit("b", 3)
    engine.launch()
    for request in "ab":
        engine.finish(request)
        engine.free(3, request=request)
    assert engine.launch() == []
    engine.free(3, request="b")
    assert told(engine.launch()) == [("DOUBLE_FREE", 3, "b", "")]


def test_a_fork_shares_pages_that_were_never_published() -> None:
    engine = Script()
    engine.alloc("a", 3, 4)
    engine.hit("child", 3)
    engine.alloc("child", 5)
    engine.log.moved("full", [4], [5])
    engine.launch()
    engine.finish("a")
    engine.free(4)
    engine.finish("child")
    engine.free(3, 5)
    assert engine.launch() == []


def test_taking_a_page_back_from_two_living_holders_is_a_hazard() -> None:
    engine = Script()
    engine.alloc("a", 3)
    engine.hit("b", 3)
    engine.free(3)
    assert engine.launch() == []
    assert engine.hazards() == {"freed_while_shared": 1}


def test_a_free_by_a_stranger_is_a_hazard_and_leaves_the_page_unknown() -> None:
    engine = Script()
    engine.alloc("a", 3)
    engine.free(3, request="z")
    engine.alloc("b", 3)
    assert engine.launch() == []
    assert engine.hazards() == {"freed_by_a_stranger": 1}


def test_many_holders_are_kept_in_bounded_space() -> None:
    engine = Script()
    engine.alloc("a", 3)
    engine.publish("a", 3)
    for number in range(1000):
        engine.hit(f"r{number}", 3)
    engine.launch()
    assert len(engine.fold.owners("full", 3, 9)) < 20
    for number in range(1000):
        engine.free(3, request=f"r{number}")
    assert engine.launch() == []
    assert engine.hazards() == {}


# --- the prefix index ---------------------------------------------------------------------------------------


def test_a_page_freed_while_the_index_names_it_is_found() -> None:
    engine = Script()
    engine.alloc("a", *range(8))
    engine.publish("a", *range(8))
    engine.launch()
    engine.free(*range(8))
    (found,) = engine.launch()
    assert told([found]) == [("FREED_WHILE_PUBLISHED", 0, "a", "")]
    assert found.detail == (
        "pages 0..7: freed in forward 2, though it was published by request a in forward 1 and never evicted"
    )


def test_a_cached_page_handed_out_without_eviction_is_found_and_so_is_the_hit_on_it() -> None:
    engine = Script()
    engine.alloc("a", *range(8))
    engine.publish("a", *range(8))
    engine.finish("a")
    engine.launch()
    engine.alloc("b", *range(8))
    assert told(engine.launch()) == [("FREED_WHILE_PUBLISHED", 0, "b", "a")]
    engine.hit("a2", *range(8))
    assert told(engine.launch()) == [("PUBLISHED_UNOWNED", 0, "a2", "b")]


def test_an_evicted_page_is_freed_and_handed_out_in_peace() -> None:
    engine = Script()
    engine.alloc("a", *range(8))
    engine.publish("a", *range(8))
    engine.finish("a")
    engine.launch()
    engine.evict(*range(8))
    engine.free(*range(8))
    engine.alloc("b", *range(8))
    engine.publish("b", *range(8))
    engine.hit("c", *range(8))
    assert engine.launch() == []


def test_a_cached_page_is_hit_after_its_request_has_ended() -> None:
    engine = Script()
    engine.alloc("a", 1, 2)
    engine.publish("a", 1, 2)
    engine.finish("a")
    engine.launch()
    engine.hit("b", 1, 2)
    engine.finish("b")
    engine.evict(1, 2)
    engine.free(1, 2)
    assert engine.launch() == []


def test_publishing_a_free_page_is_found() -> None:
    engine = Script()
    engine.alloc("a", 1)
    engine.free(1)
    engine.publish("a", 1)
    (found,) = engine.launch()
    assert told([found]) == [("PUBLISHED_UNOWNED", 1, "a", "")]
    assert found.detail == "page 1: published in forward 1, but free since forward 1"


def test_publishing_a_page_that_another_holds_is_found() -> None:
    engine = Script()
    engine.alloc("a", 1)
    engine.free(1)
    engine.alloc("b", 1)
    engine.launch()
    engine.publish("a", 1)
    assert told(engine.launch()) == [("PUBLISHED_UNOWNED", 1, "a", "b")]


def test_a_page_may_be_published_after_its_request_has_ended() -> None:
    engine = Script()
    engine.alloc("a", 1)
    engine.finish("a")
    engine.publish("a", 1)
    engine.hit("b", 1)
    assert engine.launch() == []


def test_a_hit_on_a_page_that_was_given_back_is_found() -> None:
    engine = Script()
    engine.alloc("a", 1)
    engine.publish("a", 1)
    engine.evict(1)
    engine.free(1)
    engine.launch()
    engine.hit("b", 1)
    assert told(engine.launch()) == [("PUBLISHED_UNOWNED", 1, "b", "a")]


def test_a_hit_on_pages_of_older_weights_is_found() -> None:
    engine = Script()
    engine.log.weights_updated(1)
    engine.alloc("a", *range(16))
    engine.publish("a", *range(16))
    engine.launch()
    engine.log.weights_updated(2)
    engine.hit("b", *range(16))
    (found,) = engine.launch()
    assert told([found]) == [("STALE_EPOCH", 0, "b", "a")]
    assert found.detail == "pages 0..15: published in forward 1, 1 weight updates before the present epoch 2"


def test_a_cache_that_is_cleared_with_the_weights_is_in_order() -> None:
    engine = Script()
    engine.log.weights_updated(1)
    engine.alloc("a", 0, 1)
    engine.publish("a", 0, 1)
    engine.finish("a")
    engine.evict(0, 1)
    engine.free(0, 1)
    engine.log.weights_updated(2)
    engine.log.weights_updated(2)
    engine.alloc("b", 0, 1)
    engine.publish("b", 0, 1)
    engine.log.weights_updated(2)
    engine.hit("c", 0, 1)
    assert engine.launch() == []


# --- overlapped scheduling ----------------------------------------------------------------------------------


def test_512_frees_of_a_correct_overlapped_engine_leave_no_report() -> None:
    engine = Script()
    for number in range(512):
        request, pages = f"r{number}", range(8 * (number % 4), 8 * (number % 4) + 8)
        engine.alloc(request, *pages)
        engine.launch(retired=max(engine.forward - 2, 0))
        # The forward that reads and writes these pages is still running, and the next owner gets them now.
        engine.finish(request)
        engine.free(*pages)
    engine.launch(retired=511)
    assert engine.all_found == []
    assert engine.hazards() == {}


# --- what is not known --------------------------------------------------------------------------------------


def test_nothing_is_claimed_of_pages_that_were_there_before() -> None:
    engine = Script()
    engine.hit("a", 1)
    engine.publish("a", 2)
    engine.free(3, request="a")
    engine.free(3, request="b")
    engine.alloc("b", 1)
    engine.evict(4)
    assert engine.launch() == []


def test_a_page_of_a_warm_pool_can_be_freed_only_once() -> None:
    engine = Script()
    engine.free(3)
    assert engine.launch() == []
    engine.free(3)
    assert told(engine.launch()) == [("DOUBLE_FREE", 3, "", "")]


def test_after_lost_facts_every_page_is_unknown_until_it_is_handed_out_anew() -> None:
    engine = Script()
    engine.alloc("a", 1, 2)
    engine.free(1)
    engine.publish("a", 2)
    engine.launch()
    engine.show(FactsLost(count=3))
    engine.free(1)
    engine.alloc("b", 2)
    assert engine.launch() == []
    engine.alloc("c", 2)
    assert told(engine.launch()) == [("DOUBLE_ALLOC", 2, "c", "b")]


def test_a_new_run_starts_with_empty_books() -> None:
    engine = Script()
    engine.alloc("a", 1)
    engine.launch()
    engine.show(RunStarted(run="s", origin=Origin(), groups=(group(),)))
    engine.alloc("b", 1)
    assert engine.launch() == []


def test_pages_handed_out_before_arming_are_forgotten() -> None:
    engine = Script()
    engine.alloc("a", 1)
    engine.launch()
    engine.alloc("a", 2)
    engine.launch()
    engine.show(CanaryArmed(forward=2))
    engine.alloc("b", 1, 2)
    assert told(engine.launch()) == [("DOUBLE_ALLOC", 2, "b", "a")]


def test_a_page_number_that_no_page_has_is_ignored() -> None:
    engine = Script()
    engine.alloc("a", 0, 1, 2)
    engine.alloc("b", -1)
    engine.free(-2)
    assert engine.launch() == []


# --- groups -------------------------------------------------------------------------------------------------


def test_groups_that_share_slots_share_pages() -> None:
    engine = Script(group("full"), group("swa", window=8, shares="full"))
    engine.alloc("a", 3, group="full")
    engine.launch()
    engine.alloc("b", 3, group="swa")
    (found,) = engine.launch()
    assert (found.kind, found.group) == ("DOUBLE_ALLOC", "swa")


def test_pages_of_other_groups_are_other_pages() -> None:
    engine = Script(group("full"), group("swa", window=8))
    engine.alloc("a", 3, group="full")
    engine.alloc("b", 3, group="swa")
    engine.free(3, group="full")
    assert engine.launch() == []


def test_whoever_held_a_page_before_the_watch_may_publish_it_beside_those_who_are_known() -> None:
    engine = Script()
    engine.publish("old", 1)
    engine.hit("new", 1)
    engine.publish("older", 1)
    engine.alloc("older", 1)
    engine.free(1, request="older")
    engine.free(1, request="new")
    assert engine.launch() == []


def test_a_shared_page_that_is_handed_to_one_of_its_holders_as_new_is_allotted_twice() -> None:
    script = Script()
    script.alloc("a", 3)
    script.hit("b", 3)
    script.launch()
    script.alloc("b", 3)
    script.launch()
    (violated,) = script.found
    assert (violated.kind, violated.request, violated.other) == ("DOUBLE_ALLOC", "b", "a")
