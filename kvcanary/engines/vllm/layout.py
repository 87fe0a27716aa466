"""What vLLM's pool looks like: cache groups over one backing buffer, one view ``[B, H, N, C]`` a layer.

K and V lie beside each other in ``C`` bytes of each head slot, with their scales where the cache is quantised a token
and head at a time. A layer that cannot be described token by token is named in ``uncovered``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from kvcanary.errors import ConfigError, LayoutError
from kvcanary.layout import DEFAULT_PART, Arena, AttentionGroup, KVSource, PoolLayout, Run

DRAFT_PART = "draft"
_ARENA = "pool"
_FULL = frozenset({"FullAttentionSpec", "MLAAttentionSpec"})
_WINDOW = frozenset({"SlidingWindowSpec", "SlidingWindowMLASpec"})
_FLOATS = frozenset({torch.float32, torch.float16, torch.bfloat16})
_PLAIN = frozenset({"NONE", "FP8_PER_TENSOR", "FP8_PER_TOKEN_HEAD", "INT8_PER_TOKEN_HEAD", "INT4_PER_TOKEN_HEAD"})
"""Quantisations whose scales, if the pool holds any, lie beside the token and head that they belong to."""
_V4_DATA, _V4_SCALES = 576, 8
"""Bytes of a token in a DeepSeek-V4 page: all data rows lie before all scale rows."""
_V4_INTERLEAVED = 528
"""Bytes of a token in a page of its successor, data and scales together."""


@dataclass(frozen=True, slots=True)
class CoveredGroup:
    """A cache group of the engine that the layout has.

    Attributes:
        index: its number in the engine.
        name: its name in the layout.
        split: pages of the layout in a block of the scheduler.
    """

    index: int
    name: str
    split: int


@dataclass(frozen=True, slots=True)
class Pool:
    """A layout and how the engine's numbers become its numbers."""

    layout: PoolLayout
    groups: tuple[CoveredGroup, ...]
    uncovered_groups: frozenset[int]
    draft: bool
    """some sources belong to :data:`DRAFT_PART`"""

    @property
    def by_index(self) -> dict[int, CoveredGroup]:
        """Covered groups by their number in the engine."""
        return {group.index: group for group in self.groups}


def make_pool(
    config: Any,
    layers: Mapping[str, Any],
    *,
    tp_rank: int = 0,
    draft: Iterable[str] = (),
    draft_gap: str = "",
    kernel_tables: bool = False,
) -> Pool:
    """The pool of a worker.

    Args:
        config: ``KVCacheConfig``.
        layers: attention layers by name, ``static_forward_context``.
        tp_rank: of the worker, so that fingerprints of ranks add up.
        draft: names of layers that belong to a draft model.
        draft_gap: why those are not covered, if they are not.
        kernel_tables: the runner's block tables hold kernel blocks where these are smaller than the scheduler's.

    Raises:
        ConfigError: no layer can be described.
    """
    drafts = frozenset(draft)
    uncovered: list[str] = []
    covered: list[tuple[CoveredGroup, AttentionGroup]] = []
    kinds, blocks = len(config.kv_cache_groups), int(config.num_blocks)
    for index, group in enumerate(config.kv_cache_groups):
        sources: list[KVSource] = []
        seen: set[int] = set()
        for layer, name in enumerate(group.layer_names):
            try:
                spec = _one_spec(group.kv_cache_spec, name)
                part = DRAFT_PART if name in drafts else DEFAULT_PART
                found = _layer_sources(name, layer, spec, layers.get(name), blocks, tp_rank=tp_rank, part=part)
                if draft_gap and found[0].part == DRAFT_PART:
                    raise LayoutError(draft_gap)  # noqa: TRY301 - one way into the list
                if not kernel_tables:
                    found = [_whole_blocks(source, blocks) for source in found]
            except LayoutError as error:
                uncovered.append(f"layer {name}: {error}")
                continue
            # Layers that share another one's cache are in its group and alias its view. Other groups overlay it.
            if found[0].address not in seen:
                seen.add(found[0].address)
                sources += found
        if sources:
            covered.append(_group(index, group.kv_cache_spec, sources, blocks, kinds))
    if not covered:
        raise ConfigError(f"no layer of this model has a KV cache that can be watched: {'; '.join(uncovered)}")
    layout = PoolLayout(tuple(group for _, group in covered), uncovered=tuple(uncovered))
    names = {item.index for item, _ in covered}
    return Pool(
        layout,
        tuple(item for item, _ in covered),
        frozenset(range(kinds)) - names,
        any(DRAFT_PART in group.parts for _, group in covered),
    )


