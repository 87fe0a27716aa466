"""What a scenario's engine believes, and tells: requests, their tables, the prefix index.

It tells what such an engine's adapter would tell, from the engine's own books. Whether these agree with the bytes is
none of its business.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kvcanary.faults.scenario.happenings import Places
from kvcanary.faults.scenario.pool import Pool, WorldError
from kvcanary.faults.scenario.texts import Texts
from kvcanary.text import near_to


@dataclass(slots=True)
class Held:
    """A request in the engine's books. ``row`` outlives it: a careless engine goes on using it.

    Attributes:
        tables: per group the slots of its positions, in order.
    """

    name: str
    row: int
    length: int
    tables: dict[str, list[int]] = field(default_factory=dict[str, list[int]])
    live: bool = True


@dataclass(frozen=True, slots=True)
class Published:
    """What the prefix index has under a key."""

    request: str
    slots: dict[str, list[int]]


class Engine:
    """One engine's books about one pool."""

    def __init__(self, pool: Pool, texts: Texts) -> None:
        self.pool = pool
        self.canary = pool.canary
        self.texts = texts
        self.requests: dict[str, Held] = {}
        self.index: dict[str, Published] = {}

    # --- requests -----------------------------------------------------------------------------------------

    def admit(self, name: str, length: int) -> Held:
        """It begins, or begins anew, with ``length`` tokens in the cache."""
        texts = self.texts
        tokens, identity, salts = texts.tokens(name, length), texts.identity(name), texts.salts(name)
        row = self.canary.admit(name, tokens=tokens, start=length, identity=identity, salts=salts)
        held = self.requests[name] = Held(name, row, length)
        return held

    def of(self, name: str) -> Held:
        """A request, which begins with nothing in the cache if it has not begun; one that ended stays ended."""
        return self.requests.get(name) or self.admit(name, 0)

    def live(self, name: str) -> Held:
        """A request that has not ended, begun now if need be."""
        held = self.of(name)
        return held if held.live else self.admit(name, 0)

    def rewind(self, name: str, length: int) -> None:
        """It goes on from ``length``."""
        held = self._known(name)
        held.length = length
        self.canary.rewind(name, length, tokens=self.texts.tokens(name, length))

    def go_back(self, name: str, length: int) -> None:
        """It goes on from an earlier length.

        Raises:
            WorldError: it was never so long.
        """
        held = self._known(name)
        if length > held.length:
            raise WorldError(f"request {name!r} cannot go back to {length}: it has {held.length} tokens in the cache")
        self.rewind(name, length)

    def preempt(self, name: str) -> None:
        """It loses its slots."""
        self._known(name).tables.clear()
        self.canary.preempt(name)

    def finish(self, name: str) -> None:
        """It ends: what it was fed should be what it said."""
        held = self._known(name)
        held.live = False
        self.canary.finish(name, tokens=self.texts.tokens(name, held.length), length=held.length)

    def _known(self, name: str) -> Held:
        held = self.requests.get(name)
        if held is None or not held.live:
            raise WorldError(f"no request {name!r} is live; those that are: {', '.join(self._live()) or 'none'}")
        return held

    def _live(self) -> list[str]:
        return [held.name for held in self.requests.values() if held.live]

    # --- slots --------------------------------------------------------------------------------------------

    def alloc(self, name: str, group: str, slots: list[int]) -> None:
        """The allocator hands out slots."""
        pages = self.whole_pages(group, slots)
        held = self.live(name)
        held.tables.setdefault(group, []).extend(slots)
        self.canary.alloc(group, name, pages)

    def free(self, name: str, group: str, slots: list[int]) -> None:
        """The allocator takes slots back. The tables that named them are not rewritten by that."""
        self.canary.free(group, self.whole_pages(group, slots), name or None)

    def publish(self, name: str, slots: dict[str, list[int]], key: str) -> None:
        """Slots enter the prefix index."""
        who = name or next((self.holder(group, some[0]) for group, some in slots.items() if some), "")
        self.index[key] = Published(who, slots)
        for group, some in slots.items():
            self.canary.publish(group, self.pages(group, some), who or None)

    def hit(self, name: str, key: str) -> None:
        """A request takes what the index has."""
        published = self._published(key)
        length = max(map(len, published.slots.values()))
        held = self.requests.get(name)
        if held is None or not held.live:
            held = self.admit(name, length)
        else:
            self.rewind(name, length)
        for group, slots in published.slots.items():
            held.tables[group] = slots + held.tables.get(group, [])
            self.canary.reuse(group, name, self.pages(group, slots))

    def evict(self, key: str) -> None:
        """A key leaves the index."""
        published = self._published(key)
        del self.index[key]
        for group, slots in published.slots.items():
            self.canary.evict(group, self.pages(group, slots))

    def _published(self, key: str) -> Published:
        published = self.index.get(key)
        if published is None:
            raise WorldError(f"the prefix index has no key {key!r}; it has {', '.join(self.index) or 'none'}")
        return published

    def holder(self, group: str, slot: int) -> str:
        """The request whose table names a slot; the newest of several, live ones first."""
        found = [held for held in self.requests.values() if slot in held.tables.get(group, ())]
        alive = [held for held in found if held.live] or found
        return alive[-1].name if alive else ""

    # --- places -------------------------------------------------------------------------------------------

    def slots(self, places: Places) -> dict[str, list[int]]:
        """The slots that are named, by group, in their order.

        Raises:
            WorldError: a space, or a slot, that this pool does not have.
        """
        found = self.numbers(places)
        for group, slots in found.items():
            there = self.pool.groups[group].slots
            bad = next((slot for slot in slots if not 0 <= slot < there), None)
            if bad is not None:
                raise WorldError(f"slot {bad} lies outside of group {group!r} with its {there} slots")
        return found

    def numbers(self, places: Places) -> dict[str, list[int]]:
        """As :meth:`slots`, with numbers that no slot has, as they may stand in a device's table.

        Raises:
            WorldError: a space that this pool does not have.
        """
        found: dict[str, list[int]] = {}
        for term in places:
            group = self.group_of(term.space)
            page = self.pool.groups[group].page
            slots = found.setdefault(group, [])
            for number in term.numbers:
                slots.extend(range(number * page, (number + 1) * page) if term.blocks else (number,))
        return found

    def group_of(self, space: str) -> str:
        """The group that a space names."""
        prefix = self.pool.name
        inside = space.removeprefix(f"{prefix}.") if prefix and space != prefix else space
        if inside == prefix:
            return self.pool.first
        if inside not in self.pool.groups:
            where, known = "the remote pool" if prefix else "the pool", ", ".join(self.pool.groups)
            if len(space) == 1:
                raise WorldError(
                    f"the file has no tier {space!r}; its blocks need a line like tiers = {{ {space} = 4 }}"
                )
            raise WorldError(f"no group is called {space!r}{near_to(space, self.pool.groups)}; {where} has {known}")
        return inside

    def pages(self, group: str, slots: list[int]) -> list[int]:
        """The pages that slots lie in."""
        size = self.pool.groups[group].page
        return list(dict.fromkeys(slot // size for slot in slots))

    def whole_pages(self, group: str, slots: list[int]) -> list[int]:
        """The pages that slots fill.

        Raises:
            WorldError: they fill no whole pages, or one is named twice.
        """
        size = self.pool.groups[group].page
        pages = self.pages(group, slots)
        twice = next((slot for i, slot in enumerate(slots) if slot in slots[:i]), None)
        if twice is not None:
            raise WorldError(f"slot {twice} of group {group!r} is named twice; give each slot once")
        if len(slots) != len(pages) * size:
            raise WorldError(
                f"group {group!r} is handed out in pages of {size} slots; these {len(slots)} fill no pages"
            )
        return pages
