"""What the adapter uses of SGLang, checked by name at attach: a renamed method is an error, not a silent gap."""

# pyright: reportMissingImports=false

from __future__ import annotations

import inspect
from typing import Any

from kvcanary.engines.names import Names, find_missing
from kvcanary.errors import ConfigError

OLDEST, NEWER = (0, 5, 23), (0, 6)
"""Releases from the first up to, not including, the second."""


_SCHEDULER: Names = {
    "run_batch": ("batch",),
    "process_batch_result": ("batch", "result"),
    "ingest_requests": (),
    "pause_generation": ("recv_req",),
    "continue_generation": ("recv_req",),
    "flush_cache": ("empty_cache",),
    "is_fully_idle": (),
    "tree_cache.insert": ("params",),
    "tree_cache.page_size": None,
    "enable_overlap": None,
    "forward_stream": None,
    "running_batch": None,
    "server_args": None,
    "spec_algorithm": None,
    "disaggregation_mode": None,
    "max_prefill_tokens": None,
    "req_to_token_pool.req_to_token": None,
    "req_to_token_pool.size": None,
    "req_to_token_pool.free": ("req",),
    "token_to_kv_pool_allocator.page_size": None,
    "token_to_kv_pool_allocator.clear": (),
    "tp_worker.model_runner.forward": ("forward_batch",),
    "tp_worker.model_runner.token_to_kv_pool": None,
    "tp_worker.model_runner.is_draft_worker": None,
    "tp_worker.model_runner.sliding_window_size": None,
    "tp_worker.model_runner.model_config.context_len": None,
    "tp_worker.model_runner.model_config.is_encoder_decoder": None,
    "record_weight_version_change": ("new_version",),
}
_TOKENS: Names = {
    "free_pages": None,
    "get_all_free_pages": (),
    "free_group": None,
    "alloc": ("need_size",),
    "free": ("free_index",),
    "merge_and_sort_free": (),
}
_PAGES: Names = {
    "free_pages": None,
    "get_all_free_pages": (),
    "num_pages": None,
    "alloc": ("need_size",),
    "alloc_extend": ("prefix_lens", "seq_lens", "last_loc", "extend_num_tokens"),
    "alloc_decode": ("seq_lens", "last_loc"),
    "merge_and_sort_free": (),
    "_release_page_ids": ("page_ids",),
}
_DRAFTS: Names = {
    "forward_batch_generation": ("batch",),
    "draft_worker.draft_runner.token_to_kv_pool": None,
    "draft_worker._draft_extend_for_prefill": ("batch", "target_hidden_states"),
    "draft_worker._draft_extend_for_decode": ("batch", "batch_result"),
}
_FORWARD_FIELDS = (
    "forward_mode",
    "batch_size",
    "input_ids",
    "positions",
    "seq_lens",
    "seq_lens_cpu",
    "req_pool_indices",
    "out_cache_loc",
    "extend_seq_lens",
    "extend_prefix_lens",
    "spec_info",
)
_BATCH_FIELDS = ("reqs", "prefix_lens", "extend_lens")
_REQUEST = ("rid", "origin_input_ids", "extra_key", "cache_salt", "lora_id")
_REQUEST_METHODS = ("finished", "owned_kv_len")


def check_version(version: str) -> None:
    """Refuse other releases than those that the adapter was written for.

    Raises:
        ConfigError: naming the release and the range.
    """
    release = tuple(int("".join(filter(str.isdigit, part)) or 0) for part in version.split(".")[:3])
    if not OLDEST <= release < NEWER:
        raise ConfigError(
            f"sglang {version} is none of the releases that kvcanary knows, {_dotted(OLDEST)} up to and not including "
            f"{_dotted(NEWER)}; install one of these, or a newer kvcanary"
        )


def check_scheduler(scheduler: Any, version: str) -> None:
    """Raises ConfigError when a scheduler and what it holds lack something that the adapter uses."""
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch

    missing = find_missing(scheduler, _SCHEDULER, "Scheduler")
    fields: set[str] = set(getattr(ForwardBatch, "__dataclass_fields__", ()))
    missing += [f"ForwardBatch.{name}" for name in _FORWARD_FIELDS if name not in fields]
    batch_fields: set[str] = set(getattr(ScheduleBatch, "__dataclass_fields__", ()))
    missing += [f"ScheduleBatch.{name}" for name in _BATCH_FIELDS if name not in batch_fields]
    arguments = inspect.signature(Req.__init__).parameters
    missing += [f"Req.{name}" for name in _REQUEST if name not in arguments]
    missing += [f"Req.{name}()" for name in _REQUEST_METHODS if not callable(getattr(Req, name, None))]
    _refuse(missing, version)


def check_drafts(worker: Any, version: str) -> None:
    """Raises ConfigError when a worker that drafts lacks something that the adapter uses."""
    _refuse(find_missing(worker, _DRAFTS, type(worker).__name__), version)


def check_allocator(allocator: Any, version: str) -> None:
    """Raises ConfigError when an allocator lacks something that the adapter uses."""
    _refuse(find_missing(allocator, _TOKENS if allocator.page_size == 1 else _PAGES, type(allocator).__name__), version)


def _refuse(missing: list[str], version: str) -> None:
    if missing:
        raise ConfigError(
            f"sglang {version} lacks what kvcanary uses of it: {', '.join(missing)}. Releases {_dotted(OLDEST)} up to "
            f"and not including {_dotted(NEWER)} are known; use one of these, or a newer kvcanary"
        )


def _dotted(release: tuple[int, ...]) -> str:
    return ".".join(map(str, release))
