"""Live requests with their rows: admitted when they first run, resumed after a retraction, ended or preempted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvcanary.engines.sglang.allocator import Ear, Method
from kvcanary.engines.sglang.pools import Space

if TYPE_CHECKING:
    from kvcanary.canary import Canary
    from kvcanary.engines.base import Patches
    from kvcanary.engines.sglang.late import LateLedger


@dataclass(slots=True)
class _Live:
    row: int
    request: Any
    """SGLang's"""
    preempted: bool = False


class Requests:
    """Requests of one scheduler."""

    def __init__(  # noqa: PLR0917 - what a scheduler's requests are told to, and of what
        self,
        canary: Canary,
        ear: Ear,
        table: Any,
        spaces: Sequence[Space],
        max_rows: int,
        ledger: LateLedger | None = None,
    ) -> None:
        self._canary = canary
        self._ledger = ledger
        self._ear = ear
        self._table = table
        self._space = next((space for space in spaces if space.translation is None), None)
        self._max_rows = max_rows
        self._live: dict[str, _Live] = {}
        self._preempted: dict[str, None] = {}

    def rows(self, requests: Sequence[Any], lengths: Sequence[int], *, settled: bool) -> list[int]:
        """Rows of a batch's requests, given how many tokens of each are cached. Called for every forward.

        ``settled``: the lengths are those of this forward, so a request that is new here can be vouched for.
        """
        known = self._live
        rows: list[int] = []
        for request, length in zip(requests, lengths, strict=True):
            live = known.get(request.rid)
            if live is None or live.request is not request or live.preempted:
                live = self._admit(request, length, settled=settled)
            rows.append(live.row)
        return rows

    def forget(self) -> None:
        """All records were reset, and the rows with them: who goes on is admitted anew."""
        for name, live in self._live.items():
            live.preempted = True
            self._preempted[name] = None

    def live(self) -> list[Any]:
        """SGLang's requests that have a row and their slots."""
        return [live.request for live in self._live.values() if not live.preempted]

    def wire(self, patches: Patches, scheduler: Any) -> None:
        """Listen to the table of requests and to results."""
        patches.wrap(self._table, "free", self._freed)
        patches.wrap(scheduler, "process_batch_result", self._processed)

    def _admit(self, request: Any, length: int, *, settled: bool) -> _Live:
        name = request.rid
        self._preempted.pop(name, None)
        while len(self._live) >= self._max_rows and self._preempted and name not in self._live:
            self._end(next(iter(self._preempted)), None)
        known = known_tokens(request, length) if settled else ()
        row = self._canary.admit(name, tokens=known, start=length, identity=_identity(request))
        live = self._live[name] = _Live(row, request)
        if length and self._space is not None:
            self._reused(request, length, self._space)
        return live

    def _reused(self, request: Any, length: int, space: Space) -> None:
        """A prefix from the cache: its bytes are read again first, and a last page that is not full is written on."""
        page_size = int(space.allocator.page_size)
        slots = self._table.req_to_token[request.kv.req_pool_idx, :length]
        pages = slots if page_size == 1 else slots[::page_size] // page_size
        self._ear.about(self._canary.reuse, space.name, request.rid, pages)
        if self._ledger is not None:
            self._ledger.tell("reuse", request.rid, pages)
        if length % page_size:
            self._ear.about(self._canary.own, space.name, request.rid, pages[-1:])

    def _freed(self, original: Method) -> Method:
        def free(req: Any) -> Any:
            result = original(req)
            if req.finished():
                self._finish(req)
            else:
                self._preempt(req)
            return result

        return free

    def _processed(self, original: Method) -> Method:
        def process_batch_result(batch: Any, result: Any, *args: Any, **kwargs: Any) -> Any:
            outcome = original(batch, result, *args, **kwargs)
            for request in batch.reqs:
                # Those that left their slots to a session free no row.
                if request.finished() and request.rid in self._live:
                    self._finish(request)
            return outcome

        return process_batch_result

    def _preempt(self, request: Any) -> None:
        live = self._live.get(request.rid)
        if live is not None and live.request is request:
            live.preempted = True
            self._preempted[request.rid] = None
            self._ear(self._canary.preempt, request.rid)

    def _finish(self, request: Any) -> None:
        live = self._live.get(request.rid)
        if live is not None and live.request is request:
            self._end(request.rid, request)

    def _end(self, name: str, request: Any) -> None:
        self._live.pop(name, None)
        self._preempted.pop(name, None)
        tokens = None if request is None else [*request.origin_input_ids, *request.output_ids]
        self._ear(self._canary.finish, name, tokens=tokens)


def known_tokens(request: Any, length: int) -> Sequence[int]:
    """Ids that the scheduler knows, at least ``length`` of them if it knows so many."""
    prompt: Sequence[int] = request.origin_input_ids
    return prompt if length <= len(prompt) else [*prompt, *request.output_ids]


def _identity(request: Any) -> bytes | None:
    """What SGLang's tree separates prefixes by."""
    parts = (request.extra_key, request.cache_salt)
    return None if parts == (None, None) else repr(parts).encode()
