"""Lifecycle calls of an engine: each is one append here and one small fact on the device at the next step.

All calls come from the engine's thread. ``as_of`` is always the next forward: a fact holds from there on, and
is applied in order on the forward's own stream, so it never overtakes a forward that is still running.
"""

from __future__ import annotations

import operator
import reprlib
import time
from collections.abc import Sequence

import torch

from kvcanary.batch import INDEX_DTYPES
from kvcanary.binding import Pages
from kvcanary.digests import digest_tokens
from kvcanary.errors import BatchError
from kvcanary.events import CanaryDisarmed, FactsLost
from kvcanary.integers import whole_numbers
from kvcanary.kernels import DeviceFact, FactOp
from kvcanary.record import hex64, identity_seed
from kvcanary.reporting import Reporting
from kvcanary.requests import Request
from kvcanary.state import Word

INLINE_BASE = 4096
"""Known tokens up to which a base digest is computed at once; longer ones are left to the drain's thread."""
MAX_LENGTH = 1 << 31
"""Records keep positions in 32 bits."""
REUSE_SLOTS = 512
"""Slots of one prefix hit that go to the front of the scrub with ``verify_on_reuse="budgeted"``."""


class Lifecycle(Reporting):
    """The lifecycle half of :class:`kvcanary.canary.Canary`."""

    def admit(
        self,
        request: str,
        *,
        tokens: Sequence[int] = (),
        start: int = 0,
        identity: bytes | None = None,
        salts: Sequence[int] = (),
    ) -> int:
        """Give a request a row; returns it.

        A request that is live already starts anew in the same row (resume, restart).

        Args:
            request: the engine's request id.
            tokens: all ids that are known; at least ``start`` of them make the base digest.
            start: tokens whose KV exists already (prefix hit, resume, load).
            identity: what the engine separates cached prefixes by (adapter, cache salt), as bytes.
            salts: of the first tokens, as the forwards' ``token_salts`` have them; 0, and past the end: none.

        Raises:
            BatchError: no row is free, or an argument is not what it should be; nothing has changed then.
        """
        _check_names(request, identity)
        start = _length(request, "start", start)
        seed = identity_seed(self.state.keys, identity)
        salts = _salts(request, salts)
        digest, armed = self._base(request, seed, salts, tokens, start)
        entry = self.registry.admit(request, seed, salts)
        self._pending.append(
            DeviceFact(
                FactOp.ADMIT, row=entry.row, tag=entry.tag, position=start, digest=digest, seed=seed, armed=armed
            )
        )
        if not armed:
            self._base_later(entry, tokens, start)
        self.facts.admitted(request, entry.row, entry.tag, start, hex64(digest) if armed else "")
        return entry.row

    def rewind(self, request: str, length: int, *, tokens: Sequence[int] = ()) -> None:
        """The request goes on from ``length``: a rejected draft, a replayed token, a failed load.

        Args:
            request: a live request.
            length: tokens that count from now on.
            tokens: known ids, at least ``length`` of them, to vouch for the digest there; without them the
                row's own history is used if it reaches back so far.
        """
        entry = self.registry.require(request)
        length = _length(request, "length", length)
        digest, armed = self._base(request, entry.seed, entry.salts, tokens, length)
        if armed:
            self._pending.append(
                DeviceFact(FactOp.ANCHOR, row=entry.row, tag=entry.tag, position=length, digest=digest, armed=True)
            )
        else:
            self._base_later(entry, tokens, length)
        self.facts.rewound(request, entry.tag, length)

    def preempt(self, request: str) -> None:
        """The request lost its pages; it will be admitted again."""
        entry = self.registry.require(request)
        self.facts.preempted(request, entry.tag)

    def finish(self, request: str, *, tokens: Sequence[int] | None = None, length: int | None = None) -> None:
        """The request ended; its row is free from the next step on.

        Args:
            request: a request; one that is not live is ignored, since engines finish aborted ones twice.
            tokens: prompt plus output, for the finish audit.
            length: tokens that the cache should hold; default ``len(tokens) - 1``, because the last sampled
                token was never fed to the model.

        Raises:
            BatchError: fewer tokens than ``length``, by which nothing could be audited; the request is still live then.
        """
        if length is None:
            length = max(len(tokens) - 1, 0) if tokens is not None else 0
        length = _length(request, "length", length)
        if tokens is not None and len(tokens) < length and self.is_live(request):
            raise BatchError(
                f"request {request!r}: finish() got {len(tokens)} tokens for length {length}; give all of them, or "
                "none if the engine does not know them"
            )
        entry = self.registry.finish(request)
        if entry is None:
            return
        if tokens is not None and length > 0:
            self.feed.expect_audit(entry, tuple(tokens[:length]))
        self._pending.append(DeviceFact(FactOp.FINISH, row=entry.row, tag=entry.tag, position=length))
        self.facts.finished(request, entry.tag, length)

    def row_of(self, request: str) -> int:
        """The row of a live request.

        Raises:
            BatchError: it is not live.
        """
        return self.registry.require(request).row

    def is_live(self, request: str) -> bool:
        """Whether the request has a row."""
        return self.registry.get(request) is not None

    def alloc(self, group: str | int, request: str, pages: Pages, *, judged: bool = False) -> None:
        """The allocator handed out pages; what their records said is forgotten.

        Args:
            group: name or number.
            request: whom the pages are for; ``""``: whoever writes into each of them first.
            pages: their numbers.
            judged: the numbers are the device's alone: the tensor stays there and must not change until the next
                step's facts have run, the ledger learns nothing, and the owner table's kernel judges double
                allotments.
        """
        self._tell("alloc", FactOp.ALLOC, group, request, pages, judged=judged)
        # Not pages in device tensors: whether a load fills them could not be told from here.
        if self._poison == "full" and not isinstance(pages, torch.Tensor):
            self._page_fact(FactOp.POISON, self.layout.index(group), request, self._checked(group, pages))

    def own(self, group: str | int, request: str, pages: Pages, *, judged: bool = False) -> None:
        """Pages were handed on with their contents: the owner changes, the records stay.

        ``judged``: as for :meth:`alloc`.
        """
        self._tell("reuse", FactOp.OWN, group, request, pages, judged=judged)

    def free(self, group: str | int, pages: Pages, request: str | None = None, *, judged: bool = False) -> None:
        """The allocator took pages back. Records stay until the pages are handed out again.

        Of a page with several holders tell it when the last one has gone, or each time with the ``request`` that gives
        its hold back; one that goes on to write into the page says :meth:`own` then. What stays in the prefix index is
        not free until it leaves that.

        ``judged``: as for :meth:`alloc`; the records go at once, so that a row that still reads the pages is found
        at its next forward.
        """
        self._tell("free", FactOp.FREE, group, request, pages, judged=judged)
        if judged:
            self._page_fact(FactOp.WIPE, self.layout.index(group), request, pages, judged=True)

    def publish(self, group: str | int, pages: Pages, request: str | None = None) -> None:
        """Pages can be found by other requests from now on."""
        self._tell("publish", None, group, request, pages)

    def evict(self, group: str | int, pages: Pages) -> None:
        """Pages left the prefix index."""
        self._tell("evict", None, group, None, pages)

    def reuse(self, group: str | int, request: str, pages: Pages, *, judged: bool = False) -> None:
        """A request took published pages; their bytes are read again first. ``judged``: as for :meth:`alloc`."""
        index = self.layout.index(group)
        queued = pages = self._judged(index, pages) if judged else self._checked(index, pages)
        if self.config.verify_on_reuse == "budgeted":
            queued = pages[: max(1, REUSE_SLOTS // self.layout.groups[index].page_size)]
        self._page_fact(FactOp.QUEUE, index, request, queued, judged=judged)
        if not judged:
            self._log_pages("reuse", index, request, pages)

    def move(
        self, group: str | int, sources: Pages, targets: Pages, request: str | None = None, *, judged: bool = False
    ) -> None:
        """Pages are copied on the device, in this order with the other facts; records go along.

        ``judged``: as for :meth:`alloc`.

        Raises:
            BatchError: lengths differ.
        """
        index = self.layout.index(group)
        check = self._judged if judged else self._checked
        sources, targets = check(index, sources), check(index, targets)
        if len(sources) != len(targets):
            raise BatchError(f"move needs as many targets as sources, got {len(sources)} and {len(targets)}")
        self._keep_bytes(index, targets)
        self._page_fact(FactOp.COPY, index, request, sources, targets=targets, judged=judged)
        if not judged:
            self.facts.moved(self.layout.groups[index].name, host_pages(sources), host_pages(targets))

    def restamp(self, group: str | int, pages: Pages) -> None:
        """Bytes were edited on purpose (shifted positions, requantised): trust the present ones."""
        self._tell("restamp", FactOp.RESTAMP, group, None, pages)

    def weights_updated(self, epoch: int) -> None:
        """New weights: everything cached before was made by older ones."""
        if not isinstance(epoch, int):
            raise BatchError(f"an epoch of weights must be a whole number, got {epoch!r}")
        self.facts.weights_updated(epoch)

    def facts_lost(self, count: int) -> None:
        """The engine, or the way from it, lost ``count`` of these calls: nothing is checked until :meth:`arm`.

        Pages may have changed hands untold since, so whatever a check found would prove nothing.
        """
        self.facts.append(FactsLost(count=_length("", "count of lost facts", count)))
        self.disarm(f"{count} lifecycle calls were lost on their way from the engine")

    def disarm(self, reason: str = "the engine asked for it") -> None:
        """Stop checking (warm-up, a pause in which the engine writes as it likes) until :meth:`arm`.

        ``reason`` is what :class:`~kvcanary.events.CanaryDisarmed` and the next health checks say.
        """
        with self._on_stream():
            self.state.counters[Word.ARMED] = 0
        if not self._armed:
            return
        self._armed = False
        now, wall = time.monotonic_ns(), time.time_ns()
        self.announce(CanaryDisarmed(forward=self.next_forward, time_ns=wall, monotonic_ns=now, reason=reason))

    def _base(
        self, request: str, seed: int, salts: Sequence[int], tokens: Sequence[int], length: int
    ) -> tuple[int, bool]:
        """The digest at ``length`` and whether it is known now; see :meth:`_base_later` for long ones."""
        if length == 0:
            return seed, True
        if not length <= min(len(tokens), INLINE_BASE):
            return 0, False
        try:
            return digest_tokens(self.state.keys, seed, tokens, length, salts), True
        except (TypeError, ValueError, OverflowError) as error:
            raise BatchError(f"request {request!r}: tokens must be whole numbers; {error}") from error

    def _base_later(self, entry: Request, tokens: Sequence[int], length: int) -> None:
        """Leave a long base digest to the drain's thread, with the tokens as they are now."""
        if len(tokens) >= length:
            self.feed.compute_base(entry, tuple(tokens[:length]), self._late)

    def _tell(
        self,
        kind: str,
        op: FactOp | None,
        group: str | int,
        request: str | None,
        pages: Pages,
        *,
        judged: bool = False,
    ) -> None:
        """One lifecycle call about pages: a fact for the device, where one is due, and one for the host.

        As many calls as rows that grow: what can be looked up is, and the usual one makes no call that it need not.
        """
        index, name, num_pages = self._places.get(group) or self._place(group)
        if op is not None and judged:
            self._page_fact(op, index, request, self._judged(index, pages), judged=True)
            return
        if type(pages) is list and len(pages) == 1 and type(pages[0]) is int and 0 <= pages[0] < num_pages:
            pages = (pages[0],)
        else:
            pages = self._checked(index, pages)
        if op is not None:
            self._page_fact(op, index, request, pages)
        self.facts.pages(kind, name, request or "", pages if type(pages) is tuple else host_pages(pages))

    def _place(self, group: str | int) -> tuple[int, str, int]:
        """A group's number, name and pages."""
        index = self.layout.index(group)
        item = self.layout.groups[index]
        return self._places.setdefault(group, (index, item.name, item.num_pages))

    def _keep_bytes(self, group: str | int, pages: Pages) -> None:
        """Let pages out of what is to be filled with poison at the next step: by then they may hold what was loaded."""
        if self._poison != "full":
            return
        index = self.layout.index(group)
        known = None if isinstance(pages, torch.Tensor) else set(pages)
        for fact in self._pending:
            if fact.op is FactOp.POISON and self.layout.spaces[fact.group] == self.layout.spaces[index]:
                fact.pages = () if known is None else [page for page in host_pages(fact.pages) if page not in known]

    def _judged(self, group: str | int, pages: Pages) -> Pages:
        """Pages whose numbers the host does not know."""
        if isinstance(pages, torch.Tensor) and pages.dim() == 1 and pages.dtype in INDEX_DTYPES:
            return pages
        found = f"{pages.dtype} {tuple(pages.shape)}" if isinstance(pages, torch.Tensor) else type(pages).__name__
        raise BatchError(
            f"group {self.layout.groups[self.layout.index(group)].name!r}: judged pages must be an int32 or int64 "
            f"tensor [n], got {found}; pages that the host knows are told without judged=True"
        )

    def _page_fact(
        self,
        op: FactOp,
        group: int,
        request: str | None,
        pages: Pages,
        *,
        targets: Pages = (),
        records: torch.Tensor | None = None,
        judged: bool = False,
    ) -> None:
        if len(pages) == 0:
            return
        # By position: keywords cost more than the rest of the call, and there are as many as rows that grow.
        fact = DeviceFact(op, group, pages, targets, -1, self._tag_of(request))
        if records is not None:
            fact.records = records
        fact.judged = judged
        self._pending.append(fact)

    def _tag_of(self, request: str | None) -> int:
        entry = self.registry.get(request) if request else None
        return 0 if entry is None else entry.tag

    def _log_pages(self, kind: str, group: int, request: str | None, pages: Pages) -> None:
        self.facts.pages(kind, self.layout.groups[group].name, request or "", host_pages(pages))


def host_pages(pages: Pages) -> Sequence[int]:
    """Pages that the host knows; those in a device tensor it does not."""
    return () if isinstance(pages, torch.Tensor) else pages


def _check_names(request: object, identity: object) -> None:
    if not isinstance(request, str):
        raise BatchError(f"request {request!r}: ids must be strings, got a {type(request).__name__}")
    if not isinstance(identity, bytes | None):
        raise BatchError(f"request {request!r}: identities must be bytes or None, got {identity!r}")


def _salts(request: str, salts: Sequence[int]) -> tuple[int, ...]:
    """Salts as they are now; 64 bits each."""
    numbers = whole_numbers(salts, f"request {request!r}: salts")
    if any(not -(1 << 63) <= salt < 1 << 64 for salt in numbers):
        raise BatchError(f"request {request!r}: salts must be whole numbers of 64 bits, got {reprlib.repr(salts)}")
    return numbers


def _length(request: str, name: str, value: int) -> int:
    """A number of tokens that a record can hold."""
    try:
        number = operator.index(value)
    except TypeError:
        number = -1
    if not 0 <= number < MAX_LENGTH:
        raise BatchError(
            f"request {request!r}: {name} must be a whole number from 0 to {MAX_LENGTH - 1}, got {value!r}"
        )
    return number
