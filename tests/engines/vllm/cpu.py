"""Lets the released CUDA wheel of vLLM run on a CPU: attention in plain torch, and the three operators it lacks.

None of it touches the KV cache's bookkeeping. :func:`environ` goes into the environment of the process;
:func:`register` is what vLLM calls in each process that it starts (see :mod:`tests.engines.vllm.processes`).
"""

from __future__ import annotations

import os
from typing import Any

MODEL = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "torch_dtype": "float32",
    "attention_bias": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
DRAFT = {**MODEL, "num_hidden_layers": 1}
WINDOWS = {
    **MODEL,
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "num_hidden_layers": 6,
    "rope_local_base_freq": 10000.0,
    "tie_word_embeddings": True,
    "hidden_activation": "gelu_pytorch_tanh",
    "sliding_window": 40,
    "layer_types": (["sliding_attention"] * 2 + ["full_attention"]) * 2,
    "query_pre_attn_scalar": 32,
}


def environ(*, runner: int = 2, asynchronous: bool = False) -> dict[str, str]:
    """Variables that make vLLM take the CPU, one process and the given model runner."""
    return {
        "CUDA_VISIBLE_DEVICES": "",
        "TRITON_INTERPRET": "1",
        "VLLM_TARGET_DEVICE": "cpu",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_USE_V2_MODEL_RUNNER": str(runner - 1),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "TEST_VLLM_ASYNC": str(int(asynchronous)),
    }


def register() -> None:
    """Define the operators, put the attention in place and, where asked, allow asynchronous scheduling."""
    import torch

    if hasattr(torch.ops._C, "init_cpu_memory_env"):
        return
    library = torch.library.Library("_C", "FRAGMENT")
    _LIBRARIES.append(library)
    for schema, function in (
        ("init_cpu_memory_env(int[] nodes) -> ()", lambda nodes: None),
        ("greedy_argmax(Tensor logits) -> Tensor", lambda logits: logits.argmax(-1)),
        ("fused_gumbel_argmax(Tensor logits, Tensor seeds) -> Tensor", _gumbel),
    ):
        library.define(schema)
        library.impl(schema.partition("(")[0], function, "CompositeExplicitAutograd")
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    register_backend(AttentionBackendEnum.CPU_ATTN, f"{__name__}.TorchAttention")
    _allow_async()


_LIBRARIES: list[Any] = []


def _gumbel(logits: Any, seeds: Any) -> Any:
    import torch

    rows = []
    for row, seed in zip(logits, seeds.tolist(), strict=True):
        noise = torch.rand(row.shape, generator=torch.Generator().manual_seed(seed & 0x7FFFFFFF))
        rows.append((row.float() - torch.log(-torch.log(noise))).argmax())
    return torch.stack(rows)


def _allow_async() -> None:
    """Where asked, allow what the CPU platform forbids, though a forward on a CPU is done when it returns."""
    from vllm.platforms.cpu import CpuPlatform

    check = CpuPlatform.check_and_update_config.__func__

    def check_and_update_config(cls: Any, config: Any) -> None:
        check(cls, config)
        if os.environ.get("TEST_VLLM_ASYNC") == "1":
            config.scheduler_config.async_scheduling = True
            config.scheduler_config.scheduler_cls = None

    CpuPlatform.check_and_update_config = classmethod(check_and_update_config)


def __getattr__(name: str) -> Any:
    # vLLM names the backend by module and attribute; its base classes are there only where vLLM is.
    if name == "TorchAttention":
        from tests.engines.vllm.attention import TorchAttention

        return TorchAttention
    raise AttributeError(name)
