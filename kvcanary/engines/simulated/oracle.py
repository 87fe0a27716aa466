"""The oracle: for every read and write of the simulated engine, what it should have been.

It knows what no canary can know, and shares nothing with one: not its records, its tables, nor its arithmetic. It
follows the *bytes*, the *book* (what was last put into each slot by a forward or a copy that was meant to), and who
holds each page, both as the scheduler sees it and as the device does, which is later.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from kvcanary.engines.simulated.device import Device
from kvcanary.engines.simulated.memory import Memory
from kvcanary.engines.simulated.requests import Request

WrongKind = Literal["read", "content", "write", "input", "owner", "epoch"]
BLANK = 0
"""In the book: nobody wrote this slot since its page was handed out."""


@dataclass(frozen=True, slots=True)
class Wrong:
    """Something that a correct engine never does.

    Attributes:
        forward: in which it happened; of what the scheduler did, the next one.
        kind: ``read``: attention saw another token's keys and values, or nobody's; ``content``: the right token's, but
            not its bytes; ``write``: a token went where it should not; ``input``: the model got another token or
            position; ``owner``: pages changed hands against the rules; ``epoch``: older weights made what was found.
        request: who did or suffered it; "": nobody.
        group, page, slot, position: where; -1: nowhere.
        expected, found: numbers that stand for keys and values, tokens, positions, slots or pages.
        certain: it does harm at once. Else it may, and to say so is right, but not to say so is no miss.
    """

    forward: int
    kind: WrongKind
    request: str
    group: str = ""
    page: int = -1
    slot: int = -1
    position: int = -1
    expected: int = 0
    found: int = 0
    certain: bool = True


class Oracle:
    """What is true of one engine.

    Attributes:
        wrongs: in the order in which they happened.
        forward: number of the next forward to be launched.
        reads: how many reads of attention were judged.
        book: per group and slot, the number of what was put there on purpose; :data:`BLANK` where nothing was.
        renewed: (group, slot, forward): what was there before is gone since that forward.
    """

    def __init__(self, device: Device, memory: dict[str, Memory]) -> None:
        self.wrongs: list[Wrong] = []
        self.forward = 1
        self.reads = 0
        self.renewed: set[tuple[str, int, int]] = set()
        self._executed = 0
        self._device = device
        self._memory = memory
        self.book = {group: [BLANK] * one.slots for group, one in memory.items()}
        self._now: dict[tuple[str, int], set[str]] = {}
        self._later: dict[tuple[str, int], set[str]] = {}
        self._epochs: dict[tuple[str, int], int] = {}
        self._known: set[tuple[str, int]] = set()

    def wrong(self, kind: WrongKind, request: str, forward: int = 0, **where: object) -> None:
        """Note something; of what the scheduler did, ``forward`` is the next one."""
        self.wrongs.append(Wrong(forward or self.forward, kind, request, **where))  # type: ignore[arg-type]

    # --- what the scheduler does --------------------------------------------------------------------------

    def took(self, group: str, request: str, pages: Sequence[int]) -> None:
        """Pages are handed out."""
        for page in pages:
            key = group, page
            if self._now.get(key) or key in self._epochs:
                self.wrong("owner", request, group=group, page=page)
            self._now[key] = {request}
            self._known.add(key)
        self._device.launch(lambda: self._handed(group, request, pages))

    def shared(self, group: str, request: str, pages: Sequence[int], epoch: int | None) -> None:
        """A request holds pages with what is in them; ``epoch``: they were found by their prefix under these weights."""
        for page in pages:
            key = group, page
            if epoch is not None and self._epochs.get(key, -1) != epoch:
                self.wrong("epoch" if key in self._epochs else "owner", request, group=group, page=page)
            self._now.setdefault(key, set()).add(request)
        self._device.launch(lambda: [self._later.setdefault((group, page), set()).add(request) for page in pages])

    def left(self, group: str, request: str, pages: Sequence[int]) -> None:
        """A request holds pages no more."""
        for page in pages:
            self._now.get((group, page), set()).discard(request)
        self._device.launch(lambda: [self._later.get((group, page), set()).discard(request) for page in pages])

    def freed(self, group: str, pages: Sequence[int]) -> None:
        """Pages are given back."""
        for page in pages:
            key = group, page
            held = self._now.get(key)
            if held or key in self._epochs or key not in self._known:
                certain = key in self._epochs or key not in self._known
                self.wrong("owner", min(held) if held else "", group=group, page=page, certain=certain)
            self._now[key] = set()
            self._known.discard(key)
        self._device.launch(lambda: [self._later.pop((group, page), None) for page in pages])

    def published(self, group: str, page: int, epoch: int) -> None:
        """A page can be found."""
        self._epochs[group, page] = epoch

    def evicted(self, group: str, page: int) -> None:
        """A page cannot be found any more."""
        self._epochs.pop((group, page), None)

    # --- what the device does -----------------------------------------------------------------------------

    def _handed(self, group: str, request: str, pages: Sequence[int]) -> None:
        for page in pages:
            self._later[group, page] = {request}
            self._put(group, page, [BLANK] * self._memory[group].page_size)

    def copied(self, group: str, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Pages are copied in stream order."""
        for source, target in zip(sources, targets, strict=True):
            self.load(group, [target], self.save(group, [source]))

    def save(self, group: str, pages: Sequence[int]) -> list[int]:
        """What the book says of pages."""
        size = self._memory[group].page_size
        return [value for page in pages for value in self.book[group][page * size : (page + 1) * size]]

    def load(self, group: str, pages: Sequence[int], values: Sequence[int]) -> None:
        """Pages were filled with what was saved."""
        size = self._memory[group].page_size
        for number, page in enumerate(pages):
            self._put(group, page, values[number * size : (number + 1) * size])

    def _put(self, group: str, page: int, values: Sequence[int]) -> None:
        first = page * len(values)
        self.book[group][first : first + len(values)] = values
        self.renewed.update((group, first + place, self._executed + 1) for place in range(len(values)))

    def begin(self, forward: int) -> None:
        """A forward begins on the device."""
        self._executed = forward

    def fed(self, forward: int, request: Request, start: int, wanted: Iterable[tuple[int, int]]) -> None:
        """The model gets pairs of (wanted, given) for tokens, from position ``start`` on."""
        for number, (right, given) in enumerate(wanted):
            if right != given:
                self.wrong("input", request.name, forward, position=start + number, expected=right, found=given)

    def wrote(self, forward: int, request: Request, group: str, start: int, slots: Iterable[tuple[int, int, int]]) -> None:
        """Tokens from position ``start`` on go to slots: (wanted, given, value). Negative: nowhere."""
        size, book = self._memory[group].page_size, self.book[group]
        for position, (wanted, given, value) in enumerate(slots, start):
            page = given // size
            where = {"group": group, "page": page, "slot": given, "position": position}
            where |= {"expected": wanted, "found": given}
            if wanted != given:
                self.wrong("write", request.name, forward, **where)
            elif given >= 0 and request.name not in self._later.get((group, page), ()):
                self.wrong("write", request.name, forward, **where, certain=book[given] != value)
            if given >= 0:
                book[given] = value
                self.renewed.add((group, given, forward))

    def read(
        self, forward: int, group: str, names: Sequence[tuple[str, int]], slots: torch.Tensor, values: Sequence[int]
    ) -> None:
        """Attention reads ``slots``, which should hold ``values``; ``names`` are request and position of each."""
        if not values:
            return
        self.reads += len(values)
        memory = self._memory[group]
        inside = slots.clamp(0, memory.slots - 1)
        wanted = torch.tensor(values, dtype=torch.int64, device=slots.device)
        places, book = slots.tolist(), self.book[group]
        written = [book[place] if 0 <= place < len(book) else BLANK for place in places]
        if memory.holds(inside, wanted) and written == values:
            return
        broken = memory.differs(inside, wanted).tolist()
        for (name, position), place, value, noted, bad in zip(names, places, values, written, broken, strict=True):
            if noted != value or bad:
                kind: WrongKind = "read" if noted != value else "content"
                page = place // memory.page_size
                where = {"group": group, "page": page, "slot": place, "position": position}
                where |= {"expected": value, "found": noted}
                self.wrong(kind, name, forward, **where)
