"""A hand-written engine for the ownership fold: calls as engines make them, through the real recorder and packer."""

from __future__ import annotations

from collections.abc import Sequence

from kvcanary.events import Event, GroupInfo, HazardCounted, Origin, OwnershipViolated, RunStarted, Ticked
from kvcanary.facts import FactLog
from kvcanary.observers.ownership import OwnershipFold


def group(name: str = "full", *, window: int | None = None, shares: str | None = None) -> GroupInfo:
    """A group of 1,024 pages."""
    kind = "full" if window is None else "swa"
    return GroupInfo(
        name=name, kind=kind, num_slots=16384, page_size=16, token_bytes=1, sources=1, window=window, shares=shares
    )


class Script:
    """Lifecycle calls in the field's words; :meth:`launch` closes a step and shows its facts to the fold.

    Attributes:
        forward: the next forward.
        found: violations of the last launch.
        all_found: violations since the beginning.
    """

    def __init__(self, *groups: GroupInfo) -> None:
        self.fold = OwnershipFold()
        self.log = FactLog(1 << 16)
        self.log.enabled = True
        self.forward = 1
        self.found: list[OwnershipViolated] = []
        self.all_found: list[OwnershipViolated] = []
        self.show(RunStarted(run="r", origin=Origin(), groups=groups or (group(),)))

    def alloc(self, request: str, *pages: int, group: str = "full") -> None:
        """The allocator handed out pages."""
        self.log.pages("alloc", group, request, pages)

    def free(self, *pages: int, request: str = "", group: str = "full") -> None:
        """The allocator took pages back."""
        self.log.pages("free", group, request, pages)

    def publish(self, request: str, *pages: int, group: str = "full") -> None:
        """Pages can be found by their prefix."""
        self.log.pages("publish", group, request, pages)

    def hit(self, request: str, *pages: int, group: str = "full") -> None:
        """A request took published pages."""
        self.log.pages("reuse", group, request, pages)

    def evict(self, *pages: int, group: str = "full") -> None:
        """Pages left the prefix index."""
        self.log.pages("evict", group, "", pages)

    def admit(self, request: str, start: int = 0) -> None:
        """A request got a row."""
        self.log.admitted(request, 1, 1, start)

    def finish(self, request: str) -> None:
        """A request ended."""
        self.log.finished(request, 1, 0)

    def preempt(self, request: str) -> None:
        """A request lost its pages."""
        self.log.preempted(request, 1)

    def rewind(self, request: str, length: int) -> None:
        """A request goes on from another length."""
        self.log.rewound(request, 1, length)

    def copy_start(
        self,
        transfer: str,
        request: str,
        *pages: int,
        direction: str = "in",
        ordered: bool = False,
        group: str = "full",
    ) -> None:
        """A copy was queued."""
        self.log.transfer_started(transfer, group, request, pages, direction, ordered=ordered)

    def copy_land(self, transfer: str) -> None:
        """A copy is complete."""
        self.log.transfer_landed(transfer)

    def copy_fail(self, transfer: str) -> None:
        """A copy did not complete."""
        self.log.transfer_failed(transfer, "link down")

    def launch(self, retired: int | None = None) -> list[OwnershipViolated]:
        """The next forward is queued; ``retired``: the last one that is done, the one before it unless given."""
        done = self.forward - 1 if retired is None else retired
        self.log.step(self.forward, done)
        self.log.launched(self.forward, done, 1, 1, 1, {})
        self.forward += 1
        self.found = []
        return self.show(*self.log.take())

    def retire(self, through: int) -> None:
        """The engine saw that forwards are done."""
        self.log.retired = max(self.log.retired, through)

    def show(self, *events: Event) -> list[OwnershipViolated]:
        """Show events to the fold; the violations found since the last launch."""
        for event in events:
            found = [one for one in self.fold.handle(event) if isinstance(one, OwnershipViolated)]
            self.found += found
            self.all_found += found
        return self.found

    def hazards(self) -> dict[str, int]:
        """Hazards that grew since the last call."""
        told = [one for one in self.fold.handle(Ticked()) if isinstance(one, HazardCounted)]
        return {one.hazard: one.count for one in told}


def told(found: Sequence[OwnershipViolated]) -> list[tuple[str, int, str, str]]:
    """Kind, first page and both parties."""
    return [(one.kind, one.page, one.request, one.other) for one in found]
