"""Life cycle of requests: admission, preemption, offload and end, told to the canary as they happen."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from kvcanary.engines.transformers.rows import known_tokens
from kvcanary.errors import BatchError

if TYPE_CHECKING:
    from kvcanary.canary import Canary
    from kvcanary.engines.base import Patches
    from kvcanary.exported import Records


class Tables(Protocol):
    """What the life cycle of requests needs to know of a pool."""

    def space(self, group: int) -> int:
        """The group whose slots a group uses."""
        ...

    def table(self, group: int, request: str) -> Sequence[int]:
        """Blocks of a request in a group, in order; empty when it has none."""
        ...

    def offloaded_tables(self, state: Any, arguments: Sequence[Any]) -> list[Sequence[int]]:
        """Per group the blocks of an offload victim, given the other arguments of ``_offload_to_cpu``."""
        ...


class Facts:
    """The canary's ear. Deaf during warm-up, whose requests are made up, and once the pool was left."""

    def __init__(self, canary: Canary) -> None:
        self._canary = canary
        self.enabled = True

    def __call__(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Make a lifecycle call of the canary; its result, or None when nobody listens."""
        if not self.enabled:
            return None
        try:
            return call(*args, **kwargs)
        except BatchError:
            # The watch may be stopped from another thread while the engine's thread is in the middle of a call.
            if self._canary.bound:
                raise
            return None


@dataclass(slots=True)
class _Live:
    row: int
    state: Any
    """the engine's; None for a forked child until it is first scheduled"""
    preempted: bool = False
    since: int = 0
    """the next forward when it was admitted"""


class Requests:
    """Live requests of one pool, with their rows.

    A request is admitted when it first gets a block of its own or a place in a batch, not when it is queued: the
    engine matches prefixes for every request that waits, and rows are few.
    """

    def __init__(self, canary: Canary, facts: Facts, scheduler: Any, tables: Tables, max_rows: int) -> None:
        self._canary = canary
        self._facts = facts
        self._scheduler = scheduler
        self._tables = tables
        self._max_rows = max_rows
        self._live: dict[str, _Live] = {}
        self._preempted: dict[str, None] = {}
        self._matches: dict[str, list[tuple[int, list[int]]]] = {}
        self._saved: dict[str, list[tuple[int, Records]]] = {}
        self._offloading = False

    # --- admission ----------------------------------------------------------------------------------------

    def rows(self, states: Sequence[Any]) -> list[int]:
        """Rows of the requests of a batch; -1 during warm-up. Called for every forward."""
        if not self._facts.enabled:
            return [-1] * len(states)
        known = self._live
        rows: list[int] = []
        for state in states:
            live = known.get(state.request_id)
            if live is None or live.state is not state or live.preempted:
                live = self._resumed(state)
            rows.append(live.row)
        return rows

    def _resumed(self, state: Any) -> _Live:
        live = self.admitted(state)
        if live.preempted:
            # The token that was in flight at an offload was thrown away and is fed again.
            live.preempted = False
            self._preempted.pop(state.request_id, None)
            self._facts(self._canary.rewind, state.request_id, state.position_offset)
        return live

    def admitted(self, state: Any) -> _Live:
        """The request as it is live now, admitted anew if this is another request, or a restart, of that name."""
        live = self._live.get(state.request_id)
        if live is not None and live.state is None:
            live.state = state
        if live is None or live.state is not state:
            return self._admit(state.request_id, state, state, state.position_offset)
        return live

    def matched(self, request: str, group: int, blocks: Sequence[int]) -> None:
        """A prefix match; told at admission, since most requests that match have to wait on."""
        if self._facts.enabled and blocks:
            self._matches.setdefault(request, []).append((group, list(blocks)))

    def forked(self, child: str, parent: Any, length: int) -> None:
        """A child starts at its parent's length; its own state is made later."""
        if self._facts.enabled and child not in self._live:
            self._admit(child, None, parent, length)

    def since(self, request: str) -> int:
        """The forward since which a request is live; the next one if it is not yet."""
        live = self._live.get(request)
        return self._canary.next_forward if live is None else live.since

    def state_of(self, request: str) -> Any:
        """The engine's state of a request that waits or runs."""
        return self._scheduler.active_requests.get(request) or self._scheduler.waiting_requests.get(request)

    def _admit(self, request: str, state: Any, knows: Any, length: int) -> _Live:
        if len(self._live) >= self._max_rows and self._preempted and request not in self._live:
            self._end(next(iter(self._preempted)), None)
        row = self._facts(self._canary.admit, request, tokens=known_tokens(knows, length), start=length)
        live = self._live[request] = _Live(-1 if row is None else row, state, since=self._canary.next_forward)
        self._preempted.pop(request, None)
        for group, blocks in self._matches.pop(request, ()):
            self._facts(self._canary.reuse, group, request, blocks)
        return live

    # --- end ----------------------------------------------------------------------------------------------

    def ended(self, request: str, state: Any) -> None:
        """The engine let a request go: finished, cancelled, failed; or, inside an offload, only for now."""
        self._matches.pop(request, None)
        if self._offloading:
            self._preempt(request)
            return
        self._saved.pop(request, None)
        if state is not None and state.status.name == "FINISHED":
            self._end(request, state.initial_tokens + state.generated_tokens)
        else:
            self._end(request, None)

    def restarted(self, request: str) -> None:
        """The request went back to its queue with nothing; it is admitted anew."""
        self._matches.pop(request, None)
        self._saved.pop(request, None)
        self._preempt(request)

    def forget(self) -> None:
        """All requests are gone: a new session on the same pool."""
        for request in list(self._live):
            self._end(request, None)
        self._matches.clear()
        self._saved.clear()

    def reset(self) -> None:
        """Start over without telling anybody: after warm-up."""
        self._live.clear()
        self._preempted.clear()
        self._matches.clear()
        self._saved.clear()

    def _end(self, request: str, tokens: Sequence[int] | None) -> None:
        self._preempted.pop(request, None)
        if self._live.pop(request, None) is not None:
            self._facts(self._canary.finish, request, tokens=tokens)

    def _preempt(self, request: str) -> None:
        live = self._live.get(request)
        if live is not None:
            live.preempted = True
            self._preempted[request] = None
            self._facts(self._canary.preempt, request)

    # --- offload ------------------------------------------------------------------------------------------

    def offloaded(self, victims: Sequence[Any], kept: set[str], tables: Sequence[list[Sequence[int]]]) -> None:
        """Blocks of the victims whose names are in ``kept`` were copied out; their records leave with them."""
        for state, groups in zip(victims, tables, strict=True):
            if state.request_id not in kept:
                continue
            exported = [
                (group, self._facts(self._canary.export_records, self._tables.space(group), blocks))
                for group, blocks in enumerate(groups)
                if blocks
            ]
            self._saved[state.request_id] = [(group, records) for group, records in exported if records is not None]

    def restored(self, request: str) -> None:
        """The blocks of a request were copied back, to the first ones of its new tables."""
        for group, records in self._saved.pop(request, ()):
            blocks = list(self._tables.table(group, request)[: records.pages])
            space = self._tables.space(group)
            self._facts(self._canary.import_records, space, blocks, records, request=request)

    # --- wires --------------------------------------------------------------------------------------------

    def wire(self, patches: Patches, offloading: Any) -> None:
        """Listen to the scheduler and to the offloading manager."""
        patches.wrap(self._scheduler, "finish_request", self._on_finish)
        patches.wrap(self._scheduler, "clear_cancelled_requests", self._on_cancel)
        patches.wrap(self._scheduler, "reset", self._on_reset)
        patches.wrap(offloading, "offload_requests", self._on_offload)
        patches.wrap(offloading, "_offload_to_cpu", self._on_copy_out)
        patches.wrap(offloading, "restore_scheduled_requests", self._on_restore)

    def _on_finish(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def finish_request(request_id: str) -> Any:
            state = self._scheduler.active_requests.get(request_id)
            result = original(request_id)
            self.ended(request_id, state)
            return result

        return finish_request

    def _on_cancel(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def clear_cancelled_requests() -> Any:
            states = original()
            for state in states:
                self.ended(state.request_id, None)
            return states

        return clear_cancelled_requests

    def _on_reset(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def reset() -> Any:
            result = original()
            self.forget()
            return result

        return reset

    def _on_offload(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def offload_requests() -> Any:
            self._offloading = True
            try:
                return original()
            finally:
                self._offloading = False

        return offload_requests

    def _on_copy_out(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def offload_to_cpu(victims: Sequence[Any], *rest: Any) -> Any:
            tables = [self._tables.offloaded_tables(state, rest) for state in victims]
            kept = original(victims, *rest)
            self.offloaded(victims, kept, tables)
            return kept

        return offload_to_cpu

    def _on_restore(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def restore_scheduled_requests(requests_in_batch: Sequence[Any]) -> Any:
            names = [item.state.request_id for item in requests_in_batch if item.state.is_cpu_offloaded]
            result = original(requests_in_batch)
            for name in names:
                self.restored(name)
            return result

        return restore_scheduled_requests
