"""Tiny models with random weights, made in milliseconds; one for each kind of cache that the engine knows."""

from __future__ import annotations

from typing import Any

import torch

VOCABULARY = 512
KINDS = ("full", "sliding", "mixed", "gemma", "odd")

_FULL, _SLIDING = "full_attention", "sliding_attention"
_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "max_position_embeddings": 2048,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def make_model(kind: str, seed: int = 0) -> Any:
    """A model in evaluation mode on the CPU.

    ``full``: full attention only. ``sliding``: a window that is no multiple of the page. ``mixed`` and
    ``gemma``: both, in two families. ``odd``: layer counts without a common divisor.
    """
    torch.manual_seed(seed)
    model = _MAKERS[kind]().eval()
    model.config._attn_implementation = "sdpa"
    return model


def _qwen(layers: list[str], window: int | None = None) -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        num_hidden_layers=len(layers),
        layer_types=layers,
        sliding_window=window,
        use_sliding_window=window is not None,
        **_SIZES,
    )
    return Qwen3ForCausalLM(config)


def _full() -> Any:
    return _qwen([_FULL] * 3)


def _mixed() -> Any:
    return _qwen([_SLIDING, _SLIDING, _FULL] * 2, window=19)


def _odd() -> Any:
    return _qwen([_FULL, _SLIDING, _SLIDING, _FULL, _SLIDING], window=16)


def _sliding() -> Any:
    from transformers import MistralConfig, MistralForCausalLM

    return MistralForCausalLM(MistralConfig(num_hidden_layers=3, sliding_window=21, **_SIZES))


def _gemma() -> Any:
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    layers = [_SLIDING] * 5 + [_FULL]
    return Gemma3ForCausalLM(
        Gemma3TextConfig(
            num_hidden_layers=len(layers), layer_types=layers, sliding_window=24, query_pre_attn_scalar=12, **_SIZES
        )
    )


_MAKERS = {"full": _full, "sliding": _sliding, "mixed": _mixed, "gemma": _gemma, "odd": _odd}
