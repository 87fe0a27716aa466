"""One plain world, one state, one set of kernels: what the tests of named behaviours stand on."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from kvcanary.batch import ForwardBatch
from kvcanary.kernels import DeviceFact, FactOp, Kernels
from kvcanary.kernels.reference import ReferenceKernels
from kvcanary.record import NUM_KINDS, Kind
from kvcanary.state import (
    KIND_COUNTS,
    REPEATS,
    UNVERIFIED,
    VERIFIED,
    Check,
    DeviceState,
    Limits,
    Reason,
    Role,
    ViolationWord,
    Word,
    group_base,
)
from tests.kernels.cases import LIMITS, Request, Step, World, entry, leave
from tests.kernels.pools import GroupSpec

PLAIN = GroupSpec(page_size=4, pages=40)


@dataclass(frozen=True)
class Violation:
    """One row of the ring; columns are attributes in lower case."""

    words: dict[str, int]

    def __getattr__(self, name: str) -> int:
        return self.words[name.upper()]

    @property
    def name(self) -> str:
        return Kind(self.words["KIND"]).name


class Rig:
    """Drives reference kernels over a plain world."""

    def __init__(
        self, *specs: GroupSpec, limits: Limits = LIMITS, armed: bool = True, kernels: Kernels | None = None
    ) -> None:
        self.world = World(7, specs or (PLAIN,), limits=limits, plain=True)
        self.state: DeviceState = self.world.new_state(armed=armed)
        self.kernels: Kernels = kernels or ReferenceKernels()
        self._seen = 0

    def request(self, length: int = 0, *, chunk: int = 40) -> Request:
        """A request with ``length`` tokens in the cache."""
        request, facts = self.world.admit()
        self.facts(*facts)
        while request.length < length:
            self.step((request, request.length, min(chunk, length - request.length)))
        return request

    def facts(self, *facts: DeviceFact) -> None:
        self.kernels.facts(self.state, facts)

    def fact(self, op: FactOp, **fields: Any) -> None:
        self.facts(DeviceFact(op, **fields))

    def plan(self, *rows: tuple[Request, int, int], **extra: object) -> Step:
        """A step; its facts are applied at once."""
        step = self.world.plan(rows, (), **extra)
        if step.facts:
            self.facts(*step.facts)
        step.facts.clear()
        return step

    def run(self, step: Step, scrub_bytes: int = 0, **changes: object) -> list[Violation]:
        """One whole forward; returns what was reported."""
        if changes:
            step.batch = replace(step.batch, **changes)  # type: ignore[arg-type]
        self.world.run(step, (self.kernels, self.state), scrub_bytes=scrub_bytes)
        return self.new_violations()

    def step(self, *rows: tuple[Request, int, int], scrub_bytes: int = 0) -> list[Violation]:
        return self.run(self.plan(*rows), scrub_bytes)

    def decode(self, request: Request, scrub_bytes: int = 0) -> list[Violation]:
        return self.step((request, request.length, 1), scrub_bytes=scrub_bytes)

    def enter(self, batch: ForwardBatch) -> list[Violation]:
        entry(self.kernels, self.state, batch)
        return self.new_violations()

    def leave(self, scrub_bytes: int = 0) -> list[Violation]:
        leave(self.kernels, self.state, scrub_bytes)
        return self.new_violations()

    def idle(self, scrub_bytes: int) -> list[Violation]:
        """A forward without tokens that only scrubs."""
        return self.leave(scrub_bytes)

    def new_violations(self) -> list[Violation]:
        """Rows stored since the last call, as far as the ring has them."""
        stored = int(self.state.counters[Word.STORED])
        ring, found = self.state.violations, []
        for number in range(self._seen, stored):
            row = ring[number % len(ring)].tolist()
            if row[0] == number + 1:
                found.append(Violation({word.name: row[word] for word in ViolationWord}))
        self._seen = stored
        return found

    # --- counters -------------------------------------------------------------------------------------------

    def word(self, index: int) -> int:
        return int(self.state.counters[index])

    def verified(self, check: Check, group: int = 0) -> int:
        return self.word(group_base(group) + VERIFIED + check)

    def unverified(self, reason: Reason, group: int = 0) -> int:
        return self.word(group_base(group) + UNVERIFIED + reason)

    def count(self, kind: Kind, group: int = 0) -> int:
        return self.word(group_base(group) + KIND_COUNTS + kind)

    def repeats(self, group: int = 0) -> int:
        return self.word(group_base(group) + REPEATS)

    def launches(self, role: Role) -> int:
        return self.word(Word.LAUNCHES + role)

    def acknowledge(self) -> None:
        """The host took everything from the ring."""
        for group in range(len(self.world.specs)):
            base = group_base(group) + KIND_COUNTS
            for kind in range(NUM_KINDS):
                self.state.acked[group * NUM_KINDS + kind] = self.word(base + kind)
        self.state.acked[-1] = self.word(Word.STORED)

    # --- places ---------------------------------------------------------------------------------------------

    def slot(self, request: Request, position: int, group: int = 0) -> int:
        return self.world.slot(request, group, position)

    def page(self, request: Request, position: int, group: int = 0) -> int:
        return self.slot(request, position, group) // self.world.specs[group].page_size

    def link(self, slot: int, group: int = 0) -> tuple[int, int]:
        word, digest = self.state.groups[group].links[slot].tolist()
        return word, digest

    def seal(self, slot: int, group: int = 0, part: int = 0) -> tuple[int, int]:
        fingerprint, writer = self.state.groups[group].seals[part, slot].tolist()
        return fingerprint, writer


def names(violations: list[Violation]) -> list[str]:
    """Kinds of the violations, in order."""
    return [violation.name for violation in violations]
