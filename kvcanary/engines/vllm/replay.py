"""What the scheduler told, made into calls of the canary, and which row each request has."""

from __future__ import annotations

import time
from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from kvcanary.engines.vllm.media import Span, salts_of_batch, salts_of_prompt
from kvcanary.engines.vllm.rows import Known
from kvcanary.engines.vllm.wire import (
    Admitted,
    Blocks,
    Copied,
    Finished,
    Healed,
    KnownIds,
    Preempted,
    Told,
    Withdrawn,
    starts_of,
)
from kvcanary.events import Event, PagesQuarantined, QuarantineFailed, RequestQuarantined

if TYPE_CHECKING:
    from kvcanary.canary import Canary
    from kvcanary.engines.vllm.layout import CoveredGroup, Pool


class Replay:
    """Applies the calls of a step in their order.

    A preempted request keeps its row until rows run short: it will mostly be back soon.
    """

    def __init__(self, canary: Canary, pool: Pool, max_rows: int) -> None:
        self._canary = canary
        self._pool = pool
        self._groups = pool.by_index
        self._max_rows = max_rows
        self._rows: dict[str, int] = {}
        self._preempted: dict[str, None] = {}
        self._media: dict[str, tuple[Span, ...]] = {}
        self._last_ids: dict[str, int] = {}
        self._output: Any = None

    def known(self, requests: Sequence[str]) -> Known:
        """What is known of the requests of a batch; row -1 for one that was running before the watch began."""
        rows, last_ids = self._rows, self._last_ids
        return Known(
            [rows.get(request, -1) for request in requests],
            [last_ids.get(request, -1) for request in requests],
            self._salts(requests) if self._media else None,
        )

    def _salts(self, requests: Sequence[str]) -> list[int] | None:
        counts, starts = self._output.num_scheduled_tokens, starts_of(self._output)
        return salts_of_batch([(self._media.get(name, ()), starts[name], counts[name]) for name in requests])

    def apply(self, told: Sequence[Told], scheduler_output: Any) -> None:
        """Tell the canary what happened up to a step, and know the step's batch."""
        self._output = scheduler_output
        self._last_ids = {}
        tokens = _tokens(scheduler_output)
        for call in told:
            if isinstance(call, Blocks):
                self._blocks(call)
            elif isinstance(call, Admitted):
                self._admit(call, tokens.get(call.request) or ())
            elif isinstance(call, Finished):
                self._rows.pop(call.request, None)
                self._preempted.pop(call.request, None)
                self._media.pop(call.request, None)
                self._canary.finish(call.request, tokens=call.tokens)
            elif isinstance(call, KnownIds):
                self._last_ids = dict(zip(scheduler_output.num_scheduled_tokens, array("i", call.ids), strict=True))
            elif isinstance(call, Preempted):
                self._preempt(call.request)
            elif isinstance(call, Copied):
                self._copy(call)
            elif isinstance(call, Withdrawn):
                self._withdrawn(call)
            else:
                self._healed(call)

    def _admit(self, call: Admitted, tokens: Sequence[int]) -> None:
        self._preempted.pop(call.request, None)
        if call.request not in self._rows and len(self._rows) >= self._max_rows and self._preempted:
            longest = next(iter(self._preempted))
            del self._preempted[longest], self._rows[longest]
            self._media.pop(longest, None)
            self._canary.finish(longest)
        if call.media:
            self._media[call.request] = call.media
        self._rows[call.request] = self._canary.admit(
            call.request,
            tokens=tokens,
            start=call.start,
            identity=call.identity or None,
            salts=salts_of_prompt(call.media),
        )

    def _preempt(self, request: str) -> None:
        if request in self._rows:
            self._preempted[request] = None
            self._canary.preempt(request)

    def _blocks(self, call: Blocks) -> None:
        group = self._groups.get(call.group)
        if group is None:
            self._foreign(call)
            return
        pages = _pages(group, call.blocks)
        canary = self._canary
        if call.kind == "alloc":
            canary.alloc(group.name, call.request, pages)
        elif call.kind == "free":
            canary.free(group.name, pages)
        elif call.kind == "publish":
            canary.publish(group.name, pages, request=call.request or None)
        elif call.kind == "evict":
            canary.evict(group.name, pages)
        elif call.kind == "reuse":
            canary.reuse(group.name, call.request, pages)

    def _foreign(self, call: Blocks) -> None:
        """Blocks of no group that is covered. All groups lie over the same bytes, so one of them is told for all."""
        group = self._pool.groups[0]
        if call.kind == "alloc":
            self._canary.alloc(group.name, "", _pages(group, call.blocks))
        elif call.kind == "free":
            self._canary.free(group.name, _pages(group, call.blocks))

    def _copy(self, call: Copied) -> None:
        group = self._groups.get(call.group)
        if group is not None:
            self._canary.move(group.name, _pages(group, call.sources), _pages(group, call.targets))

    def _withdrawn(self, call: Withdrawn) -> None:
        group = self._groups.get(call.group)
        if group is not None:
            pages = tuple(_pages(group, call.blocks))
            self._emit(PagesQuarantined(group=group.name, pages=pages, incident=call.incident))

    def _healed(self, call: Healed) -> None:
        if call.error:
            self._emit(QuarantineFailed(request=call.request, error=call.error, incident=call.incident))
        else:
            self._emit(
                RequestQuarantined(
                    request=call.request, action="healed", tokens_left=call.tokens_left, incident=call.incident
                )
            )

    def _emit(self, event: Event) -> None:
        now = time.time_ns(), time.monotonic_ns()
        self._canary.emit(replace(event, time_ns=now[0], monotonic_ns=now[1], forward=self._canary.next_forward))


def _pages(group: CoveredGroup, blocks: Sequence[int]) -> Sequence[int]:
    split = group.split
    return blocks if split == 1 else [block * split + i for block in blocks for i in range(split)]


def _tokens(scheduler_output: Any) -> dict[str, Sequence[int]]:
    """All ids that a step's message knows of the requests that begin or resume in it."""
    tokens = {new.req_id: new.prefill_token_ids or new.prompt_token_ids for new in scheduler_output.scheduled_new_reqs}
    return {**tokens, **scheduler_output.scheduled_cached_reqs.all_token_ids}
