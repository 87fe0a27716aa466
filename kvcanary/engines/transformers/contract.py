"""What the adapter uses of the engine, checked by name at attach: a renamed method is an error, not a silent gap."""

from __future__ import annotations

import inspect
import warnings
from typing import Any, Literal

from kvcanary.engines.names import Names, find_missing
from kvcanary.errors import ConfigError

OLDEST = (5, 17)
NEWEST = (5, 24)
"""Releases that the adapter was tested with."""


_MANAGER: Names = {
    "_create_batch_processor": (),
    "stop": (),
    "is_running": (),
    "batch_processor": None,
    "model": None,
    "distributed_helper": None,
}
_PROCESSOR: Names = {
    "cache.update": ("key_states", "value_states", "layer_idx"),
    "cache.search_prefix_match": ("request_id", "prompt_ids"),
    "cache.max_batch_tokens": None,
    "cb_config.max_requests_per_batch": None,
    "use_async_batching": None,
    "scheduler.finish_request": ("request_id",),
    "scheduler.clear_cancelled_requests": (),
    "scheduler.reset": (),
    "scheduler.active_requests": None,
    "scheduler.waiting_requests": None,
    "offloading_manager.offload_requests": (),
    "offloading_manager._offload_to_cpu": ("victims",),
    "offloading_manager.restore_scheduled_requests": ("requests_in_batch",),
    "inputs_and_outputs.prepare_batch_tensors": ("requests_in_batch",),
    "inputs_and_outputs.compute_stream": None,
    "model_runner.compute_batch": ("model", "batch_data"),
    "model_runner.warmup": ("model",),
    "model_runner.pad_inputs": None,
}
_SECTORS: Names = {
    "cache.cache_tensor": None,
    "cache.can_store_request_tokens": ("state",),
    "cache.mark_complete_blocks": ("state", "complete_blocks"),
    "cache.prepare_fork_request": ("src_state",),
    "cache.pool.get_free_blocks": ("index", "num_blocks"),
    "cache.pool.free_blocks": ("index", "block_ids"),
}
_ALLOCATOR: Names = {
    "fork_blocks": ("source_request_id", "dest_request_id", "past_length"),
    "copy_blocks": ("source_block_ids", "dest_block_ids"),
    "ledger.register_new_hash": ("block_id", "block_hash"),
    "ledger.block_to_hash": None,
    "block_table": None,
    "index": None,
    "layer_indices": None,
    "tokens_per_page": None,
    "bytes_per_page": None,
    "bytes_per_block": None,
    "blocks_per_sector": None,
    "block_physical_stride": None,
    "num_blocks": None,
    "num_key_value_heads": None,
    "head_dim": None,
    "cache_dtype": None,
    "write_trash_index": None,
}
_BLOCKS: Names = {
    "cache.block_size": None,
    "cache.num_blocks": None,
    "cache.key_cache": None,
    "cache.value_cache": None,
    "cache.layer_index_to_group_indices": None,
    "cache.write_trash_index": None,
    "cache.allocate_blocks": ("n_blocks", "request_id", "allocated_blocks"),
    "cache.mark_shareable_blocks_as_complete": ("state", "num_complete_blocks"),
    "cache.copy_cache": ("list_source_blocks", "list_forked_blocks"),
    "cache._block_manager.get_free_blocks": ("n_blocks", "last_block_id", "shareable", "group_id"),
    "cache._block_manager.free_blocks": ("blocks", "shareable"),
    "cache._block_manager.uninitialize_unshared_block": ("block_id",),
    "cache._block_manager.has_enough_free_blocks": ("n_blocks",),
    "cache._block_manager.mark_shareable_blocks_as_complete": ("num_complete_blocks", "allocated_blocks", "prompt_ids"),
    "cache._block_manager._uninit_block_ids": None,
    "cache._block_manager._init_block_ids": None,
    "cache._block_manager._id_to_block": None,
}
_GROUP_MANAGER: Names = {
    "fork_blocks": ("parent_request_id", "children_request_ids", "block_manager"),
    "block_table": None,
}
_QUARANTINE: Names = {
    "update_batch": (),
    "prepare_next_batch": (),
    "cache.free_blocks": ("request_id",),
    "scheduler.add_waiting_request": ("state",),
    "scheduler.waiting_requests_order": None,
    "scheduler.block_new_requests": None,
    "scheduler._requests_to_fork": None,
    "offloading_manager.free_request_cpu_cache": ("state",),
    "output_router.fail_and_deliver": ("state", "error"),
}
_QUARANTINE_ALLOCATOR: Names = {
    "mark_complete_blocks": ("request_id",),
    "pool.free_blocks": ("index", "block_ids"),
    "ledger.cached_blocks": None,
    "ledger.hash_to_block": None,
}
_QUARANTINE_BUFFERS: Names = {"requests_in_batch": None, "req_id_to_new_token_position": None}
_QUARANTINE_STATE = ("create_equivalent_initial_request", "get_request_config", "streaming", "_true_initial_tokens")
_STATE = ("request_id", "initial_tokens", "generated_tokens", "position_offset", "is_cpu_offloaded")


