"""Tiny models with random weights, and random prompts for them: a real engine without a download."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any, Literal

from kvcanary.errors import ConfigError

ModelName = Literal["full", "mixed"]

VOCABULARY = 512
PAGE_SIZE = 16
WINDOW = 40
"""Of the sliding layers; not a multiple of the page on purpose."""

_SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 4096,
}
_LAYERS: dict[ModelName, dict[str, Any]] = {
    "full": {"num_hidden_layers": 4},
    "mixed": {
        "num_hidden_layers": 6,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
        "sliding_window": WINDOW,
        "use_sliding_window": True,
    },
}
TITLES: dict[ModelName, str] = {
    "full": "Qwen3, 4 layers of full attention, shared prefixes",
    "mixed": "Qwen3, 4 sliding and 2 full layers",
}


def make_model(name: ModelName, *, seed: int = 0, device: str | None = None) -> Any:
    """A ``Qwen3ForCausalLM`` with random weights, in eval mode.

    Args:
        name: ``"full"`` or ``"mixed"``.
        seed: of the weights.
        device: default: CUDA if there is one, else the CPU.

    Raises:
        ConfigError: unknown name.
    """
    if name not in _LAYERS:
        raise ConfigError(f"no demo model {name!r}; there are {', '.join(_LAYERS)}")
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model: Any = Qwen3ForCausalLM(Qwen3Config(**_SHAPE, **_LAYERS[name])).eval()
    model.config._attn_implementation = "sdpa"  # noqa: SLF001 - the name that transformers gives to this setting
    target = device or ("cuda" if torch.cuda.is_available() else "cpu")
    # Flash attention, which the engine prefers on a GPU, knows no float32.
    return model.to(target, torch.bfloat16 if target == "cuda" else torch.float32)


def make_manager(model: Any, *, num_blocks: int = 128, max_batch_tokens: int = 256) -> Any:
    """A ``ContinuousBatchingManager`` for one of these models, not started. Sampling; nothing ends a request early."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    generation = GenerationConfig(do_sample=True, eos_token_id=-1)
    # Its name until release 5.17.
    old = "page_size" not in ContinuousBatchingConfig.__dataclass_fields__
    size: dict[str, Any] = {"block_size" if old else "page_size": PAGE_SIZE}
    batching = ContinuousBatchingConfig(**size, num_blocks=num_blocks, max_batch_tokens=max_batch_tokens)
    return model.init_continuous_batching(generation_config=generation, continuous_batching_config=batching)


@dataclass(frozen=True, slots=True)
class Prompts:
    """Random prompts that share a few random prefixes, as system prompts do."""

    rng: random.Random
    prefixes: tuple[tuple[int, ...], ...]

    @classmethod
    def make(cls, seed: int, *, prefixes: int = 3, pages: int = 2) -> Prompts:
        """Prompts of their own: other seeds share no prefix with these."""
        rng = random.Random(seed)
        return cls(rng, tuple(tuple(_tokens(rng, pages * PAGE_SIZE)) for _ in range(prefixes)))

    def next(self) -> tuple[list[int], int]:
        """Token ids, and how many tokens to generate."""
        prefix = self.rng.choice(self.prefixes)
        return [*prefix, *_tokens(self.rng, self.rng.randrange(5, 70))], self.rng.randrange(8, 24)


def _tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(VOCABULARY) for _ in range(count)]
