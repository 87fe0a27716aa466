"""One prepared forward of the engine, seen as tables and rows that can be changed in place."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from kvcanary.layout import AttentionGroup

if TYPE_CHECKING:
    from kvcanary.canary import Canary


@dataclass(frozen=True, slots=True)
class Row:
    """One request in the batch: ``old`` tokens before this forward, ``new`` ones in it from token ``first`` on."""

    index: int
    request: str
    first: int
    old: int
    new: int
    left: int
    """tokens that it may still generate after this forward"""
    tokens: tuple[int, ...]
    """prompt and output so far"""

    @property
    def decodes(self) -> bool:
        """One new token after at least one old one, and a few more forwards to come."""
        return self.new == 1 and self.old > 0 and self.left > 2


@dataclass(frozen=True, slots=True, eq=False)
class GroupView:
    """One attention group of the batch. All tensors are views of the engine's own.

    Attributes:
        number: its place in the layout.
        layout: the group itself.
        write_index: ``[T]``, or None when a block table says where tokens go.
        read_index: flat, row after row, or None when nothing is read or a block table is used.
        row_starts: where each row begins in ``read_index``.
        block_table: ``[B, max]``, or None.
    """

    number: int
    layout: AttentionGroup
    write_index: torch.Tensor | None
    read_index: torch.Tensor | None
    row_starts: tuple[int, ...]
    block_table: torch.Tensor | None

    @property
    def stride(self) -> int:
        """Engine index units of one page."""
        return self.layout.index_stride or self.layout.page_size

    def old_length(self, row: Row) -> int:
        """Old positions of a row that this group reads."""
        ring = self.layout.ring
        return row.old if ring is None else min(row.old, ring - 1)

    def entries(self, row: Row) -> torch.Tensor | None:
        """The table of a row's old positions, in position order: one entry per token, or per page. None: no table."""
        if self.block_table is not None:
            return self.block_table[row.index, : -(-row.old // self.layout.page_size)]
        if self.read_index is None or self.read_index.numel() == 0:
            return None
        start = self.row_starts[row.index]
        return self.read_index[start : start + self.old_length(row)]

    def page_entries(self, row: Row, page: int) -> torch.Tensor | None:
        """The part of :meth:`entries` that stands for the ``page``-th page, whole or as far as it is read."""
        entries = self.entries(row)
        if entries is None:
            return None
        size = 1 if self.block_table is not None else self.layout.page_size
        part = entries[page * size : (page + 1) * size]
        return part if part.numel() == size else None

    def full_pages(self, row: Row) -> int:
        """Pages of the row's table that hold old tokens only."""
        return self.old_length(row) // self.layout.page_size

    def context(self, row: Row, pages: int) -> tuple[int, ...]:
        """Tokens up to the end of the table's first ``pages`` pages: what the keys and values there depend on."""
        return row.tokens[: row.old - self.old_length(row) + pages * self.layout.page_size]

    def last_index(self, row: Row) -> int | None:
        """The index of the row's last old position, or None without a table."""
        entries = self.entries(row)
        if entries is None or entries.numel() == 0:
            return None
        last = int(entries[-1])
        if self.block_table is None:
            return last
        return last // self.layout.page_entry_stride * self.stride + (row.old - 1) % self.layout.page_size

    def slot(self, index: int) -> int:
        """The slot that an engine index names."""
        return index // self.stride * self.layout.page_size + index % self.stride


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """A prepared forward: live rows, groups, and the inputs of the model."""

    rows: tuple[Row, ...]
    groups: tuple[GroupView, ...]
    input_ids: torch.Tensor
    position_ids: torch.Tensor
    carry_over_ids: torch.Tensor | None
    vocabulary: int
    canary: Canary

    def decoding(self, group: str | None) -> Iterator[tuple[GroupView, list[Row]]]:
        """Groups (all, or the one asked for) with the rows that decode and have a table there."""
        for view in self.groups:
            if group in (None, view.layout.name):
                rows = [row for row in self.rows if row.decodes and view.entries(row) is not None]
                if rows:
                    yield view, rows


def read_batch(batch_data: Any, buffers: Any, canary: Canary) -> Batch:
    """The forward that ``compute_batch`` is about to launch.

    Args:
        batch_data: the model's keyword arguments.
        buffers: the processor's ``inputs_and_outputs``, of one pair of buffers or two.
        canary: whose layout names the groups.
    """
    pairs = getattr(buffers, "io_pairs", None)
    host = buffers if pairs is None else pairs[buffers.current_pair].host_io
    starts = batch_data["cu_seq_lens_q"].tolist()
    rows = tuple(_row(index, future, starts[index]) for index, future in enumerate(host.requests_in_batch))
    groups = tuple(_group(number, item, batch_data) for number, item in enumerate(canary.layout.groups))
    carry_over = None if pairs is None else buffers.get_cb_kwargs()[0]
    return Batch(
        rows=rows,
        groups=groups,
        input_ids=batch_data["input_ids"][0],
        position_ids=batch_data["position_ids"][0],
        carry_over_ids=carry_over,
        vocabulary=int(host.config.vocab_size),
        canary=canary,
    )


def _row(index: int, future: Any, first: int) -> Row:
    # The engine has advanced position_offset by this forward's tokens already.
    state, new = future.state, future.query_length
    limit = state.max_new_tokens
    left = 1 << 30 if limit is None else limit - state.generated_len()
    return Row(
        index=index,
        request=state.request_id,
        first=first,
        old=state.position_offset - new,
        new=new,
        left=left,
        tokens=(*state.initial_tokens, *state.generated_tokens),
    )


def _group(number: int, layout: AttentionGroup, batch_data: Any) -> GroupView:
    blocks = batch_data["block_table"]
    lengths = batch_data["cu_seq_lens_k"]
    if isinstance(lengths, dict):
        lengths = lengths["full_attention" if layout.ring is None else "sliding_attention"]
    flat = blocks is None
    return GroupView(
        number=number,
        layout=layout,
        write_index=batch_data["write_index"][number] if flat else None,
        read_index=batch_data["read_index"][number] if flat else None,
        row_starts=tuple(lengths.tolist()),
        block_table=None if flat else blocks[number],
    )
