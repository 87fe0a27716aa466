"""The stats fold: numbers that people plot."""

from __future__ import annotations

from collections.abc import Mapping

from kvcanary.events import (
    Event,
    EventsDropped,
    FactsLost,
    RunStarted,
    SnapshotsSkipped,
    SnapshotTaken,
    StatsReported,
)
from kvcanary.observers.base import stamp


class StatsFold:
    """Reports every ``every`` forwards, with the first snapshot at or after each multiple.

    Counts are totals since the run began; costs and ``lag_ms`` (the worst) are over the period; a role is active when
    it was launched in the period; ``oldest_unscrubbed_forwards`` bounds the age of the oldest byte that was not read
    again.
    """

    name = "stats"
    interests: tuple[type[Event], ...] = (RunStarted, SnapshotTaken, EventsDropped, FactsLost, SnapshotsSkipped)
    emits: tuple[type[Event], ...] = (StatsReported,)
    guard = False

    def __init__(self, every: int) -> None:
        self._every = every
        self._reset(0)

    def _reset(self, all_roles: int) -> None:
        self._all_roles = all_roles
        self._next = self._every
        self._events_dropped = self._facts_lost = self._snapshots_skipped = 0
        self._launches: Mapping[str, int] = {}
        self._scrubs: dict[str, _ScrubAge] = {}
        self._begin_period()

    def _begin_period(self) -> None:
        self._snapshots = self._gpu_samples = 0
        self._host_us = self._gpu_us = self._lag_us = 0.0

    def handle(self, event: Event) -> tuple[StatsReported, ...]:
        """A report when one is due."""
        match event:
            case SnapshotTaken():
                return self._snapshot(event)
            case RunStarted():
                self._reset(len(event.roles))
            case EventsDropped():
                self._events_dropped += event.count
            case FactsLost():
                self._facts_lost += event.count
            case SnapshotsSkipped():
                self._snapshots_skipped += event.count
            case _:
                pass
        return ()

    def _snapshot(self, snapshot: SnapshotTaken) -> tuple[StatsReported, ...]:
        self._add(snapshot)
        if self._every == 0 or snapshot.forward < self._next:
            return ()
        self._next = snapshot.forward - snapshot.forward % self._every + self._every
        report = self._report(snapshot)
        self._launches = snapshot.launches
        self._begin_period()
        return (report,)

    def _add(self, snapshot: SnapshotTaken) -> None:
        self._snapshots += 1
        self._host_us += snapshot.host_us
        self._lag_us = max(self._lag_us, snapshot.lag_us)
        if snapshot.gpu_us is not None:
            self._gpu_samples += 1
            self._gpu_us += snapshot.gpu_us
        for group, passes in snapshot.scrub_passes.items():
            began = snapshot.scrub_pass_forwards.get(group, 0)
            self._scrubs[group] = _ScrubAge.after(self._scrubs.get(group), passes, began)

    def _report(self, snapshot: SnapshotTaken) -> StatsReported:
        active = sum(count > self._launches.get(role, 0) for role, count in snapshot.launches.items())
        return StatsReported(
            **stamp(snapshot, self.name),
            protected_tokens=snapshot.new_tokens,
            verified=_totals(snapshot.verified),
            unverified=_totals(snapshot.unverified),
            scrub_passes=dict(snapshot.scrub_passes),
            oldest_unscrubbed_forwards={
                group: max(0, snapshot.forward - scrub.previous_began) for group, scrub in self._scrubs.items()
            },
            violations=dict(snapshot.violations),
            active_roles=active,
            all_roles=self._all_roles or len(snapshot.launches),
            violations_dropped=snapshot.violations_dropped,
            events_dropped=self._events_dropped,
            facts_lost=self._facts_lost,
            snapshots_skipped=self._snapshots_skipped,
            lag_ms=self._lag_us / 1000,
            host_us_per_forward=self._host_us / self._snapshots,
            gpu_us_per_forward=self._gpu_us / self._gpu_samples if self._gpu_samples else None,
        )


class _ScrubAge:
    """When the running pass over a group began, and the one before it.

    The byte that the scrub reads next was last read in the pass before: at its very beginning at the earliest.
    """

    __slots__ = ("began", "passes", "previous_began")

    def __init__(self, passes: int, began: int, previous_began: int) -> None:
        self.passes = passes
        self.began = began
        self.previous_began = previous_began

    @classmethod
    def after(cls, before: _ScrubAge | None, passes: int, began: int) -> _ScrubAge:
        if before is None:
            return cls(passes, began, 0 if passes else began)
        if passes == before.passes:
            return before
        return cls(passes, began, before.began)


def _totals(by_group: Mapping[str, Mapping[str, int]]) -> dict[str, int]:
    return {name: sum(groups.values()) for name, groups in by_group.items()}
