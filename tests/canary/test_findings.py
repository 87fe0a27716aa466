from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.canary.conftest import Bench
from tests.canary.hand import PAGE, HandEngine


def serve(bench: Bench, steps: int = 6) -> None:
    bench.engine.admit("a", 9)
    bench.engine.admit("b", 14)
    for _ in range(steps):
        bench.engine.step()


def test_clean_traffic_stays_silent_and_verifies_every_old_position(bench: Bench) -> None:
    serve(bench, steps=4)
    assert bench.violations() == []
    snapshot = bench.of("SnapshotTaken")[-1]
    assert snapshot.verified["links"]["full"] == sum(9 + i + 14 + i for i in range(3))
    assert snapshot.verified["row_ends"]["full"] == 6
    assert sum(snapshot.unverified["unknown_record"].values()) == 0


def test_a_flipped_bit_in_one_v_row_is_reported_with_the_request_that_wrote_it(bench: Bench) -> None:
    serve(bench)
    bench.engine.flip_bit("b", 3)
    bench.engine.step()
    bench.engine.step()
    (found,) = bench.violations()
    assert (found.kind, found.writer_request, found.slot) == ("CONTENT", "b", bench.engine.slot("b", 3))
    assert found.fingerprint_expected != found.fingerprint_found


def test_a_flipped_bit_is_found_in_a_page_nobody_uses_at_the_moment(bench: Bench) -> None:
    serve(bench)
    bench.engine.flip_bit("b", 3)
    for _ in range(2):
        bench.engine.step(["a"])
    assert bench.kinds() == {"CONTENT"}


def test_one_cause_is_reported_once_however_many_forwards_see_it(bench: Bench) -> None:
    serve(bench)
    bench.engine.flip_bit("a", 2)
    for _ in range(5):
        bench.engine.step()
    assert len(bench.violations()) == 1


def swap_pages(engine: HandEngine) -> None:
    item = engine.batch.groups[0]
    assert item is not None
    assert item.table is not None
    column = item.table.entries[:, 1].clone()
    item.table.entries[:, 1] = column.flip(0)


def test_a_page_swapped_between_two_rows_breaks_the_digest_in_the_same_forward(bench: Bench) -> None:
    serve(bench, steps=3)
    bench.engine.step(before=swap_pages)
    found = bench.violations()
    assert {v.kind for v in found} >= {"DIGEST"}
    assert {v.forward for v in found} == {4}
    assert {v.request for v in found} == {"a", "b"}


def test_a_whole_foreign_table_is_seen_by_the_row_digest(bench: Bench) -> None:
    bench.engine.admit("a", 2 * PAGE)
    bench.engine.admit("b", 2 * PAGE)
    bench.engine.step()

    def steal(engine: HandEngine) -> None:
        item = engine.batch.groups[0]
        assert item is not None
        assert item.table is not None
        item.table.entries[0, :2] = item.table.entries[1, :2]

    bench.engine.step(before=steal)
    found = bench.violations()
    assert "REQUEST_DIGEST" in {v.kind for v in found}
    assert {v.request for v in found if v.kind == "REQUEST_DIGEST"} == {"a"}


def test_a_table_shifted_by_one_entry_shows_wrong_positions(bench: Bench) -> None:
    serve(bench, steps=3)

    def shift(engine: HandEngine) -> None:
        item = engine.batch.groups[0]
        assert item is not None
        assert item.table is not None
        item.table.entries[0, :2] = item.table.entries[0, 1:3].clone()

    bench.engine.step(before=shift)
    assert "POSITION" in bench.kinds()


def stale_mapping(engine: HandEngine) -> None:
    item = engine.batch.groups[0]
    assert item is not None
    assert item.slot_mapping is not None
    item.slot_mapping[0] = engine.slot("b", 1)


def test_a_write_onto_somebody_elses_page_is_named_before_the_bytes_are_gone(bench: Bench) -> None:
    serve(bench, steps=3)
    bench.engine.step(before=stale_mapping)
    found = bench.violations()
    foreign = next(v for v in found if v.kind == "WRITE_FOREIGN")
    assert (foreign.request, foreign.owner_request, foreign.forward, foreign.role) == ("a", "b", 4, "mark")
    assert "TABLE_MISMATCH" in {v.kind for v in found}


