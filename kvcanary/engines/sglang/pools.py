"""From SGLang's pools to a layout: what lies where, and what cannot be covered.

Pools are known by their exact class: a subclass may lay its bytes out in another way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from kvcanary.errors import ConfigError
from kvcanary.layout import AttentionGroup, KVSource, PoolLayout, Run

_TRASH = (0,)
"""Padding writes to page 0 (slot 0 with pages of one token), and attention of padded rows may read it."""


DRAFT_PART = "draft"


@dataclass(frozen=True, slots=True)
class Space:
    """One slot space: the group over it, who hands its slots out, how full slots become its own.

    Attributes:
        name: of the group.
        allocator: SGLang's; its pages are the group's.
        translation: int64 table from full slots to this space's; None: they are the same.
        pool: SGLang's pool of the group's layers.
        window: tokens that attention sees; None: all.
        draft: SGLang's pool of a draft model's layers over the same slots.
    """

    name: str
    allocator: Any
    translation: torch.Tensor | None
    pool: Any
    window: int | None = None
    draft: Any = None


@dataclass(slots=True)
class _Described:
    sources: list[KVSource] = field(default_factory=list)
    uncovered: list[str] = field(default_factory=list)


def find_spaces(runner: Any, allocator: Any) -> tuple[list[Space], list[str]]:
    """The slot spaces of a runner's pool, and what it has beside them.

    Raises:
        ConfigError: a pool or allocator of this kind cannot be watched.
    """
    pool = runner.token_to_kv_pool
    window = runner.sliding_window_size
    seen = None if window is None else int(window) + 1  # SGLang counts the tokens before the current one
    kind = type(pool).__name__
    if kind == "SWAKVPool":
        return _swa_spaces(pool, allocator, seen)
    if kind == "DeepSeekV4TokenToKVPool":
        return _deepseek_v4_spaces(pool, allocator, int(pool.sliding_window))
    if kind not in _DESCRIBE:
        raise _unknown(pool)
    _check_plain(allocator)
    return [Space("full", allocator, None, pool)], []


def is_known(pool: Any) -> bool:
    """Whether a pool can be viewed by itself."""
    return type(pool).__name__ in _DESCRIBE


def make_layout(spaces: list[Space], uncovered: list[str], tp_rank: int) -> PoolLayout:
    """The layout of the spaces; sources are views of SGLang's buffers.

    Raises:
        ConfigError: a pool cannot be viewed.
    """
    groups: list[AttentionGroup] = []
    missing = list(uncovered)
    for space in spaces:
        described = _Described()
        page_size = int(space.allocator.page_size)
        _DESCRIBE[type(space.pool).__name__](space.pool, page_size, tp_rank, described)
        missing += [f"{space.name}: {words}" for words in described.uncovered]
        if space.draft is not None:
            draft = _Described()
            _DESCRIBE[type(space.draft).__name__](space.draft, page_size, tp_rank, draft)
            missing += [f"draft of {space.name}: {words}" for words in draft.uncovered]
            described.sources += [replace(it, name=f"draft.{it.name}", part=DRAFT_PART) for it in draft.sources]
        groups.append(
            AttentionGroup(
                name=space.name,
                kind="full" if space.window is None else "swa",
                num_slots=min(source.num_pages for source in described.sources) * page_size,
                page_size=page_size,
                sources=tuple(described.sources),
                window=space.window,
                trash_pages=_TRASH,
                offset_follows_position=page_size > 1,
            )
        )
    return PoolLayout(tuple(groups), uncovered=tuple(missing))


def _swa_spaces(pool: Any, allocator: Any, window: int | None) -> tuple[list[Space], list[str]]:
    kind = type(allocator).__name__
    if kind == "PureSWATokenToKVPoolAllocator":
        return [Space("swa", allocator.swa_attn_allocator, None, pool.swa_kv_pool, window)], []
    if kind != "SWATokenToKVPoolAllocator" or getattr(allocator, "swa_req_ring", False):
        raise ConfigError(
            f"SGLang's allocator {kind} cannot be watched: its window slots are not handed out token by token; run "
            "without unified memory and without per-request window rings"
        )
    full, swa = allocator.full_attn_allocator, allocator.swa_attn_allocator
    for part in (full, swa):
        _check_plain(part)
    mapping = allocator.full_to_swa_index_mapping
    return [
        Space("full", full, None, pool.full_kv_pool),
        Space("swa", swa, mapping, pool.swa_kv_pool, window),
    ], []


def _deepseek_v4_spaces(pool: Any, allocator: Any, window: int) -> tuple[list[Space], list[str]]:
    swa = getattr(allocator, "swa_attn_allocator", None)
    if pool.swa_kv_pool is None or swa is None or getattr(allocator, "swa_req_ring", False):
        raise ConfigError(
            "this DeepSeek-V4 cache keeps its window in per-request rings or in one unified pool, which cannot be "
            "watched; run with a paged window pool"
        )
    _check_plain(swa)
    if swa.page_size != pool.swa_kv_pool.page_size:
        raise ConfigError(
            f"the window pool has pages of {pool.swa_kv_pool.page_size} tokens and its allocator of {swa.page_size}; "
            "run without SGLANG_OPT_SM120_DIRECT_SWA_KV"
        )
    ratios = sorted(getattr(pool, "compressed_pool_configs", ()))
    names = ", ".join(f"c{ratio}" for ratio in ratios) or "no"
    beside = [f"DeepSeek-V4: compressed caches ({names}), their indexer and their running states"]
    return [Space("swa", swa, allocator.full_to_swa_index_mapping, pool.swa_kv_pool, window)], beside


def _check_plain(allocator: Any) -> None:
    kind = type(allocator).__name__
    if kind not in {"TokenToKVPoolAllocator", "PagedTokenToKVPoolAllocator"}:
        raise ConfigError(
            f"SGLang's allocator {kind} cannot be watched; known are TokenToKVPoolAllocator, "
            "PagedTokenToKVPoolAllocator and SWATokenToKVPoolAllocator over them"
        )


def _unknown(pool: Any) -> ConfigError:
    return ConfigError(
        f"SGLang's pool {type(pool).__name__} cannot be viewed; known are {', '.join(sorted(_DESCRIBE))}, SWAKVPool "
        "and DeepSeekV4TokenToKVPool over them"
    )


# --- one pool -----------------------------------------------------------------------------------------------


def _layers(pool: Any, count: int) -> list[int]:
    numbers: list[int] = list(getattr(pool, "model_layer_ids", ()))
    first = int(getattr(pool, "start_layer", 0) or 0)
    return numbers if len(numbers) == count else list(range(first, first + count))


def _by_token(buffer: torch.Tensor, page_size: int) -> torch.Tensor:
    """``[slots, ...]`` as ``[pages, page size, ...]``; slots beyond the last whole page are nobody's."""
    pages = buffer.shape[0] // page_size
    return buffer[: pages * page_size].view(pages, page_size, *buffer.shape[1:])


