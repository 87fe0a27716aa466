"""Folds in order: numbers events and runs the folds over them.

An event is numbered, passes every fold that is interested, and what these derive follows right behind it:
numbered next, and seen by later folds only. So every reader sees ascending numbers, derivation ends, and equal
input gives equal output.

Events are numbered in place: a frozen struct that nobody else has seen yet may be filled in, at a third of the
price of a copy. One that carries a number already (a replay, a repeated object) is copied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from msgspec.structs import force_setattr, replace

from kvcanary.errors import CanaryStalledError, ConfigError, words_of
from kvcanary.events import (
    Derived,
    Event,
    EventsDropped,
    FactsLost,
    ObserverFailed,
    RunStarted,
    SnapshotsSkipped,
    SnapshotTaken,
    event_name,
)
from kvcanary.observers.base import Fold

MAX_FAILURES = 16
"""Failures in one run after which a fold is detached until the next."""


_Route = tuple[tuple[int, Callable[[Event], Iterable[Event] | None]], ...]
"""Positions and handlers of the folds that want events of one type."""


class Folding:
    """Numbers events of one run after another and runs folds over them. One thread.

    Args:
        folds: in the order in which they run. A fold may declare ``emits``, the event types it derives; the
            order is checked against it.
        on_guard_failure: told of a guard's first failure in a run.

    Attributes:
        seq: number of the last event.
        degraded: guards that failed in this run.

    Raises:
        ConfigError: two folds of one name, or a fold that consumes what only itself or a later one emits.
    """

    def __init__(
        self, folds: Sequence[Fold], on_guard_failure: Callable[[CanaryStalledError], None] | None = None
    ) -> None:
        check_order(folds)
        self.seq = 0
        self.degraded: dict[str, None] = {}
        self._folds = tuple(folds)
        self._routes = _Routes(self._folds)
        self._failures = [0] * len(self._folds)
        self._on_guard_failure = on_guard_failure

    def begin(self) -> None:
        """A new run: number from 1, and give every fold another chance. Folds reset themselves on ``RunStarted``."""
        self.seq = 0
        self.degraded.clear()
        self._failures = [0] * len(self._folds)
        self._routes.attach_all()

    def wants(self, event_type: type[Event]) -> bool:
        """Whether a fold is interested in events of a type, failed ones included."""
        return any(issubclass(event_type, fold.interests) for fold in self._folds)

    def run(self, events: Sequence[Event]) -> list[Event]:
        """The events with their numbers, each followed by what was derived from it."""
        out: list[Event] = []
        for event in events:
            self._pass(event, self._routes[type(event)], out)
        return out

    def _pass(self, event: Event, route: _Route, out: list[Event]) -> None:
        self.seq = seq = self.seq + 1
        if event.seq:
            event = replace(event, seq=seq)
        else:
            force_setattr(event, "seq", seq)
        out.append(event)
        if not route:
            return
        derived: list[tuple[Event, int]] = []
        for index, handle in route:
            try:
                result = handle(event)
                if result:
                    name = self._folds[index].name
                    derived += [(_derived(found, event, name), index) for found in result]
            except Exception as error:  # noqa: BLE001 - whatever a fold raises is its own failure
                derived.append((self._failed(index, error, event), index))
        # Only now, when every fold has seen the event itself: numbers ascend for all of them.
        for found, by in derived:
            later = tuple(entry for entry in self._routes[type(found)] if entry[0] > by)
            self._pass(found, later, out)

    def _failed(self, index: int, error: Exception, event: Event) -> Event:
        fold = self._folds[index]
        self._failures[index] += 1
        detached = self._failures[index] >= MAX_FAILURES
        if detached:
            self._routes.detach(index)
        if fold.guard and fold.name not in self.degraded:
            self.degraded[fold.name] = None
            self._tell_of_guard(fold.name, error, event)
        action = "degraded" if fold.guard else "stopped" if detached else "continued"
        failed = ObserverFailed(
            observer=fold.name,
            error=words_of(error),
            event_type=event_name(event),
            failures=self._failures[index],
            action=action,
        )
        return _derived(failed, event, fold.name)

    def _tell_of_guard(self, name: str, error: Exception, event: Event) -> None:
        if self._on_guard_failure is None:
            return
        stalled = CanaryStalledError(
            f"guard {name!r} failed on {event_name(event)} (seq {event.seq}) with {words_of(error)}; "
            f"the run goes on without full protection"
        )
        stalled.__cause__ = error
        self._on_guard_failure(stalled)


class Losses:
    """A fold that counts what a run loses.

    Attributes:
        facts, snapshots, events: lost facts, skipped snapshots, events that full queues gave up.
        last_snapshot_ns: monotonic time of the last snapshot, or of the run's beginning.
    """

    name = "losses"
    interests: tuple[type[Event], ...] = (RunStarted, SnapshotTaken, FactsLost, SnapshotsSkipped, EventsDropped)
    guard = False

    def __init__(self) -> None:
        self.facts = self.snapshots = self.events = 0
        self.last_snapshot_ns = 0

    def handle(self, event: Event, /) -> None:
        """Count."""
        if isinstance(event, SnapshotTaken):
            self.last_snapshot_ns = event.monotonic_ns
        elif isinstance(event, RunStarted):
            self.facts = self.snapshots = self.events = 0
            self.last_snapshot_ns = event.monotonic_ns
        elif isinstance(event, FactsLost):
            self.facts += event.count
        elif isinstance(event, SnapshotsSkipped):
            self.snapshots += event.count
        elif isinstance(event, EventsDropped):
            self.events += event.count


def check_order(folds: Sequence[Fold]) -> None:
    """Refuse an order in which a fold could never see what it consumes.

    Raises:
        ConfigError: two folds of one name, or a fold with an interest that only itself or later folds emit.
    """
    names = [fold.name for fold in folds]
    for position, name in enumerate(names):
        if name in names[:position]:
            raise ConfigError(f"two folds are named {name!r}; events name who derived them, so give each its own")
    emits: list[tuple[type[Event], ...]] = [tuple(getattr(fold, "emits", ())) for fold in folds]
    for position, fold in enumerate(folds):
        for wanted in fold.interests:
            first = next((i for i, types in enumerate(emits) if wanted in types), -1)
            if first >= position:
                who = "itself emits" if first == position else f"{names[first]!r} emits, which runs after it"
                raise ConfigError(
                    f"fold {fold.name!r} consumes {event_name(wanted)}, which only {who}; derived events go to later "
                    f"folds only, so it would wait for ever: change the order or the interests"
                )


class _Routes(dict[type[Event], _Route]):
    """Which folds want events of a type, in order; remembers the answers."""

    def __init__(self, folds: Sequence[Fold]) -> None:
        super().__init__()
        self._folds = folds
        self._detached: set[int] = set()

    def __missing__(self, event_type: type[Event]) -> _Route:
        self[event_type] = route = tuple(
            (index, fold.handle)
            for index, fold in enumerate(self._folds)
            if index not in self._detached and issubclass(event_type, fold.interests)
        )
        return route

    def detach(self, index: int) -> None:
        """Leave one fold out from now on."""
        self._detached.add(index)
        self.clear()

    def attach_all(self) -> None:
        """All folds take part again."""
        self._detached.clear()
        self.clear()


def _derived(found: object, source: Event, by: str) -> Event:
    """Fill a derived event's envelope where it is empty. It keeps its source's times, so that a replay equals it."""
    if not isinstance(found, Event):
        raise TypeError(f"a fold returns events, got {type(found).__name__}")
    if found.seq:
        found = replace(found, seq=0)
    if not found.time_ns:
        force_setattr(found, "time_ns", source.time_ns)
        force_setattr(found, "monotonic_ns", source.monotonic_ns)
    if not found.forward:
        force_setattr(found, "forward", source.forward)
    if isinstance(found, Derived):
        if not found.cause:
            force_setattr(found, "cause", source.seq)
        if not found.by:
            force_setattr(found, "by", by)
    return found
