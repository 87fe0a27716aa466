"""Lifecycle facts: recorded on the engine's thread for the price of an append, packed on the drain's.

Each fact is stamped with ``forward``, from which it holds (that of the :meth:`FactLog.step` that follows the call), and
with ``retired``, the last finished forward when it was recorded. Verdicts use these stamps only.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence

from kvcanary.errors import BatchError, ConfigError
from kvcanary.events import (
    Event,
    FactsLost,
    ForwardLaunched,
    PagesAllocated,
    PagesFact,
    PagesFreed,
    PagesMoved,
    PrefixEvicted,
    PrefixPublished,
    PrefixReused,
    RecordsRestamped,
    RequestsAdmitted,
    RequestsFinished,
    RequestsPreempted,
    RequestsRewound,
    TransferFailed,
    TransferLanded,
    TransferStarted,
    WeightsUpdated,
)
from kvcanary.packing import EventCall, PagesCall, RequestCall, Spaces, Stamp, pack, page_runs

Call = PagesCall | RequestCall | EventCall

PATIENCE_SECONDS = 0.02
"""How long facts wait for the step that they belong to; an idle engine makes none."""


class _PageKinds(dict[str, type[PagesFact]]):
    def __missing__(self, kind: str) -> type[PagesFact]:
        raise ConfigError(f"no kind of page fact is called {kind!r}; kinds are {', '.join(self)}")


PAGE_KINDS = _PageKinds(
    alloc=PagesAllocated,
    free=PagesFreed,
    reuse=PrefixReused,
    publish=PrefixPublished,
    evict=PrefixEvicted,
    restamp=RecordsRestamped,
)
"""What :meth:`FactRecorder.pages` calls them."""


class FactRecorder:
    """The calls that record facts. Nothing blocks and nothing is lost uncounted; each thread's calls keep their order.

    Args:
        capacity: most calls that wait to be packed.

    Attributes:
        enabled: nothing is recorded while it is False.
        retired: the last finished forward; whoever learns of it first writes it here.
        spaces: groups that share bytes, see :data:`kvcanary.packing.Spaces`.
    """

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ConfigError(f"capacity of the fact queue is {capacity}; expected at least 1")
        self.enabled = False
        self.retired = 0
        self.spaces: Spaces = {}
        self._capacity = capacity
        self._room = capacity
        self._calls: deque[Call | Stamp] = deque()
        self._lost: list[int] = []  # count, first and last forward
        self._forward = 1
        self._unstamped = False
        """something was recorded since the last stamp"""
        self._joined: list[str] = []
        self._left: list[str] = []

    @property
    def queued(self) -> int:
        """Calls that wait to be packed."""
        return len(self._calls)

    def pages(self, kind: str, group: str, request: str, pages: Sequence[int]) -> None:
        """Pages of a group changed hands; ``kind`` is one of :data:`PAGE_KINDS`, ``""`` is nobody.

        Raises:
            ConfigError: no such kind.
            BatchError: the request is no string.
        """
        if self.enabled and len(pages):
            if not isinstance(request, str):  # pyright: ignore[reportUnnecessaryIsInstance] - the drain would see several
                raise BatchError(f"request {request!r}: ids must be strings")
            held = tuple(pages)  # the caller goes on writing into its list
            if len(self._calls) >= self._room:
                self._lose()
                return
            self._calls.append(PagesCall(PAGE_KINDS[kind], self.retired, group, request, held))
            self._unstamped = True  # after it: another thread may close the window in between

    def pages_each(self, kind: str, group: str, requests: Sequence[str], pages: Sequence[int]) -> None:
        """As :meth:`pages`, with one page for each of many requests: a batch that grew by a page a row.

        Raises:
            ConfigError: no such kind, or lengths that differ.
        """
        if len(requests) != len(pages):
            raise ConfigError(f"pages_each needs a page for each request, got {len(requests)} and {len(pages)}")
        if len(pages):
            self._put(PagesCall(PAGE_KINDS[kind], self.retired, group, tuple(requests), tuple(pages)))

    def admitted(self, request: str, row: int, tag: int, start: int, digest: str = "") -> None:
        """A request got a row; ``digest``: that of its first ``start`` tokens, "" when it comes later."""
        self._put_change(self._joined, RequestCall(RequestsAdmitted, self.retired, (request, row, tag, start, digest)))

    def finished(self, request: str, tag: int, length: int, digest: str = "") -> None:
        """A request ended; ``digest``: the one expected at ``length``, "" when the engine did not tell."""
        self._put_change(self._left, RequestCall(RequestsFinished, self.retired, (request, tag, length, digest)))

    def preempted(self, request: str, tag: int) -> None:
        """A request lost its pages and will resume or restart."""
        self._put_change(self._left, RequestCall(RequestsPreempted, self.retired, (request, tag)))

    def rewound(self, request: str, tag: int, length: int) -> None:
        """A request goes on from ``length``."""
        self._put(RequestCall(RequestsRewound, self.retired, (request, tag, length)))

    def moved(self, group: str, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Pages were copied on the device, records with them."""
        self.append(PagesMoved(group=group, sources=tuple(sources), targets=tuple(targets)))

    def transfer_started(
        self, transfer: str, group: str, request: str, pages: Sequence[int], direction: str, *, ordered: bool = False
    ) -> None:
        """Bytes are about to leave (``"out"``) or enter (``"in"``) pages."""
        self.append(
            TransferStarted(
                transfer=transfer,
                group=group,
                requests=(request,),
                runs=tuple(page_runs(0, tuple(pages))),
                direction=direction,
                ordered=ordered,
            )
        )

    def transfer_landed(self, transfer: str) -> None:
        """A transfer is complete and its bytes are visible."""
        self.append(TransferLanded(transfer=transfer))

    def transfer_failed(self, transfer: str, error: str = "") -> None:
        """A transfer did not complete."""
        self.append(TransferFailed(transfer=transfer, error=error))

    def weights_updated(self, epoch: int) -> None:
        """Everything cached before was made by older weights."""
        self.append(WeightsUpdated(epoch=epoch))

    def append(self, event: Event) -> None:
        """Record a whole event; its envelope is filled where it is empty."""
        self._put(EventCall(type(event), self.retired, event))

    def _put_change(self, change: list[str], call: RequestCall) -> None:
        if self.enabled:
            change.append(call.row[0])
            self._put(call)

    def _put(self, call: Call) -> None:
        if self.enabled:
            if len(self._calls) >= self._room:
                self._lose()
                return
            self._calls.append(call)
            self._unstamped = True

    def _lose(self) -> None:
        # What follows a loss is of little use, so the rest of the step is lost with it and recording needs one test.
        self._room = 0
        lost = self._lost or [0, self._forward, 0]
        self._lost = [lost[0] + 1, lost[1], self._forward]

    def stamp(self, forward: int, retired: int) -> None:
        """What was recorded within a step holds from its next forward, number ``forward``. Engine's thread."""
        if self.enabled:
            self.retired = retired
            self._stamp(forward)

    def _stamp(self, forward: int, time_ns: int = 0, monotonic_ns: int = 0) -> None:
        """Close a window: the calls since the last one hold from ``forward``. Losses are told once there is room."""
        self._forward = forward
        if self._lost and len(self._calls) < self._capacity:
            count, first, last = self._lost
            self._lost = []
            self._room = self._capacity
            self._put(
                EventCall(
                    FactsLost,
                    self.retired,
                    FactsLost(forward=forward, count=count, first_forward=first, last_forward=last),
                )
            )
        # Above the bound every call has its stamp already: an engine whose reader is gone must not fill the memory.
        if self._unstamped and len(self._calls) <= self._capacity:
            self._unstamped = False
            self._calls.append(Stamp(forward, time_ns or time.time_ns(), monotonic_ns or time.monotonic_ns()))


