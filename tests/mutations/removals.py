"""What can be removed: each check of the kernels' reference and of the ledger, as a change of text."""

from __future__ import annotations

from typing import NamedTuple

SCENARIOS = "tests/scenarios/test_scenarios.py::test_what_a_file_expects_is_reported_and_nothing_else"
LEDGER = (
    "tests/host/test_ownership_rules.py",
    "tests/host/test_ownership_transfers.py",
    "tests/host/test_ownership_evidence.py",
)
TESTS: dict[str, tuple[str, ...]] = {
    "kernels/ref_mark.py": ("tests/kernels/test_reference_mark.py", SCENARIOS),
    "kernels/ref_check.py": ("tests/kernels/test_reference_check.py", SCENARIOS),
    "kernels/ref_exit.py": ("tests/kernels/test_reference_exit.py", SCENARIOS),
    "kernels/ref_scrub.py": ("tests/kernels/test_reference_exit.py", SCENARIOS),
    "kernels/ref_bytes.py": ("tests/kernels/test_reference_exit.py", SCENARIOS),
    "kernels/ref_poison.py": ("tests/canary/test_poison.py", SCENARIOS),
    "kernels/ref_facts.py": ("tests/kernels/test_reference_facts.py", SCENARIOS),
    "feed.py": ("tests/canary/test_findings.py", SCENARIOS),
    "observers/ownership.py": (*LEDGER, SCENARIOS),
    "observers/ownership_transfers.py": (*LEDGER, SCENARIOS),
    "observers/ownership_evidence.py": (*LEDGER, SCENARIOS),
}
"""Modules with checks, and the tests that should notice when one is gone."""


class Removal(NamedTuple):
    """One check and how to take it out.

    ``piece`` occurs once in ``module``, a path in the package. With ``replacement`` in its place the module still
    runs, but the check ``what`` of ``kind`` is gone.
    """

    kind: str
    what: str
    module: str
    piece: str
    replacement: str = "pass"

    @property
    def tests(self) -> tuple[str, ...]:
        """Arguments of pytest: what should notice."""
        return TESTS[self.module]

    def apply(self, source: str) -> str:
        """The module's text without the check.

        Raises:
            ValueError: the piece does not occur exactly once.
        """
        count = source.count(self.piece)
        if count != 1:
            raise ValueError(
                f"{self.kind} ({self.what}): its piece of text must occur once in kvcanary/{self.module}, and occurs "
                f"{count} times; make tests/mutations/removals.py follow the code:\n{self.piece}"
            )
        return source.replace(self.piece, self.replacement)