def _group(
    index: int, spec: Any, sources: list[KVSource], blocks: int, kinds: int
) -> tuple[CoveredGroup, AttentionGroup]:
    one = _one_spec(spec)
    window = getattr(one, "sliding_window", None) if type(one).__name__ in _WINDOW else None
    kind = "full" if window is None else "swa"
    page = sources[0].page_size
    split = sources[0].num_pages // blocks
    name = f"{'draft' if all(s.part == DRAFT_PART for s in sources) else kind}.{index}"
    group = AttentionGroup(
        name=name,
        kind="full" if window is None else "swa",
        num_slots=blocks * split * page,
        page_size=page,
        sources=tuple(sources),
        window=window,
        null_pages=tuple(range(split)),
        arena=Arena(_ARENA, split) if kinds > 1 else None,
        offset_follows_position=True,
    )
    return CoveredGroup(index, name, split), group


def _whole_blocks(source: KVSource, blocks: int) -> KVSource:
    """The same bytes with the scheduler's blocks as pages, where a token's place is still page and stride.

    Raises:
        LayoutError: tokens of one block do not lie at one distance.
    """
    split = source.num_pages // blocks
    if split == 1:
        return source
    if source.page_stride != source.page_size * source.token_stride:
        raise LayoutError(
            f"blocks of {source.page_size * split} tokens are split into kernel blocks of "
            f"{source.page_size} with the heads outside of the tokens; set VLLM_KV_CACHE_LAYOUT=LBNHC, or --block-size "
            f"{source.page_size}"
        )
    return KVSource(
        name=source.name,
        tensor=source.tensor,
        num_pages=source.num_pages // split,
        page_size=source.page_size * split,
        page_stride=source.page_stride * split,
        token_stride=source.token_stride,
        runs=source.runs,
        layer=source.layer,
        component=source.component,
        dtype=source.dtype,
        part=source.part,
    )


def _one_spec(spec: Any, layer: str | None = None) -> Any:
    """The spec of one layer of a group; groups of equal kind and other sizes have one for each."""
    each = getattr(spec, "kv_cache_specs", None)
    if each is None:
        return spec
    return each[layer] if layer is not None else next(iter(each.values()))


def _layer_sources(
    name: str, number: int, spec: Any, layer: Any, num_blocks: int, *, tp_rank: int, part: str
) -> list[KVSource]:
    """Sources of one layer.

    Raises:
        LayoutError: a token of it is no run of bytes at its own place.
    """
    kind = type(spec).__name__
    if kind not in _FULL | _WINDOW:
        raise LayoutError(f"{kind} keeps no state of its own for each token in a paged table")
    if getattr(spec, "tokens_per_state", 1) != 1:
        raise LayoutError(f"one state stands for {spec.tokens_per_state} tokens")
    view = getattr(layer, "kv_cache", None)
    if not isinstance(view, torch.Tensor) or view.dim() != 4 or view.shape[0] % num_blocks:
        shape = tuple(view.shape) if isinstance(view, torch.Tensor) else type(view).__name__
        raise LayoutError(
            f"its cache is {shape}, expected a view [blocks, heads, tokens, bytes] of {num_blocks} blocks"
        )
    if getattr(layer, "is_draft_layer", False):
        part = DRAFT_PART
    quantisation = spec.kv_quant_mode.name
    if quantisation not in _PLAIN:
        raise LayoutError(f"quantisation {quantisation} spreads what belongs to a token over its page")
    if getattr(spec, "model_version", None) is not None and spec.state_content_size_bytes != _V4_INTERLEAVED:
        return _v4_sources(name, number, view, part)
    dtype = view.dtype if view.dtype in _FLOATS else torch.uint8
    tokens_first = view.permute(0, 2, 1, 3)
    # Heads of a rank follow those of the ranks before it; a latent cache has one, the same on each rank.
    first_head = 0 if "MLA" in kind else tp_rank * view.shape[1]
    source = KVSource.from_view(
        name, tokens_first, layer=number, component="kv", first_head=first_head, part=part, dtype=dtype
    )
    return [source]


def _v4_sources(name: str, number: int, view: torch.Tensor, part: str) -> list[KVSource]:
    """Data rows and scale rows of a DeepSeek-V4 page: one tensor, two strides of a token.

    Raises:
        LayoutError: its tokens have another size.
    """
    blocks, _, tokens, content = view.shape
    page_stride = view.stride(0) * view.element_size()
    if content * view.element_size() != _V4_DATA + _V4_SCALES:
        raise LayoutError(
            f"a token has {content * view.element_size()} bytes in a DeepSeek-V4 cache; expected "
            f"{_V4_DATA + _V4_SCALES} (rows of data, then of scales) or {_V4_INTERLEAVED} (both together)"
        )

    def source(component: str, first: int, size: int) -> KVSource:
        return KVSource(
            name=f"{name}.{component}",
            tensor=view,
            num_pages=blocks,
            page_size=tokens,
            page_stride=page_stride,
            token_stride=size,
            runs=(Run(first, size, 0),),
            layer=number,
            component=component,
            part=part,
        )

    return [source("latent", 0, _V4_DATA), source("scale", tokens * _V4_DATA, _V4_SCALES)]
