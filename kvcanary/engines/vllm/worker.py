"""The worker's half: one runner with its pool, the canary that watches it, and the steps between them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch

from kvcanary.batch import ForwardBatch
from kvcanary.engines.base import Patches, unarmed_checks
from kvcanary.engines.vllm import VllmAdapter
from kvcanary.engines.vllm.layout import DRAFT_PART, Pool, make_pool
from kvcanary.engines.vllm.replay import Replay
from kvcanary.engines.vllm.rows import Known, Rows
from kvcanary.engines.vllm.wire import WANTED, Wanted, pack_wanted, take
from kvcanary.errors import ConfigError
from kvcanary.events import Event
from kvcanary.mailbox import Quarantine
from kvcanary.state import BatchWord

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from kvcanary.canary import Canary

_SPARE_ROWS = 64
_DRAFTS = frozenset({"draft_model", "eagle", "eagle3"})
"""Methods whose layers are written over all of a step's tokens while drafting, and never again"""


class WorkerWatch:
    """One runner's pool under watch. All calls come from the worker's own thread.

    Args:
        runner: a model runner whose pool exists.
        canary: started and unbound.
        version: of vLLM.
        kernel_tables: see :func:`kvcanary.engines.vllm.layout.make_pool`.
    """

    def __init__(self, runner: Any, canary: Canary, version: str, *, kernel_tables: bool) -> None:
        self.runner = runner
        self.canary = canary
        self.patches = Patches()
        self._version = version
        self._kernel_tables = kernel_tables
        self._bound = False
        self._step: AbstractContextManager[Canary] | None = None
        self._entered = False
        self._drafting = False
        self._epoch = 0
        self._new_weights = False
        self._wanted: deque[Wanted] = deque()  # an asynchronous output is asked for on a thread of its own

    # --- being attached -----------------------------------------------------------------------------------

    def attach(self, wire: Callable[[], object]) -> None:
        """Bind the canary to the runner's pool, and have ``wire`` hook the runner. Nothing is checked yet.

        Raises:
            ConfigError: the runner or its pool cannot be watched; the runner is left as it was.
        """
        try:
            self._bind()
            wire()
            # However they come: in place, from a trainer, or by a worker's method of one's own.
            self.patches.after(self.runner, "reload_weights", self.weights_changed)
            self.patches.after(self.runner.get_model(), "load_weights", self.weights_changed)
        except BaseException:
            self.end()
            raise

    def _bind(self) -> None:
        runner, config = self.runner, self.runner.vllm_config
        _refuse(config)
        self.patches.claim(runner)
        tp_rank = _tp_rank()
        # Tensors of the canary are used inside and outside of the engine's inference mode.
        with torch.inference_mode(mode=False):
            self.pool: Pool = make_pool(
                runner.kv_cache_config,
                runner.compilation_config.static_forward_context,
                tp_rank=tp_rank,
                draft=_draft_layers(runner),
                draft_gap=_draft_gap(config),
                kernel_tables=self._kernel_tables,
            )
            max_rows = 2 * int(runner.max_num_reqs) + _SPARE_ROWS
            self.rows = Rows(int(runner.max_num_reqs), int(runner.max_num_tokens), self.pool.layout.device)
            self.replay = Replay(self.canary, self.pool, max_rows)
            self.canary.bind(
                self.pool.layout,
                max_tokens=int(runner.max_num_tokens),
                max_batch_rows=int(runner.max_num_reqs),
                max_rows=max_rows,
                engine="vllm",
                engine_version=self._version,
                unarmed=unarmed_checks(VllmAdapter()),
                quarantine=self._quarantine,
                ranks={"tp_rank": tp_rank, "dp_rank": int(config.parallel_config.data_parallel_rank)},
            )
        self._bound = True

    def arm(self) -> None:
        """Warm-up is over: check from now on."""
        with torch.inference_mode(mode=False):
            self.canary.arm()

    def end(self) -> None:
        """Take every hook out and leave the pool. Idempotent."""
        self.patches.undo()
        if self._bound:
            self._bound = False
            self.canary.unbind()

    def weights_changed(self, *_: Any, **__: Any) -> None:
        """Weights of the worker's models were written. What comes before the next step counts as one update."""
        self._new_weights = True

    # --- a step -------------------------------------------------------------------------------------------

    def run_model(self, scheduler_output: Any, call: Callable[[], Any]) -> Any:
        """What ``execute_model`` does, by ``call``: a step begins, and ends unless sampling follows."""
        self.begin_step(scheduler_output)
        output = self._guarded(call)
        self.leave_model(more=self.runner.execute_model_state is not None)
        return output

    def sampling(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """The method that follows the model's, as a step's end."""

        def sample_tokens(*args: Any, **kwargs: Any) -> Any:
            output = self._guarded(lambda: original(*args, **kwargs))
            self.end_step()
            return self.delivered(output)

        return sample_tokens

    def _guarded(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except BaseException as error:
            self.end_step(error)
            raise

    def begin_step(self, scheduler_output: Any) -> None:
        """The step's facts, in order, then its first launch. In ``raise`` mode this is where an error surfaces."""
        self.end_step()
        told = take(scheduler_output)
        if not self.canary.armed:
            return
        if self._new_weights:
            self._new_weights = False
            self._epoch += 1
            self.canary.weights_updated(self._epoch)
        self.replay.apply(told or (), scheduler_output)
        step = self.canary.step()
        step.__enter__()
        self._step = step

    def enter(self, make: Callable[[Known], ForwardBatch], requests: Sequence[str]) -> None:
        """The forward's inputs are complete. ``make`` gets what is known of ``requests``."""
        if self._step is not None:
            self.canary.enter(make(self.replay.known(requests)))
            self._entered = True

    def leave_model(self, *, more: bool) -> None:
        """The target model ran. ``more``: sampling and drafting follow."""
        if self._entered and more and self.pool.draft:
            # What drafting writes is not there yet, and is nobody's unless it comes.
            self.canary.turn_to("")
            self._drafting = True
        elif self._entered:
            self._leave()
        if not more:
            self.end_step()

    def drafted(self, rejected: torch.Tensor) -> None:
        """The draft model ran over the step's tokens, but for the last ``rejected`` of each row, which it will redo."""
        if self._drafting:
            self._leave_out(rejected)
            self.canary.turn_to(DRAFT_PART)

    def end_step(self, error: BaseException | None = None) -> None:
        """All of the step is launched, or it failed. Idempotent."""
        step, self._step = self._step, None
        if step is None:
            return
        try:
            if self._entered and error is None:
                self._leave()
        finally:
            self._entered = self._drafting = False
            step.__exit__(None if error is None else type(error), error, None)

    def _leave(self) -> None:
        self._entered = self._drafting = False
        self.canary.leave()

    @cached_property
    def _token_numbers(self) -> torch.Tensor:
        return torch.arange(int(self.runner.max_num_tokens), device=self.canary.state.device)

    def _leave_out(self, rejected: torch.Tensor) -> None:
        state = self.canary.state
        batch = state.scratch_batch[: rejected.shape[0]]
        ends = batch[:, BatchWord.FIRST_TOKEN] + batch[:, BatchWord.NEW]
        tokens = self._token_numbers
        row = torch.searchsorted(ends, tokens, right=True).clamp_(max=len(ends) - 1)
        late = tokens >= (ends - rejected)[row]
        state.scratch_slots.masked_fill_(late, -1)

    # --- quarantine ---------------------------------------------------------------------------------------

    def _quarantine(self, wanted: Quarantine) -> Iterable[Event]:
        group = next((item for item in self.pool.groups if item.name == wanted.group), None)
        blocks = tuple(dict.fromkeys(page // group.split for page in wanted.pages)) if group is not None else ()
        self._wanted.append(Wanted(wanted.incident, wanted.requests, group.index if group is not None else -1, blocks))
        return ()  # what came of it is told by the scheduler, beside a later step

    def delivered(self, output: Any) -> Any:
        """The step's output, with what is wanted on it before its tokens leave.

        In quarantine mode this waits, where the engine waits for its own copy of the tokens, until the findings of the
        step are known.
        """
        if self.canary.config.mode != "quarantine" or output is None:
            return output
        if hasattr(output, "get_output"):
            original = output.get_output
            output.get_output = lambda: self._with_wanted(original())
            return output
        return self._with_wanted(output)

    def _with_wanted(self, output: Any) -> Any:
        self.canary.flush()
        for wanted in self.canary.mailbox.take_quarantines():
            self._quarantine(wanted)
        wishes = [self._wanted.popleft() for _ in range(len(self._wanted))]
        if wishes:
            setattr(output, WANTED, pack_wanted(wishes))
        return output


def _refuse(config: Any) -> None:
    parallel = config.parallel_config
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if int(getattr(parallel, name, 1)) > 1:
            raise ConfigError(
                f"{name}={getattr(parallel, name)}: a rank holds a part of each request's positions, which this "
                "adapter cannot tell apart yet; set it to 1"
            )
    if config.kv_transfer_config is not None:
        raise ConfigError(
            "kv_transfer_config is set: a KV connector loads blocks by itself, and this adapter does not follow such "
            "loads yet; it would report every loaded block as unwritten. Run without a connector"
        )


def _tp_rank() -> int:
    return int(import_module("vllm.distributed").get_tensor_model_parallel_rank())


def _draft_layers(runner: Any) -> Iterable[str]:
    return getattr(getattr(runner, "speculator", None), "draft_attn_layer_names", None) or ()


def _draft_gap(config: Any) -> str:
    """Why layers of a draft model are not covered; "" if they are."""
    method = getattr(config.speculative_config, "method", None)
    if method is None or method in _DRAFTS:
        return ""
    return f"speculative method {method!r} writes it at times that this adapter does not know"
