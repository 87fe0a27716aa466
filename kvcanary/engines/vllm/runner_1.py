"""Where vLLM's earlier model runner (``vllm.v1.worker.gpu_model_runner``) is hooked."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from kvcanary.engines.vllm.contract import RUNNER_1, check

if TYPE_CHECKING:
    from kvcanary.batch import ForwardBatch
    from kvcanary.canary import Canary
    from kvcanary.engines.vllm.rows import Known
    from kvcanary.engines.vllm.worker import WorkerWatch


def watch_runner_1(runner: Any, canary: Canary, version: str) -> WorkerWatch:
    """Watch a runner whose pool exists. Nothing is checked before it is armed.

    Raises:
        ConfigError: it cannot be watched; it is left as it was.
    """
    from kvcanary.engines.vllm.worker import WorkerWatch

    check(runner, RUNNER_1, "model runner", version)
    watch = WorkerWatch(runner, canary, version, kernel_tables=True)
    watch.attach(_Hooks(watch).wire)
    return watch


class _Hooks:
    def __init__(self, watch: WorkerWatch) -> None:
        self._watch = watch
        self._runner = watch.runner
        self._tokens = 0
        """of the step's forward, without padding"""

    def wire(self) -> None:
        patches = self._watch.patches
        patches.wrap(self._runner, "_model_forward", self._model_forward)
        patches.wrap(self._runner, "sample_tokens", self._watch.sampling)
        if self._watch.pool.draft:
            patches.wrap(self._runner, "propose_draft_token_ids", self._propose)
        patches.wrap(self._runner, "execute_model", self._execute_model)

    def _execute_model(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def execute_model(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            self._tokens = int(scheduler_output.total_num_scheduled_tokens)
            return self._watch.run_model(scheduler_output, lambda: original(scheduler_output, *args, **kwargs))

        return execute_model

    def _model_forward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def model_forward(*args: Any, **kwargs: Any) -> Any:
            batch = self._runner.input_batch
            self._watch.enter(self._batch, batch.req_ids[: batch.num_reqs])
            return original(*args, **kwargs)

        return model_forward

    def _batch(self, known: Known) -> ForwardBatch:
        runner, count, tokens = self._runner, len(known.rows), self._tokens
        tables = runner.input_batch.block_table.block_tables
        groups = self._watch.pool.groups
        return self._watch.rows.batch(
            known,
            input_ids=runner.input_ids.gpu[:tokens],
            positions=runner.positions[:tokens],
            query_start_loc=runner.query_start_loc.gpu[: count + 1],
            seq_lens=runner.seq_lens[:count],
            slot_mappings=[tables[group.index].slot_mapping.gpu[:tokens] for group in groups],
            tables=[tables[group.index].get_device_tensor(count) for group in groups],
        )

    def _propose(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def propose_draft_token_ids(scheduler_output: Any, sampled_token_ids: Any, *args: Any, **kwargs: Any) -> Any:
            drafts = original(scheduler_output, sampled_token_ids, *args, **kwargs)
            # sampling_metadata, three of hidden states, spec_decode_metadata
            verified = kwargs["spec_decode_metadata"] if "spec_decode_metadata" in kwargs else args[4]
            self._watch.drafted(self._rejected(sampled_token_ids, verified))
            return drafts

        return propose_draft_token_ids

    def _rejected(self, sampled: Any, verified: Any) -> torch.Tensor:
        """Drafts that the target did not take, ``[B]``. A row without drafts has none, however few ids it got."""
        rows = self._watch.rows
        count = self._runner.input_batch.num_reqs
        if verified is None:
            return rows.drafts.send([0] * count)
        drafts = rows.drafts.send(verified.num_draft_tokens)
        if isinstance(sampled, torch.Tensor):
            taken = (sampled[:count] >= 0).sum(1)
        else:
            taken = rows.taken.send([len(ids) for ids in sampled])
        return torch.where(drafts > 0, drafts + 1 - taken, 0).clamp_(min=0)
