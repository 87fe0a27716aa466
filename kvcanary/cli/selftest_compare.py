"""Runs a case on both of its sides, one operation at a time, and compares everything after each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from kvcanary.cli.benches.traffic import Forward
from kvcanary.cli.selftest_cases import Case, Side, storage_of, to_device
from kvcanary.cli.selftest_faults import disturb
from kvcanary.kernels import DeviceFact, FactOp
from kvcanary.layout import DEFAULT_PART
from kvcanary.record import NUM_KINDS, Kind
from kvcanary.state import (
    GLOBAL_WORDS,
    GROUP_WORDS,
    KIND_COUNTS,
    REPEATS,
    SUSPECT_ROWS,
    VERIFIED,
    Check,
    DeviceState,
    PoisonMode,
    ViolationWord,
    Word,
    group_base,
)

SLOT_KINDS = frozenset(
    {Kind.POSITION, Kind.DIGEST, Kind.UNWRITTEN, Kind.CONTENT, Kind.NONFINITE, Kind.WRITE_MISSING, Kind.NULL_DIRTY}
)
"""Kinds that are reported once a slot; the others once a row."""


@dataclass(slots=True)
class Tally:
    """What was compared so far."""

    compared: Counter[str] = field(default_factory=Counter[str])
    differing: Counter[str] = field(default_factory=Counter[str])
    differences: list[str] = field(default_factory=list[str])
    reported: Counter[str] = field(default_factory=Counter[str])
    forwards: int = 0
    clean_forwards: int = 0
    false_alarms: int = 0

    @property
    def passed(self) -> bool:
        """Nothing differed, clean traffic was silent, and something was compared at all."""
        return not self.differences and not self.false_alarms and bool(self.compared)


class Comparison:
    """One case.

    Args:
        case: what to run.
        tally: where to count.
        label: names the case in differences.
        dirty: break things now and then; without, nothing may be reported.
    """

    def __init__(self, case: Case, tally: Tally, label: str, *, dirty: bool) -> None:
        self._case, self._tally, self._label, self._dirty = case, tally, label, dirty
        self._same = True
        self._tokens = self._rows = 0

    def run(self, forwards: int) -> None:
        """Run ``forwards`` forwards, or until something differs."""
        for _ in range(forwards):
            if not self._same:
                return
            self._forward()
            self._tally.forwards += 1
            self._tally.clean_forwards += not self._dirty
        kinds = _kinds(self._case.sides[1].state)
        if self._dirty:
            self._tally.reported.update(kinds)
        elif kinds:
            self._tally.false_alarms += sum(kinds.values())
            self._tally.differences.append(f"{self._label}: clean traffic was reported: {dict(kinds)}")

    def _forward(self) -> None:
        case, rng = self._case, self._case.rng
        forward = case.traffic.next()
        if self._dirty and rng.random() < 0.5:
            forward = disturb(case, forward)
        facts = [
            *forward.facts,
            *case.filling(forward.facts),
            *(case.extra_facts() if self._dirty and rng.random() < 0.4 else ()),
        ]
        if facts:
            self._do("facts", lambda side: side.kernels.facts(side.state, to_device(facts, side.device)))
        self._entry(forward)
        case.write(forward)
        if self._dirty and rng.random() < 0.05:
            self._do("abandon", lambda side: side.kernels.abandon(side.state))
        else:
            self._exit()
        if rng.random() < 0.4:
            self._fingerprint()
        if self._dirty and rng.random() < 0.3:
            self._exchange()

    def _entry(self, forward: Forward) -> None:
        layout = self._case.layout
        full = [i for i, group in enumerate(layout.groups) if group.ring is None]
        rings = [i for i, group in enumerate(layout.groups) if group.ring is not None]
        poison = DEFAULT_PART if self._case.poison != "off" else ""
        batches = {id(side): to_device(forward.batch, side.device) for side in self._case.sides}
        self._tokens, self._rows = forward.batch.num_tokens, forward.batch.num_rows

        def mark(groups: list[int], *, first: bool) -> None:
            self._do(
                "mark",
                lambda side: side.kernels.mark(side.state, batches[id(side)], groups, first=first, poison=poison),
            )

        if full:
            mark(full, first=True)
        self._do("check", lambda side: side.kernels.check(side.state, batches[id(side)], full + rings))
        if rings:
            mark(rings, first=not full)
        if len(layout.groups) > 1:
            self._do("window", lambda side: side.kernels.window(side.state, batches[id(side)], 0, 1, every=2))

    def _exit(self) -> None:
        rng, layout = self._case.rng, self._case.layout
        parts = list(dict.fromkeys(part for group in layout.groups for part in group.parts))
        for part in parts[:-1]:
            self._seal("seal", part, 0, last=False)
        scrub = rng.choice((0, 0, 600, 4000, 100_000))
        self._seal("seal and scrub" if scrub else "seal", parts[-1], scrub, last=True)
        if rng.random() < 0.2:
            self._seal("scrub", "", rng.choice((600, 100_000)), last=False)

    def _seal(self, name: str, part: str, scrub: int, *, last: bool) -> None:
        settle = self._settle_content if scrub and part else None
        poison: PoisonMode = self._case.poison if part == DEFAULT_PART else "off"
        self._do(
            name,
            lambda side: side.kernels.seal(side.state, part, scrub, last=last, nonfinite=True, poison=poison),
            settle,
        )

    def _settle_content(self) -> None:
        """Let both sides count the same slots as read again.

        A launch that seals and scrubs may pass over the slots that it has just sealed, or not.
        """
        reference, candidate = (side.state for side in self._case.sides)
        forward = int(reference.counters[Word.FORWARD]) - 1
        for group in range(len(self._case.shapes)):
            word = group_base(group) + VERIFIED + Check.CONTENT
            expected = int(reference.counters[word])
            if abs(int(candidate.counters[word]) - expected) <= self._tokens:
                candidate.counters[word] = expected
                candidate.headers[forward % candidate.headers.shape[0], word] = expected

    def _fingerprint(self) -> None:
        case = self._case
        group = case.rng.randrange(len(case.shapes))
        part = case.rng.choice(case.layout.groups[case.layout.spaces[group]].parts)
        slots = torch.tensor([case.rng.randrange(case.layout.groups[group].num_slots) for _ in range(50)])
        found: list[torch.Tensor] = []
        self._do(
            "fingerprint",
            lambda side: found.append(side.kernels.fingerprint(side.state, group, part, slots.to(side.device)).cpu()),
        )
        self._expect_equal("fingerprint", found)

    def _exchange(self) -> None:
        """Records of two pages leave, and come back in two others."""
        case = self._case
        group = case.rng.randrange(len(case.shapes))
        item = case.layout.groups[group]
        width = 2 + 2 * len(case.layout.groups[case.layout.spaces[group]].parts)
        pages = case.rng.sample(range(item.num_pages), 4)
        records = {
            id(side): torch.zeros(2 * item.page_size, width, dtype=torch.int64, device=side.device)
            for side in case.sides
        }

        def apply(side: Side, op: FactOp, numbers: list[int]) -> None:
            fact = DeviceFact(op, group=group, pages=numbers, tag=3, records=records[id(side)])
            side.kernels.facts(side.state, [fact])

        self._do("export", lambda side: apply(side, FactOp.EXPORT, pages[:2]))
        self._expect_equal("export", [records[id(side)].cpu() for side in case.sides])
        self._do("import", lambda side: apply(side, FactOp.IMPORT, pages[2:]))

    # --- comparing ----------------------------------------------------------------------------------------

    def _do(self, name: str, operation: Callable[[Side], Any], settle: Callable[[], None] | None = None) -> None:
        """One operation on both sides, then every tensor of both states.

        ``settle`` runs in between, where the two may rightly differ.
        """
        if not self._same:
            return
        reference, candidate = self._case.sides
        operation(reference)
        self._tally.compared[name] += 1
        try:
            operation(candidate)
            if candidate.device == "cuda":
                torch.cuda.synchronize()
        except Exception as error:  # noqa: BLE001 - a kernel that cannot be compiled or run is a finding like others
            lines = str(error).strip().splitlines() or [""]
            self._differ(name, f"raised {type(error).__name__}: {lines[-1]}")
            return
        if settle is not None:
            settle()
        expected, found = (_contents(side.state, self._tokens, self._rows) for side in self._case.sides)
        for tensor, value in expected.items():
            if not torch.equal(value, found[tensor]):
                self._differ(name, f"{tensor}: {_first_difference(value, found[tensor])}")
                return
        rows = [_violations(side.state) for side in self._case.sides]
        if not self._case.crowded and rows[0] != rows[1]:
            self._differ(name, f"violations: expected {rows[0] - rows[1]}, found {rows[1] - rows[0]}")

    def _expect_equal(self, name: str, values: list[torch.Tensor]) -> None:
        if self._same and not torch.equal(*values):
            self._differ(name, _first_difference(*values))

    def _differ(self, name: str, what: str) -> None:
        self._same = False
        self._tally.differing[name] += 1
        broken = f" after {', '.join(self._case.broken)}" if self._case.broken else ""
        self._tally.differences.append(f"{self._label}, {name}{broken}: {what}")


def _contents(state: DeviceState, tokens: int, rows: int) -> dict[str, torch.Tensor]:
    """Everything that has one right value, on the CPU.

    The order of violations and suspects is a matter of timing, and so is which of several findings about one row or
    slot is the one that is reported.
    """
    tensors = {
        "counters": _without_speaker(state.counters),
        "rows": state.rows,
        "history": state.history,
        "scratch_slots": state.scratch_slots[:, :tokens],
        "scratch_links": state.scratch_links[:tokens],
        "scratch_rows": state.scratch_rows[:tokens],
        "scratch_poison": state.scratch_poison[:, :tokens],
        "scratch_batch": state.scratch_batch[:rows],
        "headers": _without_speaker(state.headers),
        "outbox": state.outbox,
        "suspects": _suspects(state),
    }
    for space in sorted(set(state.layout.spaces)):
        records = state.groups[space]
        tensors |= {f"links{space}": records.links, f"seals{space}": records.seals, f"owner{space}": records.owner}
    for group in state.layout.groups:
        for source in group.sources:
            tensors[f"bytes of {group.name}, {source.name}"] = storage_of(source)
    return {name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}


def _without_speaker(words: torch.Tensor) -> torch.Tensor:
    """Counters or headers whose counts of violations are added up over groups.

    What is wrong with one row in several groups is reported by the first to see it, and a GPU looks at all at once.
    """
    words = words.detach().clone()
    groups = words[..., GLOBAL_WORDS:].unflatten(-1, (-1, GROUP_WORDS))
    groups[..., 0, REPEATS:] = groups[..., REPEATS:].sum(-2)
    groups[..., 1:, REPEATS:] = 0
    return words


def _suspects(state: DeviceState) -> torch.Tensor:
    first, last = int(state.counters[Word.SUSPECTS_DONE]), int(state.counters[Word.SUSPECTS])
    places = torch.arange(max(first, last - SUSPECT_ROWS), last) % SUSPECT_ROWS
    return state.suspects.cpu()[places].sort().values


def _violations(state: DeviceState) -> Counter[tuple[int, ...]]:
    """What was reported, without what depends on who came first."""
    stored = min(int(state.counters[Word.STORED]), state.violations.shape[0])
    found: Counter[tuple[int, ...]] = Counter()
    for row in state.violations[:stored].tolist():
        kind = row[ViolationWord.KIND]
        subject = row[ViolationWord.SLOT if kind in SLOT_KINDS else ViolationWord.ROW]
        group = row[ViolationWord.GROUP] if kind in SLOT_KINDS else 0
        found[kind, row[ViolationWord.ROLE], group, row[ViolationWord.FORWARD], subject] += 1
    return found


def _kinds(state: DeviceState) -> Counter[str]:
    words = state.counters.tolist()
    return Counter(
        {
            kind.name: count
            for kind in Kind
            if (count := sum(words[group_base(g) + KIND_COUNTS + kind] for g in range(len(state.layout.groups))))
            and kind < NUM_KINDS
        }
    )


def _first_difference(expected: torch.Tensor, found: torch.Tensor) -> str:
    if expected.shape != found.shape:
        return f"expected {list(expected.shape)} values, found {list(found.shape)}"
    places = (expected != found).nonzero()
    where = tuple(int(i) for i in places[0])
    words = f"expected {int(expected[where])}, found {int(found[where])}"
    return f"{len(places)} words differ, the first at {list(where)}: {words}"
