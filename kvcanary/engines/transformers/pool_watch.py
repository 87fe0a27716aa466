"""One pool: its layout, its life cycle, and the forwards over it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch

from kvcanary.engines.base import Patches
from kvcanary.engines.transformers.block_pool import BlockPool
from kvcanary.engines.transformers.contract import check_processor, check_quarantine, input_buffers
from kvcanary.engines.transformers.quarantine import Healer
from kvcanary.engines.transformers.requests import Facts, Requests
from kvcanary.engines.transformers.rows import Rows
from kvcanary.engines.transformers.sector_pool import SectorPool
from kvcanary.engines.transformers.sentinel import write_sentinel
from kvcanary.errors import ConfigError

if TYPE_CHECKING:
    from kvcanary.canary import Canary

_MOST_ROWS = 1 << 16


class PoolWatch:
    """One batch processor with its cache: layout, life cycle, rows, and the forward itself."""

    def __init__(self, manager: Any, processor: Any, canary: Canary, version: str, unarmed: dict[str, str]) -> None:
        self.processor = processor
        self._manager = manager
        self._canary = canary
        self._version = version
        self._unarmed = unarmed
        self._patches = Patches()
        self._gate = threading.RLock()
        self._bound = False
        self._launching = False
        self._entered = False
        self._inside = False

    def begin(self, *, idle: bool) -> None:
        """Bind the canary to the pool and hook everything. ``idle``: nothing runs on the pool now.

        Raises:
            ConfigError: the pool cannot be watched; call :meth:`end`.
        """
        processor, canary = self.processor, self._canary
        check_processor(processor, self._version)
        _check_compiled(processor.cb_config)
        cache, io = processor.cache, processor.inputs_and_outputs
        pool = SectorPool(cache) if hasattr(cache, "cache_allocators") else BlockPool(cache)
        rank = int(getattr(self._manager.distributed_helper, "tp_local_rank", 0))
        batch_rows = int(processor.cb_config.max_requests_per_batch)
        # Tensors of the canary are used inside and outside of the engine's inference mode.
        with torch.inference_mode(mode=False):
            layout = pool.layout(rank)
            if idle:
                write_sentinel(pool, cache, layout)
            cuda = layout.device.type == "cuda"
            self._stream = io.compute_stream if cuda else None
            max_rows = min(pool.num_blocks + batch_rows, _MOST_ROWS)
            self._facts = Facts(canary)
            self._requests = Requests(canary, self._facts, processor.scheduler, pool, max_rows)
            self._rows = Rows(self._requests, pool.views, batch_rows, layout.device)
            healer = self._healer = self._make_healer()
            canary.bind(
                layout,
                max_tokens=int(cache.max_batch_tokens),
                max_batch_rows=batch_rows,
                max_rows=max_rows,
                engine="transformers",
                engine_version=self._version,
                unarmed=self._unarmed,
                quarantine=None if healer is None else healer.take,
                stream=self._stream,
                ranks={"tp_rank": rank},
            )
            self._bound = True
            if cuda:
                # What was just made is filled on the current stream, and used on the engine's.
                torch.cuda.synchronize(layout.device)
            canary.arm()
        self._hook(pool, io)

    def end(self) -> None:
        """Take every hook out and leave the pool. Idempotent."""
        with self._gate:
            self._patches.undo()
        if self._bound:
            self._bound = False
            self._canary.unbind()

    def _make_healer(self) -> Healer | None:
        if self._canary.config.mode != "quarantine":
            return None
        check_quarantine(self.processor, self._version)
        return Healer(self._canary, self.processor, self._requests, self._gate)

    @property
    def has_graphs(self) -> bool:
        """Whether graphs were captured that contain the canary."""
        return any(self._graph_buffers())

    def _hook(self, pool: SectorPool | BlockPool, io: Any) -> None:
        patches, runner = self._patches, self.processor.model_runner
        # What names a request comes before what tells its blocks, and the launch comes last: the engine may run.
        self._requests.wire(patches, self.processor.offloading_manager)
        pool.wire(patches, self._canary, self._facts, self._requests)
        if self._healer is not None:
            self._healer.wire(patches)
        patches.wrap(io, "prepare_batch_tensors", self._prepare_batch_tensors)
        patches.wrap(runner, "warmup", self._warmup)
        before, after = self._before, self._after
        if _compiles(self.processor.cb_config):
            before, after = torch.compiler.disable(before), torch.compiler.disable(after)
        model = self._manager.model
        patches.on_undo(model.register_forward_pre_hook(before, with_kwargs=True).remove)
        patches.on_undo(model.register_forward_hook(after, with_kwargs=True).remove)
        patches.wrap(runner, "compute_batch", self._compute_batch)
        # Graphs captured without the canary, or with one that is gone, must not be replayed.
        self._drop_graphs()
        patches.on_undo(self._drop_graphs)

    # --- the forward --------------------------------------------------------------------------------------

    def _prepare_batch_tensors(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def prepare_batch_tensors(requests_in_batch: Any, *args: Any, **kwargs: Any) -> Any:
            self._rows.fill(requests_in_batch)
            return original(requests_in_batch, *args, **kwargs)

        return prepare_batch_tensors

    def _compute_batch(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def compute_batch(*args: Any, **kwargs: Any) -> Any:
            # Without rows this batch was prepared before the watch began.
            if not self._rows.filled:
                return original(*args, **kwargs)
            with self._gate, self._on_stream():
                self._rows.upload()
                with self._canary.step():
                    return self._launch(original, *args, **kwargs)

        return compute_batch

    def _launch(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._launching, self._entered, self._inside = True, False, False
        try:
            result = original(*args, **kwargs)
        finally:
            self._launching = False
        if not self._entered:
            self._canary.replayed()
        return result

    def _before(self, _module: Any, _args: Any, kwargs: dict[str, Any]) -> None:
        if self._launching and kwargs.get("cache") is self.processor.cache:
            self._canary.enter(self._rows.batch(kwargs))
            self._entered = self._inside = True

    def _after(self, _module: Any, _args: Any, kwargs: dict[str, Any], _output: Any) -> None:
        if self._inside and kwargs.get("cache") is self.processor.cache:
            self._inside = False
            self._canary.leave()

    def _warmup(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def warmup(*args: Any, **kwargs: Any) -> Any:
            if not self.processor.model_runner.pad_inputs:
                return original(*args, **kwargs)  # it does nothing then
            # Made-up requests read slots that nobody wrote, and the pool is reset afterwards.
            self._facts.enabled = False
            self._canary.disarm("the engine warms up with made-up requests")
            try:
                return original(*args, **kwargs)
            finally:
                self._requests.reset()
                self._facts.enabled = True
                self._canary.arm()

        return warmup

    def _on_stream(self) -> AbstractContextManager[Any]:
        stream = self._stream
        if stream is None:
            return nullcontext()
        if not self.processor.use_async_batching:
            # The engine fills its index tensors on the default stream and runs on this one without a wait; the
            # entry checks read them earlier than attention does.
            stream.wait_stream(torch.cuda.current_stream())
        return torch.cuda.stream(stream)

    def _drop_graphs(self) -> None:
        graphs = [graph for buffer in self._graph_buffers() for graph in buffer.values()]
        if not graphs:
            return
        torch.cuda.synchronize()
        for buffer in self._graph_buffers():
            buffer.clear()
        for graph in graphs:
            graph.reset()

    def _graph_buffers(self) -> Iterator[dict[Any, Any]]:
        for owner in input_buffers(self.processor, "device_io"):
            yield owner.graphs._storage  # noqa: SLF001 - the engine's buffer has no way to empty it


def _compiles(config: Any) -> bool:
    return config.varlen_compile_config is not None or config.decode_compile_config is not None


def _check_compiled(config: Any) -> None:
    for name in ("varlen_compile_config", "decode_compile_config"):
        if getattr(getattr(config, name), "fullgraph", False):
            raise ConfigError(
                f"{name} asks for fullgraph=True, but the canary runs between compiled regions; set fullgraph=False, "
                "or watch without torch.compile"
            )
