"""A small paged engine: scheduler, prefix cache, windows, chunks, preemption, forks, guesses, overlap, a host tier."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence

import torch

from kvcanary.engines.simulated.batch import LATER, Batch, Row, build
from kvcanary.engines.simulated.device import Device
from kvcanary.engines.simulated.memory import Memory
from kvcanary.engines.simulated.model import VOCABULARY, Model
from kvcanary.engines.simulated.oracle import Oracle, Wrong
from kvcanary.engines.simulated.pages import Pool
from kvcanary.engines.simulated.requests import Request
from kvcanary.engines.simulated.style import STYLES, Style
from kvcanary.engines.simulated.tier import HostTier
from kvcanary.errors import ConfigError


class SimulatedEngine:
    """Serves requests on real tensors, without a model: see :attr:`truth` for what it knows to be wrong.

    Args:
        style: one of :data:`~kvcanary.engines.simulated.style.STYLES`, or its name.
        seed: of everything that is drawn.
        device: where the cache lies.
        name: what names of requests begin with.

    Attributes:
        waiting, running: requests in order of arrival; those of the host tier are in neither.
        pools, memory: of each group.
        epoch: how often the weights were updated.
        forwards: launched so far.
    """

    def __init__(self, style: Style | str = "paged", *, seed: int = 0, device: str = "cpu", name: str = "r") -> None:
        if isinstance(style, str) and style not in STYLES:
            raise ConfigError(f"no style {style!r}; styles are {', '.join(STYLES)}")
        self.style = STYLES[style] if isinstance(style, str) else style
        self.rng = random.Random(seed)  # noqa: S311 - to be repeated, not to be secret
        self.where = torch.device(device)
        self.device = Device(torch.cuda.synchronize) if self.where.type == "cuda" else Device()
        bytes_ = torch.Generator().manual_seed(seed)
        self.memory = {group: Memory(self.style, self.where, bytes_) for group in self.style.groups}
        self.oracle = Oracle(self.device, self.memory)
        self.pools = {g: Pool(g, self.style.pages, self.rng, self.oracle) for g in self.style.groups}
        self.model = Model(self.style, self.memory, self.oracle, self.rng)
        self.tier = HostTier(self)
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.epoch = 0
        self.forwards = 0
        self._flying: deque[tuple[Batch, int]] = deque()
        self._name, self._names = name, 0
        last = self.style.pages * (self.style.page_size if self.style.slot_tables else 1)
        self._junk = [self.rng.randrange(last) for _ in range(4 * last)]

    @property
    def truth(self) -> list[Wrong]:
        """All that went wrong so far, in the order in which it happened."""
        return self.oracle.wrongs

    @property
    def in_flight(self) -> int:
        """Forwards whose results are not known yet."""
        return len(self._flying)

    @property
    def full(self) -> bool:
        """Whether all rows are taken, those included whose pages are on their way in."""
        return len(self.running) + len(self.tier.coming) >= self.style.rows

    # --- requests -----------------------------------------------------------------------------------------

    def submit(
        self, prompt: Sequence[int], limit: int = 8, *, identity: bytes = b"", salts: dict[int, int] | None = None
    ) -> Request:
        """Queue a prompt; the answer ends after ``limit`` tokens."""
        request = Request(self._next_name(), list(prompt), len(prompt) + limit, identity, dict(salts or {}))
        self.waiting.append(request)
        return request

    def prompt(self, length: int) -> list[int]:
        """Random tokens."""
        return [self.rng.randrange(VOCABULARY) for _ in range(length)]

    def begin(self, request: Request, start: int) -> None:
        """A request becomes active, and so much of it is computed already."""
        request.computed = start
        request.fed = request.expected(start)[:start]
        self.oracle.began(request.name)

    def abort(self, request: Request) -> None:
        """Nobody wants the answer any more. What copies do with the pages is waited for."""
        if request.live:
            self.tier.recall(request)
            self.finish(request)

    def finish(self, request: Request) -> None:
        """A request has its answer, or is aborted. A launched forward may still go over it, and ends in order."""
        request.live = False
        if request in self.waiting:
            self.waiting.remove(request)
            return
        if request in self.running:
            self.running.remove(request)
        self.release(request)

    def release(self, request: Request) -> None:
        """Take all pages from a request."""
        for group, pages in request.pages.items():
            self.unmap(request, [page for page in pages if page] if group == "full" else [])
            self.pools[group].drop(request.name, [page for page in pages if page])
        request.pages = {}

    def preempt(self, request: Request) -> None:
        """Take a running request's pages; it starts over later, and feeds its own answer as prompt."""
        self.settle()
        if not request.live:
            return
        self.running.remove(request)
        self.release(request)
        request.computed = 0
        self.waiting.appendleft(request)

    def fork(self, request: Request) -> Request | None:
        """Another answer to the same text: pages are shared, the last one is copied. None: no room."""
        self.settle()
        size, need = self.style.page_size, {}
        for group, pages in request.pages.items():
            ring = group == "window" and self.style.ring is not None
            first = 0 if ring else request.computed // size
            need[group] = [page for page in pages[first:] if page]
        if self.full or not request.live or not request.pages or self.style.sliding == "translated":
            return None
        if any(len(pages) > self.pools[group].room for group, pages in need.items()):
            return None
        child = Request(self._next_name(), list(request.tokens), request.limit, request.identity, dict(request.salts))
        child.epoch = request.epoch
        self.begin(child, request.computed)
        self.running.append(child)
        for group, pages in request.pages.items():
            kept = pages[: len(pages) - len(need[group])]
            self.pools[group].share(child.name, [page for page in kept if page])
            fresh = self.pools[group].take(child.name, len(need[group]))
            self.copy_pages(child, group, need[group], fresh)
            child.pages[group] = kept + fresh
        return child

    def copy_pages(self, request: Request, group: str, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy pages on the main stream."""
        self.device.launch(lambda: self.memory[group].copy(sources, targets))
        self.device.launch(lambda: self.oracle.copied(group, sources, targets))

    def update_weights(self) -> None:
        """New weights: what is cached must be found no more."""
        self.settle()
        self.epoch = self.oracle.epoch = self.epoch + 1
        for pool in self.pools.values():
            pool.forget_all()

    # --- the loop -----------------------------------------------------------------------------------------

    def step(self) -> bool:
        """Launch one forward, and retire what has to be; False when there is nothing to do."""
        while len(self._flying) > self.style.depth:
            self.retire()
        self.tier.progress()
        rows = [row for request in list(self.running) if request in self.running and (row := self._plan(request))]
        while self.waiting and not self.full and self._enough(self.waiting[0]):
            request = self.waiting.popleft()
            self._admit(request)
            row = self._plan(request)
            rows += [row] if row else []
        rows = [row for row in rows if row.request in self.running]
        if not rows:
            busy = bool(self._flying) or self.tier.busy
            self.settle()
            self.tier.progress(wait=True)
            return busy
        batch = build(self.forwards + 1, rows, self.style, self.where, self._junk)
        self.launch(batch)
        if not self.style.depth:
            self.retire()
        return True

    def idle(self) -> None:
        """A forward of padding alone, as a rank without work makes for the others."""
        row = Row(Request("", [0], 0, pages={group: [0] for group in self.style.groups}), 0, [0])
        batch = build(self.forwards + 1, [row], self.style, self.where, self._junk)
        batch.rows.clear()
        for wanted in batch.wanted.values():
            wanted.clear()
        batch.padding += 1
        self.launch(batch)
        self.settle()

    def launch(self, batch: Batch) -> None:
        """Put a forward on the main stream."""
        self.forwards = batch.forward
        self.device.launch(lambda: self.model.resolve(batch))
        self.forward(batch)
        self.oracle.forward = batch.forward + 1
        self._flying.append((batch, self.device.launched))

    def forward(self, batch: Batch) -> None:
        """The model itself, launched."""
        self.device.launch(lambda: self.model.forward(batch))
        if self.style.draft_layer:
            self.draft(batch)
        self.device.launch(lambda: self.model.sample(batch))

    def draft(self, batch: Batch) -> None:
        """The draft model's own layer, launched."""
        self.device.launch(lambda: self.model.draft(batch))

    def settle(self) -> None:
        """Retire all that is launched."""
        while self._flying:
            self.retire()

    def retire(self) -> None:
        """Wait for the oldest forward and learn what it sampled."""
        batch, number = self._flying.popleft()
        self.device.run(number)
        for row in batch.rows:
            request = row.request
            if not row.samples or not request.live or request not in self.running:
                continue
            request.pending -= 1
            request.tokens += row.result
            if row.drafts and len(row.result) <= row.drafts:
                self.rewind(request, row.end - row.drafts + len(row.result) - 1)
            if len(request.tokens) >= request.limit:
                self.finish(request)

    def rewind(self, request: Request, length: int) -> None:
        """Guesses were wrong: the request goes on from ``length``."""
        request.computed = length

    # --- the scheduler ------------------------------------------------------------------------------------

    def _enough(self, request: Request) -> bool:
        pages = -(-(len(request.tokens) + self.style.longest_write) // self.style.page_size)
        return all(pool.room >= pages for pool in self.pools.values())

    def _next_name(self) -> str:
        self._names += 1
        return f"{self._name}{self._names}"

    def _admit(self, request: Request) -> None:
        found = self.lookup(request)
        start = len(found.get("full", ())) * self.style.page_size
        request.epoch = self.epoch
        self.begin(request, start)
        self.running.append(request)
        request.pages = {group: found.get(group, []) for group in self.style.groups}
        for group, pages in found.items():
            self.pools[group].share(request.name, [page for page in pages if page], self.epoch)

    def lookup(self, request: Request) -> dict[str, list[int]]:
        """Pages of the longest prefix that is cached, at least one token short of all."""
        size = self.style.page_size
        if not self.style.cache:
            return {}
        keys = [self.block_key(request, block) for block in range((len(request.tokens) - 1) // size)]
        count = 0
        while count < len(keys) and keys[count] in self.pools["full"].by_key:
            count += 1
        full = self.pools["full"].by_key
        if not self.style.sliding:
            return {"full": [full[key] for key in keys[:count]]} if count else {}
        window = self.pools["window"].by_key
        for length in range(count, 0, -1):
            first = max(0, length * size - self.style.window + 1) // size
            if all(key in window for key in keys[first:length]):
                pages = [0] * first + [window[key] for key in keys[first:length]]
                return {"full": [full[key] for key in keys[:length]], "window": pages}
        return {}

    def block_key(self, request: Request, block: int) -> int:
        """What a full page is found by: all that went before, the identity and the media."""
        end = (block + 1) * self.style.page_size
        salts = tuple((p, s) for p, s in sorted(request.salts.items()) if p < end)
        return hash((request.origin, tuple(request.tokens[:end]), salts))

    def _plan(self, request: Request) -> Row | None:
        """The next row of a request, with pages for all of it; None when there is nothing to do, or no room."""
        new = min(self.style.chunk, request.length - request.computed)
        if new <= 0:
            return None
        end = request.computed + new
        decodes = end == request.length
        drafts = self.style.drafts if decodes and new == 1 else 0
        if not self._grow(request, end + drafts):
            return None
        known = request.tokens[request.computed : end]
        ids = known + [LATER] * (new - len(known)) + self.prompt(drafts)
        row = Row(request, request.computed, ids, drafts, decodes)
        request.computed = row.end
        request.pending += decodes
        self._publish(request)
        return row

    def _grow(self, request: Request, end: int) -> bool:
        """Give a request pages for ``end`` tokens, those of others who came later if need be."""
        self.slide(request, request.computed)
        size = self.style.page_size
        for group, pool in self.pools.items():
            pages = request.pages[group]
            places = self.style.ring if group == "window" and self.style.ring else end
            missing = -(-places // size) - len(pages)
            while missing > pool.room:
                others = self.running[self.running.index(request) + 1 :] if request in self.running else []
                if not others:
                    return False
                self.preempt(others[-1])
                if not request.live or not request.pages:
                    return False
            if missing > 0:
                pages += pool.take(request.name, missing)
        self.mapped(request)
        return True

    def slide(self, request: Request, context: int) -> None:
        """Give up the window's pages that no forward from ``context`` on will read."""
        if self.style.sliding not in ("translated", "null"):
            return
        pages, size = request.pages["window"], self.style.page_size
        passed = max(0, context - self.style.window + 1) // size
        gone = [page for page in pages[:passed] if page]
        if gone:
            self.unmap(request, request.pages["full"][:passed])
            pages[:passed] = [0] * passed
            self.pools["window"].drop(request.name, gone)

    def _publish(self, request: Request) -> None:
        """Let others find the pages that this request's forwards fill, as soon as these are launched."""
        if self.style.cache and request.epoch == self.epoch:
            full = min(request.computed, len(request.tokens)) // self.style.page_size
            for group in self.style.groups:
                pages, pool = request.pages[group], self.pools[group]
                for block in range(full):
                    if pages[block] and pages[block] not in pool.key_of:
                        key = self.block_key(request, block)
                        if key not in pool.by_key:
                            pool.publish(request.name, [key], [pages[block]], self.epoch)

    # --- full slots to window slots -----------------------------------------------------------------------

    def mapped(self, request: Request) -> None:
        """A request has pages: its full slots translate to window slots from the next forward on."""
        if self.style.sliding == "translated":
            pairs = zip(request.pages["full"], request.pages["window"], strict=False)
            self._translate([(full, window) for full, window in pairs if window])

    def unmap(self, request: Request, full: Sequence[int]) -> None:
        """Full pages translate to nothing any more."""
        if self.style.sliding == "translated" and full:
            self._translate([(page, 0) for page in full])

    def _translate(self, pairs: Sequence[tuple[int, int]]) -> None:
        def change() -> None:
            size = self.style.page_size
            table = self.model.translation.view(-1, size)
            for full, window in pairs:
                first = window * size
                table[full] = torch.arange(first, first + size, dtype=torch.int32) if window else 0

        self.device.launch(change)
