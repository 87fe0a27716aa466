"""One token written through a pool's own path into the padding slot, and looked for where the layout says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from kvcanary.engines.sentinel import put_back
from kvcanary.engines.sglang.pools import DRAFT_PART, Space
from kvcanary.errors import ConfigError
from kvcanary.layout import DEFAULT_PART, AttentionGroup, KVSource, PoolLayout

_WRITABLE = frozenset({"MHATokenToKVPool", "MLATokenToKVPool"})
"""Pools that take keys and values as the model makes them; the others are written by kernels of one back end."""


def write_sentinels(spaces: list[Space], layout: PoolLayout) -> None:
    """Write a token of every layer, see its bytes change in that layer's sources only, and put the old ones back.

    Nothing may run on the pool.

    Raises:
        ConfigError: the sources do not show what SGLang wrote.
    """
    for space, group in zip(spaces, layout.groups, strict=True):
        for pool, part in ((space.pool, DEFAULT_PART), (space.draft, DRAFT_PART)):
            if type(pool).__name__ in _WRITABLE and not getattr(pool, "is_quantized_kv_cache", False):
                places = [place for source in group.sources for place in token_bytes(source, 0)]
                with put_back(places):
                    _try(pool, group, part, places, layout.device)


def _try(pool: Any, group: AttentionGroup, part: str, places: list[torch.Tensor], device: torch.device) -> None:
    names = [(source.name, source.layer, source.part) for source in group.sources for _ in source.runs]
    layers = sorted({source.layer for source in group.sources if source.part == part})
    for number, layer in enumerate(layers):
        for place in places:
            place.zero_()
        _write(pool, int(pool.start_layer or 0) + number, device)
        wrong = [name for (name, *at), place in zip(names, places, strict=True) if _missed(place, at, layer, part)]
        if wrong:
            raise ConfigError(
                f"a token written through {type(pool).__name__}.set_kv_buffer to layer {layer} of the {part} "
                f"model's part of group {group.name!r} was not found where the layout says: "
                f"{', '.join(dict.fromkeys(wrong))}. This release lays its cache out in another way; use a known "
                "release or a newer kvcanary"
            )


def _missed(place: torch.Tensor, at: Sequence[object], layer: int, part: str) -> bool:
    return bool(place.any()) != (tuple(at) == (layer, part))


def token_bytes(source: KVSource, slot: int) -> list[torch.Tensor]:
    """The bytes of one token's runs, addressed by the numbers that the kernels use."""
    page, offset = divmod(slot, source.page_size)
    return [source.view_bytes(run.offset, run.num_bytes)[page, offset] for run in source.runs]


def _write(pool: Any, layer: int, device: torch.device) -> None:
    slot = torch.zeros(1, dtype=torch.int64, device=device)
    dtype = pool.dtype if pool.dtype.itemsize > 1 else torch.bfloat16
    if type(pool).__name__ == "MLATokenToKVPool":
        shapes = [(1, 1, int(pool.kv_cache_dim))]
    else:
        shapes = [(1, int(pool.head_num), int(pool.head_dim)), (1, int(pool.head_num), int(pool.v_head_dim))]
    rows = [torch.ones(shape, dtype=dtype, device=device) for shape in shapes]
    pool.set_kv_buffer(None, slot, rows[0], rows[-1], layer_id_override=layer)