_MARK = (
    (
        "INPUT_POSITION",
        "the length of a row",
        "    report(launch, Kind.INPUT_POSITION, group, fields, wrong)",
        "    pass",
    ),
    ("INPUT_POSITION", "positions that are skipped", "wrong = back < 0", "wrong = torch.zeros_like(back < 0)"),
    ("INPUT_POSITION", "how far a window may go back", "wrong.logical_or_(back > rewind)"),
    (
        "INPUT_POSITION",
        "positions given for the tokens",
        "report(launch, Kind.INPUT_POSITION, group, fields, inputs.positions != tokens.position)",
    ),
    (
        "INPUT_PLACEHOLDER",
        "negative ids",
        "report(launch, Kind.INPUT_PLACEHOLDER, group, {**place, V.CODE_FOUND: inputs.codes}, inputs.ids < 0)",
    ),
    (
        "INPUT_TOKEN",
        "ids that the scheduler expects",
        "            report(launch, Kind.INPUT_TOKEN, group, fields, wrong)\n\n\ndef _judge_last",
        "            pass\n\n\ndef _judge_last",
    ),
    (
        "INPUT_TOKEN",
        "the last id that the scheduler knows",
        "    report(launch, Kind.INPUT_TOKEN, group, fields, wrong)\n\n\n# --- slots",
        "    pass\n\n\n# --- slots",
    ),
    ("SLOT_RANGE", "slots to write", "report(launch, Kind.SLOT_RANGE, g, fields, places.slot == OUTSIDE)"),
    ("WRITE_FREED", "any", "report(launch, Kind.WRITE_FREED, g, fields, harmful & (state == OWNER_FREED))"),
    ("WRITE_FOREIGN", "any", "report(launch, Kind.WRITE_FOREIGN, g, fields, harmful & foreign)"),
    ("WRITE_FOREIGN", "null pages", " | (state == OWNER_NULL)\n", "\n"),
    (
        "WRITE_FOREIGN",
        "pages of other requests",
        "(held & (holder != tag) & (holder != 0) & (tag != 0)) | (state == OWNER_NULL)",
        "state == OWNER_NULL",
    ),
    (
        "WRITE_FOREIGN",
        "the short way for pages of one's own",
        "if not torch.equal(writes.owner >> TAG_SHIFT, tag + (OWNER_HELD << TAG_BITS)):",
        "if not torch.equal(tag, tag):",
    ),
    ("TABLE_MISMATCH", "any", "report(launch, Kind.TABLE_MISMATCH, g, fields, wrong)"),
    ("TABLE_MISMATCH", "the slot that the table names", "wrong |= named != slot"),
    ("TABLE_MISMATCH", "the offset in the page", "wrong = offset != wanted", "wrong = torch.zeros_like(slot).bool()"),
    (
        "TABLE_MISMATCH",
        "the short way by the table",
        "(not compare or torch.equal(named, slot)) and torch.equal(offset, wanted)",
        "torch.equal(offset, wanted)",
    ),
    (
        "TABLE_MISMATCH",
        "the short way by the offset",
        "(not compare or torch.equal(named, slot)) and torch.equal(offset, wanted)",
        "not compare or torch.equal(named, slot)",
    ),
)

_CHECK = (
    (
        "WRITE_CONFLICT",
        "any",
        "report(launch, Kind.WRITE_CONFLICT, g, fields, (found != wanted).any(1).logical_and_(slot >= 0))",
    ),
    ("WINDOW", "any", "report(launch, Kind.WINDOW, g, place, _lowest_of_rows(entries.row, missing))"),
    (
        "WINDOW",
        "reserved pages",
        "usable = (places.slot >= 0) & (owner < OWNER_TRASH)",
        "usable = places.slot >= 0",
    ),
    (
        "WINDOW",
        "the short way with reserved pages",
        "return bool(own.trash_pages or own.null_pages)",
        "return bool(own.name == '')",
    ),
    (
        "SLOT_RANGE",
        "slots to read",
        "report(launch, Kind.SLOT_RANGE, g, {**place, V.SLOT: places.engine_index}, judged & (places.slot == OUTSIDE))",
    ),
    ("UNWRITTEN", "any", "report(launch, Kind.UNWRITTEN, g, record, empty & claimed)"),
    (
        "UNWRITTEN",
        "freed pages",
        "claimed = (owner == OWNER_HELD) | (owner == OWNER_FREED)",
        "claimed = owner == OWNER_HELD",
    ),
    ("POSITION", "any", "report(launch, Kind.POSITION, g, record, judged & known & ~right)"),
    (
        "POSITION",
        "the short way",
        "if not torch.equal(positions_of(records.words), entries.position):\n        return False",
    ),
    (
        "DIGEST",
        "any",
        "report(launch, Kind.DIGEST, g, {**record, V.DIGEST_EXPECTED: records.expected}, broken)",
    ),
    ("DIGEST", "the short way", "not torch.equal(records.digests, records.expected) or ", ""),
    (
        "DIGEST",
        "the seed of the first record",
        "bound = (entries.begin == 0).logical_and_(seed != 0)",
        "bound = torch.zeros_like(seed).bool()",
    ),
    ("REQUEST_DIGEST", "any", "report(launch, Kind.REQUEST_DIGEST, g, fields, wrong)"),
    ("REQUEST_DIGEST", "the short way", "usable is None and torch.equal(after, wanted) and", "usable is None and"),
)

_EXIT = (
    ("NONFINITE", "any", "report(launch, Kind.NONFINITE, g, fields, bad)"),
    (
        "WRITE_CONFLICT",
        "rings, before their bytes are sealed",
        "if part == 0 and group.ring is not None:\n        report_conflicts(launch, g)",
    ),
)

