"""What the ledger finds in one fact, told as events: one for each rule and pair of parties, however many pages."""

from __future__ import annotations

from typing import NamedTuple

from kvcanary.events import Event, HazardCounted, OwnershipViolated
from kvcanary.observers.base import stamp
from kvcanary.text import printable

MAX_RUNS_TOLD = 4
"""Runs of pages that a violation lists in words; the rest is a number."""
MAX_RUNS = 64
"""Runs of pages that it carries."""


class Pages(NamedTuple):
    """``size`` consecutive pages of a group, from ``first``."""

    group: str
    first: int
    size: int


class Findings:
    """Violations of the fact at hand, and hazards since the run began."""

    def __init__(self, by: str) -> None:
        self._by = by
        self.clear()

    def clear(self) -> None:
        """A new run."""
        self._runs: dict[tuple[str, str, str, str, str], list[Pages]] = {}
        self._hazards: dict[str, int] = {}
        self._told: dict[str, int] = {}

    def violated(self, kind: str, pages: Pages, request: str, other: str, detail: str) -> None:
        """``request`` broke a rule with ``pages``, and ``other`` suffers."""
        key = (kind, pages.group, request, "" if other == request else other, detail)
        self._runs.setdefault(key, []).append(pages)

    def hazard(self, name: str, pages: int) -> None:
        """Legal but risky."""
        self._hazards[name] = self._hazards.get(name, 0) + pages

    def take(self, source: Event) -> list[Event]:
        """Events for the violations found in ``source``."""
        if not self._runs:
            return []
        found, self._runs = self._runs, {}
        return [
            OwnershipViolated(
                **stamp(source, self._by),
                kind=kind,
                group=group,
                page=runs[0].first,
                request=request,
                other=other,
                detail=printable(f"{_listed(runs)}: {detail}"),
                page_runs=tuple((pages.first, pages.size) for pages in runs[:MAX_RUNS]),
            )
            for (kind, group, request, other, detail), runs in found.items()
        ]

    def take_hazards(self, source: Event) -> list[Event]:
        """Totals, in pages, of the hazards that grew since the last call."""
        grown = [name for name, count in self._hazards.items() if count > self._told.get(name, 0)]
        self._told.update((name, self._hazards[name]) for name in grown)
        return [HazardCounted(**stamp(source, self._by), hazard=name, count=self._hazards[name]) for name in grown]


def _listed(runs: list[Pages]) -> str:
    told = [str(first) if size == 1 else f"{first}..{first + size - 1}" for _, first, size in runs[:MAX_RUNS_TOLD]]
    rest = sum(pages.size for pages in runs[MAX_RUNS_TOLD:])
    single = len(runs) == 1 and runs[0].size == 1
    return f"page{'' if single else 's'} {', '.join(told)}{f' and {rest} more' if rest else ''}"