def check_version(version: str) -> None:
    """Refuse releases before the oldest one, warn of those after the newest one.

    Raises:
        ConfigError: the release is too old.
    """
    parts = version.split(".")
    release = tuple(int("".join(filter(str.isdigit, part)) or 0) for part in parts[:2])
    if release < OLDEST:
        raise ConfigError(
            f"transformers {version} is too old: its continuous batching can be watched from {_dotted(OLDEST)} on; "
            f"install transformers>={_dotted(OLDEST)}"
        )
    if release > NEWEST:
        warnings.warn(
            f"transformers {version} is newer than {_dotted(NEWEST)}, the last release that kvcanary was tested with; "
            "names are checked and a token is written and read back, but a change of meaning would go unnoticed",
            stacklevel=2,
        )


def check_mode(version: str, mode: str) -> None:
    """Raises ConfigError when a release cannot do what the mode asks for."""
    if mode == "quarantine" and version.startswith("5.17."):
        raise ConfigError(
            f"mode 'quarantine': transformers {version} keeps its prefix index inside its blocks, from which the "
            "adapter cannot take a page; use transformers>=5.18, or mode 'log' or 'raise'"
        )


def check_manager(manager: Any, version: str) -> None:
    """Raises ConfigError when a manager lacks something that the adapter uses."""
    _refuse(find_missing(manager, _MANAGER, "manager"), version)


def check_processor(processor: Any, version: str) -> None:
    """Raises ConfigError when a batch processor, its cache or a request lack something that the adapter uses."""
    missing = find_missing(processor, _PROCESSOR, "batch_processor")
    cache: Any = getattr(processor, "cache", None)
    if hasattr(cache, "cache_allocators"):
        missing += find_missing(processor, _SECTORS, "batch_processor")
        for name, allocator in cache.cache_allocators.items():
            missing += find_missing(allocator, _ALLOCATOR, f"cache_allocators[{name!r}]")
    elif hasattr(cache, "_block_manager"):
        missing += find_missing(processor, _BLOCKS, "batch_processor")
        for index, manager in enumerate(getattr(cache, "group_cache_managers", ())):
            missing += find_missing(manager, _GROUP_MANAGER, f"group_cache_managers[{index}]")
    else:
        missing.append("batch_processor.cache.cache_allocators (or _block_manager)")
    missing += _missing_in_states()
    _refuse(missing, version)


def input_buffers(processor: Any, side: Literal["host_io", "device_io"]) -> list[Any]:
    """The buffers of a processor's inputs: one of a pair each where it batches asynchronously."""
    buffers = processor.inputs_and_outputs
    return [getattr(pair, side) for pair in buffers.io_pairs] if hasattr(buffers, "io_pairs") else [buffers]


def check_quarantine(processor: Any, version: str) -> None:
    """Raises ConfigError when a batch processor lacks something by which requests and pages are taken out."""
    missing = find_missing(processor, _QUARANTINE, "batch_processor")
    for name, allocator in processor.cache.cache_allocators.items():
        missing += find_missing(allocator, _QUARANTINE_ALLOCATOR, f"cache_allocators[{name!r}]")
    for item in input_buffers(processor, "host_io"):
        missing += find_missing(item, _QUARANTINE_BUFFERS, "inputs_and_outputs")
    _refuse(missing + _missing_in_state(_QUARANTINE_STATE), version)


def _missing_in_state(names: tuple[str, ...]) -> list[str]:
    from transformers.generation.continuous_batching import requests

    fields = set(getattr(requests.RequestState, "__dataclass_fields__", ())) | set(dir(requests.RequestState))
    return [f"RequestState.{name}" for name in names if name not in fields]


def _missing_in_states() -> list[str]:
    from transformers.generation.continuous_batching import requests

    missing = _missing_in_state(_STATE)
    future = set(inspect.signature(requests.FutureRequestState.__init__).parameters)
    return missing + [f"FutureRequestState.{name}" for name in ("state", "query_length") if name not in future]


def _refuse(missing: list[str], version: str) -> None:
    if missing:
        raise ConfigError(
            f"transformers {version} lacks what kvcanary uses of its continuous batching: {', '.join(missing)}. "
            f"Releases {_dotted(OLDEST)} to {_dotted(NEWEST)} were tested; use one of these, or a newer kvcanary"
        )


def _dotted(release: tuple[int, int]) -> str:
    return ".".join(map(str, release))