_SCRUB = (
    ("CONTENT", "any", "report(launch, Kind.CONTENT, space, fields, twice, flag_part=part)"),
    ("CONTENT", "the walk over the pool", "enqueue(launch, g, part, wrong)"),
    ("CONTENT", "the second look of what was queued", "enqueue(launch, space, part, once)"),
    ("NULL_DIRTY", "any", "report(launch, Kind.NULL_DIRTY, g, fields, dirty, flag_part=part)"),
)

_BYTES = (
    (
        "NULL_DIRTY",
        "pages that must be zero",
        "(words != 0).any(1) if zero else self._nonfinite(words)",
        "self._nonfinite(words)",
    ),
    (
        "NULL_DIRTY",
        "pages that must be finite",
        "(words != 0).any(1) if zero else self._nonfinite(words)",
        "(words != 0).any(1) if zero else None",
    ),
    ("NONFINITE", "the values", "if not (math.isfinite(low) and math.isfinite(high)):", "if math.isnan(0.0):"),
)

_POISON = (
    ("WRITE_MISSING", "any", "report(launch, Kind.WRITE_MISSING, g, fields, missing)"),
    (
        "WRITE_MISSING",
        "the poison of the forward",
        "missing = placed & (span.at(sealed.slot) == pattern).all(1)",
        "missing = torch.zeros_like(placed)",
    ),
    ("WRITE_MISSING", "the poison of the allotment", "missing |= (bits & PoisonBit.FOUND) != 0"),
)

_FACTS = (
    ("DOUBLE_ALLOC", "pages that are held", "Kind.DOUBLE_ALLOC, OWNER_HELD", "Kind.DOUBLE_ALLOC, -1"),
    ("DOUBLE_FREE", "pages that are free", "words, Kind.DOUBLE_FREE, OWNER_FREED", "words, Kind.DOUBLE_FREE, -1"),
    (
        "DOUBLE_FREE",
        "and DOUBLE_ALLOC: pages in that state",
        "report(self.launch, kind, self.space, fields, (found == state) & ~again)",
    ),
    (
        "DOUBLE_FREE",
        "and DOUBLE_ALLOC: pages named twice in a list",
        "report(self.launch, kind, self.space, fields, again & (found < OWNER_TRASH))",
    ),
    (
        "REQUEST_DIGEST",
        "a base that comes late",
        "report(self.launch, Kind.REQUEST_DIGEST, self.fact.group, fields, wrong)",
    ),
)

_FEED = (
    (
        "FINAL_DIGEST",
        "any",
        "if audit is None or not held or audit.length != length or audit.digest == digest:",
        "if row:",
    ),
)

_OWNERSHIP = (
    ("DOUBLE_ALLOC", "any", 'self._findings.violated("DOUBLE_ALLOC", pages, life.name, other, what)'),
    (
        "FREED_WHILE_PUBLISHED",
        "pages handed out",
        'self._findings.violated("FREED_WHILE_PUBLISHED", pages, life.name, published.request, what)',
    ),
    (
        "FREED_WHILE_PUBLISHED",
        "pages freed",
        'self._findings.violated("FREED_WHILE_PUBLISHED", pages, by, published.request, what)',
    ),
    (
        "DOUBLE_FREE",
        "any",
        'self._findings.violated("DOUBLE_FREE", pages, name or entry.last_owner, entry.last_owner, what)',
    ),
    (
        "PUBLISHED_UNOWNED",
        "any",
        'self._findings.violated("PUBLISHED_UNOWNED", pages, name, holder, detail)',
    ),
    (
        "PUBLISHED_UNOWNED",
        "free pages that are published",
        'self._unowned(published.forward, pages, name, entry, "published")\n            return',
        "return",
    ),
    (
        "PUBLISHED_UNOWNED",
        "pages of others that are published",
        'self._unowned(published.forward, pages, name, entry, "published")\n        after',
        "pass\n        after",
    ),
    (
        "PUBLISHED_UNOWNED",
        "pages found by their prefix",
        'self._unowned(forward, pages, name, entry, "found by its prefix")',
    ),
    (
        "PUBLISHED_UNWRITTEN",
        "pages published after the write did not come",
        "published = self._evidence.unwritten(pages, published, after.notes.missing)",
    ),
    ("STALE_EPOCH", "any", 'self._findings.violated("STALE_EPOCH", pages, name, published.request, what)'),
    (
        "FAILED_LOAD_USED",
        "pages that are handed out as loaded",
        'self._transfers.used(pages, life.name, entry, "taken for loaded")',
        "entry",
    ),
    (
        "FAILED_LOAD_USED",
        "pages that are published",
        'self._transfers.used(pages, name, entry, "published")',
        "entry",
    ),
    (
        "FAILED_LOAD_USED",
        "pages found by their prefix",
        'self._transfers.used(pages, name, entry, "taken from the prefix index")',
        "entry",
    ),
)

