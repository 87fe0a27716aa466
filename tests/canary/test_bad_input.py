from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvcanary.batch import ForwardBatch, GroupBatch, PageTable
from kvcanary.errors import BatchError, ConfigError, LayoutError
from kvcanary.layout import AttentionGroup, KVSource, PoolLayout, Run
from tests.canary.conftest import Bench


def a_batch(bench: Bench) -> Any:
    bench.engine.admit("a", 6)
    bench.engine.step()
    return bench.engine.batch


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("input_ids", torch.zeros(3), "input_ids has dtype torch.float32"),
        ("context_lens", torch.zeros(5, dtype=torch.int32), r"context_lens has shape \(5,\), expected \(1,\)"),
        ("query_start_loc", torch.zeros(1, dtype=torch.int32), r"query_start_loc has shape \(1,\)"),
        ("groups", (), "groups has 0 items, the layout has 1"),
        ("last_ids", torch.zeros(2, dtype=torch.int32), "last_ids has shape"),
    ],
)
def test_a_batch_whose_tensors_disagree_is_refused_and_names_the_field(
    bench: Bench, field: str, value: object, says: str
) -> None:
    batch = a_batch(bench)
    changes: dict[str, Any] = {field: value}
    with pytest.raises(BatchError, match=says):
        bench.canary.enter(dataclasses.replace(batch, **changes))


TENSORS = st.one_of(
    st.none(),
    st.just("no tensor"),
    st.builds(
        lambda shape, dtype: torch.zeros(shape, dtype=dtype),
        st.lists(st.integers(0, 3), max_size=3),
        st.sampled_from([torch.int32, torch.int64, torch.float32]),
    ),
    st.builds(lambda length: torch.zeros(length, dtype=torch.int32, device="meta"), st.integers(0, 3)),
)


def like(kind: type[Any]) -> st.SearchStrategy[Any]:
    """Objects of a batch's classes with anything in their tensors, mostly what fits two rows of two tokens."""
    fits = {"query_start_loc": 3, "row_offsets": 3, "num_requests": 1}

    def tensor(name: str) -> st.SearchStrategy[Any]:
        return st.one_of(*[st.just(torch.zeros(fits.get(name, 2), dtype=torch.int32))] * 6, TENSORS)

    known: dict[str, st.SearchStrategy[Any]] = {
        "unit": st.sampled_from(["page", "slot", "page", "byte"]),
        "covers_new": st.booleans(),
        "linked": st.booleans(),
        "entries": st.one_of(st.just(torch.zeros(2, 4, dtype=torch.int32)), tensor("entries")),
    }
    if kind is GroupBatch:
        known["table"] = st.one_of(st.none(), like(PageTable), like(PageTable), st.just("no table"))
    if kind is ForwardBatch:
        known["groups"] = st.one_of(
            *[st.tuples(like(GroupBatch))] * 4, st.tuples(st.one_of(st.none(), st.just(7))), st.lists(like(GroupBatch))
        )
    return st.builds(kind, **{f.name: known.get(f.name, tensor(f.name)) for f in dataclasses.fields(kind)})


