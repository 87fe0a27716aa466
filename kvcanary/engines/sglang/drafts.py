"""The KV of a draft model: another part of the target's slots, written by forwards of its own.

While drafts are proposed and after they were verified the draft model writes the same slots, in a pool of its own. Its
bytes are sealed within the target's forward, once it has run over the tokens that were accepted; what it wrote for
rejected ones it will write again, so that is left out.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch

from kvcanary.engines.sglang.allocator import Method
from kvcanary.engines.sglang.pools import DRAFT_PART, is_known

if TYPE_CHECKING:
    from kvcanary.canary import Canary
    from kvcanary.engines.base import Patches
    from kvcanary.engines.sglang.pools import Space

_WORKERS = frozenset({"EAGLEWorkerV2", "StandaloneWorkerV2"})
"""Workers whose draft model runs over all new tokens after each forward of the target, and never again"""


def find_draft(scheduler: Any, space: Space) -> tuple[Any, str]:
    """The draft model's pool over the slots of ``space``, or None and why there is none that is covered."""
    worker = scheduler.draft_worker
    if worker is None:
        return None, ""
    why = _gap(scheduler, worker, space)
    if why:
        return None, f"the KV of the draft model ({scheduler.spec_algorithm.name}): {why}"
    return worker.draft_worker.draft_runner.token_to_kv_pool, ""


def _gap(scheduler: Any, worker: Any, space: Space) -> str:
    if type(worker).__name__ not in _WORKERS:
        return "it is written at times that this adapter does not know"
    if (getattr(scheduler.server_args, "speculative_eagle_topk", None) or 1) > 1:
        return "accepted tokens of a draft tree move before it is written"
    pool = worker.draft_worker.draft_runner.token_to_kv_pool
    if space.translation is not None or not is_known(pool):
        return f"its pool is a {type(pool).__name__} and not one over the target's slots"
    if int(pool.page_size) != int(space.pool.page_size) or int(pool.size) != int(space.pool.size):
        return f"its pool has {pool.size} slots in pages of {pool.page_size}, unlike the target's"
    return ""


class DraftWatch:
    """Keeps a step open from the target's forward until the draft model has followed.

    Attributes:
        rest: what is to be done once the worker is done with a batch; None: it has none in hand.
    """

    def __init__(self, canary: Canary) -> None:
        self._canary = canary
        self.rest: ExitStack | None = None
        self._tokens = 0
        self._numbers = torch.arange(canary.state.limits.max_tokens, device=canary.layout.device)

    def wire(self, patches: Patches, worker: Any) -> None:
        """Listen to the worker that drafts and verifies, and to its draft model."""
        patches.wrap(worker, "forward_batch_generation", self._generate)
        patches.wrap(worker.draft_worker, "_draft_extend_for_prefill", self._followed)
        patches.wrap(worker.draft_worker, "_draft_extend_for_decode", self._followed)

    def model_done(self, rest: ExitStack, tokens: int) -> None:
        """The target's forward, which was entered, is launched. What the draft model holds is nobody's until it ran."""
        self._canary.turn_to("")
        self._tokens = tokens
        rest.push(self._leave)

    def _generate(self, original: Method) -> Method:
        def forward_batch_generation(*args: Any, **kwargs: Any) -> Any:
            try:
                with ExitStack() as self.rest:
                    return original(*args, **kwargs)
            finally:
                self.rest, self._tokens = None, 0

        return forward_batch_generation

    def _leave(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._canary.leave()

    def _followed(self, original: Method) -> Method:
        def draft_extend(batch: Any, result: Any, *args: Any, **kwargs: Any) -> Any:
            outcome = original(batch, result, *args, **kwargs)
            if self._tokens and self._canary.bound:
                accepted = getattr(result, "accept_lens", None)
                if accepted is not None:
                    self._leave_out(accepted)
                self._canary.turn_to(DRAFT_PART)
            return outcome

        return draft_extend

    def _leave_out(self, accepted: torch.Tensor) -> None:
        """Tokens of each row, all of one number, beyond those accepted (``[B]``)."""
        scratch = self._canary.state.scratch_slots
        rows, tokens = accepted.shape[0], self._tokens
        numbers = self._numbers[:tokens].view(rows, -1)
        late = numbers - numbers[:, :1] >= accepted[:, None]
        scratch[:, :tokens].masked_fill_(late.view(-1), -1)