def test_a_write_into_a_freed_page_is_reported(bench: Bench) -> None:
    serve(bench, steps=2)
    bench.engine.finish("b")
    freed = bench.engine.free_pages[-1] * PAGE

    def write_freed(engine: HandEngine) -> None:
        item = engine.batch.groups[0]
        assert item is not None
        assert item.slot_mapping is not None
        item.slot_mapping[0] = freed

    bench.engine.step(before=write_freed)
    assert "WRITE_FREED" in bench.kinds()


def test_a_lost_carry_over_is_seen_one_forward_later(bench: Bench) -> None:
    serve(bench, steps=3)

    def wrong_token(engine: HandEngine) -> None:
        engine.batch.input_ids[0] = (engine.batch.input_ids[0] + 1) % 1000

    bench.engine.step(before=wrong_token)
    assert bench.violations() == []
    bench.engine.step()
    found = bench.violations()
    assert {(v.kind, v.request, v.position_expected) for v in found} == {("INPUT_TOKEN", "a", 11)}


def test_a_negative_token_that_reaches_the_model_is_a_placeholder(bench: Bench) -> None:
    serve(bench, steps=2)

    def placeholder(engine: HandEngine) -> None:
        engine.batch.input_ids[1] = -1

    bench.engine.step(before=placeholder)
    assert "INPUT_PLACEHOLDER" in bench.kinds()


def test_an_index_outside_the_pool_is_reported_and_never_followed(bench: Bench) -> None:
    serve(bench, steps=2)

    def out(engine: HandEngine) -> None:
        item = engine.batch.groups[0]
        assert item is not None
        assert item.table is not None
        item.table.entries[1, 0] = 1 << 30

    bench.engine.step(before=out)
    assert bench.kinds() == {"SLOT_RANGE"}


def test_a_prefix_hit_on_pages_of_a_finished_request_is_legal(bench: Bench) -> None:
    engine = bench.engine
    engine.admit("a", 2 * PAGE + 1)
    engine.step()
    shared = engine.pages["a"][:2]
    prompt = engine.tokens["a"][: 2 * PAGE] + engine.new_tokens(3)
    engine.admit("b", len(prompt), pages=shared, tokens=prompt)
    for _ in range(3):
        engine.step()
    assert bench.violations() == []
    assert bench.of("SnapshotTaken")[-1].unverified["unarmed_row"]["full"] == 0


def test_a_prefix_hit_on_the_wrong_pages_is_caught_at_the_first_forward(bench: Bench) -> None:
    engine = bench.engine
    engine.admit("a", 2 * PAGE + 1)
    engine.step()
    prompt = engine.new_tokens(2 * PAGE + 3)
    engine.admit("b", len(prompt), pages=engine.pages["a"][:2], tokens=prompt)
    engine.step()
    assert {(v.kind, v.request) for v in bench.violations()} >= {("REQUEST_DIGEST", "b")}


def test_pages_that_change_hands_are_silent_when_they_are_rewritten(bench: Bench) -> None:
    engine = bench.engine
    for round_ in range(12):
        engine.admit(f"r{round_}", 17)
        engine.step()
        engine.step()
        engine.finish(f"r{round_}")
    assert bench.violations() == []


def test_a_position_that_was_never_written_in_a_page_handed_out_is_unwritten(bench: Bench) -> None:
    engine = bench.engine
    engine.admit("a", 9)
    engine.step()
    engine.cached["a"] += 2  # two positions are skipped: nothing was written there
    engine.tokens["a"] += engine.new_tokens(3)
    engine.step()
    assert {"UNWRITTEN"} <= bench.kinds()


def test_the_finish_audit_sees_an_answer_that_differs_from_what_was_cached(bench: Bench) -> None:
    engine = bench.engine
    engine.admit("a", 9)
    engine.admit("b", 9)
    engine.step()
    engine.step()
    engine.tokens["a"][4] += 1
    engine.finish("a")
    engine.finish("b")
    engine.admit("c", 3)
    engine.step()
    assert {(v.kind, v.request) for v in bench.violations()} == {("FINAL_DIGEST", "a")}


def test_a_forward_that_raised_leaves_its_tokens_unsealed_and_can_be_repeated(bench: Bench) -> None:
    serve(bench, steps=2)
    with pytest.raises(RuntimeError, match="the model raised"):
        bench.engine.step(fail=True)
    bench.engine.step()
    bench.engine.step()
    assert bench.violations() == []
    assert bench.of("SnapshotTaken")[-1].abandoned == 1


