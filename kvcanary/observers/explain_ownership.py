"""From a broken rule of ownership to words, as :mod:`kvcanary.observers.explain` does for violations."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvcanary.events import OwnershipViolated
from kvcanary.observers.explain import Explanation, in_print
from kvcanary.observers.ledger import Owner


def explain_ownership(event: OwnershipViolated, owners: Sequence[Owner] = ()) -> Explanation:
    """The words for a broken rule of ownership. ``owners``: who held its page, newest first, as the ledger has it."""
    found, expected, cause = _LEDGER.get(event.kind, ("a rule of ownership broken", "the rule kept", "unknown"))
    place = [f"request {event.request or '?'}", f"group {event.group or '?'}"]
    place += [f"page {event.page}"] if event.page >= 0 else []
    headline = f"{event.kind}: {', '.join(place)}: found {found}, expected {expected}, forward {event.forward}"
    suffers = (f"request {event.other} is the other party",) if event.other else ()
    detail = (event.detail,) if event.detail else ()
    return in_print(Explanation(headline, cause, (*detail, *suffers, *_history(owners)), found, expected))


def _history(owners: Sequence[Owner]) -> Iterator[str]:
    for owner in owners[:MOST_OWNERS]:
        who = f"request {owner.request}" if owner.request else "somebody"
        if owner.until:
            yield f"{who} held the page from forward {owner.since} until it was taken back for forward {owner.until}"
        else:
            yield f"{who} holds the page since forward {owner.since}"


MOST_OWNERS = 3
"""Its holder, and two before."""

_LEDGER: dict[str, tuple[str, str, str]] = {
    "EARLY_REUSE": (
        "a page handed on while something still uses it",
        "hand-over after its last user is done",
        "freed too early: no stream orders the old user and the new one",
    ),
    "DOUBLE_FREE": (
        "a page that was free already",
        "a page in use",
        "freed twice: two places of the engine give it back",
    ),
    "DOUBLE_ALLOC": ("a page in use", "a free page", "allotted twice: the allocator handed out a page in use"),
    "FREED_WHILE_PUBLISHED": (
        "a page freed while the prefix index still names it",
        "eviction before the page is freed",
        "freed too early: other requests can still find the page by its prefix",
    ),
    "PUBLISHED_UNOWNED": (
        "a page published that nobody holds",
        "a published page with an owner",
        "stale slot: the prefix index names a page that was given back",
    ),
    "PUBLISHED_UNWRITTEN": (
        "a published page that the forward left unwritten",
        "all published slots written when the forward is done",
        "never written: the page was published before, and the write never came",
    ),
    "WINDOW_FREED_EARLY": (
        "a page freed that the window still reaches",
        "pages kept while their positions are in the window",
        "freed too early: the window was counted on a length that was not settled",
    ),
    "TRANSFER_OVERLAP": (
        "a page in use by an unordered transfer",
        "pages untouched until the transfer has landed",
        "foreign write: a transfer and a forward or another transfer touch the same page",
    ),
    "STALE_EPOCH": (
        "pages computed with older weights",
        "pages of the present weights",
        "stale slot: the prefix cache was not cleared when the weights changed",
    ),
    "FAILED_LOAD_USED": (
        "pages whose load failed",
        "pages whose load has landed",
        "never written: the request went on although its transfer failed",
    ),
}

LEDGER_KINDS = tuple(_LEDGER)
"""Kinds of violation that the ledger can find."""
