"""What lifecycle facts do to records, owners and rows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from kvcanary.batch import GroupBatch
from kvcanary.errors import BatchError
from kvcanary.kernels import FactOp
from kvcanary.record import OWNER_FREED, OWNER_HELD, Owner, SealFlag, parse_owner, parse_writer
from kvcanary.state import HISTORY, OUTBOX_ROWS, OWNER_TRASH, Check, Reason, RowFlag, RowWord, Word
from tests.kernels.cases import Request
from tests.kernels.pools import GroupSpec, flip_bit, run_addresses, storage_bytes
from tests.kernels.rig import PLAIN, Rig, names

BIG = 1 << 20


def owner(rig: Rig, page: int, group: int = 0) -> Owner:
    return parse_owner(int(rig.state.groups[group].owner[page]))


def move_bytes(rig: Rig, source_slot: int, target_slot: int) -> None:
    for source in rig.world.layout.groups[0].sources:
        raw = storage_bytes(source)
        runs = zip(run_addresses(source, source_slot), run_addresses(source, target_slot), strict=True)
        for (a, size), (b, _) in runs:
            raw[b : b + size] = raw[a : a + size].clone()


# --- pages --------------------------------------------------------------------------------------------------


def test_an_allotted_page_has_an_owner_and_no_records() -> None:
    rig = Rig()
    request = rig.request(4)
    page = rig.page(request, 0)
    rig.fact(FactOp.ALLOC, pages=[page], tag=9)
    assert owner(rig, page) == (2, 9, OWNER_HELD)
    assert int(rig.state.groups[0].links[4 * page : 4 * page + 4].abs().sum()) == 0
    assert int(rig.state.groups[0].seals[:, 4 * page : 4 * page + 4].abs().sum()) == 0


def test_pages_may_come_as_a_device_tensor() -> None:
    rig = Rig()
    rig.fact(FactOp.ALLOC, pages=torch.tensor([5, 6], dtype=torch.int32), tag=3)
    assert [owner(rig, page)[1] for page in (5, 6)] == [3, 3]


def test_a_freed_page_keeps_its_tag_and_its_records() -> None:
    rig = Rig()
    request = rig.request(4)
    page, link = rig.page(request, 0), rig.link(rig.slot(request, 1))
    rig.fact(FactOp.FREE, pages=[page])
    assert owner(rig, page) == (2, request.tag, OWNER_FREED)
    assert rig.link(rig.slot(request, 1)) == link


def test_a_page_handed_on_keeps_its_records() -> None:
    rig = Rig()
    request = rig.request(4)
    link = rig.link(rig.slot(request, 1))
    rig.fact(FactOp.OWN, pages=[rig.page(request, 0)], tag=8)
    assert owner(rig, rig.page(request, 0)) == (2, 8, OWNER_HELD)
    assert rig.link(rig.slot(request, 1)) == link


@pytest.mark.parametrize("op", [FactOp.ALLOC, FactOp.FREE, FactOp.OWN])
def test_reserved_pages_stay_reserved_whatever_is_said_about_them(op: FactOp) -> None:
    rig = Rig(replace(PLAIN, trash=True))
    rig.fact(op, pages=[0, 3], tag=8)
    assert owner(rig, 0) == (0, 0, OWNER_TRASH)
    assert owner(rig, 3)[2] != OWNER_TRASH


def test_an_arena_page_that_changes_hands_loses_the_records_of_whoever_had_it() -> None:
    full = GroupSpec(page_size=4, pages=24, arena=2)
    rig = Rig(full, GroupSpec(page_size=2, pages=36, arena=3), GroupSpec(page_size=4, pages=24))
    for group in (0, 1, 2):
        rig.state.groups[group].links.fill_(7)
        rig.state.groups[group].seals.fill_(7)
    rig.fact(FactOp.ALLOC, group=0, pages=[5], tag=1)
    # Arena page 2: pages 4 and 5 of the first group, 6 to 8 of the second.
    links = rig.state.groups[1].links
    assert (links == 0).all(1).nonzero().squeeze(1).tolist() == list(range(12, 18))
    assert (rig.state.groups[0].links == 0).all(1).nonzero().squeeze(1).tolist() == list(range(20, 24))
    assert bool(rig.state.groups[2].links.all())
    links.fill_(7)
    rig.fact(FactOp.ALLOC, group=0, pages=[4], tag=1)
    assert bool(links.all())
    rig.fact(FactOp.ALLOC, group=1, pages=[6], tag=2)
    assert rig.state.arenas["arena"].tolist()[2] == 2
    assert not bool(rig.state.groups[0].links[16:24].any())


def test_a_moved_page_is_checked_and_scrubbed_in_its_new_place() -> None:
    rig = Rig()
    request = rig.request(8)
    page = rig.page(request, 2)
    target = 39
    for offset in range(4):
        move_bytes(rig, 4 * page + offset, 4 * target + offset)
    rig.fact(FactOp.ALLOC, pages=[target], tag=request.tag)
    rig.fact(FactOp.COPY, pages=[page], targets=[target])
    request.pages[0][0] = target
    writer = parse_writer(rig.seal(rig.slot(request, 2))[1])
    assert (writer.forward, writer.tag) == (2, request.tag)
    assert rig.decode(request, scrub_bytes=BIG) == []
    assert rig.idle(BIG) == []
    flip_bit(rig.world.layout.groups[0].sources[0], rig.slot(request, 2))
    rig.idle(BIG)
    assert names(rig.idle(BIG)) == ["CONTENT"]


def test_a_suspect_that_moves_is_looked_at_again_in_its_new_place() -> None:
    rig = Rig()
    request = rig.request(4)
    slot, page = rig.slot(request, 1), rig.page(request, 1)
    flip_bit(rig.world.layout.groups[0].sources[0], slot)
    rig.idle(BIG)
    assert rig.seal(slot)[1] >> 56 == SealFlag.SUSPECT
    move_bytes(rig, slot, 4 * 39 + slot % 4)
    rig.fact(FactOp.COPY, pages=[page], targets=[39])
    assert rig.seal(4 * 39 + slot % 4)[1] >> 56 == 0


def test_unsealed_records_stay_unsealed_when_they_move() -> None:
    rig = Rig()
    request = rig.request(4)
    page = rig.page(request, 1)
    rig.state.groups[0].seals[0, 4 * page : 4 * page + 4] = torch.tensor([3, int(SealFlag.POSITION) << 56])
    rig.fact(FactOp.COPY, pages=[page], targets=[39])
    assert not bool(rig.state.groups[0].seals[0, 156:160].any())


def test_exported_records_come_back_elsewhere_and_are_scrubbed_first() -> None:
    rig = Rig(replace(PLAIN, draft="tiny"))
    request = rig.request(8)
    pages = [rig.page(request, 0), rig.page(request, 4)]
    records = torch.zeros(8, 6, dtype=torch.int64)
    rig.fact(FactOp.EXPORT, pages=pages, records=records)
    assert records[1, :2].tolist() == list(rig.link(rig.slot(request, 1)))
    assert records[1, 4:].tolist() == list(rig.seal(rig.slot(request, 1), 0, 1))
    for k, page in enumerate(pages):
        for offset in range(4):
            move_bytes(rig, 4 * page + offset, 4 * (38 + k) + offset)
    rig.fact(FactOp.IMPORT, pages=[38, 39], records=records, tag=request.tag)
    request.pages[0] = [38, 39]
    assert owner(rig, 38) == (2, request.tag, OWNER_HELD)
    assert rig.word(Word.SUSPECTS) == 16
    content = rig.verified(Check.CONTENT)
    assert rig.decode(request, scrub_bytes=1) == []
    assert rig.verified(Check.CONTENT) - content >= 16
    flip_bit(rig.world.layout.groups[0].sources[0], rig.slot(request, 6))
    rig.fact(FactOp.QUEUE, pages=[39])
    assert [rig.idle(1), names(rig.idle(1))] == [[], ["CONTENT"]]


def test_wiped_pages_claim_nothing() -> None:
    rig = Rig()
    request = rig.request(4)
    rig.fact(FactOp.WIPE, pages=[rig.page(request, 0)])
    assert rig.link(rig.slot(request, 1)) == (0, 0)
    assert owner(rig, rig.page(request, 0))[2] == OWNER_HELD


def test_restamped_pages_are_trusted_with_their_present_bytes() -> None:
    rig = Rig(replace(PLAIN, draft="tiny"))
    request = rig.request(6)
    flip_bit(rig.world.layout.groups[0].sources[0], rig.slot(request, 1))
    rig.idle(BIG)
    rig.fact(FactOp.RESTAMP, pages=[rig.page(request, 1), rig.page(request, 5)])
    assert [rig.idle(BIG) for _ in range(3)] == [[], [], []]
    writer = parse_writer(rig.seal(rig.slot(request, 1))[1])
    assert (writer.tag, writer.flags) == (request.tag, 0)
    assert rig.seal(rig.slot(request, 5) + 1) == (0, 0)


def test_slots_with_a_link_but_no_seal_are_not_scrubbed() -> None:
    rig = Rig()
    request = rig.request(4)
    rig.state.groups[0].seals[:, 4 * rig.page(request, 0) :][:, :4] = 0
    flip_bit(rig.world.layout.groups[0].sources[0], rig.slot(request, 1))
    assert [rig.idle(BIG), rig.idle(BIG), rig.decode(request)] == [[], [], []]


@pytest.mark.parametrize(
    ("op", "fields", "words"),
    [
        (FactOp.ALLOC, {"pages": [40]}, "0..39"),
        (FactOp.FREE, {"pages": [-1]}, "0..39"),
        (FactOp.COPY, {"pages": [1, 2], "targets": [3]}, "2 pages go to 1 targets"),
        (FactOp.EXPORT, {"pages": [1]}, "got none"),
        (FactOp.IMPORT, {"pages": [1], "records": torch.zeros(4, 6, dtype=torch.int64)}, r"\(4, 4\), got .* \(4, 6\)"),
        (FactOp.ADMIT, {"row": 12}, "row 12"),
    ],
)
def test_a_fact_that_fits_nothing_is_refused_by_name(op: FactOp, fields: dict[str, Any], words: str) -> None:
    with pytest.raises(BatchError, match=words) as caught:
        Rig().fact(op, **fields)
    assert op.name in str(caught.value)


def test_a_judged_free_of_a_free_page_is_reported_each_time_with_its_last_owner() -> None:
    rig = Rig()
    request = rig.request(4)
    page = rig.page(request, 0)
    rig.fact(FactOp.FREE, pages=torch.tensor([page]), judged=True)
    assert rig.new_violations() == []
    rig.fact(FactOp.FREE, pages=torch.tensor([page]), judged=True)
    rig.fact(FactOp.FREE, pages=torch.tensor([page]), judged=True)
    found = rig.new_violations()
    assert [(v.name, v.page, v.slot, parse_owner(v.owner).tag) for v in found] == [
        ("DOUBLE_FREE", page, 4 * page, request.tag)
    ] * 2


def test_a_judged_allotment_of_a_held_page_is_reported_with_its_holder() -> None:
    rig = Rig()
    request = rig.request(4)
    page = rig.page(request, 0)
    rig.fact(FactOp.ALLOC, pages=torch.tensor([page, 30]), judged=True)
    (found,) = rig.new_violations()
    assert (found.name, found.page, parse_owner(found.owner).tag) == ("DOUBLE_ALLOC", page, request.tag)


@pytest.mark.parametrize("op", [FactOp.FREE, FactOp.ALLOC])
def test_a_page_named_twice_in_one_judged_fact_is_reported_once(op: FactOp) -> None:
    rig = Rig()
    if op is FactOp.FREE:
        rig.fact(FactOp.ALLOC, pages=[7, 8])
    rig.fact(op, pages=torch.tensor([7, 8, 7]), judged=True)
    assert [(v.name, v.page) for v in rig.new_violations()] == [(f"DOUBLE_{op.name}", 7)]


def test_judged_facts_report_nothing_about_reserved_pages_or_unknown_owners_or_before_arming() -> None:
    rig = Rig(replace(PLAIN, trash=True))
    trash = rig.world.layout.groups[0].trash_pages[0]
    rig.fact(FactOp.FREE, pages=torch.tensor([trash, 20]), judged=True)
    rig.fact(FactOp.FREE, pages=torch.tensor([trash]), judged=True)
    unarmed = Rig(armed=False)
    unarmed.fact(FactOp.ALLOC, pages=torch.tensor([3, 3]), judged=True)
    assert rig.new_violations() == unarmed.new_violations() == []


def test_judged_facts_pass_over_numbers_that_are_no_pages() -> None:
    rig = Rig()
    for op in (FactOp.ALLOC, FactOp.QUEUE, FactOp.WIPE, FactOp.OWN, FactOp.FREE):
        rig.fact(op, pages=torch.tensor([-1, 30, 40, 1 << 40]), tag=3, judged=True)
    assert owner(rig, 30) == (1, 3, OWNER_FREED)
    assert rig.new_violations() == []


def test_only_judged_facts_are_judged() -> None:
    rig = Rig()
    rig.fact(FactOp.ALLOC, pages=[7, 7])
    rig.fact(FactOp.FREE, pages=[7])
    rig.fact(FactOp.FREE, pages=[7])
    assert rig.new_violations() == []


def test_a_page_handed_out_to_nobody_belongs_to_the_first_row_that_writes_into_it() -> None:
    rig = Rig()
    first, second = rig.request(4), rig.request(4)
    rig.fact(FactOp.ALLOC, pages=[30])
    assert owner(rig, 30).tag == 0
    mapping, batch = torch.tensor([4 * 30]), rig.plan((first, 4, 1)).batch
    forward = rig.word(Word.FORWARD)
    assert rig.enter(replace(batch, groups=(GroupBatch(slot_mapping=mapping),))) == []
    assert owner(rig, 30).tag == first.tag
    assert owner(rig, 30).as_of == forward
    batch = rig.plan((second, 4, 1)).batch
    found = rig.enter(replace(batch, groups=(GroupBatch(slot_mapping=mapping),)))
    assert "WRITE_FOREIGN" in names(found)


# --- rows ---------------------------------------------------------------------------------------------------


def test_a_row_that_starts_at_zero_is_armed_with_its_seed() -> None:
    rig = Rig()
    rig.fact(FactOp.ADMIT, row=3, tag=5, seed=1234)
    assert rig.state.rows[3].tolist() == [5, 1234, 0, 0, RowFlag.ARMED, 0, -1, 0]
    assert int(rig.state.history[3, 0]) == 1234


def test_a_row_that_starts_later_is_armed_only_with_a_base() -> None:
    rig = Rig()
    rig.fact(FactOp.ADMIT, row=3, tag=5, position=70, digest=99, seed=1, armed=True)
    assert rig.state.rows[3].tolist() == [5, 1, 70, 70, RowFlag.ARMED, 0, -1, 0]
    assert int(rig.state.history[3, 70 % HISTORY]) == 99
    rig.fact(FactOp.ADMIT, row=3, tag=6, position=70, seed=1)
    assert rig.state.rows[3].tolist() == [6, 1, 0, -1, 0, 0, -1, 0]


def late_row(rig: Rig, length: int = 9) -> tuple[Request, int]:
    """A row whose base is still on its way, one token on."""
    request = rig.request(length)
    base = rig.world.digest(request, length)
    rig.fact(FactOp.ADMIT, row=request.row, tag=request.tag, position=length, seed=rig.world.keys.seed)
    rig.decode(request)
    return request, base


def test_a_late_base_that_agrees_arms_the_row() -> None:
    rig = Rig()
    request, base = late_row(rig)
    rig.fact(FactOp.ANCHOR, row=request.row, tag=request.tag, position=9, digest=base)
    ends = rig.verified(Check.ROW_ENDS)
    assert rig.decode(request) == []
    assert rig.verified(Check.ROW_ENDS) - ends == 1


def test_a_late_base_that_disagrees_is_reported_and_leaves_the_row_unarmed() -> None:
    rig = Rig()
    request, base = late_row(rig)
    rig.fact(FactOp.ANCHOR, row=request.row, tag=request.tag, position=9, digest=base + 1)
    found = rig.new_violations()
    assert [(v.name, v.row, v.position_expected, v.digest_expected, v.digest_found) for v in found] == [
        ("REQUEST_DIGEST", request.row, 9, base + 1, base)
    ]
    assert int(rig.state.rows[request.row, RowWord.FLAGS]) == RowFlag.TAINTED
    rig.decode(request)
    assert rig.unverified(Reason.UNARMED_ROW) > 0


def test_a_late_base_for_a_row_that_went_on_without_any_raises_no_alarm() -> None:
    rig = Rig(armed=False)
    request = rig.request(9)
    rig.state.counters[Word.ARMED] = 1
    rig.state.groups[0].owner.zero_()
    base = rig.world.digest(request, 9)
    rig.fact(FactOp.ADMIT, row=request.row, tag=request.tag, position=9, seed=rig.world.keys.seed)
    assert rig.decode(request) == []
    rig.fact(FactOp.ANCHOR, row=request.row, tag=request.tag, position=9, digest=base)
    assert [rig.decode(request), rig.decode(request)] == [[], []]
    assert int(rig.state.rows[request.row, RowWord.HIGH]) == -1
    base = rig.world.digest(request, 12)
    rig.fact(FactOp.ANCHOR, row=request.row, tag=request.tag, position=12, digest=base, armed=True)
    assert rig.decode(request) == []
    assert int(rig.state.rows[request.row, RowWord.HIGH]) == 13


def test_a_base_for_a_row_that_was_given_away_is_ignored() -> None:
    rig = Rig()
    request, base = late_row(rig)
    before = rig.state.rows.clone()
    rig.fact(FactOp.ANCHOR, row=request.row, tag=request.tag + 1, position=9, digest=base + 1)
    assert torch.equal(before, rig.state.rows)


def test_a_base_for_another_position_than_the_one_assumed_is_ignored() -> None:
    rig = Rig()
    request, base = late_row(rig)
    before = rig.state.rows.clone()
    rig.fact(FactOp.ANCHOR, row=request.row, tag=request.tag, position=8, digest=base + 1)
    assert torch.equal(before, rig.state.rows)


@pytest.mark.parametrize("started", [True, False])
def test_a_base_is_set_where_the_row_has_not_started_or_when_it_is_armed(started: bool) -> None:
    rig = Rig()
    if started:
        request, _ = late_row(rig)
    else:
        request = rig.request()
        rig.fact(FactOp.ADMIT, row=request.row, tag=request.tag, position=9)
    rig.fact(FactOp.ANCHOR, row=request.row, tag=request.tag, position=12, digest=77, armed=started)
    row = rig.state.rows[request.row].tolist()
    assert (row[RowWord.LOW], row[RowWord.HIGH], row[RowWord.FLAGS]) == (12, 12, RowFlag.ARMED)
    assert int(rig.state.history[request.row, 12]) == 77


def test_a_finished_row_leaves_its_digest_and_is_free() -> None:
    rig = Rig()
    request = rig.request(9)
    rig.fact(FactOp.FINISH, row=request.row, tag=request.tag, position=8)
    assert rig.state.outbox[0].tolist() == [1, request.tag, 8, 1, rig.world.digest(request, 8), 2]
    assert rig.state.rows[request.row, [RowWord.TAG, RowWord.HIGH]].tolist() == [0, -1]


def test_a_length_outside_the_history_or_another_tag_is_unverified() -> None:
    rig = Rig()
    request = rig.request(9)
    rig.fact(FactOp.FINISH, row=request.row, tag=request.tag + 1, position=8)
    rig.fact(FactOp.FINISH, row=-1, tag=4, position=8)
    assert int(rig.state.rows[request.row, RowWord.TAG]) == request.tag
    rig.fact(FactOp.FINISH, row=request.row, tag=request.tag, position=10)
    assert rig.state.outbox[:3, 3].tolist() == [0, 0, 0]


def test_the_outbox_goes_round() -> None:
    rig = Rig()
    for _ in range(OUTBOX_ROWS + 2):
        rig.fact(FactOp.FINISH, row=-1, tag=4, position=8)
    assert rig.state.outbox[:3, 0].tolist() == [OUTBOX_ROWS + 1, OUTBOX_ROWS + 2, 3]
    assert rig.word(Word.OUTBOX) == OUTBOX_ROWS + 2
