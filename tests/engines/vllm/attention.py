"""Attention over vLLM's paged cache in plain torch: write by slot mapping, gather by block table, masked softmax."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionImpl,
    AttentionMetadataBuilder,
    AttentionType,
    MultipleOf,
)


@dataclass
class Metadata:
    """What one forward reads."""

    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    num_reqs: int


class Builder(AttentionMetadataBuilder):
    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Metadata:
        common = common_attn_metadata
        return Metadata(common.query_start_loc, common.seq_lens, common.block_table_tensor, common.num_reqs)


class Attention(AttentionImpl):
    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: Any = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        **kwargs: Any,
    ) -> None:
        self.num_heads, self.head_size, self.scale, self.num_kv_heads = num_heads, head_size, scale, num_kv_heads
        self.sliding_window = sliding_window
        self.kv_cache_dtype, self.attn_type = kv_cache_dtype, attn_type
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name

    def do_kv_cache_update(
        self, layer: Any, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor
    ) -> None:
        written = slot_mapping >= 0
        slots, page = slot_mapping[written], kv_cache.shape[2]
        new = torch.cat([key[: len(written)], value[: len(written)]], -1)[written]
        kv_cache[slots // page, :, slots % page] = new.to(kv_cache.dtype)

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Metadata | None,
        output: torch.Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        if attn_metadata is None:
            return output.zero_()
        queries = query.view(-1, self.num_heads, self.head_size)
        outputs = output.view(-1, self.num_heads, self.head_size)
        starts, lengths = attn_metadata.query_start_loc.tolist(), attn_metadata.seq_lens.tolist()
        for row in range(attn_metadata.num_reqs):
            first, end, length = starts[row], starts[row + 1], lengths[row]
            if end > first:
                keys, values = self._gather(kv_cache, attn_metadata.block_table[row], length)
                positions = torch.arange(length - (end - first), length)[:, None]
                seen = torch.arange(length)[None] <= positions
                if self.sliding_window:
                    seen &= torch.arange(length)[None] > positions - self.sliding_window
                found = torch.nn.functional.scaled_dot_product_attention(
                    queries[first:end].transpose(0, 1)[None], keys[None], values[None], attn_mask=seen, scale=self.scale
                )
                outputs[first:end] = found[0].transpose(0, 1)
        return output

    def _gather(self, cache: torch.Tensor, table: torch.Tensor, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        positions, page = torch.arange(length), cache.shape[2]
        both = cache[table[positions // page].long(), :, positions % page]
        both = both.repeat_interleave(self.num_heads // cache.shape[1], 1).transpose(0, 1)
        return both[..., : self.head_size], both[..., self.head_size :]


class TorchAttention(AttentionBackend):
    forward_includes_kv_cache_update = False
    supported_dtypes: ClassVar = [torch.float32]
    supported_kv_cache_dtypes: ClassVar = ["auto"]

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        return [MultipleOf(1)]

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return []

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @staticmethod
    def get_name() -> str:
        return "CPU_ATTN"

    @staticmethod
    def get_impl_cls() -> type[Attention]:
        return Attention

    @staticmethod
    def get_builder_cls() -> type[Builder]:
        return Builder
