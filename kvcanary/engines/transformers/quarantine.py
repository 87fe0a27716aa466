"""Requests and pages taken out of service on the engine's thread: healed where that can be, aborted where it cannot.

A quarantine is asked for at the entry of a step, when the rows of the forward are fixed. It is carried out where the
engine itself changes its tables: before it takes a forward's tokens, so that none of a bad one is kept, and before it
makes the next batch, so that nobody is given a bad page.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from kvcanary.engines.transformers.contract import input_buffers
from kvcanary.engines.transformers.prefix_index import PrefixIndex
from kvcanary.events import PagesQuarantined, QuarantineFailed, RequestQuarantined

if TYPE_CHECKING:
    from kvcanary.canary import Canary
    from kvcanary.engines.base import Patches
    from kvcanary.engines.transformers.requests import Requests
    from kvcanary.mailbox import Quarantine

MOST_HEALS = 3
"""Times that one request is recomputed; a fault that comes back each time would keep it for ever."""


class QuarantinedError(RuntimeError):
    """What a client is told whose request was aborted."""


class Healer:
    """Carries out quarantines on one batch processor of 5.18 or later.

    Args:
        canary: whose mailbox is read.
        processor: the engine's batch processor.
        requests: who is live since when.
        gate: held while tables are changed; the watch takes its hooks out under it.
    """

    def __init__(self, canary: Canary, processor: Any, requests: Requests, gate: AbstractContextManager[Any]) -> None:
        self._canary = canary
        self._processor = processor
        self._scheduler = processor.scheduler
        self._requests = requests
        self._gate = gate
        allocators = sorted(processor.cache.cache_allocators.values(), key=lambda allocator: allocator.index)
        self._indexes = [PrefixIndex(allocator) for allocator in allocators]
        self._asked: deque[Quarantine] = deque()
        self._heals: dict[str, int] = {}
        self._numbers = itertools.count(1)

    def take(self, wanted: Quarantine) -> tuple[()]:
        """Note what is wanted; :meth:`wire` says when it is done. What was done is told by events of its own."""
        self._asked.append(wanted)
        return ()

    def wire(self, patches: Patches) -> None:
        """Listen to who gets and publishes pages, and stand where the engine changes its tables."""
        for index in self._indexes:
            index.wire(patches, self._canary)
        patches.wrap(self._processor, "update_batch", self._first)
        patches.wrap(self._processor, "prepare_next_batch", self._first)
        patches.on_undo(self._give_up)

    def _first(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def carry_out_first(*args: Any, **kwargs: Any) -> Any:
            if self._asked or self._canary.mailbox.pending:
                with self._gate:
                    self._canary.check()
                    while self._asked:
                        self._carry_out(self._asked.popleft())
            return original(*args, **kwargs)

        return carry_out_first

    def _give_up(self) -> None:
        """The watch ends: say what was asked for and not done."""
        for wanted in (*self._asked, *self._canary.mailbox.take_quarantines()):
            self._fail(wanted, "", "the watch was stopped before the engine came round to it")
        self._asked.clear()

    # --- what is concerned --------------------------------------------------------------------------------

    def _carry_out(self, wanted: Quarantine) -> None:
        try:
            bad = [self._bad_pages(number, wanted) for number in range(len(self._indexes))]
            victims = self._victims(wanted, bad)
            for number, (index, pages) in enumerate(zip(self._indexes, bad, strict=True)):
                dropped = index.drop(pages)
                if dropped:
                    self._tell_of_pages(wanted, number, dropped)
        except Exception as error:  # noqa: BLE001 - the engine's own methods: the server goes on whatever they raise
            self._fail(wanted, "", _words(error))
            return
        for request in victims:
            self._take_out(wanted, request)
        if not self._scheduler.active_requests:
            # Set by an offload and cleared by a request that finishes: without any, nobody would ever be let in.
            self._scheduler.block_new_requests = False

    def _bad_pages(self, number: int, wanted: Quarantine) -> set[int]:
        """Pages of a group that are wrong or hold what was computed from wrong ones."""
        index = self._indexes[number]
        pages = index.written(wanted.requests, wanted.forward)
        if wanted.group and self._canary.layout.index(wanted.group) == number:
            named = {request for request in wanted.requests if self._is_concerned(request, wanted.forward)}
            for page in wanted.pages:
                holders = set(index.holders({page}))
                # A row that found it through a wrong table does not hold it: the page is its owner's, and right.
                if index.since(page) <= wanted.forward and (not named or not holders or named & holders):
                    pages.add(page)
        return index.with_descendants(pages)

    def _victims(self, wanted: Quarantine, bad: Iterable[set[int]]) -> Iterator[str]:
        named = [request for request in wanted.requests if self._is_concerned(request, wanted.forward)]
        holders = [request for index, pages in zip(self._indexes, bad, strict=True) for request in index.holders(pages)]
        for request in wanted.requests:
            if self._requests.state_of(request) is None:
                self._fail(wanted, request, "it had ended before: its whole answer has left")
        return iter(dict.fromkeys(named + holders))

    def _is_concerned(self, request: str, forward: int) -> bool:
        """Whether this is still the request in which something was found, and not another, or itself recomputed."""
        if request in self._scheduler.active_requests:
            return self._requests.since(request) <= forward
        state = self._scheduler.waiting_requests.get(request)
        return state is not None and (state.is_cpu_offloaded or (_true_prompt(state) > 0 and not state.streaming))

    # --- what is done -------------------------------------------------------------------------------------

    def _take_out(self, wanted: Quarantine, request: str) -> None:
        state = self._requests.state_of(request)
        if state is None:
            return
        left = _generated(state) if state.streaming else 0
        dropped = _generated(state) - left
        try:
            self._count_heal(request)
            self._heal(state)
            action = "healed"
        except Exception as error:  # noqa: BLE001 - the engine's own methods: the server goes on whatever they raise
            if not self._abort(wanted, state, error):
                return
            action = "aborted"
        self._canary.emit(
            RequestQuarantined(
                forward=self._canary.next_forward,
                request=request,
                action=action,
                incident=wanted.incident,
                tokens_left=left,
                tokens_dropped=dropped,
            )
        )

    def _count_heal(self, request: str) -> None:
        self._heals = {name: n for name, n in self._heals.items() if self._requests.state_of(name) is not None}
        heals = self._heals[request] = self._heals.get(request, 0) + 1
        if heals > MOST_HEALS:
            raise QuarantinedError(f"it was recomputed {MOST_HEALS} times, and its cache was found wrong again")

    def _heal(self, state: Any) -> None:
        """Back to the queue with all that has left, and nothing else; the pages go the way of a finished request's."""
        request, scheduler = state.request_id, self._scheduler
        fresh = _fresh(state)
        self._put_aside(state)
        if scheduler.waiting_requests.get(request) is state:
            self._processor.offloading_manager.free_request_cpu_cache(state)
            self._requests.restarted(request)
            scheduler.waiting_requests[request] = fresh  # keeps its place
            return
        scheduler.active_requests.pop(request)
        self._processor.cache.free_blocks(request)
        self._requests.restarted(request)
        scheduler.add_waiting_request(fresh)

    def _put_aside(self, state: Any) -> None:
        """Let what is in flight for a request go to a stand-in, which nobody asked for."""
        from transformers.generation.continuous_batching import requests as engine

        name = f"__kvcanary_quarantined_{next(self._numbers)}__"
        nobody: Any = engine.RequestState(request_id=name, initial_tokens=[], max_new_tokens=None)
        nobody._status = state.status  # noqa: SLF001 - the property takes a time stamp and may log
        for buffers in self._host_buffers():
            for future in buffers.requests_in_batch:
                if future.state is state:
                    future.state, future.complete_blocks = nobody, {}
            # The order counts: it says which token a request carries over into its next forward.
            positions = buffers.req_id_to_new_token_position
            buffers.req_id_to_new_token_position = {
                name if request == state.request_id else request: place for request, place in positions.items()
            }
        forks = self._scheduler._requests_to_fork  # noqa: SLF001 - a prompt that is computed anew forks then
        forks[:] = [parent for parent in forks if parent is not state]

    def _abort(self, wanted: Quarantine, state: Any, error: Exception) -> bool:
        try:
            self._put_aside(state)
            if not state.streaming:
                state.generated_tokens.clear()
            if self._scheduler.waiting_requests.pop(state.request_id, None) is not None:
                self._scheduler.waiting_requests_order.remove(state.request_id)
                self._processor.offloading_manager.free_request_cpu_cache(state)
            self._scheduler.finish_request(state.request_id)
            told = f"kvcanary aborted request {state.request_id!r}: {_words(error)}"
            self._processor.output_router.fail_and_deliver(state, QuarantinedError(told))
        except Exception as second:  # noqa: BLE001 - as in _take_out
            self._fail(wanted, state.request_id, f"{_words(error)}; then, aborting it: {_words(second)}")
            return False
        return True

    def _tell_of_pages(self, wanted: Quarantine, number: int, pages: tuple[int, ...]) -> None:
        group, now = self._canary.layout.groups[number].name, self._canary.next_forward
        self._canary.emit(PagesQuarantined(forward=now, incident=wanted.incident, group=group, pages=pages))

    def _fail(self, wanted: Quarantine, request: str, error: str) -> None:
        self._canary.emit(
            QuarantineFailed(
                forward=self._canary.next_forward,
                request=request,
                error=error,
                incident=wanted.incident,
                group=wanted.group,
                pages=wanted.pages,
            )
        )

    def _host_buffers(self) -> list[Any]:
        return input_buffers(self._processor, "host_io")


def _fresh(state: Any) -> Any:
    """The same request before it was computed: prompt and settings, and of a streamed one what was streamed."""
    if state.streaming:
        return state.create_equivalent_initial_request()
    prompt = _true_prompt(state) or len(state.initial_tokens)
    settings = state.get_request_config()
    if settings["max_new_tokens"] is not None:
        # A request that was reset before has its earlier tokens in its prompt, and so many fewer to go.
        settings["max_new_tokens"] += len(state.initial_tokens) - prompt
    fresh = type(state)(request_id=state.request_id, initial_tokens=state.initial_tokens[:prompt], **settings)
    fresh.created_time = state.created_time
    return fresh


def _true_prompt(state: Any) -> int:
    """Length of the client's own prompt if earlier tokens were appended to it; else 0."""
    return int(state._true_initial_tokens)  # noqa: SLF001 - the engine has no public name


def _generated(state: Any) -> int:
    """Tokens generated so far, also before a reset."""
    prompt = _true_prompt(state)
    return len(state.generated_tokens) + (len(state.initial_tokens) - prompt if prompt else 0)


def _words(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
