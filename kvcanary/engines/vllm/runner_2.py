"""Where vLLM's new model runner (``vllm.v1.worker.gpu.model_runner``) is hooked."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from kvcanary.engines.vllm.contract import RUNNER_2, check

if TYPE_CHECKING:
    from kvcanary.batch import ForwardBatch
    from kvcanary.canary import Canary
    from kvcanary.engines.vllm.rows import Known
    from kvcanary.engines.vllm.worker import WorkerWatch


def watch_runner_2(runner: Any, canary: Canary, version: str) -> WorkerWatch:
    """Watch a runner whose pool exists. Nothing is checked before it is armed.

    Raises:
        ConfigError: it cannot be watched; it is left as it was.
    """
    from kvcanary.engines.vllm.worker import WorkerWatch

    check(runner, RUNNER_2, "model runner", version)
    watch = WorkerWatch(runner, canary, version, kernel_tables=False)
    watch.attach(_Hooks(watch).wire)
    return watch


class _Hooks:
    def __init__(self, watch: WorkerWatch) -> None:
        self._watch = watch
        self._runner = watch.runner

    def wire(self) -> None:
        patches = self._watch.patches
        patches.wrap(self._runner, "prepare_attn", self._prepare_attn)
        patches.wrap(self._runner, "sample_tokens", self._watch.sampling)
        patches.wrap(self._runner, "pool", self._watch.sampling)
        if self._watch.pool.draft:
            patches.wrap(self._runner.speculator, "propose", self._propose)
        patches.wrap(self._runner, "execute_model", self._execute_model)

    def _execute_model(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def execute_model(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            # The second positional one is what an earlier pipeline stage sends, the third says that the run is a dummy.
            if kwargs.get("dummy_run", args[1] if len(args) > 1 else False):
                return original(scheduler_output, *args, **kwargs)
            return self._watch.run_model(scheduler_output, lambda: original(scheduler_output, *args, **kwargs))

        return execute_model

    def _prepare_attn(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def prepare_attn(input_batch: Any) -> Any:
            tables, slot_mappings = original(input_batch)
            self._watch.enter(partial(self._batch, input_batch, tables, slot_mappings), input_batch.req_ids)
            return tables, slot_mappings

        return prepare_attn

    def _batch(self, inputs: Any, tables: Any, slot_mappings: Any, known: Known) -> ForwardBatch:
        count, tokens = len(known.rows), inputs.num_tokens
        groups = self._watch.pool.groups
        return self._watch.rows.batch(
            known,
            input_ids=inputs.input_ids[:tokens],
            positions=inputs.positions[:tokens],
            query_start_loc=inputs.query_start_loc[: count + 1],
            seq_lens=inputs.seq_lens[:count],
            slot_mappings=[slot_mappings[group.index][:tokens] for group in groups],
            tables=[tables[group.index][:count] for group in groups],
        )

    def _propose(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def propose(*args: Any, **kwargs: Any) -> Any:
            drafts = original(*args, **kwargs)
            if not kwargs.get("dummy_run", False):
                # input_batch, attn_metadata, slot_mappings, two of hidden states, num_sampled, num_rejected
                rejected = kwargs["num_rejected"] if "num_rejected" in kwargs else args[6]
                self._watch.drafted(rejected)
            return drafts

        return propose