def _mha(pool: Any, page_size: int, tp_rank: int, out: _Described) -> None:
    layout = getattr(pool, "kv_cache_layout", "nhd")
    if layout not in {"nhd", "hnd"}:
        raise ConfigError(
            f"the KV layout {layout!r} of {type(pool).__name__} cannot be viewed, since a token is no run of "
            "contiguous bytes; set SGLANG_AITER_KV_CACHE_LAYOUT=nhd"
        )
    floating = pool.dtype if pool.dtype.itemsize == pool.store_dtype.itemsize else torch.uint8
    for component, buffers in (("k", pool.k_buffer), ("v", pool.v_buffer)):
        for layer, buffer in zip(_layers(pool, len(buffers)), buffers, strict=True):
            view = buffer.transpose(1, 2) if layout == "hnd" else _by_token(buffer, page_size)
            name = f"layer{layer}.{component}"
            head = tp_rank * int(pool.head_num)
            dtype = floating if pool.store_dtype == torch.uint8 else view.dtype
            out.sources.append(
                KVSource.from_view(name, view, layer=layer, component=component, first_head=head, dtype=dtype)
            )
    _scales(pool, page_size, out)
    if pool.store_dtype.itemsize == 1 and pool.k_scale_buffer is None:
        out.uncovered.append("scales per tensor, which lie on the layers and not in the pool")


def _scales(pool: Any, page_size: int, out: _Described) -> None:
    for name, component in (
        ("k_scale_buffer", "k_scale"),
        ("v_scale_buffer", "v_scale"),
        ("native_k_scale_buffer", "k_native_scale"),
        ("native_v_scale_buffer", "v_native_scale"),
    ):
        buffers = getattr(pool, name, None)
        if buffers is None:
            continue
        slots = int(pool.size) + int(pool.page_size)
        if any(buffer.dim() < 2 or buffer.shape[0] != slots for buffer in buffers):
            out.uncovered.append(f"{component} of {type(pool).__name__}, which is not laid out by token")
            continue
        for layer, buffer in zip(_layers(pool, len(buffers)), buffers, strict=True):
            view = _by_token(buffer.view(torch.uint8), page_size)
            out.sources.append(KVSource.from_view(f"layer{layer}.{component}", view, layer=layer, component=component))


