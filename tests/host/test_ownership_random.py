"""Random programs of a correct engine leave no report; with one fault planted, that one is reported."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from kvcanary.events import FactsLost, OwnershipViolated, Ticked
from tests.host.ownership_script import Script, told

PAGES = 24


@dataclass
class Page:
    """What is true of a page."""

    holders: list[str] = field(default_factory=list[str])
    free: bool = True
    published: str = ""
    stale: bool = False
    """published before the weights changed"""
    handed_out: int = 0
    """forward from which the present owner has it"""
    quiet_after: int = 0
    """last forward that may touch it for an earlier owner"""
    transfers: list[str] = field(default_factory=list[str])
    failed: bool = False
    recomputing: bool = False
    """the next forward writes it anew"""


class Engine:
    """An allocator with a prefix cache, overlapped scheduling and transfers that no stream orders. It makes no mistake
    unless asked to.
    """

    def __init__(self, seed: int, *, warm: int = 0, names: bool = False) -> None:
        self.random = random.Random(seed)
        self.script = Script()
        self.names = names
        self.pages = [Page() for _ in range(PAGES)]
        for page in range(warm):
            self.pages[page] = Page(["old"], free=False)
        self.live: list[str] = ["old"] if warm else []
        self.retired = 0
        self.epoch = 0
        self.made = 0
        self.transfers: dict[str, tuple[str, str, bool, list[int]]] = {}

    # --- what a correct engine does -----------------------------------------------------------------------

    def admit(self) -> None:
        self.made += 1
        name = f"r{self.made}"
        self.live.append(name)
        if self.random.random() < 0.7:
            self.script.admit(name)

    def alloc(self) -> None:
        free = [i for i, page in enumerate(self.pages) if page.free and not page.transfers]
        if free and self.live:
            self._take(self.random.choice(self.live), self._some(free, 4))

    def _take(self, request: str, pages: list[int]) -> None:
        for number in pages:
            page = self.pages[number]
            self.pages[number] = Page(
                [request], free=False, handed_out=self.script.forward, quiet_after=page.quiet_after
            )
        self.script.alloc(request, *pages)

    def restore(self) -> None:
        held = self._held(lambda page: len(page.holders) == 1 and not page.failed)
        if held:
            number = self.random.choice(held)
            self.script.alloc(self.pages[number].holders[0], number)

    def publish(self) -> None:
        held = self._held(lambda page: not page.published and not page.failed and not self._loading(page))
        if held:
            number = self.random.choice(held)
            page = self.pages[number]
            page.published = self.random.choice(page.holders)
            self.script.publish(page.published, number)

    def hit(self) -> None:
        cached = [i for i, page in enumerate(self.pages) if page.published and not page.stale]
        if cached and self.live:
            self._hit(self.random.choice(self.live), self._some(cached, 4))

    def _hit(self, request: str, pages: list[int]) -> None:
        self.script.hit(request, *pages)
        for number in pages:
            if request not in self.pages[number].holders:
                self.pages[number].holders.append(request)

    def fork(self) -> None:
        held = self._held(lambda page: not page.failed and not page.published and not self._loading(page))
        if held and self.live:
            self._hit(self.random.choice(self.live), self._some(held, 2))

    def evict(self) -> None:
        cached = [i for i, page in enumerate(self.pages) if page.published and not page.holders and not page.transfers]
        if cached:
            for number in self._some(cached, 3):
                self._evict(number)

    def _evict(self, number: int) -> None:
        self.pages[number].published = ""
        self.pages[number].stale = False
        self.script.evict(number)
        if not self.pages[number].holders:
            self._give_back([number], "")

    def _give_back(self, pages: list[int], request: str) -> None:
        for number in pages:
            page = self.pages[number]
            quiet = max(page.quiet_after, self.script.forward - 1)
            self.pages[number] = Page(quiet_after=quiet, transfers=page.transfers)
        self.script.free(*pages, request=request)

    def leave(self) -> None:
        """A request ends or is preempted, before or after its pages are given back."""
        idle = [name for name in self.live if not any(request == name for _, request, _, _ in self.transfers.values())]
        if not idle:
            return
        name = self.random.choice(idle)
        preempted, first = self.random.random() < 0.3, self.random.random() < 0.5
        tell = self.script.preempt if preempted else self.script.finish
        if first:
            tell(name)
        gone: list[int] = []
        for number, page in enumerate(self.pages):
            if name not in page.holders:
                continue
            if page.holders == [name] and not page.published:
                gone.append(number)
            elif self.names and len(page.holders) > 1:
                self.script.free(number, request=name)
            page.holders.remove(name)
        if gone:
            self.random.shuffle(gone)
            self._give_back(gone, name if self.names else "")
        if not first:
            tell(name)
        if not preempted:
            self.live.remove(name)

    def shrink(self) -> None:
        """A request gives some of its pages back and goes on, as windows do."""
        held = self._held(lambda page: len(page.holders) == 1 and not page.published and not page.transfers)
        if held:
            number = self.random.choice(held)
            self._give_back([number], self.pages[number].holders[0] if self.names else "")

    def load(self) -> None:
        """Bytes enter pages once nobody else can touch them, by a writer that no stream orders."""
        held = self._held(
            lambda page: (
                len(page.holders) == 1
                and not page.published
                and not page.transfers
                and page.quiet_after <= self.retired
            )
        )
        self._start(held, inward=True, ordered=False)

    def load_in_order(self) -> None:
        held = self._held(lambda page: len(page.holders) == 1 and not page.published and not page.transfers)
        self._start(held, inward=True, ordered=True)

    def store(self) -> None:
        held = self._held(lambda page: not page.failed and not self._loading(page))
        self._start(held, inward=False, ordered=self.random.random() < 0.3)

    def _start(self, candidates: list[int], *, inward: bool, ordered: bool) -> None:
        if not candidates:
            return
        request = self.random.choice(self.pages[self.random.choice(candidates)].holders)
        pages = self._some([i for i in candidates if request in self.pages[i].holders], 3)
        self.made += 1
        name = f"x{self.made}"
        self.transfers[name] = (name, request, inward, pages)
        for number in pages:
            self.pages[number].transfers.append(name)
            self.pages[number].failed &= not inward
            self.pages[number].recomputing &= not inward
        self.script.copy_start(name, request, *pages, direction="in" if inward else "out", ordered=ordered)

    def end_transfer(self) -> None:
        if not self.transfers:
            return
        name, request, inward, pages = self.transfers.pop(self.random.choice(list(self.transfers)))
        fails = self.random.random() < 0.4
        (self.script.copy_fail if fails else self.script.copy_land)(name)
        for number in pages:
            page = self.pages[number]
            page.transfers.remove(name)
            page.failed |= fails and inward
        if fails and inward and self.random.random() < 0.5:
            self.recompute(request)

    def recompute(self, request: str = "") -> None:
        request = request or (self.random.choice(self.live) if self.live else "")
        if request:
            self.script.rewind(request, 0)
            for page in self.pages:
                page.recomputing |= page.failed and request in page.holders

    def update_weights(self) -> None:
        """The cache is cleared first; what requests still hold is only taken out of the index."""
        if self.random.random() < 0.7:
            for number, page in enumerate(self.pages):
                if page.published and not page.transfers:
                    self._evict(number)
        self.epoch += 1
        self.script.log.weights_updated(self.epoch)
        for page in self.pages:
            page.stale |= bool(page.published)

    def launch(self) -> list[OwnershipViolated]:
        """The next forward goes out while up to two earlier ones run."""
        self.retired = max(self.retired, self.script.forward - 1 - self.random.randrange(3))
        for page in self.pages:
            page.failed &= not page.recomputing
            page.recomputing = False
        return self.script.launch(retired=self.retired)

    def learn(self) -> None:
        self.retired = self.script.forward - 1
        self.script.retire(self.retired)

    ACTIONS = (
        admit, alloc, alloc, alloc, restore, publish, publish, hit, fork, evict, evict, leave, leave, shrink, load,
        load_in_order, store, end_transfer, end_transfer, recompute, update_weights, launch, launch, launch, learn,
    )  # fmt: skip

    def run(self, program: list[int]) -> None:
        for number in program:
            self.ACTIONS[number](self)

    # --- what a faulty one does ---------------------------------------------------------------------------

    def double_free(self) -> tuple[str, int]:
        number = self._one(lambda page: page.free and not page.transfers)
        self.script.free(number)
        return "DOUBLE_FREE", number

    def double_alloc(self) -> tuple[str, int]:
        number = self._one(lambda page: not page.free and bool(page.holders))
        self.script.alloc("thief", number)
        return "DOUBLE_ALLOC", number

    def free_published(self) -> tuple[str, int]:
        number = self._one(lambda page: bool(page.published))
        self.script.free(number)
        return "FREED_WHILE_PUBLISHED", number

    def publish_free(self) -> tuple[str, int]:
        number = self._one(lambda page: page.free)
        self.script.publish("late", number)
        return "PUBLISHED_UNOWNED", number

    def hit_free(self) -> tuple[str, int]:
        number = self._one(lambda page: page.free)
        self.script.hit("late", number)
        return "PUBLISHED_UNOWNED", number

    def hit_stale(self) -> tuple[str, int]:
        number = self._one(lambda page: bool(page.published))
        self.epoch += 1
        self.script.log.weights_updated(self.epoch)
        self.script.hit("late", number)
        return "STALE_EPOCH", number

    def alloc_in_flight(self) -> tuple[str, int]:
        number = self._one(lambda page: not page.free and bool(page.holders) and not page.published)
        self.script.copy_start("late", self.pages[number].holders[0], number, direction="out")
        self.script.free(number)
        self.script.alloc("next", number)
        return "EARLY_REUSE", number

    def load_early(self) -> tuple[str, int]:
        number = self._one(lambda page: page.free and not page.transfers)
        self.script.alloc("first", number)
        self.script.launch(retired=self.retired)
        self.script.free(number)
        self.script.alloc("next", number)
        self.script.copy_start("late", "next", number)
        return "EARLY_REUSE", number

    def load_twice(self) -> tuple[str, int]:
        number = self._one(lambda page: len(page.holders) == 1 and not page.published)
        request = self.pages[number].holders[0]
        self.script.copy_start("one", request, number, direction="out")
        self.script.copy_start("two", request, number)
        return "TRANSFER_OVERLAP", number

    def use_failed_load(self) -> tuple[str, int]:
        number = self._one(lambda page: len(page.holders) == 1 and not page.published and not page.transfers)
        request = self.pages[number].holders[0]
        self.script.copy_start("late", request, number)
        self.script.copy_fail("late")
        self.script.publish(request, number)
        return "FAILED_LOAD_USED", number

    # --- choice -------------------------------------------------------------------------------------------

    def _loading(self, page: Page) -> bool:
        return any(self.transfers[name][2] for name in page.transfers)

    def _held(self, wanted: Callable[[Page], bool]) -> list[int]:
        return [i for i, page in enumerate(self.pages) if page.holders and wanted(page)]

    def _some(self, pages: list[int], most: int) -> list[int]:
        return self.random.sample(pages, min(len(pages), self.random.randrange(1, most + 1)))

    def _one(self, wanted: Callable[[Page], bool]) -> int:
        found = [i for i, page in enumerate(self.pages) if wanted(page)]
        assume(found)
        return self.random.choice(found)


FAULTS = (
    Engine.double_free,
    Engine.double_alloc,
    Engine.free_published,
    Engine.publish_free,
    Engine.hit_free,
    Engine.hit_stale,
    Engine.alloc_in_flight,
    Engine.load_early,
    Engine.load_twice,
    Engine.use_failed_load,
)

programs = st.lists(st.integers(0, len(Engine.ACTIONS) - 1), min_size=1, max_size=150)
seeds = st.integers(0, 1 << 30)
quick = settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much]
)


@quick
@given(seeds, programs, st.integers(0, PAGES), st.booleans(), st.integers(0, 150))
def test_a_correct_engine_leaves_no_report(
    seed: int,
    program: list[int],
    warm: int,
    names: bool,
    loss: int,
) -> None:
    engine = Engine(seed, warm=warm, names=names)
    engine.run(program[:loss])
    if loss < len(program):
        engine.script.log.append(FactsLost(count=1))
    engine.run(program[loss:])
    engine.launch()
    assert engine.script.all_found == []


@quick
@given(seeds, programs, st.booleans())
def test_a_checkpoint_in_the_middle_changes_no_verdict(seed: int, program: list[int], names: bool) -> None:
    engine = Engine(seed, names=names)
    engine.run(program)
    engine.launch()
    fold = engine.script.fold
    engine.script.show(fold.checkpoint(Ticked()))
    engine.run(program)
    engine.launch()
    assert engine.script.all_found == []


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
@settings(quick, max_examples=40)
@given(seeds, programs)
def test_one_planted_fault_is_reported(
    fault: Callable[[Engine], tuple[str, int]], seed: int, program: list[int]
) -> None:
    engine = Engine(seed)
    # Every page is known, and most faults have one to choose.
    engine.admit()
    engine._take("r1", list(range(PAGES)))
    engine._give_back(list(range(PAGES // 2)), "")
    engine.publish()
    engine.launch()
    engine.run(program)
    engine.launch()
    assert engine.script.all_found == []
    kind, page = fault(engine)
    engine.script.launch(retired=engine.retired)
    assert (kind, page) in [(one[0], one[1]) for one in told(engine.script.all_found)]
