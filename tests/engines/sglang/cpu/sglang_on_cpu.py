"""What SGLang's CUDA wheel lacks on a CPU without its own kernels: loaded as a plugin in each of its processes."""

from __future__ import annotations

import sys
import types
from typing import Any

import torch


def _rotary_embedding(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor | None,
    head_size: int,
    cos_sin_cache: torch.Tensor,
    is_neox: bool,
) -> None:
    """Rotate ``query`` and ``key`` ``[tokens, heads * head_size]`` in place, halves against each other."""
    if not is_neox:
        raise ValueError("this stand-in rotates halves only; use a model with is_neox_style=True")
    cos, sin = cos_sin_cache[positions].chunk(2, -1)
    half = cos.shape[-1]
    cos, sin = cos[:, None], sin[:, None]
    for vectors in (query, key):
        if vectors is None:
            continue
        heads = vectors.view(vectors.shape[0], -1, head_size)
        first, second = heads[..., :half].clone(), heads[..., half : 2 * half].clone()
        heads[..., :half] = (first * cos - second * sin).to(heads.dtype)
        heads[..., half : 2 * half] = (second * cos + first * sin).to(heads.dtype)


def _keep_windows(server_args: Any, hf_config: Any) -> dict[str, bool]:
    """SGLang gives Gemma 3 no window pool since an accuracy test failed on a GPU; here the pools are what counts."""
    return {"disable_hybrid_swa_memory": False}


def register() -> None:
    """Give SGLang the rotary operator that it borrows, Triton's versions of the tree helpers, and a window pool."""
    if "vllm" not in sys.modules:
        package, operators = types.ModuleType("vllm"), types.ModuleType("vllm._custom_ops")
        operators.__dict__["rotary_embedding"] = _rotary_embedding
        package.__dict__["_custom_ops"] = operators
        sys.modules.update({"vllm": package, "vllm._custom_ops": operators})
    if "sglang.srt.managers.scheduler" in sys.modules:
        from sglang.kernels.ops.speculative import spec_tree

        spec_tree._is_xpu = True
        from sglang.srt.arg_groups import overrides
        from sglang.srt.arg_groups.model_override_base import register_model_override

        del overrides  # loaded first, so that its rules come first
        register_model_override("Gemma3ForCausalLM")(_keep_windows)
