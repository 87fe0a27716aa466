"""What check says about old positions, and how often it says it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kvcanary.kernels import FactOp
from kvcanary.record import NUM_KINDS, Kind, mix, parse_writer
from kvcanary.state import Check, Reason, Role, RowWord, Word
from tests.kernels.cases import LIMITS, table_of, with_group
from tests.kernels.pools import GroupSpec
from tests.kernels.rig import PLAIN, Rig, names

FREE = GroupSpec(page_size=1, pages=900, unit="slot")


def test_clean_rows_are_verified_in_full() -> None:
    rig = Rig()
    request = rig.request(9)
    links, ends = rig.verified(Check.LINKS), rig.verified(Check.ROW_ENDS)
    assert rig.decode(request) == []
    assert (rig.verified(Check.LINKS) - links, rig.verified(Check.ROW_ENDS) - ends) == (9, 1)


def test_a_wrong_position_is_named_with_its_writer_and_the_reader() -> None:
    rig = Rig()
    one, two = rig.request(8), rig.request(8)
    step = rig.plan((two, 8, 1))
    slots = rig.slot(one, 2), rig.slot(two, 5)
    rig.state.groups[0].links[slots[1]] = rig.state.groups[0].links[slots[0]]
    found = rig.run(step)[0]
    assert (found.name, found.position_expected, found.position_found) == ("POSITION", 5, 2)
    assert (found.slot, found.row, found.tag) == (slots[1], two.row, two.tag)
    assert (found.code_found, found.role) == (one.tokens[2], Role.CHECK)
    assert parse_writer(found.writer).tag == two.tag


def test_a_changed_token_breaks_the_link_to_the_next_record() -> None:
    rig = Rig()
    request = rig.request(12)
    slot = rig.slot(request, 6)
    rig.state.groups[0].links[slot, 0] ^= 1
    found = rig.decode(request)
    assert [(v.name, v.position_expected) for v in found] == [("DIGEST", 7)]
    word, digest = rig.link(slot)
    implied = digest + mix(rig.world.keys, word & 0xFFFFFFFF, 6)
    assert (found[0].digest_expected - implied) % 2**64 == 0
    assert found[0].digest_found == rig.link(rig.slot(request, 7))[1]


def test_a_changed_digest_breaks_both_its_links() -> None:
    rig = Rig()
    request = rig.request(12)
    rig.state.groups[0].links[rig.slot(request, 6), 1] += 1
    assert [(v.name, v.position_expected) for v in rig.decode(request)] == [("DIGEST", 6), ("DIGEST", 7)]


def test_a_first_record_with_another_seed_belongs_to_another_identity() -> None:
    rig = Rig()
    request = rig.request(3)
    rig.state.rows[request.row, RowWord.SEED] += 1
    assert [(v.name, v.position_expected) for v in rig.decode(request)] == [("DIGEST", 0)]


def test_a_changed_last_record_is_a_wrong_row_end() -> None:
    rig = Rig()
    request = rig.request(6)
    rig.state.groups[0].links[rig.slot(request, 5), 0] ^= 1
    found = rig.decode(request)
    assert names(found) == ["REQUEST_DIGEST"]
    assert (found[0].position_expected, found[0].slot) == (5, rig.slot(request, 5))
    assert found[0].digest_expected == int(rig.state.history[request.row, 6])


def test_a_table_that_points_at_another_row_whole_is_caught_at_the_row_end() -> None:
    rig = Rig()
    one, two = rig.request(8), rig.request(8)
    step = rig.plan((one, 8, 1), (two, 8, 1))
    entries = table_of(step.batch, 0).entries
    entries[0, :2] = entries[1, :2].clone()
    assert [(v.name, v.row) for v in rig.run(step)] == [("REQUEST_DIGEST", one.row)]


def test_an_empty_record_in_a_page_handed_out_since_arming_is_unwritten() -> None:
    rig = Rig()
    request = rig.request(6)
    rig.state.groups[0].links[rig.slot(request, 3)] = 0
    found = rig.decode(request)
    assert [(v.name, v.position_expected, v.position_found) for v in found] == [("UNWRITTEN", 3, -1)]


def test_an_empty_record_in_a_freed_page_is_unwritten_too() -> None:
    rig = Rig()
    request = rig.request(8)
    step = rig.plan((request, 8, 1))
    rig.fact(FactOp.FREE, pages=[rig.page(request, 0)])
    rig.fact(FactOp.WIPE, pages=[rig.page(request, 0)])
    assert set(names(rig.run(step))) == {"UNWRITTEN"}


def test_a_warm_pool_is_unverified_and_no_alarm() -> None:
    rig = Rig(armed=False)
    request = rig.request(9)
    rig.state.counters[Word.ARMED] = 1
    rig.state.groups[0].owner.zero_()
    rig.fact(FactOp.ADMIT, row=request.row, tag=request.tag, position=9, seed=rig.world.keys.seed)
    assert rig.decode(request) == []
    assert (rig.unverified(Reason.UNKNOWN_RECORD), rig.verified(Check.LINKS)) == (9, 0)


def test_a_base_that_vouched_for_nothing_leaves_the_row_end_unarmed() -> None:
    rig = Rig()
    request = rig.request(9)
    rig.fact(FactOp.ADMIT, row=request.row, tag=request.tag, position=9, seed=rig.world.keys.seed)
    rig.decode(request)
    rig.decode(request)
    assert rig.unverified(Reason.UNARMED_ROW) == 2


def test_a_rewind_beyond_the_history_anchors_anew_and_counts_as_unverified() -> None:
    rig = Rig(FREE)
    request = rig.request(100)
    ends = rig.verified(Check.ROW_ENDS)
    assert rig.step((request, 20, 1)) == []
    assert (rig.unverified(Reason.UNARMED_ROW), rig.verified(Check.ROW_ENDS)) == (1, ends)
    assert rig.decode(request) == []
    assert rig.unverified(Reason.UNARMED_ROW) == 2


def test_a_rewind_within_the_history_stays_verified() -> None:
    rig = Rig(FREE)
    request = rig.request(100)
    ends = rig.verified(Check.ROW_ENDS)
    assert rig.step((request, 40, 1)) == []
    assert rig.decode(request) == []
    assert rig.verified(Check.ROW_ENDS) - ends == 2


# --- tables -------------------------------------------------------------------------------------------------


def test_only_the_lowest_missing_position_of_a_row_is_reported() -> None:
    rig = Rig(FREE)
    request = rig.request(9)
    step = rig.plan((request, 9, 1))
    table_of(step.batch, 0).entries[0, [3, 5, 6]] = torch.tensor([-1, -7, -1], dtype=torch.int64)
    found = rig.run(step)
    assert [(v.name, v.position_expected, v.slot) for v in found] == [("WINDOW", 3, -1)]
    assert rig.repeats() == 0


def test_every_row_that_misses_something_is_reported() -> None:
    rig = Rig(FREE)
    one, two = rig.request(9), rig.request(9)
    step = rig.plan((one, 9, 1), (two, 9, 1))
    table_of(step.batch, 0).entries[:, [3, 5]] = -1
    assert [(v.name, v.row, v.position_expected) for v in rig.run(step)] == [
        ("WINDOW", one.row, 3),
        ("WINDOW", two.row, 3),
    ]


@pytest.mark.parametrize("page", [0, 1])
def test_a_required_position_in_a_reserved_page_is_missing(page: int) -> None:
    rig = Rig(replace(PLAIN, trash=True, null=True))
    request = rig.request(9)
    step = rig.plan((request, 9, 1))
    table_of(step.batch, 0).entries[0, 1] = page
    assert [(v.name, v.position_expected) for v in rig.run(step)] == [("WINDOW", 4)]


def test_a_right_record_in_a_reserved_page_is_missing_all_the_same() -> None:
    rig = Rig(replace(PLAIN, null=True))
    request = rig.request(4)
    step = rig.plan((request, 4, 1))
    first, links = rig.slot(request, 0), rig.state.groups[0].links
    null = rig.world.layout.groups[0].null_pages[0]
    links[null * 4 : null * 4 + 4] = links[first : first + 4]
    table_of(step.batch, 0).entries[0, 0] = null
    assert [(v.name, v.position_expected) for v in rig.run(step)] == [("WINDOW", 0)]


def test_a_table_shorter_than_the_row_misses_what_lies_beyond() -> None:
    rig = Rig(replace(FREE, flat=True))
    one, two = rig.request(6), rig.request(6)
    step = rig.plan((one, 6, 0), (two, 6, 0))
    table = table_of(step.batch, 0)
    step.batch = with_group(step.batch, 0, table=replace(table, row_offsets=torch.tensor([0, 4, 12])))
    table.entries[4:10] = table.entries[6:12].clone()
    assert [(v.name, v.row, v.position_expected) for v in rig.run(step)] == [("WINDOW", one.row, 4)]


def test_an_entry_outside_the_pool_is_reported_and_not_followed() -> None:
    rig = Rig(FREE)
    request = rig.request(5)
    step = rig.plan((request, 5, 1))
    table_of(step.batch, 0).entries[0, 2] = 1 << 33
    assert [(v.name, v.slot, v.position_expected) for v in rig.run(step)] == [("SLOT_RANGE", 1 << 33, 2)]


def test_an_index_that_the_translation_lacks_is_outside_and_an_unmapped_one_is_missing() -> None:
    rig = Rig(replace(FREE, pages=50, translated=True))
    one, two = rig.request(5), rig.request(5)
    step = rig.plan((one, 5, 0), (two, 5, 0))
    table_of(step.batch, 0).entries[0, 1] = 50
    item = step.batch.groups[0]
    assert item is not None
    assert item.translation is not None
    item.translation[int(table_of(step.batch, 0).entries[1, 2])] = 0
    found = rig.run(step)
    assert [(v.name, v.row, v.slot, v.position_expected) for v in found] == [
        ("WINDOW", two.row, -1, 2),
        ("SLOT_RANGE", one.row, 50, 1),
    ]


def test_positions_before_the_window_are_counted_and_not_read() -> None:
    rig = Rig(replace(FREE, window=8, kind="swa"))
    request = rig.request(20, chunk=4)
    links, skipped = rig.verified(Check.LINKS), rig.unverified(Reason.OUT_OF_WINDOW)
    assert rig.decode(request) == []
    assert rig.verified(Check.LINKS) - links == 7
    assert rig.unverified(Reason.OUT_OF_WINDOW) - skipped == 13


def test_required_from_overrides_window_and_first_position() -> None:
    rig = Rig(replace(FREE, window=8, kind="swa"))
    request = rig.request(20)
    step = rig.plan((request, 20, 1))
    links = rig.verified(Check.LINKS)
    assert rig.run(step, groups=with_group(step.batch, 0, required_from=torch.tensor([5])).groups) == []
    assert rig.verified(Check.LINKS) - links == 15


def test_rows_without_a_table_are_counted() -> None:
    rig = Rig(replace(FREE, unit=None))
    request = rig.request(6)
    assert rig.decode(request) == []
    assert (rig.unverified(Reason.NO_TABLE), rig.verified(Check.LINKS)) == (6, 0)


def test_a_group_that_takes_no_part_is_left_alone() -> None:
    rig = Rig(PLAIN, PLAIN)
    request = rig.request(6)
    step = rig.plan((request, 6, 1))
    links = [rig.verified(Check.LINKS, g) for g in (0, 1)]
    assert rig.run(step, groups=(step.batch.groups[0], None)) == []
    assert [rig.verified(Check.LINKS, g) - links[g] for g in (0, 1)] == [6, 0]
    assert rig.link(rig.slot(request, 6, 1), 1) == (0, 0)


def test_a_state_group_keeps_the_newest_position_only() -> None:
    rig = Rig(GroupSpec(page_size=1, pages=9, ring=1, kind="state"), PLAIN)
    request = rig.request(6, chunk=3)
    links = rig.verified(Check.LINKS)
    assert rig.decode(request) == []
    assert rig.verified(Check.LINKS) - links == 1
    rig.state.groups[0].links[rig.slot(request, 0), 0] -= 1 << 32
    assert [(v.name, v.position_found) for v in rig.decode(request)] == [("POSITION", 5)]


def test_shared_spaces_share_records_and_count_apart() -> None:
    rig = Rig(replace(FREE, pages=120), replace(FREE, pages=120, shares=0, window=8, kind="swa"))
    request = rig.request(10, chunk=5)
    assert rig.decode(request) == []
    assert (rig.verified(Check.WRITES, 0), rig.verified(Check.WRITES, 1)) == (11, 11)
    rig.state.groups[1].links[rig.slot(request, 10, 1), 1] += 1
    assert [(v.name, v.group) for v in rig.decode(request)] == [("DIGEST", 1), ("REQUEST_DIGEST", 1)]


# --- capacity -----------------------------------------------------------------------------------------------


def test_over_capacity_the_newest_half_is_always_checked_and_the_rest_in_turn() -> None:
    rig = Rig(FREE, limits=replace(LIMITS, head_entries=64))
    request = rig.request(300)
    links = rig.verified(Check.LINKS)
    over = rig.unverified(Reason.OVER_CAPACITY)
    assert rig.step((request, 300, 0)) == []
    assert (rig.verified(Check.LINKS) - links, rig.unverified(Reason.OVER_CAPACITY) - over) == (64, 236)
    rig.state.groups[0].links[rig.slot(request, 290), 1] += 1
    assert "DIGEST" in names(rig.step((request, 300, 0)))


def test_over_capacity_everything_has_its_turn() -> None:
    rig = Rig(FREE, limits=replace(LIMITS, head_entries=64))
    request = rig.request(300)
    for position in (3, 120, 267):
        rig.state.groups[0].links[rig.slot(request, position)] = 0
    seen = set()
    for _ in range(268 // 4):
        seen |= {v.position_expected for v in rig.step((request, 300, 0)) if v.name == "UNWRITTEN"}
    assert seen == {3, 120, 267}


def test_the_first_record_of_a_stretch_is_judged_by_the_one_before_it() -> None:
    rig = Rig(FREE, limits=replace(LIMITS, head_entries=64))
    request = rig.request(300)
    begin = rig.word(Word.FORWARD) * 32 % 268
    rig.state.groups[0].links[rig.slot(request, begin), 1] += 1
    found = {v.position_expected for v in rig.step((request, 300, 0))}
    assert begin in found


# --- said once ----------------------------------------------------------------------------------------------


def test_a_slot_is_reported_once_and_repeats_are_counted() -> None:
    rig = Rig()
    request = rig.request(6)
    rig.state.groups[0].links[rig.slot(request, 2), 0] += 5 << 32
    assert "POSITION" in names(rig.decode(request))
    repeats = rig.repeats()
    assert "POSITION" not in names(rig.decode(request))
    assert rig.count(Kind.POSITION) == 1
    assert rig.repeats() > repeats


def test_a_slot_is_reported_anew_once_it_was_written_anew() -> None:
    rig = Rig()
    request = rig.request(6)
    for _ in range(2):
        rig.state.groups[0].links[rig.slot(request, 5), 0] += 5 << 32
        assert names(rig.decode(request)) == ["POSITION"]
        rig.step((request, 5, 1))


def test_two_rows_on_one_bad_slot_are_one_report_and_one_repeat() -> None:
    rig = Rig(FREE)
    one, two = rig.request(4), rig.request(4)
    slot = rig.slot(one, 1)
    rig.state.groups[0].links[slot, 0] += 5 << 32
    step = rig.plan((one, 4, 0), (two, 4, 0))
    table_of(step.batch, 0).entries[1, 1] = slot
    assert [(v.name, v.row) for v in rig.run(step)] == [("POSITION", one.row)]
    assert rig.repeats() == 1


def test_a_flood_is_cut_at_the_quota_but_counted_and_does_not_hide_another_kind() -> None:
    rig = Rig(FREE, limits=replace(LIMITS, ring_quota=5))
    request = rig.request(40)
    rig.state.groups[0].links[rig.slot(request, 0) : rig.slot(request, 0) + 1] = 0
    for position in range(10, 30):
        rig.state.groups[0].links[rig.slot(request, position), 0] += 5 << 32
    found = rig.decode(request)
    assert names(found).count("POSITION") == 5
    assert names(found).count("UNWRITTEN") == 1
    assert rig.count(Kind.POSITION) == 20


def test_the_quota_is_refilled_as_the_host_acknowledges() -> None:
    rig = Rig(FREE, limits=replace(LIMITS, ring_quota=2))
    request = rig.request(20)
    for round_ in range(3):
        rig.acknowledge()
        for position in range(4 * round_, 4 * round_ + 4):
            rig.state.groups[0].links[rig.slot(request, position), 0] += 5 << 32
        assert names(rig.decode(request)) == ["POSITION"] * 2


def test_a_full_ring_keeps_what_the_host_has_not_read() -> None:
    rig = Rig(FREE, limits=replace(LIMITS, ring_capacity=4))
    request = rig.request(20)
    for position in range(10):
        rig.state.groups[0].links[rig.slot(request, position), 0] += 5 << 32
    found = rig.decode(request)
    assert [v.sequence for v in found] == [1, 2, 3, 4]
    assert rig.word(Word.STORED) == 10
    rig.acknowledge()
    rig.state.groups[0].links[rig.slot(request, 15), 0] += 5 << 32
    assert [v.sequence for v in rig.decode(request)] == [11]


def test_quotas_are_kept_for_each_group_and_kind() -> None:
    rig = Rig(FREE, FREE, limits=replace(LIMITS, ring_quota=1))
    request = rig.request(20)
    rig.state.acked[NUM_KINDS + Kind.POSITION] = 0
    for group in (0, 1):
        for position in (3, 4):
            rig.state.groups[group].links[rig.slot(request, position, group), 0] += 5 << 32
    assert [(v.name, v.group) for v in rig.decode(request)] == [("POSITION", 0), ("POSITION", 1)]


def test_inference_mode_outside_and_inside_makes_no_difference() -> None:
    rig = Rig()
    request = rig.request(6)
    with torch.inference_mode():
        assert rig.decode(request) == []
    assert rig.decode(request) == []
    with torch.inference_mode():
        rig.state.groups[0].links[rig.slot(request, 2)] = 0
        assert names(rig.decode(request)) == ["UNWRITTEN"]