def test_offloaded_pages_come_back_with_their_records(bench: Bench) -> None:
    engine, canary = bench.engine, bench.canary
    serve(bench, steps=3)
    old = engine.pages["b"]
    records = canary.export_records("full", old)
    bytes_ = engine.pool[:, :, old].clone()
    canary.free("full", old, "b")
    new = engine.free_pages[: len(old)]
    engine.free_pages = engine.free_pages[len(old) :] + old
    canary.alloc("full", "b", new)
    engine.pool[:, :, new] = bytes_
    canary.import_records("full", new, records, "b")
    engine.pages["b"] = new
    for _ in range(3):
        engine.step()
    assert bench.violations() == []


def test_a_load_that_brought_other_bytes_is_found(bench: Bench) -> None:
    engine, canary = bench.engine, bench.canary
    serve(bench, steps=3)
    old = engine.pages["b"]
    records = canary.export_records("full", old)
    new, engine.free_pages = engine.free_pages[: len(old)], engine.free_pages[len(old) :]
    canary.alloc("full", "b", new)
    engine.pool[:, :, new] = engine.pool[:, :, old]
    engine.pool[0, 0, new[0], 1] = 0
    canary.import_records("full", new, records, "b")
    engine.pages["b"] = new
    engine.step()
    engine.step()
    assert {(v.kind, v.page) for v in bench.violations()} == {("CONTENT", new[0])}


def test_a_copied_page_keeps_its_records_and_a_wrong_copy_is_found(bench: Bench) -> None:
    engine, canary = bench.engine, bench.canary
    engine.admit("a", 2 * PAGE + 2)
    engine.step()
    child = engine.free_pages.pop(0)
    canary.admit("a#1", tokens=engine.tokens["a"], start=engine.cached["a"])
    canary.alloc("full", "a#1", [child])
    canary.move("full", [engine.pages["a"][2]], [child], "a#1")
    engine.pool[:, :, child] = engine.pool[:, :, engine.pages["a"][2]]
    engine.pages["a#1"] = [*engine.pages["a"][:2], child]
    engine.tokens["a#1"] = list(engine.tokens["a"])
    engine.cached["a#1"] = engine.cached["a"]
    for _ in range(3):
        engine.step()
    assert bench.violations() == []


def test_a_copy_of_bad_bytes_is_found_though_the_original_was_reported(bench: Bench) -> None:
    engine, canary = bench.engine, bench.canary
    engine.admit("a", PAGE)
    engine.step()
    engine.flip_bit("a", 1)
    for _ in range(3):
        engine.step()
    source, child = engine.pages["a"][0], engine.free_pages.pop(0)
    assert {(v.kind, v.page) for v in bench.violations()} == {("CONTENT", source)}
    canary.admit("b", tokens=engine.tokens["a"], start=PAGE)
    canary.alloc("full", "b", [child])
    canary.move("full", [source], [child], "b")
    engine.pool[:, :, child] = engine.pool[:, :, source]
    for _ in range(3):
        engine.step()
    assert {(v.kind, v.page) for v in bench.violations()} == {("CONTENT", source), ("CONTENT", child)}


def test_verify_reads_all_sealed_bytes_now(bench: Bench) -> None:
    serve(bench, steps=2)
    assert bench.canary.verify().clean
    bench.engine.flip_bit("a", 5)
    report = bench.canary.verify("full", bench.engine.pages["a"])
    assert [(m.slot, m.writer) for m in report.mismatches] == [(bench.engine.slot("a", 5), "a")]


def test_inspect_tells_everything_about_a_slot(bench: Bench) -> None:
    serve(bench, steps=2)
    info = bench.canary.inspect("full", bench.engine.slot("a", 5))
    assert (info.position, info.token, info.owner, info.owner_state) == (5, bench.engine.tokens["a"][5], "a", "held")
    assert info.seals[0].bytes_match is True


def test_nothing_is_claimed_about_a_warm_pool(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench()
    serve(bench, steps=3)
    bench.canary.arm()
    for _ in range(3):
        bench.engine.step()
    assert bench.violations() == []
    assert bench.of("SnapshotTaken")[-1].unverified["unknown_record"]["full"] > 0


def test_nonfinite_values_are_reported_where_they_were_written(bench: Bench) -> None:
    engine = bench.engine
    engine.admit("a", 6)
    model = engine._model

    def nan() -> None:
        model()
        page, offset = divmod(engine.slot("a", 4), PAGE)
        engine.pool[0, 0, page, offset, 0, 0] = torch.nan

    engine._model = nan  # type: ignore[method-assign]
    engine.step()
    assert {(v.kind, v.slot) for v in bench.violations()} == {("NONFINITE", engine.slot("a", 4))}
