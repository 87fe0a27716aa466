"""The layout against pools that vLLM's own functions lay out: each token's bytes are found where they are."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvcanary.engines.vllm.layout import DRAFT_PART, Pool, make_pool
from kvcanary.errors import ConfigError
from kvcanary.layout import KVSource

vllm = pytest.importorskip("vllm", reason="needs vLLM: make test-engines")

from vllm.v1.kv_cache_interface import (  # noqa: E402 - only where there is a vLLM
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    KVQuantMode,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    compute_layout_strides,
)
from vllm.v1.kv_cache_layout import KVCacheLayout  # noqa: E402
from vllm.v1.worker.utils import allocate_kv_cache  # noqa: E402

LAYERS = [f"model.layers.{i}.attn" for i in range(3)]
BLOCKS = 6


def full(**options: Any) -> Any:
    return FullAttentionSpec(
        **{"block_size": 16, "num_kv_heads": 2, "head_size": 16, "dtype": torch.float32, **options}
    )


def allocated(
    spec: Any, layout: str, *, kernel_block: int | None = None, layers: list[str] = LAYERS
) -> tuple[Any, Any]:
    """vLLM's configuration and attention layers with their views for a pool of one group."""
    order = KVCacheLayout[layout]
    strides = compute_layout_strides(spec, BLOCKS, len(layers), order)
    size = BLOCKS * spec.page_size_bytes * len(layers)
    tensor = KVCacheTensor(size=size, layers=layers, layer_stride=strides[0], block_stride=strides[1])
    config = KVCacheConfig(
        num_blocks=BLOCKS, kv_cache_tensors=[tensor], kv_cache_groups=[KVCacheGroupSpec(layers, spec)]
    )
    views = allocate_kv_cache(config, torch.device("cpu"), order, [kernel_block or spec.block_size])
    return config, {name: SimpleNamespace(kv_cache=view) for name, view in views.items()}


def token_bytes(source: KVSource, page: int, offset: int) -> torch.Tensor:
    """The bytes of one token, by the numbers that the kernels go by."""
    tensor = source.tensor
    whole = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
    first = tensor.storage_offset() * tensor.element_size() + page * source.page_stride + offset * source.token_stride
    return torch.cat([whole[first + run.offset : first + run.offset + run.num_bytes] for run in source.runs])


