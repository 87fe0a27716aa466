"""The host tier: requests whose pages were copied out, and the way to another engine. No stream orders its copies."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from kvcanary.engines.simulated.device import Copy
from kvcanary.engines.simulated.requests import Request

if TYPE_CHECKING:
    from kvcanary.engines.simulated.engine import SimulatedEngine


@dataclass(slots=True, eq=False)
class Package:
    """A request with its pages, outside of any pool.

    Attributes:
        name: of the copy that is under way.
        pages: per group, which pages of the pool; 0 where there is none.
        saved: per group the bytes; absent until they have landed.
        book: per group what the oracle knows of them.
        luggage: what a watcher gives along.
        failed: the load did not bring the bytes.
    """

    name: str
    request: Request
    pages: dict[str, list[int]]
    saved: dict[str, tuple[torch.Tensor, torch.Tensor]] = field(
        default_factory=dict[str, "tuple[torch.Tensor, torch.Tensor]"]
    )
    book: dict[str, list[int]] = field(default_factory=dict[str, "list[int]"])
    luggage: Any = None
    failed: bool = False

    def held(self, group: str) -> list[int]:
        """Pages of the pool, without those that a window has passed."""
        return [page for page in self.pages[group] if page]


class HostTier:
    """Packages on their way out, at rest, and on their way in."""

    def __init__(self, engine: SimulatedEngine) -> None:
        self._engine = engine
        self._copies = 0
        self.leaving: list[tuple[Package, Copy, SimulatedEngine]] = []
        self.resting: list[Package] = []
        self.coming: list[tuple[Package, Copy]] = []

    @property
    def busy(self) -> bool:
        """Whether anything is here, or under way."""
        return bool(self.leaving or self.resting or self.coming)

    def send(self, request: Request, to: SimulatedEngine | None = None) -> None:
        """Copy a running request's pages out; they are given up once the copy has landed."""
        engine = self._engine
        engine.settle()
        if not request.live or request not in engine.running or not request.computed:
            return
        engine.running.remove(request)
        package = Package(self._name("out"), request, {group: list(pages) for group, pages in request.pages.items()})
        self.leaving.append((package, self.store(package), to or engine))

    def recall(self, request: Request) -> None:
        """A request is to end: wait for the copies of its pages, and forget them."""
        for item in [item for item in self.leaving if item[0].request is request]:
            self._leave(item)
        for arrival in [arrival for arrival in self.coming if arrival[0].request is request]:
            self._arrive(arrival)
        self.resting = [package for package in self.resting if package.request is not request]

    def store(self, package: Package) -> Copy:
        """Begin to copy pages out."""
        engine = self._engine

        def note() -> None:
            package.book = {group: engine.oracle.save(group, package.held(group)) for group in package.pages}

        def copy() -> None:
            package.saved = {group: engine.memory[group].save(package.held(group)) for group in package.pages}

        engine.device.launch(note)
        return engine.device.copy(copy)

    def stored(self, package: Package, to: SimulatedEngine) -> None:
        """Pages are on the host, for engine ``to``; those of the pool may go."""
        self._engine.release(package.request)

    def fetch(self, package: Package) -> bool:
        """Begin to load a package; False when there is no room."""
        engine = self._engine
        room = all(len(package.held(group)) < engine.pools[group].room for group in package.pages)
        if not room or engine.full:
            return False
        engine.settle()  # nothing may be under way over pages that a copy is about to fill
        package.name, request = self._name("in"), package.request
        request.computed, request.pending = min(request.computed, len(request.tokens) - 1), 0
        engine.begin(request, request.computed)
        for group, pages in package.pages.items():
            fresh = iter(engine.pools[group].take(request.name, len(package.held(group))))
            package.pages[group] = [next(fresh) if page else 0 for page in pages]
        request.pages = {group: list(pages) for group, pages in package.pages.items()}
        self.coming.append((package, self.load(package)))
        return True

    def load(self, package: Package) -> Copy:
        """Begin to copy pages in."""
        engine = self._engine

        def copy() -> None:
            for group in package.pages:
                engine.memory[group].load(package.held(group), package.saved[group])

        for group in package.pages:
            engine.oracle.filling(group, package.name, package.request.name, package.held(group))
        return engine.device.copy(copy)

    def loaded(self, package: Package) -> None:
        """Pages are there."""
        engine, request = self._engine, package.request
        for group in package.pages:
            pages, book = package.held(group), package.book[group]
            engine.oracle.filled(group, package.name, request.name, pages, failed=package.failed)
            engine.device.launch(partial(engine.oracle.load, group, pages, book))
        engine.mapped(request)
        engine.running.append(request)

    def progress(self, *, wait: bool = False) -> None:
        """Let copies land: some of those that may, or with ``wait`` all."""
        for item in list(self.leaving):
            if wait or self._engine.rng.random() < 0.5:
                self._leave(item)
        for arrival in list(self.coming):
            if wait or self._engine.rng.random() < 0.5:
                self._arrive(arrival)
        for package in list(self.resting):
            if self.fetch(package):
                self.resting.remove(package)

    def _leave(self, item: tuple[Package, Copy, SimulatedEngine]) -> None:
        package, copy, to = item
        self._engine.device.land(copy)
        self.leaving.remove(item)
        self.stored(package, to)
        to.tier.resting.append(package)

    def _arrive(self, arrival: tuple[Package, Copy]) -> None:
        package, copy = arrival
        self._engine.device.land(copy)
        self.coming.remove(arrival)
        self.loaded(package)

    def _name(self, way: str) -> str:
        self._copies += 1
        return f"{way}-{self._copies}"