_TRANSFERS = (
    (
        "TRANSFER_OVERLAP",
        "any",
        'self._findings.violated("TRANSFER_OVERLAP", pages, request, other, detail)',
    ),
    (
        "TRANSFER_OVERLAP",
        "two transfers",
        'self._overlap(pages, flight.request, other.request, f"{flight} meets {other}")',
    ),
    (
        "TRANSFER_OVERLAP",
        "a load into another's page",
        'self._overlap(pages, flight.request, live[0].name, f"{flight} enters what another request holds")',
    ),
    (
        "TRANSFER_OVERLAP",
        "a transfer and a copy",
        "self._overlap(Pages(fact.group, page, 1), holder, flight.request, what)",
    ),
    (
        "EARLY_REUSE",
        "loads below a running forward",
        'self._findings.violated("EARLY_REUSE", pages, request, entry.last_owner, what)',
    ),
    (
        "EARLY_REUSE",
        "pages handed out during a transfer",
        'self._findings.violated("EARLY_REUSE", pages, name, flight.request or entry.last_owner, what)',
    ),
    (
        "FAILED_LOAD_USED",
        "any that facts tell of",
        'self._findings.violated("FAILED_LOAD_USED", pages, request, failure.request, what)',
    ),
    (
        "FAILED_LOAD_USED",
        "loads that are called landed",
        'self.used(pages, failure.request, entry, "called landed")',
        "entry",
    ),
)

_EVIDENCE = (
    (
        "PUBLISHED_UNWRITTEN",
        "any",
        'self._findings.violated("PUBLISHED_UNWRITTEN", pages, published.request, reader, what)',
    ),
    (
        "PUBLISHED_UNWRITTEN",
        "writes that did not come",
        "published = self.unwritten(_pages(violation), published, violation.request)",
    ),
    (
        "PUBLISHED_UNWRITTEN",
        "pages that are read",
        "entry.noting(published=self.unwritten(_pages(violation), published, violation.request))",
        "entry",
    ),
    (
        "FAILED_LOAD_USED",
        "pages that are read",
        'self._findings.violated("FAILED_LOAD_USED", _pages(violation), violation.request, failure.request, what)',
    ),
    (
        "WINDOW_FREED_EARLY",
        "any",
        'self._findings.violated("WINDOW_FREED_EARLY", _pages(violation), violation.request, holder, what)',
    ),
)


def _of(module: str, rows: tuple[tuple[str, ...], ...]) -> list[Removal]:
    return [Removal(kind, what, module, *change) for kind, what, *change in rows]


REMOVALS: tuple[Removal, ...] = (
    *_of("kernels/ref_mark.py", _MARK),
    *_of("kernels/ref_check.py", _CHECK),
    *_of("kernels/ref_exit.py", _EXIT),
    *_of("kernels/ref_scrub.py", _SCRUB),
    *_of("kernels/ref_bytes.py", _BYTES),
    *_of("kernels/ref_poison.py", _POISON),
    *_of("kernels/ref_facts.py", _FACTS),
    *_of("feed.py", _FEED),
    *_of("observers/ownership.py", _OWNERSHIP),
    *_of("observers/ownership_transfers.py", _TRANSFERS),
    *_of("observers/ownership_evidence.py", _EVIDENCE),
)
"""All of them: at least one for every kind of violation, and one for every place that reports one."""
