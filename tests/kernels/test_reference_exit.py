"""What the exit seals, scrubs and commits."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kvcanary.kernels import FactOp
from kvcanary.layout import KVSource
from kvcanary.record import Kind, SealFlag, mix, parse_writer, signed, token_code, writer_word
from kvcanary.state import (
    HISTORY,
    SCRUB_CURSOR,
    SCRUB_PASS_FORWARD,
    SCRUB_PASSES,
    SUSPECT_ROWS,
    Check,
    Reason,
    Role,
    RowFlag,
    RowWord,
    Word,
    group_base,
)
from tests.kernels.cases import table_of, with_group
from tests.kernels.model_exit import Model
from tests.kernels.pools import GroupSpec, flip_bit, run_addresses, storage_bytes
from tests.kernels.rig import PLAIN, Rig, names

DRAFT = replace(PLAIN, draft="tiny")
BIG = 1 << 20


def source_of(rig: Rig, group: int = 0, number: int = 0) -> KVSource:
    return rig.world.layout.groups[group].sources[number]


# --- seals --------------------------------------------------------------------------------------------------


def test_new_tokens_are_sealed_with_their_fingerprint_and_writer() -> None:
    rig = Rig()
    request = rig.request(3)
    slot = rig.slot(request, 2)
    expected = Model(rig.state).fingerprint(0, "target", slot)
    assert rig.seal(slot) == (expected, writer_word(1, request.tag))
    assert rig.verified(Check.SEALED) == 3


def test_each_part_has_a_seal_of_its_own() -> None:
    rig = Rig(DRAFT)
    request = rig.request(1)
    slot, model = rig.slot(request, 0), Model(rig.state)
    assert [rig.seal(slot, 0, part)[0] for part in (0, 1)] == [
        model.fingerprint(0, "target", slot),
        model.fingerprint(0, "draft", slot),
    ]
    assert rig.verified(Check.SEALED) == 1


def test_marking_a_slot_clears_the_seals_of_all_parts_until_each_is_made_again() -> None:
    rig = Rig(DRAFT)
    request = rig.request(1)
    step = rig.plan((request, 0, 1))
    rig.enter(step.batch)
    slot = rig.slot(request, 0)
    assert [rig.seal(slot, 0, part) for part in (0, 1)] == [(0, 0), (0, 0)]
    rig.kernels.seal(rig.state, "draft", 0, last=False, nonfinite=True)
    assert rig.seal(slot) == (0, 0)
    assert rig.seal(slot, 0, 1)[0] != 0


def test_only_the_token_whose_record_is_in_the_slot_is_sealed() -> None:
    rig = Rig()
    one, two = rig.request(4), rig.request(4)
    step = rig.plan((one, 4, 1), (two, 4, 1))
    table = replace(table_of(step.batch, 0), covers_new=False)
    slot, sealed = rig.slot(one, 4), rig.verified(Check.SEALED)
    rig.run(step, groups=with_group(step.batch, 0, slot_mapping=torch.tensor([slot, slot]), table=table).groups)
    assert rig.verified(Check.SEALED) - sealed == 1


def test_two_rows_in_one_slot_of_a_ring_are_a_conflict_before_its_bytes_are_sealed() -> None:
    rig = Rig(GroupSpec(page_size=1, pages=9, ring=1, kind="state"), PLAIN)
    one, two = rig.request(4), rig.request(4)
    step = rig.plan((one, 4, 1), (two, 4, 1))
    slot = rig.slot(one, 4)
    batch = with_group(step.batch, 0, slot_mapping=torch.tensor([slot, slot]))
    found = [v for v in rig.run(step, groups=batch.groups) if v.name == "WRITE_CONFLICT"]
    assert [(v.slot, v.role) for v in found] == [(slot, Role.SEAL)]


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn, torch.float8_e5m2]
)
def test_a_nan_in_a_new_token_is_reported_for_its_row(dtype: torch.dtype) -> None:
    rig = Rig(replace(PLAIN, dtype=dtype))
    request = rig.request(4)
    step = rig.plan((request, 4, 2))
    source = source_of(rig, number=3)
    (address, size), *_ = run_addresses(source, rig.slot(request, 5))
    step.spoil.append((source, address + size - dtype.itemsize, dtype.itemsize))
    found = rig.run(step)
    assert [(v.name, v.slot, v.row, v.part, v.position_expected) for v in found] == [
        ("NONFINITE", rig.slot(request, 5), request.row, 0, 5)
    ]
    assert rig.seal(rig.slot(request, 5))[1] >> 56 == SealFlag.NONFINITE


def test_infinities_count_and_the_check_can_be_left_out() -> None:
    rig = Rig(replace(PLAIN, dtype=torch.float32))
    request = rig.request(4)
    view = source_of(rig).tensor
    for nonfinite, expected in ((False, []), (True, ["NONFINITE"])):
        step = rig.plan((request, 4, 1))
        rig.enter(step.batch)
        rig.world.write(step)
        view[rig.page(request, 4), 0, 0, 0] = float("-inf")
        rig.kernels.seal(rig.state, "target", 0, last=True, nonfinite=nonfinite)
        assert names(rig.new_violations()) == expected


def test_bytes_that_are_no_numbers_are_never_non_finite() -> None:
    rig = Rig(replace(PLAIN, shape="odd"))
    request = rig.request(4)
    step = rig.plan((request, 4, 1))
    step.spoil += [(source_of(rig), *run) for run in run_addresses(source_of(rig), rig.slot(request, 4))]
    assert rig.run(step) == []


# --- the end of a forward -----------------------------------------------------------------------------------


def test_the_history_advances_by_what_the_model_received_and_keeps_64_positions() -> None:
    rig = Rig(GroupSpec(page_size=1, pages=300, unit="slot"))
    request = rig.request(150, chunk=100)
    row = rig.state.rows[request.row].tolist()
    assert (row[RowWord.LOW], row[RowWord.HIGH], row[RowWord.FLAGS]) == (87, 150, RowFlag.ARMED)
    for position in range(87, 151):
        assert int(rig.state.history[request.row, position % HISTORY]) == rig.world.digest(request, position)


def test_a_prefill_longer_than_the_history_keeps_its_end() -> None:
    rig = Rig(GroupSpec(page_size=1, pages=300, unit="slot"))
    request = rig.request(150, chunk=150)
    for position in range(87, 151):
        assert int(rig.state.history[request.row, position % HISTORY]) == rig.world.digest(request, position)


def test_a_rewind_advances_the_history_again_from_there() -> None:
    rig = Rig()
    request = rig.request(20)
    rig.step((request, 15, 2))
    row = rig.state.rows[request.row].tolist()
    assert (row[RowWord.LOW], row[RowWord.HIGH]) == (0, 17)
    for position in range(18):
        assert int(rig.state.history[request.row, position]) == rig.world.digest(request, position)


def test_the_digest_sum_counts_every_live_token_once() -> None:
    rig = Rig()
    request = rig.request(10, chunk=4)
    keys, tokens = rig.world.keys, request.tokens
    expected = sum(mix(keys, token_code(token, p), p) for p, token in enumerate(tokens))
    assert rig.word(Word.DIGEST_SUM) == signed(expected)


def test_an_abandoned_forward_leaves_histories_and_seals_as_they_were() -> None:
    rig = Rig()
    request = rig.request(6)
    step = rig.plan((request, 6, 1))
    rig.enter(step.batch)
    rig.kernels.abandon(rig.state)
    assert int(rig.state.rows[request.row, RowWord.HIGH]) == 6
    assert rig.seal(rig.slot(request, 6)) == (0, 0)
    assert (rig.word(Word.ABANDONED), rig.word(Word.FORWARD), rig.word(Word.SCRATCH_TOKENS)) == (1, 3, 0)
    assert rig.step((request, 6, 1)) == []


def test_headers_are_cumulative_and_end_with_their_sequence() -> None:
    rig = Rig()
    request = rig.request(4)
    rig.decode(request)
    first, second = rig.state.headers[1], rig.state.headers[2]
    assert first[[Word.SEQUENCE, Word.FORWARD, Word.NEW_TOKENS]].tolist() == [1, 1, 4]
    assert second[[Word.SEQUENCE, Word.FORWARD, Word.NEW_TOKENS]].tolist() == [2, 2, 5]
    for _ in range(4):
        rig.decode(request)
    assert int(rig.state.headers[1, Word.SEQUENCE]) == 5


def test_every_launch_is_counted_by_its_role() -> None:
    rig = Rig(DRAFT)
    request = rig.request(2)
    rig.decode(request, scrub_bytes=10)
    counts = {role: rig.launches(role) for role in Role}
    assert counts == {Role.FACTS: 2, Role.MARK: 2, Role.CHECK: 2, Role.SEAL: 4, Role.SCRUB: 1, Role.WINDOW: 0}


# --- scrub --------------------------------------------------------------------------------------------------


def test_a_flipped_bit_is_content_only_at_the_second_look() -> None:
    rig = Rig()
    request = rig.request(6)
    slot = rig.slot(request, 3)
    before = rig.seal(slot)[0]
    flip_bit(source_of(rig), slot, byte=9, bit=5)
    assert rig.idle(BIG) == []
    assert rig.seal(slot)[1] >> 56 == SealFlag.SUSPECT
    found = rig.idle(BIG)
    assert [(v.name, v.slot, v.part, v.position_found) for v in found] == [("CONTENT", slot, 0, 3)]
    assert (found[0].fingerprint_expected, found[0].code_found) == (before, request.tokens[3])
    assert found[0].fingerprint_found == Model(rig.state).fingerprint(0, "target", slot)
    assert [rig.idle(BIG) for _ in range(3)] == [[], [], []]


def test_bytes_that_are_back_at_the_second_look_clear_the_suspicion() -> None:
    rig = Rig()
    request = rig.request(6)
    slot = rig.slot(request, 3)
    flip_bit(source_of(rig), slot)
    rig.idle(BIG)
    flip_bit(source_of(rig), slot)
    assert rig.idle(BIG) == []
    assert rig.seal(slot)[1] >> 56 == 0


def test_a_slot_written_anew_between_the_looks_starts_over() -> None:
    rig = Rig()
    request = rig.request(6)
    slot = rig.slot(request, 5)
    flip_bit(source_of(rig), slot)
    rig.idle(BIG)
    assert rig.step((request, 5, 1), scrub_bytes=1) == []
    flip_bit(source_of(rig), slot)
    assert rig.idle(BIG) == []
    assert names(rig.idle(BIG)) == ["CONTENT"]


def test_every_part_is_scrubbed() -> None:
    rig = Rig(DRAFT)
    request = rig.request(6)
    flip_bit(rig.world.layout.groups[0].part_sources("draft")[0], rig.slot(request, 2))
    rig.idle(BIG)
    assert [(v.name, v.part) for v in rig.idle(BIG)] == [("CONTENT", 1)]
    assert rig.seal(rig.slot(request, 2))[1] >> 56 == 0


def test_a_small_budget_reads_every_sealed_slot_within_one_pass_of_known_length() -> None:
    rig = Rig()
    request = rig.request(40)
    group, base = rig.world.layout.groups[0], group_base(0)
    budget = 7 * group.token_bytes
    steps = -(-group.num_slots // 7)
    content = rig.verified(Check.CONTENT)
    for position in (0, 17, 39):
        flip_bit(source_of(rig), rig.slot(request, position))
    found = []
    for _ in range(steps + 1):
        found += rig.idle(budget)
    assert sorted(v.slot for v in found) == sorted(rig.slot(request, p) for p in (0, 17, 39))
    assert rig.verified(Check.CONTENT) - content >= 40
    assert rig.word(base + SCRUB_PASSES) == 1
    assert rig.word(base + SCRUB_PASS_FORWARD) == 1 + steps
    assert rig.word(base + SCRUB_CURSOR) == 7 * (steps + 1) % group.num_slots


def test_a_walk_that_ends_with_the_pool_has_made_a_pass() -> None:
    rig = Rig()
    rig.idle(20 * rig.world.layout.groups[0].token_bytes * 4)
    assert (rig.word(group_base(0) + SCRUB_PASSES), rig.word(group_base(0) + SCRUB_CURSOR)) == (0, 80)
    rig.idle(20 * rig.world.layout.groups[0].token_bytes * 4)
    assert (rig.word(group_base(0) + SCRUB_PASSES), rig.word(group_base(0) + SCRUB_CURSOR)) == (1, 0)


def test_the_budget_is_shared_by_size_and_every_space_gets_a_slot() -> None:
    free = GroupSpec(page_size=1, pages=300, unit="slot")
    rig = Rig(free, replace(free, pages=3, shape="tiny"))
    rig.idle(10 * rig.world.layout.groups[0].token_bytes)
    cursors = [rig.word(group_base(g) + SCRUB_CURSOR) for g in (0, 1)]
    assert cursors[0] in (9, 10)
    assert cursors[1] == 1


def test_a_null_page_that_was_written_is_dirty_once() -> None:
    rig = Rig(replace(PLAIN, null=True, null_is_zero=True))
    assert rig.idle(BIG) == []
    flip_bit(source_of(rig), 6)
    assert [(v.name, v.slot, v.page) for v in rig.idle(BIG)] == [("NULL_DIRTY", 6, 1)]
    assert rig.idle(BIG) == []
    assert rig.repeats() == 1


def test_a_null_page_that_need_not_be_zero_must_be_finite() -> None:
    rig = Rig(replace(PLAIN, null=True))
    assert rig.idle(BIG) == []
    source_of(rig).tensor[1, 2] = float("nan")
    assert [(v.name, v.slot) for v in rig.idle(BIG)] == [("NULL_DIRTY", 6)]


def test_queued_slots_come_before_the_walk() -> None:
    rig = Rig()
    request = rig.request(8)
    slot = rig.slot(request, 7)
    flip_bit(source_of(rig), slot)
    for expected in ([], ["CONTENT"]):
        rig.fact(FactOp.QUEUE, pages=[rig.page(request, 7)])
        assert names(rig.idle(1)) == expected


def test_a_queued_slot_without_a_seal_is_counted() -> None:
    rig = Rig()
    request = rig.request(4)
    rig.fact(FactOp.QUEUE, pages=[rig.page(request, 0)])
    rig.fact(FactOp.WIPE, pages=[rig.page(request, 0)])
    rig.idle(1)
    assert rig.unverified(Reason.UNSEALED) == 4
    assert rig.word(Word.SUSPECTS_DONE) == rig.word(Word.SUSPECTS) == 4


def test_a_queue_that_overflowed_goes_on_with_what_it_still_has() -> None:
    rig = Rig(GroupSpec(page_size=1, pages=300, unit="slot"))
    request = rig.request(250)
    pages = [rig.page(request, p) for p in range(250)]
    for _ in range(18):
        rig.fact(FactOp.QUEUE, pages=pages)
    assert rig.word(Word.SUSPECTS) > SUSPECT_ROWS
    for _ in range(5):
        assert rig.idle(1) == []
    assert rig.word(Word.SUSPECTS_DONE) == rig.word(Word.SUSPECTS)
    assert rig.verified(Check.CONTENT) >= SUSPECT_ROWS


def test_a_lost_scale_is_content_even_if_the_values_are_whole() -> None:
    rig = Rig(replace(PLAIN, shape="latent"))
    request = rig.request(4)
    scale = next(s for s in rig.world.layout.groups[0].sources if s.component == "scale")
    (address, size), *_ = run_addresses(scale, rig.slot(request, 1))
    storage_bytes(scale)[address : address + size] = 0
    rig.idle(BIG)
    assert [(v.name, v.slot) for v in rig.idle(BIG)] == [("CONTENT", rig.slot(request, 1))]
    assert rig.count(Kind.CONTENT) == 1


def test_a_seal_shows_who_wrote_the_slot_and_when() -> None:
    rig = Rig()
    request = rig.request(6, chunk=3)
    writer = parse_writer(rig.seal(rig.slot(request, 4))[1])
    assert (writer.forward, writer.tag, writer.flags) == (2, request.tag, 0)