class FactLog(FactRecorder):
    """Facts of an engine in this process. The engine's thread records, the drain's thread takes.

    Attributes:
        wants: whether anybody is interested in facts of a type; others are not packed.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._window: list[Call] = []
        self._window_since = 0.0
        self._hurried = False
        self._in_step = False
        self.wants: Callable[[type[Event]], bool] = _everything

    @property
    def queued(self) -> int:
        """Calls that wait to be packed."""
        return len(self._calls) + len(self._window)

    def new_run(self) -> None:
        """Forwards are numbered from 1 again; what the old run recorded must have been taken. Engine's thread."""
        self.retired, self._forward, self._in_step = 0, 1, False
        self._joined.clear()
        self._left.clear()

    def step(self, forward: int, retired: int) -> None:
        """A step begins: the facts since the last one hold from its first forward. Engine's thread."""
        if self.enabled:
            self._in_step = True
            self.stamp(forward, retired)

    def launched(  # noqa: PLR0917 - the columns of one fact
        self, forward: int, retired: int, rows: int, tokens: int, forwards: int, due: dict[str, int]
    ) -> None:
        """The step's forwards, ``forward`` the first, are on the device's queue. Engine's thread.

        ``due`` is kept as it is; the caller does not change it any more.
        """
        if not self.enabled:
            return
        self.retired = retired
        time_ns, monotonic_ns = time.time_ns(), time.monotonic_ns()
        event = ForwardLaunched(
            time_ns=time_ns,
            monotonic_ns=monotonic_ns,
            forward=forward,
            retired=retired,
            rows=rows,
            tokens=tokens,
            joined=tuple(self._joined),
            left=tuple(self._left),
            forwards=forwards,
            due=due,
        )
        if self._joined or self._left:
            self._joined.clear()
            self._left.clear()
        self._put(EventCall(ForwardLaunched, retired, event))
        self._stamp(forward + forwards, time_ns, monotonic_ns)
        self._in_step = False

    def launched_nothing(self) -> None:
        """The step made no forward. Engine's thread."""
        self._in_step = False

    def announce(self, event: Event) -> None:
        """Tell of an end or a new beginning of the checks: in its place among the facts, soon, whether there is room.

        It must not be overtaken by facts: the ledger would judge what comes after by what was before. Engine's thread.
        """
        self._calls.append(EventCall(type(event), self.retired, event))
        self._unstamped = True
        self.hurry()

    def hurry(self) -> None:
        """Let the next :meth:`take` not wait for the next step. Any thread."""
        self._hurried = True

    def take(self, *, everything: bool = False) -> list[Event]:
        """The facts of all complete windows, in order. The drain's thread.

        Facts that wait for their step are taken without it when none came for :data:`PATIENCE_SECONDS` or after
        :meth:`hurry`; they hold from the next forward. Within a step that is not known yet and they wait for its end,
        unless ``everything`` is asked for or recording is over.
        """
        hurried, self._hurried = self._hurried, False
        everything = everything or not self.enabled
        events: list[Event] = []
        for call in [self._calls.popleft() for _ in range(len(self._calls))]:
            if isinstance(call, Stamp):
                events += pack(self._window, call, self.spaces)
                self._window = []
            elif self.wants(call.kind):
                self._window.append(call)
        if self._window and (everything or (not self._in_step and (hurried or self._waited_enough()))):
            forward = self._forward + self._in_step
            events += pack(self._window, Stamp(forward, time.time_ns(), time.monotonic_ns()), self.spaces)
            self._window = []
        if not self._window:
            self._window_since = 0.0
        return events

    def _waited_enough(self) -> bool:
        now = time.monotonic()
        self._window_since = self._window_since or now
        return now - self._window_since > PATIENCE_SECONDS


def _everything(_event_type: type[Event]) -> bool:
    return True
