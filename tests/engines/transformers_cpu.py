"""Stand-ins that let every mode of continuous batching run on a CPU; none of them touches the KV logic.

On a CPU the engine refuses asynchronous batching (no streams), CPU offload (no pinned memory), padding
(no graphs) and the block-table decode path (no flash kernels). With these in place a forward runs at once,
which is the order that a GPU's one compute stream gives.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from itertools import pairwise
from typing import Any

import torch

_PACKAGE = "transformers.generation.continuous_batching"
_MISSING = object()


class _Inert:
    """A stream or an event with nothing to wait for."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def record(self, *_: Any) -> None: ...

    def record_event(self, *_: Any) -> None: ...

    def wait_event(self, *_: Any) -> None: ...

    def synchronize(self) -> None: ...


class _Instead:
    """A module with some names replaced."""

    def __init__(self, module: Any, **names: Any) -> None:
        self._module = module
        self.__dict__.update(names)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def _empty(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
    del pin_memory
    return torch.empty(*args, **kwargs)


_CUDA = _Instead(
    torch.cuda,
    Stream=_Inert,
    Event=_Inert,
    is_available=lambda: True,
    empty_cache=lambda: None,
    stream=lambda _: nullcontext(),
)


@contextmanager
def cpu_stand_ins(*, asynchronous: bool = False, padded: bool = False, fast_decode: bool = False) -> Iterator[None]:
    """Put the stand-ins in place, and take them out again at the end."""
    with ExitStack() as stack:
        put = _Put(stack)
        _allow_offload(put)
        if asynchronous:
            _allow_async(put)
        if padded:
            _pad(put)
        if fast_decode:
            _allow_fast_decode(put)
        yield


class _Put:
    """Sets attributes until the stack unwinds."""

    def __init__(self, stack: ExitStack) -> None:
        self.later = stack.callback

    def __call__(self, owner: Any, name: str, value: Any) -> None:
        old = vars(owner).get(name, _MISSING)
        setattr(owner, name, value)
        self.later(lambda: delattr(owner, name) if old is _MISSING else setattr(owner, name, old))


def _module(name: str) -> Any:
    return importlib.import_module(f"{_PACKAGE}.{name}")


def _sectors() -> bool:
    """Whether this is 5.18 or later."""
    return hasattr(_module("cache").PagedAttentionCache, "can_store_request_tokens")


def _allow_offload(put: _Put) -> None:
    put(_module("offloading_manager"), "torch", _Instead(torch, empty=_empty))


def _allow_async(put: _Put) -> None:
    modules = [_module(name) for name in ("input_outputs", "model_runner", "continuous_api", "offloading_manager")]
    if hasattr(_module("utils"), "create_device_stream"):
        put(modules[0].ContinuousBatchingAsyncIOs, "_supported_device_types", ("cuda", "xpu", "cpu"))
        put(modules[0], "create_device_stream", _Inert)
        put(modules[0], "torch", _Instead(torch, Event=_Inert))
        for module in modules:
            if hasattr(module, "stream_context"):
                put(module, "stream_context", lambda _: nullcontext())
        return
    for module in modules:
        put(module, "torch", _Instead(torch, cuda=_CUDA, empty=_empty))


def _pad(put: _Put) -> None:
    """Pad every batch, as the engine does for graphs."""
    runner = _module("model_runner").ModelRunner
    original = runner.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        self.pad_inputs = True

    put(runner, "__init__", init)


def _allow_fast_decode(put: _Put) -> None:
    put(_module("initialization"), "ensure_decode_fast_path_is_available", lambda *_: None)
    ios = _module("input_outputs").ContinuousBatchingIOs
    original = ios.get_model_kwargs

    def get_model_kwargs(self: Any, *args: Any, **kwargs: Any) -> Any:
        keywords = original(self, *args, **kwargs)
        if keywords["block_table"] is not None:
            keywords["attention_mask"] = _decode_mask(keywords, self.model_dtype)
        return keywords

    put(ios, "get_model_kwargs", get_model_kwargs)
    if _sectors():
        _update_by_table(put)
    else:
        _attend_by_table(put)


def _lengths(keywords: Any) -> torch.Tensor:
    ends = keywords["cu_seq_lens_k"]
    return ends if isinstance(ends, torch.Tensor) else ends["full_attention"]


def _decode_mask(keywords: Any, dtype: torch.dtype) -> torch.Tensor:
    """Each row's one token sees the row's own keys; padding sees everything, for nobody."""
    ends = _lengths(keywords).tolist()
    tokens = keywords["input_ids"].shape[1]
    mask = torch.full((1, 1, tokens, ends[-1]), torch.finfo(dtype).min, dtype=dtype)
    for row, (first, last) in enumerate(pairwise(ends)):
        mask[..., row, first:last] = 0
    return mask


def _through_table(
    keys: torch.Tensor,
    values: torch.Tensor,
    new: tuple[torch.Tensor, torch.Tensor],
    table: torch.Tensor,
    ends: list[int],
) -> tuple[torch.Tensor, torch.Tensor]:
    """What the flash kernel does: write each row's token through its table, then read the row.

    ``keys``, ``values``: ``[pages, page, heads, dim]``; ``new``: ``[tokens, heads, dim]`` each.
    """
    page = keys.shape[1]
    found: list[tuple[torch.Tensor, torch.Tensor]] = []
    for row, (first, last) in enumerate(pairwise(ends)):
        length = last - first
        if length == 0:
            continue
        here = table[row, (length - 1) // page], (length - 1) % page
        keys[here], values[here] = new[0][row], new[1][row]
        pages = table[row, : -(-length // page)].long()
        found.append((keys[pages].flatten(0, 1)[:length], values[pages].flatten(0, 1)[:length]))
    return torch.cat([key for key, _ in found]), torch.cat([value for _, value in found])


def _update_by_table(put: _Put) -> None:
    cache = _module("cache").PagedAttentionCache
    original = cache.update

    def update(self: Any, key_states: Any, value_states: Any, layer_idx: int, kwargs: Any) -> Any:
        table = kwargs.get("block_table")
        if table is None:
            return original(self, key_states, value_states, layer_idx, kwargs=kwargs)
        allocator = self.layer_to_allocator[layer_idx]
        new = key_states.squeeze(0).transpose(0, 1), value_states.squeeze(0).transpose(0, 1)
        keys, values = allocator.get_cache_for_block_table(layer_idx)
        found = _through_table(keys, values, new, table[allocator.index], _lengths(kwargs).tolist())
        return tuple(states.transpose(0, 1).unsqueeze(0) for states in found)

    put(cache, "update", update)


def _attend_by_table(put: _Put) -> None:
    paged = importlib.import_module("transformers.integrations.sdpa_paged")
    functions = importlib.import_module("transformers.modeling_utils").ALL_ATTENTION_FUNCTIONS
    original = paged.sdpa_attention_paged_forward

    def attend(module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **kwargs: Any) -> Any:
        table = kwargs.get("block_table")
        if table is None:
            return original(module, query, key, value, attention_mask, **kwargs)
        cache = kwargs["cache"]
        group, place = cache.layer_index_to_group_indices[module.layer_idx]
        shape = (-1, cache.block_size, cache.num_key_value_heads, cache.head_dim)
        new = key.squeeze(0).transpose(0, 1), value.squeeze(0).transpose(0, 1)
        keys, values = cache.key_cache[place].view(shape), cache.value_cache[place].view(shape)
        found = _through_table(keys, values, new, table[group], _lengths(kwargs).tolist())
        states = [paged.repeat_kv(part.transpose(0, 1).unsqueeze(0), module.num_key_value_groups) for part in found]
        output = torch.nn.functional.scaled_dot_product_attention(
            query, states[0], states[1], attn_mask=attention_mask, scale=kwargs.get("scaling")
        )
        return output.transpose(1, 2).contiguous(), None

    before = functions["paged|sdpa"]
    functions.register("paged|sdpa", attend)
    put.later(lambda: functions.register("paged|sdpa", before))
