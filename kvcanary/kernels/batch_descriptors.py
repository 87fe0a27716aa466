"""Descriptors of batches: what a forward brings, by its addresses, one row of int64 words a group.

A row is written again only when an address changed.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import IntEnum
from typing import TYPE_CHECKING

import torch

from kvcanary.errors import BatchError

if TYPE_CHECKING:
    from kvcanary.batch import ForwardBatch, GroupBatch, PageTable

ITEM_ROW = 16
"""Words of a batch item's row; as many arguments has the kernel that writes one."""


class ItemWord(IntEnum):
    """Words of a batch item's row; addresses are 0 where the batch brings nothing."""

    SLOT_MAPPING = 0
    ENTRIES = 1
    HEIGHT = 2
    """rows of a two-dimensional table; -1: flat"""
    WIDTH = 3
    """columns; all entries of a flat table"""
    ROW_STRIDE = 4
    ROW_INDEX = 5
    ROW_OFFSETS = 6
    FIRST = 7
    REQUIRED = 8
    TRANSLATION = 9
    TRANSLATION_SIZE = 10
    """-1: no translation"""
    WIDE = 11
    """bit set over the words above: that tensor is int64"""
    FLAGS = 12


class ItemFlag(IntEnum):
    """Bits of :attr:`ItemWord.FLAGS`."""

    PRESENT = 1
    PAGES = 2
    """entries name pages"""
    COVERS_NEW = 4
    TABLE = 8


def item_row(item: GroupBatch, batch_rows: int) -> tuple[int, ...]:
    """The row of :class:`ItemWord` of one group's part of a forward; also the key under which it is remembered."""
    table, wide = item.table, 0
    addresses = [0] * 11
    addresses[ItemWord.HEIGHT] = batch_rows
    for word, tensor in _item_tensors(item, table):
        addresses[word] = address_of(tensor, word.name)
        wide |= (tensor.dtype is torch.int64) << word
    flags = int(ItemFlag.PRESENT)
    if table is not None:
        entries = table.entries
        flat = table.row_offsets is not None
        addresses[ItemWord.HEIGHT] = -1 if flat else entries.shape[0]
        addresses[ItemWord.WIDTH] = entries.shape[-1]
        addresses[ItemWord.ROW_STRIDE] = 0 if flat else entries.stride(0)
        flags |= ItemFlag.TABLE
        flags |= ItemFlag.PAGES if table.unit == "page" else 0
        flags |= ItemFlag.COVERS_NEW if table.covers_new else 0
    addresses[ItemWord.TRANSLATION_SIZE] = -1 if item.translation is None else item.translation.shape[0]
    return (*addresses, wide, flags)


def _item_tensors(item: GroupBatch, table: PageTable | None) -> Iterator[tuple[ItemWord, torch.Tensor]]:
    pairs: list[tuple[ItemWord, torch.Tensor | None]] = [
        (ItemWord.SLOT_MAPPING, item.slot_mapping),
        (ItemWord.REQUIRED, item.required_from),
        (ItemWord.TRANSLATION, item.translation),
    ]
    if table is not None:
        pairs += [
            (ItemWord.ENTRIES, table.entries),
            (ItemWord.ROW_INDEX, table.row_index),
            (ItemWord.ROW_OFFSETS, table.row_offsets),
            (ItemWord.FIRST, table.first_position),
        ]
    return ((word, tensor) for word, tensor in pairs if tensor is not None)


def address_of(tensor: torch.Tensor, name: str) -> int:
    """The address of an index tensor whose last dimension must be contiguous.

    Raises:
        BatchError: it is not.
    """
    if tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
        raise BatchError(
            f"{name.lower()} has stride {tensor.stride(-1)} in its last dimension; the triton backend reads contiguous "
            "elements: pass .contiguous(), or a view that keeps the last dimension"
        )
    return tensor.data_ptr()


BATCH_FIELDS = (
    "input_ids",
    "query_start_loc",
    "context_lens",
    "request_rows",
    "positions",
    "token_salts",
    "expected_ids",
    "last_ids",
    "num_requests",
)
"""In the order in which kernels take their addresses."""


def batch_addresses(batch: ForwardBatch) -> tuple[list[int], int]:
    """Addresses of BATCH_FIELDS (0: not given), and a bit set of those that are int64."""
    addresses, wide = [], 0
    for i, name in enumerate(BATCH_FIELDS):
        tensor = getattr(batch, name)
        if tensor is None:
            addresses.append(0)
            continue
        addresses.append(address_of(tensor, name))
        wide |= (tensor.dtype is torch.int64) << i
    return addresses, wide