def _mla(pool: Any, page_size: int, tp_rank: int, out: _Described) -> None:
    del tp_rank  # every rank has all of it
    floating = pool.store_dtype if pool.store_dtype != torch.uint8 else torch.uint8
    for layer, buffer in zip(_layers(pool, len(pool.kv_buffer)), pool.kv_buffer, strict=True):
        view = _by_token(buffer, page_size)
        out.sources.append(
            KVSource.from_view(f"layer{layer}.latent", view, layer=layer, component="latent", dtype=floating)
        )
    scales = getattr(pool, "kv_scale_buffer", None) or ()
    for layer, buffer in zip(_layers(pool, len(scales)), scales, strict=True):
        view = _by_token(buffer.view(torch.uint8), page_size)
        out.sources.append(KVSource.from_view(f"layer{layer}.scale", view, layer=layer, component="scale"))


def _dsa(pool: Any, page_size: int, tp_rank: int, out: _Described) -> None:
    _mla(pool, page_size, tp_rank, out)
    if pool.index_kpool != 1 or pool.index_page_size != page_size:
        out.uncovered.append("index keys, which are pooled over several tokens")
        return
    if torch.version.hip is not None:
        out.uncovered.append("index keys, which are shuffled in tiles on this platform")
        return
    for layer, buffer in zip(_layers(pool, pool.layer_num), pool.index_k_with_scale_buffer, strict=True):
        if buffer.shape[0] == 0:  # this layer uses the choice of an earlier one
            continue
        keys, scales = int(pool.index_head_dim), int(pool.index_head_dim) // int(pool.quant_block_size) * 4
        out.sources += _two_rows(f"layer{layer}.index", buffer, page_size, layer, "index", (keys, scales))


def _deepseek_v4(pool: Any, page_size: int, tp_rank: int, out: _Described) -> None:
    del tp_rank
    uniform = type(pool).__name__ == "DeepSeekV4UniformFP8KVPool"
    for layer, buffer in zip(_layers(pool, len(pool.kv_buffer)), pool.kv_buffer, strict=True):
        name = f"layer{layer}.latent"
        if uniform:
            view = buffer.view(buffer.shape[0], page_size, -1)
            out.sources.append(KVSource.from_view(name, view, layer=layer, component="latent"))
            continue
        layout = pool.kv_layout
        sizes = (int(layout.data_bytes), int(layout.scale_bytes))
        out.sources += _two_rows(name, buffer, page_size, layer, "latent", sizes, layout.row_addressing(page_size))


def _two_rows(  # noqa: PLR0917 - where the rows of one buffer lie
    name: str,
    buffer: torch.Tensor,
    page_size: int,
    layer: int,
    component: str,
    sizes: tuple[int, int],
    addressing: tuple[int, int, int] | None = None,
) -> Iterator[KVSource]:
    """Pages ``[pages, bytes]`` of data rows and scale rows.

    ``addressing``: stride of data rows, first scale row, stride of scale rows; None: all data, then all scales.
    """
    data, scale = sizes
    step, base, scale_step = addressing or (data, page_size * data, scale)
    for suffix, offset, num_bytes, stride in (("", 0, data, step), ("_scale", base, scale, scale_step)):
        yield KVSource(
            name=name + suffix,
            tensor=buffer,
            num_pages=buffer.shape[0],
            page_size=page_size,
            page_stride=buffer.stride(0) * buffer.element_size(),
            token_stride=stride,
            runs=(Run(offset, num_bytes, 0),),
            layer=layer,
            component=component + suffix,
        )


_DESCRIBE: dict[str, Callable[[Any, int, int, _Described], None]] = {
    "MHATokenToKVPool": _mha,
    "MHATokenToKVPoolFP4": _mha,
    "MHATokenToKVPoolMXFP8": _mha,
    "MLATokenToKVPool": _mla,
    "MLATokenToKVPoolFP4": _mla,
    "DSATokenToKVPool": _dsa,
    "DeepSeekV4SingleKVPool": _deepseek_v4,
    "DeepSeekV4UniformFP8KVPool": _deepseek_v4,
}
