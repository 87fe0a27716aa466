"""Layouts over SGLang's real pools: what its own write changes is where the sources say, and nowhere else."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvcanary.batch import ForwardBatch, GroupBatch
from kvcanary.canary import Canary
from kvcanary.config import CanaryConfig
from kvcanary.engines.sglang.pools import Space, find_spaces, make_layout
from kvcanary.engines.sglang.sentinel import token_bytes, write_sentinels
from kvcanary.errors import ConfigError
from kvcanary.layout import AttentionGroup, PoolLayout

pytestmark = [pytest.mark.usefixtures("parallel"), pytest.mark.filterwarnings("ignore")]

HEADS, DIM, LAYERS, LAYER = 2, 64, 3, 1
SLOTS = [17, 40, 63]
BUFFERS = ("k_buffer", "v_buffer", "kv_buffer", "k_scale_buffer", "v_scale_buffer", "kv_scale_buffer")


@pytest.fixture
def parallel(on_cpu: None) -> Iterator[None]:
    """One rank."""
    from sglang.srt.runtime_context import get_parallel

    with get_parallel().override(attn_dcp_size=1, attn_dcp_rank=0, dcp_enabled=False):
        yield


@pytest.fixture
def hnd(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_USE_HND_KVCACHE", "1")


# --- real pools ---------------------------------------------------------------------------------------------


def mha(kind: str = "MHATokenToKVPool", dtype: torch.dtype = torch.bfloat16, page_size: int = 16) -> Any:
    from sglang.srt.mem_cache import memory_pool

    return getattr(memory_pool, kind)(
        size=96, page_size=page_size, dtype=dtype, head_num=HEADS, head_dim=DIM, layer_num=LAYERS, device="cpu",
        enable_memory_saver=False,
    )  # fmt: skip


def mla(kind: str = "MLATokenToKVPool", dtype: torch.dtype = torch.bfloat16) -> Any:
    from sglang.srt.mem_cache import memory_pool

    return getattr(memory_pool, kind)(
        size=96, page_size=16, dtype=dtype, kv_lora_rank=64, qk_rope_head_dim=16, layer_num=LAYERS, device="cpu",
        enable_memory_saver=False,
    )  # fmt: skip


def dsa() -> Any:
    from sglang.srt.mem_cache.memory_pool import DSATokenToKVPool

    return DSATokenToKVPool(
        size=256, page_size=64, kv_lora_rank=512, dtype=torch.bfloat16, qk_rope_head_dim=64, layer_num=LAYERS,
        device="cpu", index_head_dim=128, enable_memory_saver=False, kv_cache_dim=576,
    )  # fmt: skip


def deepseek_v4(kind: str = "DeepSeekV4SingleKVPool", **more: Any) -> Any:
    from sglang.srt.mem_cache import deepseek_v4_memory_pool

    return getattr(deepseek_v4_memory_pool, kind)(
        size=256, page_size=64, dtype=torch.float8_e4m3fn, qk_nope_head_dim=448, qk_rope_head_dim=64,
        layer_num=LAYERS, device="cpu", enable_memory_saver=False, **more,
    )  # fmt: skip


def swa(window_pool_size: int = 64) -> Any:
    from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

    return SWAKVPool(
        size=96, size_swa=window_pool_size, page_size=16, dtype=torch.bfloat16, head_num=HEADS, head_dim=DIM,
        swa_attention_layer_ids=[0, 1], full_attention_layer_ids=[2], device="cpu",
    )  # fmt: skip


# --- their own writes ---------------------------------------------------------------------------------------


def keys(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(count, HEADS, DIM, dtype=torch.bfloat16), torch.randn(count, HEADS, DIM, dtype=torch.bfloat16)


def write_mha(pool: Any, slots: torch.Tensor) -> None:
    pool.set_kv_buffer(None, slots, *keys(len(slots)), layer_id_override=LAYER)


def write_mxfp8(pool: Any, slots: torch.Tensor) -> None:
    """Its own write needs a GPU; these are the views that its readers get."""
    for view in (pool.get_key_buffer(LAYER), pool.get_value_buffer(LAYER), *pool.get_kv_scale_buffer(LAYER)):
        view.view(torch.uint8)[slots] = torch.randint(1, 255, (len(slots), *view.shape[1:]), dtype=torch.uint8)


def write_mla(pool: Any, slots: torch.Tensor) -> None:
    latent = torch.randn(len(slots), 1, pool.kv_cache_dim, dtype=torch.bfloat16)
    pool.set_kv_buffer(None, slots, latent, None, layer_id_override=LAYER)


def write_mla_fp4(pool: Any, slots: torch.Tensor) -> None:
    latent = torch.randn(len(slots), 1, pool.kv_cache_dim, dtype=torch.bfloat16)
    pool.set_kv_buffer(SimpleNamespace(layer_id=LAYER), slots, latent, None)


def write_dsa(pool: Any, slots: torch.Tensor) -> None:
    write_mla(pool, slots)
    index = torch.randn(len(slots), 128).to(torch.float8_e4m3fn)
    pool.set_index_k_scale_buffer(LAYER, slots, index, torch.randn(len(slots), 1))


def write_deepseek_v4(pool: Any, slots: torch.Tensor) -> None:
    from sglang.srt.mem_cache.deepseek_v4_memory_pool import NopeFp8RopeBf16Pack

    count = len(slots)
    nope, rope = torch.randn(count, 448).to(torch.float8_e4m3fn), torch.randn(count, 64, dtype=torch.bfloat16)
    scales = torch.randint(1, 255, (count, 7), dtype=torch.uint8)
    pool.set_key_buffer(LAYER, slots, NopeFp8RopeBf16Pack(nope, rope, scales))


def write_uniform(pool: Any, slots: torch.Tensor) -> None:
    pool.set_key_buffer_fused(LAYER, slots, torch.randn(len(slots), 512, dtype=torch.bfloat16))


CASES: dict[str, tuple[Callable[[], Any], Callable[[Any, torch.Tensor], None], int]] = {
    "mha": (mha, write_mha, 2),
    "mha page size 1": (lambda: mha(page_size=1), write_mha, 2),
    "mha fp8": (lambda: mha(dtype=torch.float8_e4m3fn), write_mha, 2),
    "mha fp4": (lambda: mha("MHATokenToKVPoolFP4", torch.float4_e2m1fn_x2), write_mha, 4),
    "mha mxfp8": (lambda: mha("MHATokenToKVPoolMXFP8", torch.float8_e4m3fn), write_mxfp8, 4),
    "mla": (mla, write_mla, 1),
    "mla fp4": (lambda: mla("MLATokenToKVPoolFP4", torch.float4_e2m1fn_x2), write_mla_fp4, 2),
    "dsa": (dsa, write_dsa, 3),
    "deepseek v4": (deepseek_v4, write_deepseek_v4, 2),
    "deepseek v4 uniform": (lambda: deepseek_v4("DeepSeekV4UniformFP8KVPool"), write_uniform, 1),
}


def allocator(pool: Any) -> Any:
    """The allocator that SGLang makes for such a pool."""
    from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
    from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator

    if pool.page_size == 1:
        return TokenToKVPoolAllocator(pool.size, torch.bfloat16, "cpu", pool, need_sort=False)
    return PagedTokenToKVPoolAllocator(pool.size, pool.page_size, torch.bfloat16, "cpu", pool, need_sort=False)


def layout_of(pool: Any) -> PoolLayout:
    return make_layout([Space("full", allocator(pool), None, pool)], [], 0)


def storages(pool: Any) -> dict[int, torch.Tensor]:
    """Every byte of the pool, by address of its storage."""
    buffers = [tensor for name in BUFFERS for tensor in getattr(pool, name, None) or ()]
    buffers += list(getattr(pool, "index_k_with_scale_buffer", ()))
    found = {}
    for tensor in buffers:
        whole = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
        found[whole.data_ptr()] = whole
    return found


def changes(pool: Any, write: Callable[[], None]) -> set[int]:
    """Addresses of the bytes that a write changed."""
    before = {address: whole.clone() for address, whole in storages(pool).items()}
    write()
    after = storages(pool)
    return {a + int(i) for a, whole in after.items() for i in (whole != before[a]).nonzero().flatten()}


def addresses(group: AttentionGroup, slots: list[int], layer: int | None = None) -> dict[tuple[str, int], set[int]]:
    """Addresses of the tokens' bytes, by source and slot."""
    found: dict[tuple[str, int], set[int]] = {}
    for source in group.sources:
        for slot in slots if layer is None or source.layer == layer else ():
            runs = token_bytes(source, slot)
            found[source.name, slot] = {run.data_ptr() + i for run in runs for i in range(run.numel())}
    return found


