"""What mark says about inputs, and about the slots that a forward is about to write."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kvcanary.kernels import FactOp
from kvcanary.record import Kind, link_word, parse_owner, prefix_digest, token_code
from kvcanary.state import BatchWord, Check, DigestSource, Reason, RowFlag, RowWord, Word
from tests.kernels.cases import table_of, with_group
from tests.kernels.pools import GroupSpec
from tests.kernels.rig import PLAIN, Rig, names

# --- records ------------------------------------------------------------------------------------------------


def test_a_record_holds_token_position_and_the_digest_before_it() -> None:
    rig = Rig()
    request = rig.request(11, chunk=4)
    for position in range(11):
        code = token_code(request.tokens[position], position)
        digest = prefix_digest(rig.world.keys, rig.world.keys.seed, request.tokens[:position])
        assert rig.link(rig.slot(request, position)) == (link_word(code, position), digest)


def test_chunks_and_one_piece_leave_the_same_records() -> None:
    rig = Rig()
    one = rig.request(20)
    other = rig.world.admit()[0]
    rig.fact(FactOp.ADMIT, row=other.row, tag=other.tag, seed=rig.world.keys.seed)
    for start in range(0, 20, 3):
        other.tokens, other.salts = list(one.tokens), list(one.salts)
        rig.step((other, start, min(3, 20 - start)))
    assert [rig.link(rig.slot(one, p)) for p in range(20)] == [rig.link(rig.slot(other, p)) for p in range(20)]


def test_a_salt_changes_the_code_and_a_huge_id_is_hashed() -> None:
    rig = Rig()
    request = rig.request()
    step = rig.plan((request, 0, 3))
    step.batch.input_ids[2] = 2**31 - 1
    rig.run(step, token_salts=torch.tensor([0, 99, 0]))
    codes = [rig.link(rig.slot(request, p))[0] & 0xFFFFFFFF for p in range(3)]
    tokens = request.tokens
    assert codes == [tokens[0], token_code(tokens[1], 1, 99), token_code(2**31 - 1, 2)]


def test_padding_tokens_and_rows_leave_no_trace() -> None:
    rig = Rig()
    request = rig.request(5)
    step = rig.plan((request, 5, 2))
    before = rig.state.groups[0].links.clone()
    batch = replace(
        step.batch,
        input_ids=torch.tensor([7, *step.batch.input_ids.tolist(), 8, 9]),
        query_start_loc=torch.tensor([0, 1, 3, 3]),
        context_lens=torch.tensor([0, 5, 0]),
        request_rows=torch.tensor([-1, request.row, -1]),
        token_salts=None,
    )
    table = table_of(batch, 0)
    grid = torch.zeros(3, table.entries.shape[1], dtype=torch.int64)
    grid[1] = table.entries[0]
    mapping = torch.tensor([2, rig.slot(request, 5), rig.slot(request, 6), 3, 3])
    batch = with_group(batch, 0, slot_mapping=mapping, table=replace(table, entries=grid))
    assert rig.enter(batch) == []
    changed = (before != rig.state.groups[0].links).any(1).nonzero().squeeze(1).tolist()
    assert sorted(changed) == sorted([rig.slot(request, 5), rig.slot(request, 6)])
    assert rig.state.scratch_rows[:5].tolist() == [-1, request.row, request.row, -1, -1]
    assert rig.state.scratch_batch[:3, BatchWord.ROW].tolist() == [-1, request.row, -1]
    assert rig.word(Word.NEW_TOKENS) == 7


def test_rows_from_num_requests_on_are_padding_whatever_they_name() -> None:
    rig = Rig()
    one, two = rig.request(4), rig.request(4)
    step = rig.plan((one, 4, 1), (two, 4, 1))
    assert rig.run(step, num_requests=torch.tensor([1])) == []
    assert rig.state.rows[[one.row, two.row], RowWord.HIGH].tolist() == [5, 4]


def test_an_empty_row_between_others_is_checked_and_not_advanced() -> None:
    rig = Rig()
    requests = [rig.request(6) for _ in range(3)]
    links = rig.verified(Check.LINKS)
    assert rig.step(*((r, 6, new) for r, new in zip(requests, (1, 0, 2), strict=True))) == []
    assert rig.verified(Check.LINKS) - links == 18
    assert [int(rig.state.rows[r.row, RowWord.HIGH]) for r in requests] == [7, 6, 8]


def test_a_row_that_the_row_table_does_not_have_counts_as_padding() -> None:
    rig = Rig()
    request = rig.request(3)
    step = rig.plan((request, 3, 1))
    assert rig.run(step, request_rows=torch.tensor([10_000])) == []
    assert rig.link(rig.slot(request, 3)) == (0, 0)


# --- inputs -------------------------------------------------------------------------------------------------


def test_a_negative_id_is_a_placeholder_that_reached_the_model() -> None:
    rig = Rig()
    request = rig.request(2)
    step = rig.plan((request, 2, 1))
    step.batch.input_ids[0] = -1
    found = rig.enter(step.batch)
    assert names(found) == ["INPUT_PLACEHOLDER"]
    assert (found[0].row, found[0].tag, found[0].position_expected) == (request.row, request.tag, 2)


def test_an_id_other_than_the_scheduler_expects_is_named_with_both_ids() -> None:
    rig = Rig()
    request = rig.request(2)
    step = rig.plan((request, 2, 2))
    expected = step.batch.input_ids.clone().long()
    step.batch.input_ids[1] = 12345
    found = rig.enter(replace(step.batch, expected_ids=expected))
    assert names(found) == ["INPUT_TOKEN"]
    assert (found[0].code_found, found[0].code_expected, found[0].position_expected) == (12345, int(expected[1]), 3)


def test_a_negative_expectation_is_no_opinion() -> None:
    rig = Rig()
    request = rig.request(2)
    step = rig.plan((request, 2, 2))
    assert rig.run(step, expected_ids=torch.tensor([-1, -1])) == []


def test_a_last_id_that_was_never_fed_shows_a_lost_carry_over() -> None:
    rig = Rig()
    request = rig.request(6)
    step = rig.plan((request, 6, 1))
    found = rig.run(step, last_ids=torch.tensor([request.tokens[5] + 1]))
    assert names(found) == ["INPUT_TOKEN"]
    assert (found[0].position_expected, found[0].code_expected) == (5, request.tokens[5] + 1)
    assert rig.run(rig.plan((request, 7, 1)), last_ids=torch.tensor([request.tokens[6]])) == []


@pytest.mark.parametrize("context", [5, 7])
def test_a_row_that_skips_a_position_or_shifts_one_is_an_input_position(context: int) -> None:
    rig = Rig(replace(PLAIN, max_rewind=0))
    request = rig.request(6)
    step = rig.plan((request, 6, 1))
    found = rig.enter(replace(step.batch, context_lens=torch.tensor([context])))
    first = next(v for v in found if v.name == "INPUT_POSITION")
    assert (first.position_expected, first.position_found) == (6, context)


def test_positions_that_differ_from_the_row_length_are_reported_once_and_taint_the_row() -> None:
    rig = Rig()
    request = rig.request(4)
    step = rig.plan((request, 4, 3))
    found = rig.enter(replace(step.batch, positions=torch.tensor([4, 6, 7])))
    assert [(v.name, v.position_expected, v.position_found) for v in found] == [("INPUT_POSITION", 5, 6)]
    assert rig.repeats() == 1
    assert int(rig.state.rows[request.row, RowWord.FLAGS]) & RowFlag.TAINTED


def test_what_follows_a_tainting_report_says_so_until_the_row_is_admitted_anew() -> None:
    rig = Rig()
    request = rig.request(4)
    step = rig.plan((request, 4, 1))
    step.batch.input_ids[0] = -5
    found = rig.run(step, positions=torch.tensor([9]))
    assert [(v.name, v.tainted) for v in found] == [("INPUT_POSITION", 0), ("INPUT_PLACEHOLDER", 1)]
    rig.fact(FactOp.ADMIT, row=request.row, tag=99, seed=5)
    assert int(rig.state.rows[request.row, RowWord.FLAGS]) == RowFlag.ARMED
    assert int(rig.state.rows[request.row, RowWord.REPORTED]) == 0


def test_a_rewind_within_the_limit_is_silent_and_beyond_it_is_not() -> None:
    rig = Rig(replace(PLAIN, max_rewind=3))
    request = rig.request(20)
    assert rig.step((request, 17, 2)) == []
    assert rig.verified(Check.ROW_ENDS) > 0
    found = rig.step((request, 14, 1))
    assert [(v.name, v.position_expected, v.position_found) for v in found] == [("INPUT_POSITION", 19, 14)]


def test_draft_trees_have_positions_of_their_own_and_unlinked_records() -> None:
    rig = Rig()
    request = rig.request(8)
    step = rig.plan((request, 8, 3))
    batch = replace(step.batch, linked=False, positions=torch.tensor([8, 9, 9]))
    step.batch = batch
    assert rig.run(step) == []
    words = [rig.link(rig.slot(request, p)) for p in (8, 9, 10)]
    assert [(word >> 32, digest) for word, digest in words] == [(8, 0), (9, 0), (9, 0)]
    assert int(rig.state.rows[request.row, RowWord.HIGH]) == 8
    assert rig.step((request, 8, 2)) == []


# --- slots --------------------------------------------------------------------------------------------------


def test_two_tokens_in_one_slot_are_a_conflict_reported_for_the_loser() -> None:
    rig = Rig()
    one, two = rig.request(4), rig.request(4)
    step = rig.plan((one, 4, 1), (two, 4, 1))
    table = replace(table_of(step.batch, 0), covers_new=False)
    slot = rig.slot(one, 4)
    found = rig.enter(with_group(step.batch, 0, slot_mapping=torch.tensor([slot, slot]), table=table))
    conflicts = [v for v in found if v.name == "WRITE_CONFLICT"]
    assert len(conflicts) == 1
    assert conflicts[0].slot == slot
    assert conflicts[0].code_expected != conflicts[0].code_found
    assert "WRITE_FOREIGN" in names(found)


def test_two_rows_that_write_the_same_record_do_not_conflict() -> None:
    rig = Rig()
    one = rig.request(4)
    two = rig.request(0)
    two.tokens, two.salts, two.pages = list(one.tokens), list(one.salts), one.pages
    step = rig.plan((one, 3, 1), (two, 0, 4))
    assert rig.enter(step.batch) == []


def test_a_write_into_somebody_elses_page_is_foreign_and_shows_what_was_there() -> None:
    rig = Rig()
    victim, writer = rig.request(8), rig.request(4)
    slot, old = rig.slot(victim, 5), rig.link(rig.slot(victim, 5))
    step = rig.plan((writer, 4, 1))
    found = rig.enter(with_group(step.batch, 0, slot_mapping=torch.tensor([slot])))
    foreign = next(v for v in found if v.name == "WRITE_FOREIGN")
    assert (foreign.slot, foreign.page, foreign.tag) == (slot, slot // 4, writer.tag)
    assert (foreign.position_found, foreign.digest_found) == (5, old[1])
    assert parse_owner(foreign.owner).tag == victim.tag
    assert rig.link(slot)[0] >> 32 == 4


def test_a_write_into_a_freed_page_is_named() -> None:
    rig = Rig()
    request = rig.request(4)
    step = rig.plan((request, 4, 1))
    rig.fact(FactOp.FREE, pages=[rig.page(request, 4)])
    assert names(rig.enter(step.batch)) == ["WRITE_FREED"]


def test_the_same_token_after_the_same_prefix_may_be_written_again_anywhere() -> None:
    rig = Rig()
    request = rig.request(8)
    rig.fact(FactOp.FREE, pages=[rig.page(request, 7)])
    assert rig.step((request, 7, 1)) == []
    rig.fact(FactOp.OWN, pages=[rig.page(request, 7)], tag=77)
    assert rig.step((request, 7, 1)) == []


def test_an_unlinked_record_is_never_a_legal_rewrite() -> None:
    rig = Rig()
    request = rig.request(8)
    step = rig.plan((request, 8, 1))
    rig.run(step, linked=False)
    rig.fact(FactOp.FREE, pages=[rig.page(request, 8)])
    assert names(rig.run(rig.plan((request, 8, 1)), linked=False)) == ["WRITE_FREED"]


def test_trash_pages_take_anything_in_silence() -> None:
    rig = Rig(replace(PLAIN, trash=True))
    request = rig.request(4)
    step = rig.plan((request, 4, 1))
    table = replace(table_of(step.batch, 0), covers_new=False)
    assert rig.enter(with_group(step.batch, 0, slot_mapping=torch.tensor([2]), table=table)) == []
    assert rig.link(2) == (0, 0)
    assert int(rig.state.scratch_slots[0, 0]) == -1


def test_a_write_into_a_null_page_is_foreign() -> None:
    rig = Rig(replace(PLAIN, null=True))
    request = rig.request(4)
    step = rig.plan((request, 4, 1))
    table = replace(table_of(step.batch, 0), covers_new=False)
    assert names(rig.enter(with_group(step.batch, 0, slot_mapping=torch.tensor([4]), table=table))) == ["WRITE_FOREIGN"]


def test_a_write_into_a_page_nobody_told_us_about_is_unverified() -> None:
    rig = Rig()
    request = rig.request(3)
    rig.state.groups[0].owner.zero_()
    writes = rig.verified(Check.WRITES)
    assert rig.step((request, 3, 1)) == []
    assert (rig.unverified(Reason.UNKNOWN_OWNER), rig.verified(Check.WRITES) - writes) == (1, 0)


def test_a_mapping_that_differs_from_the_table_names_both_slots() -> None:
    rig = Rig(GroupSpec(page_size=1, pages=40, unit="slot"))
    request = rig.request(4)
    step = rig.plan((request, 4, 1))
    rig.fact(FactOp.ALLOC, pages=[39], tag=request.tag)
    found = rig.enter(with_group(step.batch, 0, slot_mapping=torch.tensor([39])))
    assert [(v.name, v.slot, v.position_found) for v in found] == [("TABLE_MISMATCH", 39, rig.slot(request, 4))]


def test_a_table_that_does_not_cover_new_tokens_is_not_compared() -> None:
    rig = Rig(GroupSpec(page_size=1, pages=40, unit="slot", covers_new=False))
    request = rig.request(4)
    step = rig.plan((request, 4, 1))
    table_of(step.batch, 0).entries[:, 4] = 0
    assert rig.run(step) == []


def test_a_slot_at_the_wrong_offset_of_its_page_is_a_mismatch() -> None:
    rig = Rig(replace(PLAIN, covers_new=False))
    request = rig.request(4)
    step = rig.plan((request, 4, 1))
    found = rig.enter(with_group(step.batch, 0, slot_mapping=torch.tensor([rig.slot(request, 4) + 1])))
    assert [(v.name, v.position_expected, v.position_found) for v in found] == [("TABLE_MISMATCH", 4, -1)]


@pytest.mark.parametrize("index", [160, 2**31 - 1, 1 << 40])
def test_an_index_outside_the_pool_is_reported_and_never_followed(index: int) -> None:
    rig = Rig()
    request = rig.request(4)
    step = rig.plan((request, 4, 1))
    before = rig.state.groups[0].links.clone()
    found = rig.enter(with_group(step.batch, 0, slot_mapping=torch.tensor([index])))
    assert [(v.name, v.slot, v.page) for v in found] == [("SLOT_RANGE", index, -1)]
    assert torch.equal(before, rig.state.groups[0].links)


def test_an_index_in_the_gap_between_pages_is_outside_the_pool() -> None:
    rig = Rig(replace(PLAIN, stride_gap=3))
    request = rig.request(4)
    step = rig.plan((request, 4, 1))
    assert names(rig.enter(with_group(step.batch, 0, slot_mapping=torch.tensor([7 * 5 + 4])))) == ["SLOT_RANGE"]


def test_negative_indices_are_not_written() -> None:
    rig = Rig()
    request = rig.request(4)
    step = rig.plan((request, 4, 1))
    assert rig.enter(with_group(step.batch, 0, slot_mapping=torch.tensor([-3]))) == []
    assert int(rig.state.scratch_slots[0, 0]) == -1


def test_a_ring_is_read_before_it_is_overwritten_and_takes_more_tokens_than_it_has_places() -> None:
    rig = Rig(GroupSpec(page_size=4, pages=20, ring=16, window=12, kind="swa"), PLAIN)
    request = rig.request(14)
    assert rig.step((request, 14, 40)) == []
    assert rig.step((request, 54, 1)) == []
    positions = sorted(rig.link(rig.slot(request, p))[0] >> 32 for p in range(16))
    assert positions == list(range(39, 55))
    assert rig.count(Kind.WRITE_CONFLICT) == 0


# --- digests ------------------------------------------------------------------------------------------------


def test_an_unknown_base_is_taken_from_the_slots_and_the_anchor_remembered() -> None:
    rig = Rig()
    request = rig.request(9)
    digest = rig.world.digest(request, 9)
    rig.fact(FactOp.ADMIT, row=request.row, tag=request.tag, position=9, seed=rig.world.keys.seed)
    step = rig.plan((request, 9, 1))
    assert rig.enter(step.batch) == []
    assert int(rig.state.scratch_batch[0, BatchWord.SOURCE]) == DigestSource.SLOTS
    rig.leave()
    row = rig.state.rows[request.row].tolist()
    assert (row[RowWord.ANCHOR_POSITION], row[RowWord.ANCHOR_DIGEST], row[RowWord.FLAGS]) == (9, digest, 0)
    assert (row[RowWord.LOW], row[RowWord.HIGH]) == (9, 10)


def test_with_no_base_anywhere_records_stay_unlinked_and_are_counted() -> None:
    rig = Rig()
    request = rig.request(9)
    rig.fact(FactOp.ADMIT, row=request.row, tag=request.tag, position=9, seed=rig.world.keys.seed)
    rig.state.groups[0].links[rig.slot(request, 8)] = 0
    rig.fact(FactOp.OWN, pages=[], tag=0)
    rig.state.groups[0].owner[rig.page(request, 8)] = 0
    assert rig.step((request, 9, 1)) == []
    assert rig.link(rig.slot(request, 9))[1] == 0
    assert int(rig.state.rows[request.row, RowWord.HIGH]) == -1
    assert rig.decode(request) == []
    assert rig.unverified(Reason.UNLINKED) == 1
    assert rig.unverified(Reason.UNKNOWN_RECORD) == 2


def test_nothing_happens_unarmed_but_launches_and_forwards_count() -> None:
    rig = Rig(armed=False)
    request = rig.request()
    assert rig.step((request, 0, 4), scrub_bytes=100) == []
    assert int(rig.state.groups[0].links.abs().sum()) == 0
    assert rig.word(Word.FORWARD) == 2
    assert [rig.word(Word.LAUNCHES + role) for role in range(5)] == [2, 1, 1, 1, 1]
    assert rig.state.headers[1, [Word.SEQUENCE, Word.FORWARD]].tolist() == [1, 1]
