"""What the adapter uses of vLLM, checked by name at attach: what was renamed is an error, not a silent gap."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from kvcanary.engines.names import Names, find_missing
from kvcanary.errors import ConfigError

SUPPORTED = ">=0.33,<0.34"
"""Releases that the adapter was tested with, and whose meaning it relies on."""


SCHEDULER: Names = {
    "schedule": (),
    "update_from_output": ("scheduler_output", "model_runner_output"),
    "_preempt_request": ("request", "timestamp", "drop_stale_output"),
    "_free_request": ("request",),
    "requests": None,
    "running": None,
    "prev_step_scheduled_req_ids": None,
    "num_spec_tokens": None,
    "scheduler_config.async_scheduling": None,
    "is_encoder_decoder": None,
    "connector": None,
    "kv_cache_manager.take_kv_cache_block_copies": (),
    "kv_cache_manager.get_block_ids": ("request_id",),
    "kv_cache_manager.coordinator.single_type_managers": None,
    "kv_cache_manager.block_pool.blocks": None,
    "kv_cache_manager.block_pool.get_new_blocks": ("num_blocks",),
    "kv_cache_manager.block_pool.free_blocks": ("ordered_blocks",),
    "kv_cache_manager.block_pool.touch": ("blocks",),
    "kv_cache_manager.block_pool.cache_full_blocks": (
        "request",
        "blocks",
        "num_cached_blocks",
        "num_full_blocks",
        "kv_cache_group_id",
        "block_mask",
    ),
    "kv_cache_manager.block_pool.evict_blocks": ("block_ids",),
    "kv_cache_manager.block_pool.reset_prefix_cache": (),
    "kv_cache_manager.block_pool._maybe_evict_cached_block": ("block",),
    "kv_cache_manager.block_pool.move_block_hashes": ("src_block", "dst_block"),
}
MANAGER: Names = {
    "allocate_new_blocks": ("request_id",),
    "allocate_external_computed_blocks": ("request_id",),
    "add_local_computed_blocks": ("request_id",),
    "kv_cache_group_id": None,
}
_BLOCK = ("block_id", "ref_cnt", "is_null", "block_hash", "pool")
_REQUEST = (
    "request_id",
    "all_token_ids",
    "num_output_tokens",
    "num_computed_tokens",
    "status",
    "lora_request",
    "cache_salt",
    "mm_features",
    "prompt_embeds",
)
_POOL: Names = {
    "kv_cache_config.kv_cache_groups": None,
    "kv_cache_config.num_blocks": None,
    "compilation_config.static_forward_context": None,
    "vllm_config.parallel_config": None,
    "vllm_config.model_config": None,
    "vllm_config.kv_transfer_config": None,
    "vllm_config.speculative_config": None,
    "max_num_tokens": None,
    "max_num_reqs": None,
    "execute_model": ("scheduler_output",),
    "sample_tokens": ("grammar_output",),
    "execute_model_state": None,
    "reload_weights": (),
    "get_model": (),
}
RUNNER_2: Names = {
    **_POOL,
    "execute_model": ("scheduler_output", "dummy_run"),
    "prepare_attn": ("input_batch",),
    "pool": (),
    "speculator": None,
    "req_states": None,
}
RUNNER_1: Names = {
    **_POOL,
    "_model_forward": (),
    "propose_draft_token_ids": ("sampled_token_ids", "spec_decode_metadata"),
    "input_ids.gpu": None,
    "positions": None,
    "query_start_loc.gpu": None,
    "seq_lens": None,
    "input_batch.req_ids": None,
    "input_batch.num_reqs": None,
    "input_batch.block_table.block_tables": None,
}


def check_version(version: str) -> None:
    """Refuse releases outside of :data:`SUPPORTED`.

    Raises:
        ConfigError: naming the release and the range.
    """
    parts = version.split(".")
    if parts[:2] != ["0", "33"]:
        raise ConfigError(
            f"vLLM {version} is not supported: this adapter was written for {SUPPORTED}; install such a release, or a "
            "kvcanary that names yours"
        )


def check(root: Any, names: Names, where: str, version: str) -> None:
    """Raises ConfigError when ``root`` lacks something that the adapter uses."""
    refuse(find_missing(root, names, where), version)


def check_scheduler(scheduler: Any, version: str) -> None:
    """Raises ConfigError when a scheduler, its pool, managers or requests lack something that the adapter uses."""
    lacking = find_missing(scheduler, SCHEDULER, "scheduler")
    if not lacking:
        manager = scheduler.kv_cache_manager
        for one in manager.coordinator.single_type_managers:
            lacking += find_missing(one, MANAGER, type(one).__name__)
        block = manager.block_pool.blocks[0]
        lacking += [f"{type(block).__name__}.{name}" for name in _BLOCK if not hasattr(block, name)]
        lacking += _missing_in_requests()
    refuse(lacking, version)


def refuse(lacking: list[str], version: str) -> None:
    """Raises ConfigError when anything is lacking."""
    if lacking:
        raise ConfigError(
            f"vLLM {version} lacks what kvcanary uses of it: {', '.join(lacking)}. Releases {SUPPORTED} were tested; "
            "use one of these without changes to those names, or a newer kvcanary"
        )


def _missing_in_requests() -> list[str]:
    request = import_module("vllm.v1.request").Request
    made = set(request.__init__.__code__.co_names)
    return [f"Request.{name}" for name in _REQUEST if not hasattr(request, name) and name not in made]
