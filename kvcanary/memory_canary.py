"""A canary without a device: what tests tell it goes through the real folds to the real observers, at once."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar

from msgspec.structs import replace

from kvcanary.bus import Bus
from kvcanary.config import CanaryConfig
from kvcanary.errors import BatchError, CanaryStalledError, ConfigError
from kvcanary.events import (
    CanaryArmed,
    Event,
    FactsLost,
    ForwardRetired,
    GroupInfo,
    Origin,
    RunStarted,
    SnapshotTaken,
    Ticked,
    ViolationDetected,
)
from kvcanary.facts import FactLog
from kvcanary.mailbox import Mailbox, Raise
from kvcanary.observers import default_folds, default_sinks
from kvcanary.observers.base import Observer
from kvcanary.wire import CallName, LifecycleCalls, unpack

E = TypeVar("E", bound=Event)

DELIVERY_SECONDS = 10.0
"""How long one call waits for observers to handle what it brought."""
_ROLES: tuple[str, ...] = ("facts", "mark", "check", "seal")


class Clock(Protocol):
    """Such as :class:`kvcanary.testing.DeterministicClock`, or the module :mod:`time`."""

    def time_ns(self) -> int:
        """Nanoseconds since 1970."""
        ...

    def monotonic_ns(self) -> int:
        """Nanoseconds since some time."""
        ...


class MemoryCanary(LifecycleCalls):
    """The host half of a canary: facts, numbering, folds (the ledger among them) and observers, but no device.

    For tests of observers, and of schedulers: it takes their lifecycle calls, and the ledger judges them. It reads no
    cache, so it verifies nothing by itself, and :func:`kvcanary.testing.assert_no_violations` says so. Every call
    returns when the observers have handled what it brought; async ones run on a loop of their own. One thread.

    Args:
        config: default: mode ``log``.
        observers: functions and objects that receive events, in addition to the configured ones.
        groups: attention groups, by name or in full.
        clock: what stamps the events.

    Attributes:
        events: all events so far, in their order.

    Raises:
        ConfigError: the mode is ``off``, or an observer cannot be used.
    """

    def __init__(
        self,
        config: CanaryConfig | None = None,
        *,
        observers: Sequence[Observer] = (),
        groups: Sequence[str | GroupInfo] = ("full",),
        clock: Clock = time,
    ) -> None:
        self.config = config or CanaryConfig(mode="log")
        if self.config.mode == "off":
            raise ConfigError("mode 'off' makes no canary; a MemoryCanary needs 'log', 'raise' or 'quarantine'")
        self.events: list[Event] = []
        self.next_forward = 1
        self.mailbox = Mailbox()
        self._groups = tuple(map(_group, groups))
        self._clock = clock
        self._observers = (*default_sinks(self.config), *observers)
        folds = default_folds(self.config, self.mailbox)
        self._bus = Bus(folds, sink_queue=self.config.sink_queue, on_guard_failure=self._unguarded)
        self._facts = FactLog(self.config.fact_queue)
        self._tags: dict[str, int] = {}
        self._admissions = 0

    def start(self) -> Self:
        """Subscribe the observers and begin a run, armed."""
        for observer in self._observers:
            self._bus.subscribe(observer, private=True)
        self._facts.enabled = True
        started = RunStarted(
            run="memory",
            origin=Origin(engine="memory"),
            mode=self.config.mode,
            config=self.config.describe(),
            groups=self._groups,
            roles=_ROLES,
        )
        self.events += self._bus.begin_run(self._stamped(started))
        self.emit(CanaryArmed(forward=1))
        return self

    def stop(self) -> None:
        """End the run and the observers. Idempotent."""
        if self._bus.running:
            self.flush()
            self._bus.end_run("stopped")
        self._bus.close(time.monotonic() + DELIVERY_SECONDS)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()
        if error is None:
            self.check()

    @property
    def error(self) -> BaseException | None:
        """The first corruption or stall in ``raise`` mode; stays."""
        return self.mailbox.error

    def check(self) -> None:
        """Raise what was found in ``raise`` mode.

        Raises:
            KVCorruptionError: corruption was found.
            CanaryStalledError: a guard stopped working.
        """
        if self.mailbox.error is not None:
            raise self.mailbox.error

    def forward(
        self, *, rows: int = 1, tokens: int = 1, verified: Mapping[str, Mapping[str, int]] | None = None
    ) -> int:
        """One forward, launched and done; returns its number.

        Args:
            rows: requests in it.
            tokens: new tokens.
            verified: what a device would have verified since the run began, by check and group.

        Raises:
            KVCorruptionError: in ``raise`` mode, at every forward once corruption was found.
        """
        self.check()
        number, self.next_forward = self.next_forward, self.next_forward + 1
        due = dict.fromkeys(_ROLES, number)
        self._facts.step(number, number - 1)
        self._facts.launched(number, number - 1, rows, tokens, 1, due)
        counted = {check: dict(groups) for check, groups in (verified or {}).items()}
        taken = SnapshotTaken(forward=number, host_forward=number, launches=due, due=due, verified=counted)
        self._publish([*self._facts.take(), ForwardRetired(forward=number, through=number), taken])
        return number

    def find(self, kind: str, **fields: Any) -> None:
        """A violation, as if the device had found it in the last forward; ``fields`` are those of the event."""
        found = ViolationDetected(kind=kind, role="check", group=self._groups[0].name, forward=self.next_forward - 1)
        self.emit(replace(found, **fields))

    def tick(self) -> None:
        """A second passes: folds tell what they hold back."""
        self.emit(Ticked())

    def emit(self, event: Event) -> None:
        """Put an event into the stream, after the facts so far."""
        self._publish([*self._facts.take(everything=True), event])

    def flush(self) -> None:
        """Have the facts so far judged, without a forward."""
        self._publish(self._facts.take(everything=True))

    def ingest(self, data: bytes) -> None:
        """Make the calls that a :class:`~kvcanary.wire.FactWriter` packed.

        Raises:
            ConfigError: not such bytes, or those of another version.
        """
        for name, arguments in unpack(data):
            self._put(name, **arguments)

    # --- lifecycle calls ----------------------------------------------------------------------------------

    def _put(self, name: CallName, **arguments: Any) -> None:
        if "group" in arguments:
            arguments["group"] = self._group_name(arguments["group"])
        handler: Callable[..., None] = getattr(self, f"_on_{name}", None) or self._pages_call(name)
        handler(**arguments)

    def _pages_call(self, kind: str) -> Callable[..., None]:
        def tell(group: str, pages: Sequence[int], request: str | None = None) -> None:
            self._facts.pages("reuse" if kind == "own" else kind, group, request or "", pages)

        return tell

    def _on_admit(self, request: str, start: int, **_: object) -> None:
        self._admissions += 1
        self._tags[request] = self._admissions
        self._facts.admitted(request, self._admissions - 1, self._admissions, start)

    def _on_rewind(self, request: str, length: int, **_: object) -> None:
        self._facts.rewound(request, self._tag(request), length)

    def _on_preempt(self, request: str) -> None:
        self._facts.preempted(request, self._tag(request))

    def _on_finish(self, request: str, tokens: Sequence[int] | None, length: int | None) -> None:
        tag = self._tags.pop(request, None)
        if tag is not None:
            self._facts.finished(request, tag, max(len(tokens or ()) - 1, 0) if length is None else length)

    def _on_move(self, group: str, sources: Sequence[int], targets: Sequence[int], **_: object) -> None:
        self._facts.moved(group, sources, targets)

    def _on_transfer(
        self,
        transfer: str,
        event: str,
        *,
        pages: Sequence[int],
        direction: str,
        tier: str,
        blocks: Sequence[int],
        error: str,
        request: str | None,
        **start: Any,
    ) -> None:
        self._facts.retired = self.next_forward - 1
        if event == "start":
            who, ordered = request or "", start["ordered"]
            if len(pages):
                self._facts.transfer_started(transfer, start["group"], who, pages, direction, ordered=ordered)
            if tier:
                other = "out" if direction == "in" else "in"
                self._facts.transfer_started(transfer, tier, who, blocks, other, ordered=ordered)
        elif event == "landed":
            self._facts.transfer_landed(transfer)
        elif event == "failed":
            self._facts.transfer_failed(transfer, error)
        else:
            raise BatchError(f"transfer {transfer!r}: event must be 'start', 'landed' or 'failed', got {event!r}")

    def _on_alloc_blocks(self, tier: str, request: str, blocks: Sequence[int]) -> None:
        self._facts.pages("alloc", tier, request, blocks)

    def _on_free_blocks(self, tier: str, blocks: Sequence[int], request: str | None) -> None:
        self._facts.pages("free", tier, request or "", blocks)

    def _on_weights_updated(self, epoch: int) -> None:
        self._facts.weights_updated(epoch)

    def _on_facts_lost(self, count: int) -> None:
        self._facts.append(FactsLost(count=count))

    def _tag(self, request: str) -> int:
        if request not in self._tags:
            raise BatchError(f"request {request!r} is not live; call admit() first")
        return self._tags[request]

    def _group_name(self, group: str | int) -> str:
        names = [info.name for info in self._groups]
        if isinstance(group, int) and 0 <= group < len(names):
            return names[group]
        if group in names:
            return str(group)
        raise BatchError(f"no attention group {group!r}; this canary has {names}")

    # --- the stream ---------------------------------------------------------------------------------------

    def _publish(self, events: Iterable[Event]) -> None:
        if not self._bus.running:
            raise BatchError("this canary has no run; use it as a context manager, or call start()")
        self.events += self._bus.publish([self._stamped(event) for event in events])
        if not self._bus.flush(time.monotonic() + DELIVERY_SECONDS):
            raise BatchError(f"an observer did not handle its events within {DELIVERY_SECONDS} s")
        self.events += self._bus.pump(everything=True)

    def _unguarded(self, error: CanaryStalledError) -> None:
        if self.config.mode == "raise":
            self.mailbox.post(Raise(error))

    def _stamped(self, event: E) -> E:
        return replace(event, time_ns=self._clock.time_ns(), monotonic_ns=self._clock.monotonic_ns())


def _group(group: str | GroupInfo) -> GroupInfo:
    if isinstance(group, GroupInfo):
        return group
    return GroupInfo(name=group, kind="full", num_slots=1 << 20, page_size=16, token_bytes=0, sources=0)