@settings(deadline=None, max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(batch=like(ForwardBatch))
def test_the_first_look_at_a_batch_accepts_nothing_that_the_full_one_refuses(bench: Bench, batch: ForwardBatch) -> None:
    try:
        batch._judge(bench.canary.layout, 512, 16)
        accepted = True
    except BatchError:
        accepted = False
    assert batch._fits(bench.canary.layout, 512, 16) is accepted


def test_the_engine_goes_on_after_a_refused_batch(bench: Bench) -> None:
    batch = a_batch(bench)
    with pytest.raises(BatchError):
        bench.canary.enter(dataclasses.replace(batch, groups=()))
    bench.engine.step()
    assert bench.violations() == []


def test_leave_without_enter_is_out_of_order(bench: Bench) -> None:
    with pytest.raises(BatchError, match=r"leave\(\) without enter\(\)"):
        bench.canary.leave()


def test_a_forward_before_a_pool_is_bound_is_out_of_order() -> None:
    from kvcanary.canary import Canary
    from kvcanary.config import CanaryConfig

    with pytest.raises(BatchError, match="no pool yet"):
        Canary(CanaryConfig(mode="log")).admit("a")


def test_a_page_outside_the_pool_names_page_and_pool(bench: Bench) -> None:
    with pytest.raises(BatchError, match="page 64 lies outside the pool of 64"):
        bench.canary.alloc("full", "a", [3, 64])


def test_an_unknown_group_names_those_that_exist(bench: Bench) -> None:
    with pytest.raises(LayoutError, match=r"no attention group 'swa'; this layout has \['full'\]"):
        bench.canary.free("swa", [3])


def test_a_request_that_was_never_admitted_has_no_row(bench: Bench) -> None:
    with pytest.raises(BatchError, match="'ghost' is not live"):
        bench.canary.row_of("ghost")


def test_more_live_requests_than_rows_is_refused(bench: Bench) -> None:
    for i in range(32):
        bench.canary.admit(str(i))
    with pytest.raises(BatchError, match="all 32 are taken"):
        bench.canary.admit("one more")


def test_an_unknown_role_names_those_that_exist(bench: Bench) -> None:
    with pytest.raises(ConfigError, match="no launch role 'chek'"):
        bench.canary.suppress("chek")


@pytest.mark.parametrize(
    ("tier", "blocks", "says"),
    [
        ("full", [0], r"a tier needs a name that no group has \(\['full'\]\), got 'full'"),
        ("", [0], "a tier needs a name"),
        ("host", ["first"], "tier 'host': blocks must be whole numbers"),
        ("host", [-1], "tier 'host': blocks count from 0, got -1"),
    ],
)
def test_a_block_outside_of_the_pool_needs_a_tier_of_its_own_and_a_number(
    bench: Bench, tier: str, blocks: Any, says: str
) -> None:
    with pytest.raises(BatchError, match=says):
        bench.canary.alloc_blocks(tier, "a", blocks)
    with pytest.raises(BatchError, match=says):
        bench.canary.free_blocks(tier, blocks)


def test_a_copy_may_name_a_tier_alone(bench: Bench) -> None:
    for name in ("x", "y"):
        bench.canary.transfer(name, "start", direction="out", tier="host", blocks=[3])
    bench.engine.admit("a", 6)
    bench.engine.step()
    assert [(found.kind, found.group, found.page) for found in bench.of("OwnershipViolated")] == [
        ("TRANSFER_OVERLAP", "host", 3)
    ]


def source(**changes: Any) -> KVSource:
    tensor = torch.zeros(8, 4, 16)
    fields: dict[str, Any] = {
        "name": "k0",
        "tensor": tensor,
        "num_pages": 8,
        "page_size": 4,
        "page_stride": 256,
        "token_stride": 64,
        "runs": (Run(0, 64, 0),),
    }
    return KVSource(**{**fields, **changes})


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"num_pages": 9}, "reach 2304 bytes"),
        ({"runs": ()}, "runs must be non-empty"),
        ({"page_size": 0}, "sizes must be positive"),
        ({"token_stride": 70}, "reach"),
    ],
)
def test_a_source_that_reaches_beyond_its_storage_is_refused(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(LayoutError, match=says):
        source(**changes)


def test_a_view_without_contiguous_elements_is_refused_and_never_copied() -> None:
    with pytest.raises(LayoutError, match="stride"):
        KVSource.from_view("k0", torch.zeros(8, 4, 16, 2)[..., 0])


def test_slots_must_fill_whole_pages() -> None:
    with pytest.raises(LayoutError, match="num_slots=31 must be a positive multiple of page_size=4"):
        AttentionGroup("full", "full", 31, 4, (source(),))


def test_a_group_larger_than_its_sources_is_refused() -> None:
    with pytest.raises(LayoutError, match="holds 8 pages of 4"):
        AttentionGroup("full", "full", 36, 4, (source(),))


def test_a_layout_without_groups_is_refused() -> None:
    with pytest.raises(LayoutError, match="at least one attention group"):
        PoolLayout(())


def test_a_source_is_a_view_of_the_engines_bytes() -> None:
    tensor = torch.zeros(8, 4, 2, 16, dtype=torch.bfloat16)
    made = KVSource.from_view("k0", tensor.transpose(1, 2).transpose(1, 2))
    assert made.address == tensor.data_ptr()


def test_head_major_views_become_one_run_a_head() -> None:
    view = torch.zeros(8, 2, 4, 16, dtype=torch.bfloat16).transpose(1, 2)  # [pages, heads, page, dim] seen as NHD
    made = KVSource.from_view("k0", view, first_head=6)
    assert [(run.offset, run.num_bytes, run.first_word) for run in made.runs] == [(0, 32, 48), (128, 32, 56)]


def test_a_rank_counts_its_words_from_its_first_head_whether_a_run_holds_one_head_or_all() -> None:
    tensor = torch.zeros(8, 4, 2, 16, dtype=torch.bfloat16)
    by_token = KVSource.from_view("k0", tensor, first_head=6)
    by_head = KVSource.from_view("k0", tensor.transpose(1, 2).contiguous().transpose(1, 2), first_head=6)
    assert by_token.runs[0].first_word == by_head.runs[0].first_word == 48


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"request": 7}, "request 7: ids must be strings, got a int"),
        ({"request": "a", "identity": "adapter"}, "request 'a': identities must be bytes or None, got 'adapter'"),
    ],
)
def test_a_wrong_id_or_identity_is_named_by_itself(bench: Bench, arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(BatchError, match=says):
        bench.canary.admit(**arguments)
