"""Facts as words: what the facts kernel reads, checked on the host as far as the host can see."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from kvcanary.errors import BatchError
from kvcanary.kernels import DeviceFact, FactOp
from kvcanary.kernels.descriptors import FACT_ROW, FactWord
from kvcanary.kernels.triton_pages import HOST_LIST
from kvcanary.layout import AttentionGroup, PoolLayout

Sums = Callable[[int, int, torch.Tensor], torch.Tensor]
"""Fingerprints of slots of a (space, part number)."""

Fill = Callable[[int, torch.Tensor], None]
"""Fills slots of a space with poison."""

_ROW_OPS = frozenset({FactOp.ADMIT, FactOp.ANCHOR})
_TABLE_OPS = frozenset({FactOp.COPY, FactOp.EXPORT, FactOp.IMPORT, FactOp.RESTAMP})
_COUNT, _RECORDS = int(FactWord.COUNT), int(FactWord.RECORDS)
_PAGES, _PAGES_KIND = int(FactWord.PAGES), int(FactWord.PAGES_KIND)
_TARGETS, _TARGETS_KIND = int(FactWord.TARGETS), int(FactWord.TARGETS_KIND)


@dataclass(slots=True)
class Encoded:
    """Words of ``count`` facts and their lists.

    ``alive`` holds the tensors that the kernel reads by address; on one stream the allocator hands their memory to
    nobody who writes before the kernel has read. ``copies``: exported records that go on to where they were wanted.
    """

    count: int = 0
    words: list[int] = field(default_factory=list)
    alive: list[torch.Tensor] = field(default_factory=list)
    copies: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)

    def finish(self) -> None:
        """After the launch."""
        for target, source in self.copies:
            target.copy_(source, non_blocking=target.is_pinned())


class FactEncoder:
    """Encodes the facts of one state."""

    max_facts = 1024
    """facts of one launch"""

    def __init__(self, layout: PoolLayout, max_rows: int, device: torch.device) -> None:
        self._layout = layout
        self._max_rows = max_rows
        self._device = device

    def encode(self, facts: Sequence[DeviceFact], sums: Sums, fill: Fill) -> Encoded:
        """Words for ``facts``; what they change of the bytes is done at once, since it concerns no record.

        Raises:
            BatchError: a fact names a row, page or record tensor that does not exist or does not fit.
        """
        encoded = Encoded(count=len(facts), words=[0] * (len(facts) * FACT_ROW))
        for i, fact in enumerate(facts):
            row = self._encode(fact, encoded, sums, fill)
            encoded.words[i * FACT_ROW : (i + 1) * FACT_ROW] = row
        return encoded

    def _encode(self, fact: DeviceFact, encoded: Encoded, sums: Sums, fill: Fill) -> list[int]:
        space = self._layout.spaces[fact.group]
        group = self._layout.groups[space]
        # In the order of FactWord.
        words = [fact.op, fact.group, space, fact.row, fact.tag, fact.position, fact.digest, fact.seed]
        words += (int(fact.armed), 0, 0, 0, 0, 0, 0, int(fact.judged))
        if fact.op in _ROW_OPS or (fact.op is FactOp.FINISH and fact.row >= 0):
            self._check_row(fact, group)
        elif fact.op is not FactOp.FINISH:
            words[_PAGES], words[_PAGES_KIND], words[_COUNT] = self._add_list(fact, group, fact.pages, encoded)
            if fact.op is FactOp.POISON:
                words[_COUNT] = 0
                slots = self._slots(fact.pages, group.page_size)
                encoded.alive.append(slots)
                fill(space, slots)
            if fact.op in _TABLE_OPS:
                words[_RECORDS] = self._records(fact, group, space, words, encoded, sums)
        return words

    def _check_row(self, fact: DeviceFact, group: AttentionGroup) -> None:
        if not 0 <= fact.row < self._max_rows:
            raise BatchError(f"{_name(fact, group)}: row {fact.row} is none of the {self._max_rows} rows")

    def _add_list(
        self, fact: DeviceFact, group: AttentionGroup, pages: Sequence[int] | torch.Tensor, encoded: Encoded
    ) -> tuple[int, int, int]:
        """Place, kind and length of a list of pages."""
        if isinstance(pages, torch.Tensor):
            if pages.device.type != "cpu":
                # What lies on the device cannot be looked at from here; the kernel passes over what is no page.
                tensor = pages.flatten().to(torch.int64).contiguous()
                encoded.alive.append(tensor)
                return tensor.data_ptr(), 1, tensor.shape[0]
            pages = pages.flatten().tolist()
        if pages and not fact.judged and (min(pages) < 0 or max(pages) >= group.num_pages):
            raise BatchError(
                f"{_name(fact, group)}: pages {min(pages)}..{max(pages)} reach out of 0..{group.num_pages - 1}"
            )
        place = len(encoded.words)
        encoded.words += pages
        return place, HOST_LIST, len(pages)

    def _records(
        self,
        fact: DeviceFact,
        group: AttentionGroup,
        space: int,
        words: list[int],
        encoded: Encoded,
        sums: Sums,
    ) -> int:
        """The address of the table that a fact reads or writes."""
        pages = words[_COUNT]
        shape = (pages * group.page_size, 2 + 2 * len(group.parts))
        if fact.op is FactOp.COPY:
            words[_TARGETS], words[_TARGETS_KIND], targets = self._add_list(fact, group, fact.targets, encoded)
            if targets != pages:
                raise BatchError(f"{_name(fact, group)}: {pages} pages go to {targets} targets; name one each")
            table = torch.empty(shape, dtype=torch.int64, device=self._device)
        elif fact.op is FactOp.RESTAMP:
            slots = self._slots(fact.pages, group.page_size)
            table = torch.stack([sums(space, part, slots) for part in range(len(group.parts))])
            encoded.alive.append(slots)
        else:
            table = self._record_tensor(fact, group, shape, encoded)
        encoded.alive.append(table)
        return table.data_ptr()

    def _slots(self, pages: Sequence[int] | torch.Tensor, page_size: int) -> torch.Tensor:
        if not isinstance(pages, torch.Tensor):
            pages = torch.tensor(pages, dtype=torch.int64, pin_memory=self._device.type == "cuda")
        numbers = pages.to(self._device, torch.int64, non_blocking=True).flatten()
        return (numbers.unsqueeze(1) * page_size + torch.arange(page_size, device=self._device)).flatten()

    def _record_tensor(
        self, fact: DeviceFact, group: AttentionGroup, shape: tuple[int, int], encoded: Encoded
    ) -> torch.Tensor:
        records = fact.records
        if records is None or tuple(records.shape) != shape or records.dtype != torch.int64:
            found = "none" if records is None else f"{records.dtype} {tuple(records.shape)}"
            raise BatchError(f"{_name(fact, group)}: records must be int64 {shape}, got {found}")
        if records.device == self._device and records.is_contiguous():
            return records
        if fact.op is FactOp.IMPORT:
            return records.to(self._device, non_blocking=True).contiguous()
        table = torch.empty(shape, dtype=torch.int64, device=self._device)
        encoded.copies.append((records, table))
        return table


def _name(fact: DeviceFact, group: AttentionGroup) -> str:
    return f"fact {fact.op.name} for group {group.name!r}"
