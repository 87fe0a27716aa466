"""What crosses the pool's border: copies, blocks of other tiers, records that travel, and calls of another process."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvcanary.binding import Pages
from kvcanary.errors import BatchError, KVCanaryError, LayoutError
from kvcanary.exported import Records, adopted, refuse_strangers
from kvcanary.integers import whole_numbers
from kvcanary.kernels import FactOp
from kvcanary.lifecycle import Lifecycle, host_pages
from kvcanary.record import key_fingerprint
from kvcanary.wire import unpack


class Transfers(Lifecycle):
    """Part of :class:`kvcanary.canary.Canary`."""

    def transfer(
        self,
        transfer: str,
        event: str,
        *,
        group: str | int = 0,
        pages: Pages = (),
        direction: str = "in",
        ordered: bool = False,
        request: str | None = None,
        error: str = "",
        tier: str = "",
        blocks: Sequence[int] = (),
    ) -> None:
        """Bytes enter or leave pages by a copy: ``event`` is ``"start"``, ``"landed"`` or ``"failed"``.

        At the start of an incoming transfer the pages' records are wiped, so that nothing vouches for them until
        :meth:`import_records` or a forward does. ``ordered``: the forward's own stream orders the copy. ``tier`` and
        ``blocks``: the other end, where it is memory of this engine outside of the pool (host blocks, staging, places
        of metadata); the ledger then sees two copies that meet there.

        Raises:
            BatchError: unknown event or direction, or a tier that has the name of a group.
        """
        if event == "start":
            if direction not in ("in", "out"):
                raise BatchError(f"transfer {transfer!r}: direction must be 'in' or 'out', got {direction!r}")
            pages = self._checked(group, pages)
            self.facts.retired = self._retired()  # an unordered copy is judged by what is done by now
            index = self.layout.index(group)
            if direction == "in":
                self._keep_bytes(index, pages)
                self._page_fact(FactOp.WIPE, index, request, pages)
            name = self.layout.groups[index].name
            if len(pages):
                self.facts.transfer_started(
                    transfer, name, request or "", host_pages(pages), direction, ordered=ordered
                )
            if tier:
                held, other = self._blocks(tier, blocks), "out" if direction == "in" else "in"
                self.facts.transfer_started(transfer, tier, request or "", held, other, ordered=ordered)
        elif event == "landed":
            self.facts.transfer_landed(transfer)
        elif event == "failed":
            self.facts.transfer_failed(transfer, error)
        else:
            raise BatchError(f"transfer {transfer!r}: event must be 'start', 'landed' or 'failed', got {event!r}")

    def alloc_blocks(self, tier: str, request: str, blocks: Sequence[int]) -> None:
        """Blocks outside of the pool (see :meth:`transfer`) were handed out. For the ledger; nothing of them is read.

        Raises:
            BatchError: the tier has the name of a group, or a block is no number.
        """
        self.facts.pages("alloc", tier, request, self._blocks(tier, blocks))

    def free_blocks(self, tier: str, blocks: Sequence[int], request: str | None = None) -> None:
        """Blocks outside of the pool were taken back.

        Raises:
            BatchError: the tier has the name of a group, or a block is no number.
        """
        self.facts.pages("free", tier, request or "", self._blocks(tier, blocks))

    def export_records(self, group: str | int, pages: Pages) -> Records:
        """Records of pages whose bytes are about to be copied out, taken in order with the other facts."""
        index = self.layout.index(group)
        pages = self._checked(index, pages)
        item = self.layout.groups[index]
        parts = self.state.groups[index].seals.shape[0]
        words = torch.zeros(len(pages) * item.page_size, 2 + 2 * parts, dtype=torch.int64, device=self.state.device)
        self._page_fact(FactOp.EXPORT, index, None, pages, records=words)
        layout, key = self.layout, key_fingerprint(self.state.keys)
        return Records(item.name, len(pages), words, layout.fingerprint, layout.content(index), key, self.run)

    def import_records(
        self, group: str | int, pages: Pages, records: Records, request: str | None = None, *, relaid: bool = False
    ) -> None:
        """Give pages the records that came with their bytes; the first ``len(pages)`` of them.

        The slots are read again before anything else, so a transfer that brought other bytes is found. ``relaid``:
        whoever moved the bytes laid them out anew (other strides, other parallelism), so only what the group's seals
        add up must be the same: layers, components, dtypes, heads.

        Raises:
            LayoutError: the records come from another layout, group or key.
            BatchError: more pages than records.
        """
        index = self.layout.index(group)
        item = self.layout.groups[index]
        if not isinstance(records, Records):
            raise LayoutError(f"import_records() takes what export_records() gave, got {type(records).__name__}")
        refuse_strangers(records, self.layout, index, self.state.keys, relaid=relaid)
        pages = self._checked(index, pages)
        if len(pages) > records.pages:
            raise BatchError(f"{len(pages)} pages were loaded, but only {records.pages} pages of records came along")
        words = records.words[: len(pages) * item.page_size]
        shape = (len(pages) * item.page_size, 2 + 2 * self.state.groups[index].seals.shape[0])
        if words.dtype != torch.int64 or words.shape != shape:
            raise LayoutError(f"records must be int64 {shape}, got {words.dtype} {tuple(words.shape)}")
        if records.run != self.run:
            words = adopted(words, self._tag_of(request))
        self._keep_bytes(index, pages)
        self._page_fact(FactOp.IMPORT, index, request, pages, records=words)
        self._log_pages("alloc", index, request, pages)

    def ingest(self, data: bytes) -> None:
        """Make the calls that a :class:`~kvcanary.wire.FactWriter` packed in the scheduler's process, in order.

        Before the step that they belong to. One that is refused does not keep the others from being made.

        Raises:
            ConfigError: not such bytes, or those of another version; nothing has changed then.
            BatchError, LayoutError: the first refusal.
        """
        refused: list[KVCanaryError] = []
        for name, arguments in unpack(data):
            try:
                getattr(self, name)(**arguments)
            except (BatchError, LayoutError) as error:
                refused.append(error)
        if refused:
            raise refused[0]

    def _blocks(self, tier: str, blocks: Sequence[int]) -> tuple[int, ...]:
        names = [group.name for group in self.layout.groups]
        if not tier or not isinstance(tier, str) or tier in names:
            raise BatchError(f"a tier needs a name that no group has ({names}), got {tier!r}")
        numbers = whole_numbers(blocks, f"tier {tier!r}: blocks")
        if numbers and min(numbers) < 0:
            raise BatchError(f"tier {tier!r}: blocks count from 0, got {min(numbers)}")
        return numbers