@pytest.mark.parametrize("case", CASES)
def test_what_a_pool_writes_is_where_its_sources_are_and_nowhere_else(case: str) -> None:
    make, write, sources = CASES[case]
    pool = make()
    layout = layout_of(pool)
    written = changes(pool, lambda: write(pool, torch.tensor(SLOTS)))
    places = addresses(layout.groups[0], SLOTS, LAYER)
    assert len(places) == sources * len(SLOTS)
    assert written <= set().union(*places.values())
    assert all(written & place for place in places.values())


@pytest.mark.parametrize("case", [case for case in CASES if case not in {"mha fp8", "deepseek v4 uniform"}])
def test_what_a_token_loses_of_any_source_is_found(case: str) -> None:
    """Keys, values, scales and index keys, one after the other: each is sealed with its token."""
    make, write, _ = CASES[case]
    pool = make()
    layout = layout_of(pool)
    canary = Canary(CanaryConfig(mode="log"))
    canary.bind(layout, max_tokens=8, max_batch_rows=1, max_rows=1)
    canary.arm()
    page_size = layout.groups[0].page_size
    first = page_size if page_size > SLOTS[0] else 0  # page 0 is nobody's
    row, slots = canary.admit("r"), torch.tensor(SLOTS) + first
    batch = ForwardBatch(
        input_ids=torch.arange(3),
        query_start_loc=torch.tensor([0, 3]),
        context_lens=torch.tensor([0]),
        request_rows=torch.tensor([row]),
        groups=(GroupBatch(slot_mapping=slots),),
    )
    pages, lost = sorted(set((slots // page_size).tolist())), int(slots[1])
    canary.alloc("full", "r", pages)
    with canary.step(), canary.forward(batch):
        write(pool, slots)
    assert canary.verify("full", pages).clean
    for source in layout.groups[0].sources:
        (place, *_) = token_bytes(source, lost)
        kept = place.clone()
        place.copy_(kept ^ 1)
        assert [found.slot for found in canary.verify("full", pages).mismatches] == [lost], source.name
        place.copy_(kept)
    canary.stop(1)


def test_keys_by_head_are_found_too(hnd: None) -> None:
    pool = mha()
    assert pool.kv_cache_layout == "hnd"
    layout = layout_of(pool)
    written = changes(pool, lambda: write_mha(pool, torch.tensor(SLOTS)))
    places = addresses(layout.groups[0], SLOTS, LAYER)
    assert written <= set().union(*places.values())
    assert all(len(source.runs) == HEADS for source in layout.groups[0].sources)


@pytest.mark.parametrize("case", CASES)
def test_no_two_tokens_share_a_byte(case: str) -> None:
    layout = layout_of(CASES[case][0]())
    places = list(addresses(layout.groups[0], SLOTS).values())
    assert sum(map(len, places)) == len(set().union(*places))


@pytest.mark.parametrize(("kv_layout", "data", "scale"), [("v41", 512, 16), ("v41_new", 512, 16), ("v4", 576, 8)])
def test_deepseek_rows_have_data_and_scales(kv_layout: str, data: int, scale: int) -> None:
    group = layout_of(deepseek_v4(kv_layout=kv_layout)).groups[0]
    assert [source.token_bytes for source in group.sources[:2]] == [data, scale]
    places = list(addresses(group, list(range(64))).values())
    assert sum(map(len, places)) == len(set().union(*places))


def test_a_window_model_has_two_groups_and_a_translation() -> None:
    from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator

    pool = swa()
    owner = SWATokenToKVPoolAllocator(96, 64, 16, torch.bfloat16, "cpu", pool, need_sort=False)
    spaces, uncovered = find_spaces(SimpleNamespace(token_to_kv_pool=pool, sliding_window_size=31), owner)
    layout = make_layout(spaces, uncovered, 0)
    assert [(group.name, group.kind, group.window) for group in layout.groups] == [
        ("full", "full", None),
        ("swa", "swa", 32),
    ]
    assert [sorted({source.layer for source in group.sources}) for group in layout.groups] == [[2], [0, 1]]
    assert spaces[1].translation is owner.full_to_swa_index_mapping
    assert [group.num_slots for group in layout.groups] == [112, 80]


def test_what_no_source_covers_is_listed() -> None:
    assert layout_of(mha(dtype=torch.float8_e4m3fn)).uncovered == (
        "full: scales per tensor, which lie on the layers and not in the pool",
    )
    interleaved = mha("MHATokenToKVPoolMXFP8", torch.float8_e4m3fn, page_size=32)
    interleaved.k_scale_buffer = [scale.view(4, 32, HEADS, 2) for scale in interleaved.k_scale_buffer]
    assert layout_of(interleaved).uncovered == (
        "full: k_scale of MHATokenToKVPoolMXFP8, which is not laid out by token",
    )


@pytest.mark.parametrize(
    ("pool", "owner", "words"),
    [
        (SimpleNamespace, lambda pool: None, "pool SimpleNamespace cannot be viewed"),
        (mha, lambda pool: SimpleNamespace(), "allocator SimpleNamespace cannot be watched"),
        (swa, lambda pool: SimpleNamespace(), "allocator SimpleNamespace cannot be watched"),
    ],
)
def test_what_is_not_known_is_refused(pool: Callable[[], Any], owner: Callable[[Any], Any], words: str) -> None:
    found = pool()
    with pytest.raises(ConfigError, match=words):
        find_spaces(SimpleNamespace(token_to_kv_pool=found, sliding_window_size=None), owner(found))


def test_a_layout_that_is_no_run_of_bytes_is_refused() -> None:
    pool = mha()
    pool.kv_cache_layout = "vectorized_5d"
    with pytest.raises(ConfigError, match="vectorized_5d"):
        layout_of(pool)


@pytest.mark.parametrize("make", [mha, mla])
def test_the_sentinel_finds_a_pool_that_writes_elsewhere(make: Callable[[], Any]) -> None:
    pool = make()
    layout = layout_of(pool)
    spaces = [Space("full", allocator(pool), None, pool)]
    untouched = changes(pool, lambda: write_sentinels(spaces, layout))
    assert untouched == set()
    with ExitStack() as undo:
        original = pool.set_kv_buffer
        undo.callback(lambda: delattr(pool, "set_kv_buffer"))

        def set_kv_buffer(layer: Any, loc: torch.Tensor, *rest: Any, layer_id_override: int) -> None:
            original(layer, loc, *rest, layer_id_override=(layer_id_override + 1) % LAYERS)

        pool.set_kv_buffer = set_kv_buffer

        def refused() -> None:
            with pytest.raises(ConfigError, match="lays its cache out in another way"):
                write_sentinels(spaces, layout)

        assert changes(pool, refused) == set()