def check_every_token(pool: Pool, layers: dict[str, Any]) -> None:
    """Write a sentinel into each token of each layer, and find it through the sources and nowhere else."""
    (group,) = pool.layout.groups
    random = torch.Generator().manual_seed(7)
    for source in group.sources:
        view = layers[source.name].kv_cache
        page = view.shape[2]
        for token in range(group.num_slots):
            sentinel = torch.randint(1, 100, view[0, :, 0].shape, generator=random).to(view.dtype)
            view[token // page, :, token % page] = sentinel
            places = [divmod(token, group.page_size)]
            found = token_bytes(source, *places[0])
            assert torch.equal(found, sentinel.contiguous().view(torch.uint8).flatten())
            for other in group.sources:
                if other is not source:
                    assert not torch.equal(token_bytes(other, *places[0]), found)
    # Every token has been written: none may have overwritten another's.
    seen = {
        tuple(token_bytes(s, *divmod(t, group.page_size)).tolist())
        for s in group.sources
        for t in range(group.num_slots)
    }
    assert len(seen) == group.num_slots * len(group.sources)


@pytest.mark.parametrize(
    ("layout", "runs"), [("LBNHC", 1), ("LBHNC", 2), ("LHBNC", 2), ("BLHNC", 2), ("BLNHC", 1), ("BHLNC", 2)]
)
def test_a_token_is_found_in_every_physical_layout(layout: str, runs: int) -> None:
    config, layers = allocated(full(), layout)
    pool = make_pool(config, layers)
    assert pool.layout.uncovered == ()
    assert [len(source.runs) for source in pool.layout.groups[0].sources] == [runs] * 3
    check_every_token(pool, layers)


def test_scales_beside_a_quantised_token_are_covered_with_it() -> None:
    spec = full(dtype=torch.int8, kv_quant_mode=KVQuantMode.INT8_PER_TOKEN_HEAD, state_content_bytes=16 + 4 + 16 + 4)
    config, layers = allocated(spec, "LBNHC")
    pool = make_pool(config, layers)
    assert {source.token_bytes for source in pool.layout.groups[0].sources} == {2 * 40}
    check_every_token(pool, layers)


def test_a_latent_cache_is_one_run_a_token() -> None:
    spec = MLAAttentionSpec(block_size=16, num_kv_heads=1, head_size=576, dtype=torch.bfloat16)
    config, layers = allocated(spec, "LBNHC")
    pool = make_pool(config, layers)
    assert {(len(source.runs), source.token_bytes) for source in pool.layout.groups[0].sources} == {(1, 1152)}
    check_every_token(pool, layers)


def test_packed_sparse_latents_are_one_run_a_token() -> None:
    spec = MLAAttentionSpec(
        block_size=64,
        num_kv_heads=1,
        head_size=656,
        dtype=torch.uint8,
        cache_dtype_str="fp8_ds_mla",
        state_content_bytes=656,
    )
    config, layers = allocated(spec, "LBNHC", layers=LAYERS[:1])
    check_every_token(make_pool(config, layers), layers)


def test_rows_of_data_and_rows_of_scales_are_two_sources() -> None:
    spec = MLAAttentionSpec(
        block_size=64,
        num_kv_heads=1,
        head_size=512,
        dtype=torch.uint8,
        cache_dtype_str="fp8_ds_mla",
        model_version="deepseek_v4",
        alignment=576,
        state_content_bytes=584,
    )
    config, layers = allocated(spec, "LBNHC", layers=LAYERS[:1])
    (group,) = make_pool(config, layers).layout.groups
    data, scales = group.sources
    assert (data.page_stride, data.token_stride, data.runs[0].num_bytes) == (37440, 576, 576)
    assert (scales.page_stride, scales.token_stride, scales.runs[0][:2]) == (37440, 8, (64 * 576, 8))
    whole = torch.empty(0, dtype=torch.uint8).set_(data.tensor.untyped_storage())
    whole[2 * 37440 + 5 * 576] = 77
    whole[2 * 37440 + 64 * 576 + 5 * 8] = 78
    assert token_bytes(data, 2, 5)[0] == 77
    assert token_bytes(scales, 2, 5)[0] == 78


def test_pages_are_kernel_blocks_where_tables_hold_those() -> None:
    config, layers = allocated(full(block_size=64), "LBHNC", kernel_block=16)
    pool = make_pool(config, layers, kernel_tables=True)
    (group,) = pool.layout.groups
    assert (group.page_size, group.num_pages, pool.groups[0].split) == (16, 4 * BLOCKS, 4)
    assert group.null_pages == (0, 1, 2, 3)
    check_every_token(pool, layers)


def test_kernel_blocks_are_joined_where_tokens_lie_at_one_distance() -> None:
    config, layers = allocated(full(block_size=64), "LBNHC", kernel_block=16)
    pool = make_pool(config, layers)
    assert (pool.layout.groups[0].page_size, pool.groups[0].split) == (64, 1)
    check_every_token(pool, layers)


def test_kernel_blocks_with_heads_outside_of_tokens_are_refused_and_say_what_to_set() -> None:
    config, layers = allocated(full(block_size=64), "LBHNC", kernel_block=16)
    with pytest.raises(ConfigError, match="VLLM_KV_CACHE_LAYOUT=LBNHC"):
        make_pool(config, layers)


def test_groups_over_the_same_bytes_share_an_arena() -> None:
    windows = SlidingWindowSpec(block_size=16, num_kv_heads=2, head_size=16, dtype=torch.float32, sliding_window=40)
    config, layers = allocated(full(), "LBNHC")
    other = ["model.layers.9.attn"]
    config.kv_cache_groups.append(KVCacheGroupSpec(other, windows))
    layers[other[0]] = layers[LAYERS[0]]
    first, second = make_pool(config, layers).layout.groups
    assert first.arena == second.arena is not None
    assert (second.kind, second.window) == ("swa", 40)


def test_layers_of_a_draft_model_are_a_part_of_their_own() -> None:
    config, layers = allocated(full(), "LBNHC")
    pool = make_pool(config, layers, draft=LAYERS[2:])
    assert pool.layout.groups[0].parts == ("target", DRAFT_PART)
    assert pool.draft


def test_draft_layers_that_are_written_at_unknown_times_are_listed_as_uncovered() -> None:
    config, layers = allocated(full(), "LBNHC")
    pool = make_pool(config, layers, draft=LAYERS[2:], draft_gap="method 'mtp' writes it at other times")
    assert pool.layout.groups[0].parts == ("target",)
    assert not pool.draft
    assert pool.layout.uncovered == ("layer model.layers.2.attn: method 'mtp' writes it at other times",)


def test_layers_that_share_a_cache_are_covered_once() -> None:
    config, layers = allocated(full(), "LBNHC")
    layers[LAYERS[2]] = layers[LAYERS[0]]
    assert len(make_pool(config, layers).layout.groups[0].sources) == 2


def test_recurrent_state_is_listed_as_uncovered() -> None:
    config, layers = allocated(full(), "LBNHC")
    state = MambaSpec(shapes=((2, 512),), dtypes=(torch.float32,), block_size=16)
    config.kv_cache_groups.append(KVCacheGroupSpec(["model.layers.8.mamba"], state))
    pool = make_pool(config, layers)
    assert len(pool.layout.groups) == 1
    assert pool.uncovered_groups == {1}
    assert "model.layers.8.mamba: MambaSpec" in pool.layout.uncovered[0]
    # Its blocks overlay those of the group that is covered.
    assert pool.layout.groups[0].arena is not None


def test_compressed_states_are_listed_as_uncovered() -> None:
    spec = MLAAttentionSpec(block_size=64, num_kv_heads=1, head_size=512, dtype=torch.uint8, tokens_per_state=4)
    config, layers = allocated(full(), "LBNHC")
    config.kv_cache_groups.append(KVCacheGroupSpec(["compressed"], spec))
    assert "one state stands for 4 tokens" in make_pool(config, layers).layout.uncovered[0]


def test_a_pool_without_a_layer_that_can_be_watched_is_refused() -> None:
    config, layers = allocated(full(), "LBNHC")
    config.kv_cache_groups[0] = KVCacheGroupSpec(
        ["x"], MambaSpec(shapes=((2, 8),), dtypes=(torch.float32,), block_size=16)
    )
    with pytest.raises(ConfigError, match="no layer of this model"):
        make_pool(config, layers)
