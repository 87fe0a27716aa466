"""From one violation to words: the likely fault, the evidence for it, and a headline.

Everything is concluded from the violation's own fields and from the ledger, so that a replay says the same. Fields that
were withheld (token ids, digests) are left out of the text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from kvcanary.events import ViolationDetected
from kvcanary.observers.ledger import Owner
from kvcanary.text import printable

BITS64 = 1 << 64
_MISREAD = frozenset({"UNWRITTEN", "POSITION", "DIGEST"})
"""Kinds in which a row reads a page and finds something else there."""
_SEEN = {
    "mark": "seen in what the forward was given, before the model ran",
    "check": "seen through the table that attention reads, before the model ran",
    "facts": "seen when the request ended, with the digest of all that it was fed",
}
"""When it was seen, by role."""


class Explanation(NamedTuple):
    """What people read. ``cause`` starts with the name of the likely fault."""

    headline: str
    cause: str
    evidence: tuple[str, ...]
    found: str
    expected: str


class Words(NamedTuple):
    """What one kind of violation has to say: found, expected, likely cause, further evidence."""

    found: str
    expected: str
    cause: str
    evidence: tuple[str, ...] = ()


def docs_link(kind: str) -> str:
    """Where the documentation explains a kind, relative to ``docs/``."""
    return f"violations.md#{kind.lower()}"


def explain(violation: ViolationDetected, owners: Sequence[Owner] = ()) -> Explanation:
    """The words for a violation that the device, or the finish audit, found.

    ``owners``: who held its page, newest first, as the ledger has it.
    """
    words = _EXPLAIN.get(violation.kind, _unknown)(violation)
    if violation.kind in _MISREAD and _was_taken(violation, owners):
        taken = f"the page was taken from request {_reader(violation)}, which still reads it"
        words = words._replace(cause=f"freed too early: {taken}, and went to {_owner(violation)}")
    headline = (
        f"{violation.kind}: {_place(violation)}: found {words.found}, expected {words.expected}, "
        f"forward {violation.forward}"
    )
    evidence = (*words.evidence, *_circumstances(violation), *_history(violation, owners))
    return in_print(Explanation(headline, words.cause, evidence, words.found, words.expected))


def in_print(words: Explanation) -> Explanation:
    """The words without what would break a line or command a terminal: engines take request ids from clients."""
    if all(map(str.isprintable, (words.headline, words.cause, words.found, words.expected, *words.evidence))):
        return words
    evidence = tuple(map(printable, words.evidence))
    return Explanation(
        printable(words.headline), printable(words.cause), evidence, printable(words.found), printable(words.expected)
    )


# --- parts of sentences -------------------------------------------------------------------------------------


def _name(request: str, tag: int) -> str:
    return request or (f"with tag {tag}" if tag else "nobody known")


def _reader(v: ViolationDetected) -> str:
    return _name(v.request, v.tag)


def _writer(v: ViolationDetected) -> str:
    known = v.writer_request or v.writer_tag
    return f"request {_name(v.writer_request, v.writer_tag)}" if known else "a row that no live request has"


def _owner(v: ViolationDetected) -> str:
    known = v.owner_request or v.owner_tag
    return f"request {_name(v.owner_request, v.owner_tag)}" if known else "nobody known"


def _place(v: ViolationDetected) -> str:
    parts = [f"request {_reader(v)}" if v.request or v.tag else "no request", f"group {v.group}"]
    if v.slot >= 0:
        parts.append(f"slot {v.slot}")
    if v.page >= 0:
        parts.append(f"page {v.page}")
    if v.position_expected >= 0:
        parts.append(f"position {v.position_expected}")
    return ", ".join(parts)


def _token(token: int | None, other: str) -> str:
    return other if token is None else f"token {token}"


def _digest(digest: str, other: str) -> str:
    return f"prefix digest {digest}" if digest else other


def _another_wrote(v: ViolationDetected) -> bool:
    return bool(v.writer_forward and v.tag and v.writer_tag != v.tag) and not _same_name(v, v.writer_request)


def _another_owns(v: ViolationDetected) -> bool:
    others = v.owner_state == "held" and bool(v.owner_tag and v.tag and v.owner_tag != v.tag)
    return others and not _same_name(v, v.owner_request)


def _same_name(v: ViolationDetected, name: str) -> bool:
    """Whether it is the reader itself: one that resumes has a new tag."""
    return bool(name) and name == v.request


def _nobody_reads(v: ViolationDetected) -> str | None:
    """The likely fault when the row is that of no live request."""
    if v.tag or v.request or v.row < 0:
        return None
    whose = f", through pages that {_owner(v)} holds" if v.owner_state == "held" and v.owner_tag else ""
    return f"stale row: the forward goes over a row whose request has ended, or was never admitted{whose}"


def _was_taken(v: ViolationDetected, owners: Sequence[Owner]) -> bool:
    """Whether the reader had the page before it went to its present owner, and does not share it now."""
    if not v.request or not _another_owns(v):
        return False
    mine = [owner for owner in owners if owner.request == v.request]
    return bool(mine) and all(owner.until and owner.until <= v.forward for owner in mine)


def _circumstances(v: ViolationDetected) -> Iterator[str]:
    if v.role in _SEEN:
        yield _SEEN[v.role]
    if v.writer_forward:
        yield f"the record was written by {_writer(v)} in forward {v.writer_forward}"
    if v.owner_state == "held":
        yield f"the page belongs to {_owner(v)} since forward {v.owner_as_of}"
    elif v.owner_state == "freed":
        yield f"the page is free since forward {v.owner_as_of}; {_owner(v)} had it before"
    elif v.owner_state in {"trash", "null"}:
        yield f"the page is reserved ({v.owner_state})"
    if v.tainted:
        yield "the request already had a wrong digest; this may follow from it"


def _history(v: ViolationDetected, owners: Sequence[Owner]) -> Iterator[str]:
    for owner in owners[:2]:
        who = f"request {owner.request}" if owner.request else "somebody"
        if owner.until and owner.until <= v.forward:
            yield f"{who} held the page from forward {owner.since} until it was taken back for forward {owner.until}"
        elif owner.request != v.owner_request:
            # Who shares a page came later than whoever it was handed out to; the ledger keeps only that forward.
            yield f"{who} holds the page too"


# --- kinds --------------------------------------------------------------------------------------------------


def _write_foreign(v: ViolationDetected) -> Words:
    found = f"a page of {_owner(v)}" if v.owner_state == "held" else f"a reserved page ({v.owner_state or 'unknown'})"
    expected = f"a page of request {_reader(v)}"
    if v.owner_state in {"null", "trash"}:
        return Words(
            found, expected, "foreign write: a live token was written into a page that is reserved for padding"
        )
    if v.owner_as_of and v.forward - v.owner_as_of <= 1:
        return Words(
            found, expected, "stale slot: the slot mapping is older than the page's last hand-over, which just happened"
        )
    return Words(
        found, expected, "foreign write: the slot mapping names a page of another request (stale slot, or swapped rows)"
    )


def _write_freed(v: ViolationDetected) -> Words:
    own = bool(v.tag) and v.owner_tag == v.tag
    cause = (
        "freed too early: the request still writes into a page that was taken from it"
        if own
        else "stale slot: the slot mapping names a page that nobody holds any more"
    )
    return Words(f"a page freed in forward {v.owner_as_of}", f"a page of request {_reader(v)}", cause)


def _write_conflict(_: ViolationDetected) -> Words:
    return Words(
        "another token marked for the same slot",
        "one token a slot",
        "duplicate slot: two tokens of one forward are mapped to one slot (page allotted twice, or swapped rows)",
    )


def _table_mismatch(v: ViolationDetected) -> Words:
    named = v.position_found
    offset = v.slot - named if v.slot >= 0 and named >= 0 else 0
    shifted = 0 < abs(offset) <= 2
    cause = (
        "shifted position: slot mapping and page table are a step apart"
        if shifted
        else "stale slot: slot mapping and page table were made from different states of the scheduler"
    )
    expected = f"slot {named}, which the page table names" if named >= 0 else "the slot that the page table names"
    return Words(f"a write to slot {v.slot}", expected, cause, (f"they differ by {offset:+d} slots",) if offset else ())


def _input_token(v: ViolationDetected) -> Words:
    return Words(
        _token(v.token_found, "another token"),
        _token(v.token_expected, "the token that the scheduler recorded"),
        "lost carry-over: the model was fed another token than the one sampled for this request (or swapped rows)",
    )


def _input_position(v: ViolationDetected) -> Words:
    offset = v.position_found - v.position_expected
    return Words(
        f"position {v.position_found}",
        f"position {v.position_expected}",
        "shifted position: the forward starts elsewhere than the request's history ends",
        (f"off by {offset:+d}",),
    )


def _input_placeholder(v: ViolationDetected) -> Words:
    return Words(
        "a negative token id" if v.token_found is None else _token(v.token_found, ""),
        "a token of the vocabulary",
        "lost carry-over: a placeholder reached the model because no sampled token took its place",
    )


def _slot_range(v: ViolationDetected) -> Words:
    return Words(
        f"index {v.slot}, outside the pool" if v.slot >= 0 else "an index outside the pool",
        "an index within the pool",
        "stale slot: an entry of the page table or slot mapping is garbage, never written, or of another pool",
    )


def _position(v: ViolationDetected) -> Words:
    offset = v.position_found - v.position_expected
    evidence = (f"off by {offset:+d}",)
    found, expected = f"a record of position {v.position_found}", f"position {v.position_expected}"
    nobodys = _nobody_reads(v)
    if nobodys is not None:
        cause = nobodys
    elif _another_owns(v):
        cause = f"stale slot: the table of request {_reader(v)} names a page that {_owner(v)} holds (or swapped rows)"
    elif _another_wrote(v):
        cause = f"foreign write: {_writer(v)} wrote where request {_reader(v)} reads"
    else:
        cause = "shifted position: the request's own tokens are read from a wrong place of its table"
    return Words(found, expected, cause, evidence)


def _wrong_digest(v: ViolationDetected) -> Words:
    found = _digest(v.digest_found, "a record that belongs to another prefix")
    expected = _digest(v.digest_expected, "the digest that the record before it leads to")
    if v.position_expected == 0:
        # Before the first token there is only the seed, which comes from the identity.
        cause = "other identity: the page was computed under another adapter, salt or tenant than the request has"
        return Words(found, expected, cause)
    nobodys = _nobody_reads(v)
    if nobodys is not None:
        return Words(found, expected, nobodys)
    if _another_owns(v):
        return Words(found, expected, f"swapped rows: the table names pages that {_owner(v)} holds (or a stale slot)")
    if _another_wrote(v):
        return Words(found, expected, f"foreign write: {_writer(v)} wrote at the right position of another sequence")
    return Words(found, expected, "stale slot: an entry of the table names an older page of the same positions")


def _request_digest(v: ViolationDetected) -> Words:
    found = _digest(v.digest_found, "a row whose tokens are not the request's")
    expected = _digest(v.digest_expected, "the digest of the tokens that the request was fed")
    if _another_owns(v) or _another_wrote(v):
        cause = "swapped rows: the row is consistent in itself, but another request's"
        return Words(found, expected, f"{cause} (or the prefix index has one key for two prefixes)")
    return Words(
        found, expected, "lost carry-over: the cache holds other tokens than the request was fed (or swapped rows)"
    )


def _final_digest(v: ViolationDetected) -> Words:
    return Words(
        _digest(v.digest_found, "a history that differs from prompt plus output"),
        _digest(v.digest_expected, "the digest of prompt plus output"),
        "lost carry-over: a token that was fed is not the one that was returned (or swapped rows)",
    )


def _unwritten(v: ViolationDetected) -> Words:
    if v.owner_state == "freed":
        return Words(
            "no record in a freed page",
            "a written slot",
            "freed too early: the request still reads a page that was freed",
        )
    since = f"no record since the page was handed out in forward {v.owner_as_of}"
    return Words(
        since, "a written slot", "never written: the page was handed out, and read before anybody wrote the slot"
    )


def _window(_: ViolationDetected) -> Words:
    return Words(
        "no slot",
        "a slot, since the window still reaches this position",
        "freed too early: a position that window layers still read has lost its slot",
    )


def _write_missing(v: ViolationDetected) -> Words:
    return Words(
        "the poison that was put there",
        f"bytes of the new token{' in part ' + v.part if v.part else ''}",
        "never written: the forward skipped the write of this token",
    )


def _nonfinite(_: ViolationDetected) -> Words:
    return Words(
        "NaN or infinity", "finite values", "numerics or uncleared memory: the model wrote values that are not finite"
    )


def _null_dirty(_: ViolationDetected) -> Words:
    return Words(
        "bytes that are not clean",
        "a clean null slot, since attention may read it",
        "foreign write: something wrote into the reserved null slot (often a padded row)",
    )


def _content(v: ViolationDetected) -> Words:
    found, expected = f"bytes with fingerprint {v.fingerprint_found}", f"fingerprint {v.fingerprint_expected}"
    bit = flipped_bit(v.fingerprint_expected, v.fingerprint_found)
    if bit is not None:
        clue = f"the difference is that of one flipped bit: bit {bit} of one 32-bit word"
        return Words(found, expected, "flipped bits: a single bit changed after the token was sealed", (clue,))
    evidence = ("more than one bit changed",) if v.fingerprint_found else ()
    if v.owner_state == "freed":
        cause = "freed too early: the page was free, and something reused its bytes"
    elif _another_owns_bytes(v) and v.writer_forward >= v.owner_as_of:
        cause = (
            "incomplete copy: the record came with a copy, and the bytes under it are others (stored too early, loaded "
            "in part, or read in another layout)"
        )
    elif _another_owns_bytes(v):
        cause = f"foreign write: the bytes changed after {_owner(v)} got the page, without a new record"
    else:
        cause = "foreign write: the bytes changed after the token was sealed (a late copy, or early reuse)"
    return Words(found, expected, cause, evidence)


def _another_owns_bytes(v: ViolationDetected) -> bool:
    return v.owner_state == "held" and bool(v.owner_tag and v.writer_tag and v.owner_tag != v.writer_tag)


def flipped_bit(expected: str, found: str) -> int | None:
    """Which bit of its 32-bit word was flipped, if the fingerprints differ as by exactly one flipped bit.

    A flip of bit ``k`` changes the fingerprint by ``± key * 2**k`` with an odd 32-bit key. Any other change looks
    like that with a probability of about 2^-26.
    """
    if not expected or not found:
        return None
    difference = (int(found, 16) - int(expected, 16)) % BITS64
    for size in (difference, BITS64 - difference):
        bit = (size & -size).bit_length() - 1
        if size and bit < 32 and size >> bit < 1 << 32:
            return bit
    return None


def _double_free(_: ViolationDetected) -> Words:
    return Words(
        "a page that was free already", "a page in use", "freed twice: two places of the engine give the page back"
    )


def _double_alloc(v: ViolationDetected) -> Words:
    return Words(f"a page of {_owner(v)}", "a free page", "allotted twice: the allocator handed out a page in use")


def _unknown(v: ViolationDetected) -> Words:
    return Words("a violation of an unknown kind", "none", f"unknown: this version does not know {v.kind}")


_EXPLAIN: dict[str, Callable[[ViolationDetected], Words]] = {
    "WRITE_FOREIGN": _write_foreign,
    "WRITE_FREED": _write_freed,
    "WRITE_CONFLICT": _write_conflict,
    "TABLE_MISMATCH": _table_mismatch,
    "INPUT_TOKEN": _input_token,
    "INPUT_POSITION": _input_position,
    "INPUT_PLACEHOLDER": _input_placeholder,
    "SLOT_RANGE": _slot_range,
    "POSITION": _position,
    "DIGEST": _wrong_digest,
    "UNWRITTEN": _unwritten,
    "REQUEST_DIGEST": _request_digest,
    "WINDOW": _window,
    "WRITE_MISSING": _write_missing,
    "NONFINITE": _nonfinite,
    "CONTENT": _content,
    "NULL_DIRTY": _null_dirty,
    "FINAL_DIGEST": _final_digest,
    "DOUBLE_FREE": _double_free,
    "DOUBLE_ALLOC": _double_alloc,
}

KINDS = tuple(_EXPLAIN)
"""Kinds of violation that the device, or the finish audit, can find."""
