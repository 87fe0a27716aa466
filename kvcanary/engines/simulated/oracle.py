"""The oracle: for every read and write of the simulated engine, what it should have been.

It knows what no canary can know, and shares nothing with one: not its records, its tables, nor its arithmetic. It
follows the *bytes*, the *book* (what was last put into each slot by a forward or a copy that was meant to), and who
holds each page, both as the scheduler sees it and as the device does, which is later.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch

from kvcanary.engines.simulated.device import Device
from kvcanary.engines.simulated.memory import Memory
from kvcanary.engines.simulated.requests import Request

WrongKind = Literal["read", "content", "write", "input", "owner", "epoch"]
Due = Literal["now", "next", "end", "never"]
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
        author: who put there what was read.
        due: by when it can be known: ``now``; ``next``: when its request runs again; ``end``: when that ends;
            ``never``: it does no harm yet, so to say so is right, and not to say so is no miss.
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
    author: str = ""
    due: Due = "now"


class Oracle:
    """What is true of one engine.

    Attributes:
        wrongs: in the order in which they happened.
        forward: number of the next forward to be launched.
        epoch: of the present weights.
        reads: how many reads of attention were judged.
        book: per group and slot, the number of what was put there on purpose; :data:`BLANK` where nothing was.
        renewed: (group, slot, forward): what was there before is gone since that forward.
        executing: number of the forward that the device began last.
        ran: for each request the forwards that it took part in, and its length before each.
        begun: for each request the forwards from which it was active.
        watchful: look for changed bytes everywhere after each forward, and not only where somebody reads.
    """

    def __init__(self, device: Device, memory: dict[str, Memory]) -> None:
        self.wrongs: list[Wrong] = []
        self.forward = 1
        self.epoch = 0
        self.reads = 0
        self.renewed: set[tuple[str, int, int]] = set()
        self.ran: dict[str, list[tuple[int, int]]] = {}
        self.begun: dict[str, list[int]] = {}
        self.watchful = False
        self.executing = 0
        self._author: dict[int, str] = {}
        self._wrote: dict[tuple[str, int], str] = {}
        self._lost: set[tuple[str, int]] = set()
        self._changed: set[tuple[str, int]] = set()
        self._misfed: dict[str, int] = {}
        self._filling: dict[tuple[str, int], str] = {}
        self._last_use: dict[tuple[str, int], int] = {}
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
            held = self._now.get(key)
            if held or key in self._epochs or key in self._filling:
                # Handed to the one who has it, a page stays where it is, for all that the ledger is told.
                told_again = held == {request} and key not in self._epochs and key not in self._filling
                self.wrong("owner", request, group=group, page=page, due="never" if told_again else "now")
            self._now[key] = {request}
            self._known.add(key)
        self._device.launch(lambda: self._handed(group, request, pages))

    def shared(self, group: str, request: str, pages: Sequence[int], epoch: int | None) -> None:
        """A request holds pages with what is in them; ``epoch``: found by their prefix, under these weights."""
        for page in pages:
            key = group, page
            if epoch is not None and self._epochs.get(key, -1) != epoch:
                self.wrong("epoch" if key in self._epochs else "owner", request, group=group, page=page)
            elif self._epochs.get(key, self.epoch) != self.epoch:
                self.wrong("epoch", request, group=group, page=page, due="never")
            self._now.setdefault(key, set()).add(request)
        self._device.launch(lambda: self._joined(group, request, pages))

    def left(self, group: str, request: str, pages: Sequence[int]) -> None:
        """A request holds pages no more."""
        for page in pages:
            self._now.get((group, page), set()).discard(request)
        self._device.launch(lambda: self._parted(group, request, pages))

    def replaced(self, group: str, request: str, positions: range) -> None:
        """A request has other pages for ``positions``, and looks at the old ones no more."""

        def forgive() -> None:
            for at, one in enumerate(self.wrongs):
                mine = (one.group, one.request) == (group, request) and one.position in positions
                if mine and one.due == "next" and one.kind in ("read", "write", "content"):
                    self.wrongs[at] = replace(one, due="never")

        self._device.launch(forgive)

    def freed(self, group: str, pages: Sequence[int]) -> None:
        """Pages are given back."""
        for page in pages:
            key = group, page
            held = self._now.get(key)
            if held or key in self._epochs or key not in self._known:
                due: Due = "now" if key in self._epochs or key not in self._known else "never"
                self.wrong("owner", min(held) if held else "", group=group, page=page, due=due)
            self._now[key] = set()
            self._last_use[key] = self.forward - 1
            self._known.discard(key)
        self._device.launch(lambda: [self._later.pop((group, page), None) for page in pages])

    def published(self, group: str, page: int, epoch: int) -> None:
        """A page can be found."""
        self._epochs[group, page] = epoch

    def evicted(self, group: str, page: int) -> None:
        """A page cannot be found any more."""
        self._epochs.pop((group, page), None)

    def began(self, request: str) -> None:
        """A request becomes active, perhaps again: what was fed before counts by what it left in its pages."""
        self.begun.setdefault(request, []).append(self.forward)
        self._device.launch(lambda: self._misfed.pop(request, None))

    def filling(self, group: str, name: str, request: str, pages: Sequence[int]) -> None:
        """A copy that no stream orders begins to fill pages."""
        for page in pages:
            key = group, page
            if key in self._filling or self._last_use.get(key, 0) > self.executing:
                self.wrong("owner", request, group=group, page=page)
            self._filling[key] = name

    def filled(self, group: str, name: str, request: str, pages: Sequence[int], *, failed: bool) -> None:
        """The copy has ended, and the request goes on."""
        for page in pages:
            if self._filling.get((group, page)) == name:
                del self._filling[group, page]
            if failed:
                self.wrong("owner", request, group=group, page=page)

    # --- what the device does -----------------------------------------------------------------------------

    def _handed(self, group: str, request: str, pages: Sequence[int]) -> None:
        for page in pages:
            self._later[group, page] = {request}
            self._put(group, page, [BLANK] * self._memory[group].page_size)

    def _joined(self, group: str, request: str, pages: Sequence[int]) -> None:
        for page in pages:
            self._later.setdefault((group, page), set()).add(request)

    def _parted(self, group: str, request: str, pages: Sequence[int]) -> None:
        for page in pages:
            self._later.get((group, page), set()).discard(request)

    def copied(self, group: str, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Pages are copied in stream order."""
        size = self._memory[group].page_size
        for source, target in zip(sources, targets, strict=True):
            self.load(group, [target], self.save(group, [source]))
            for place in range(size):
                author = self._wrote.get((group, source * size + place))
                if author is not None:
                    self._wrote[group, target * size + place] = author

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
        self.renewed.update((group, first + place, self.executing + 1) for place in range(len(values)))
        for place in range(len(values)):
            self._wrote.pop((group, first + place), None)

    def begin(self, forward: int) -> None:
        """A forward begins on the device."""
        self.executing = forward
        self._lost.clear()

    def end(self) -> None:
        """A forward is over."""
        if self.watchful:
            for group in self.book:
                self._look(group)

    def _look(self, group: str) -> None:
        memory, book = self._memory[group], self.book[group]
        noted = torch.tensor(book, dtype=torch.int64, device=memory.kv.device)
        slots = torch.arange(memory.slots, device=noted.device)
        changed = memory.differs(slots, noted).logical_and_(noted != BLANK).nonzero().flatten().tolist()
        for slot in changed:
            if (group, slot) not in self._changed:
                self._changed.add((group, slot))
                author = self._author_of(group, slot)
                self.wrong("content", author, self.executing, due="never", **self._where(group, slot))

    def _author_of(self, group: str, slot: int) -> str:
        """Who wrote what lies in a slot; of what was loaded, who wrote the same last."""
        return self._wrote.get((group, slot)) or self._author.get(self.book[group][slot], "")

    def _where(self, group: str, slot: int) -> dict[str, object]:
        return {"group": group, "page": slot // self._memory[group].page_size, "slot": slot}

    def fed(self, forward: int, request: Request, start: int, given: Sequence[tuple[int, int, bool]]) -> None:
        """The model gets (wanted, given, known to the scheduler) for each token from position ``start`` on."""
        name = request.name
        self.ran.setdefault(name, []).append((forward, start))
        if self._misfed.get(name, -1) >= start:
            del self._misfed[name]
        for position, (right, got, known) in enumerate(given, start):
            if right != got:
                due: Due = "now" if known else "end"
                self.wrong("input", name, forward, position=position, expected=right, found=got, due=due)
                self._misfed.setdefault(name, position)

    def wrote(
        self, forward: int, request: Request, group: str, start: int, slots: Iterable[tuple[int, int, int]]
    ) -> None:
        """Tokens from position ``start`` on go to slots: (wanted, given, value). Negative: nowhere."""
        size, book = self._memory[group].page_size, self.book[group]
        for position, (wanted, given, value) in enumerate(slots, start):
            where = {**self._where(group, given), "position": position, "expected": wanted, "found": given}
            if wanted != given:
                lost = given < size  # nowhere, or the reserved page: seen when it is missed
                self.wrong("write", request.name, forward, **where, due="next" if lost else "now")
                if lost:
                    self._lost.add((group, wanted))
            elif given >= 0 and request.name not in self._later.get((group, given // size), ()):
                self.wrong("write", request.name, forward, **where, due="never" if book[given] == value else "now")
            if given >= 0:
                book[given] = value
                self._author[value] = self._wrote[group, given] = request.name
                self.renewed.add((group, given, forward))

    def read(
        self,
        forward: int,
        group: str,
        names: Sequence[tuple[str, int]],
        slots: torch.Tensor,
        values: Sequence[int],
        *,
        model: str,
    ) -> None:
        """A model reads ``slots``, which should hold ``values``; ``names`` are request and position of each."""
        self.reads += len(values)
        memory, book = self._memory[group], self.book[group]
        inside = slots.clamp(0, memory.slots - 1)
        wanted = torch.tensor(values, dtype=torch.int64, device=slots.device)
        places = slots.tolist()
        noted = [book[place] if 0 <= place < len(book) else BLANK for place in places]
        if noted == values and memory.holds(inside, wanted, model):
            return
        broken = memory.differs(inside, wanted, model).tolist()
        for (name, position), place, value, found, bad in zip(names, places, values, noted, broken, strict=True):
            if found != value or bad:
                where = {**self._where(group, place), "position": position, "expected": value, "found": found}
                author = self._author_of(group, place) if found != BLANK else ""
                due: Due = "next" if (group, place) in self._lost else "now"
                if author == name and position >= self._misfed.get(name, 1 << 30):
                    due = "end"
                self.wrong("read" if found != value else "content", name, forward, **where, author=author, due=due)

    def misled(self, forward: int, request: str, group: str, position: int, slot: int) -> None:
        """A row looks for a token where it does not write it, though the same may be there."""
        self.wrong("read", request, forward, **self._where(group, slot), position=position, due="never")
