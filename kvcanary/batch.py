"""What one forward touches, in the field's terms. All tensors stay on the device; nothing is read on the host.

Made and compared with the layout at each forward, on the engine's thread. Hence a first look that builds no shape, and
classes that are not frozen, which would take twice as long to make: change none that a canary has entered.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from kvcanary.errors import BatchError
from kvcanary.layout import PoolLayout

INDEX_DTYPES = (torch.int32, torch.int64)


@dataclass(slots=True, eq=False, kw_only=True)
class PageTable:
    """The table that attention itself reads.

    Two-dimensional: ``entries [rows, max]``, batch row ``b`` uses row ``row_index[b]`` (or ``b``).
    Flat: ``entries [n]``, batch row ``b`` uses ``row_offsets[b]`` up to ``row_offsets[b + 1]``.
    In both, entry 0 of a row belongs to position ``first_position[b]`` (``unit="slot"``), or to the page that
    holds that position (``unit="page"``). Groups with ``ring`` and a two-dimensional table are addressed by
    ``position % ring``. Entries beyond a row's end are never read; they may be stale.

    Attributes:
        entries: int32 or int64.
        unit: what an entry names.
        row_index: int32 or int64 ``[B]``.
        row_offsets: int32 or int64 ``[B + 1]``; makes the table flat.
        first_position: int32 or int64 ``[B]``; None: 0.
        covers_new: the entries for this forward's new tokens are real, so they can be compared with
            ``slot_mapping``.
    """

    entries: torch.Tensor
    unit: Literal["slot", "page"] = "page"
    row_index: torch.Tensor | None = None
    row_offsets: torch.Tensor | None = None
    first_position: torch.Tensor | None = None
    covers_new: bool = True


@dataclass(slots=True, eq=False, kw_only=True)
class GroupBatch:
    """One attention group's part of a forward.

    Attributes:
        slot_mapping: int32 or int64 ``[T]``, the index each new token is written to; negative: not written.
            None: the table's entry of the new position.
        table: None when nothing is read; rows with old tokens then count as unverified.
        required_from: ``[B]``, old positions from here on must be mapped and are checked; None: the later of the
            table's first position and the start of the group's window (``context_len - window + 1``).
        translation: int32 or int64 ``[slots]``; maps what table and mapping hold to this group's indices
            (full slot to window slot). 0 or negative: not mapped.
    """

    slot_mapping: torch.Tensor | None = None
    table: PageTable | None = None
    required_from: torch.Tensor | None = None
    translation: torch.Tensor | None = None


@dataclass(slots=True, eq=False, kw_only=True)
class ForwardBatch:
    """One forward: ``T`` new tokens (padding included) in ``B`` rows (padding included).

    Attributes:
        input_ids: int32 or int64 ``[T]``, as the model receives them.
        query_start_loc: ``[B + 1]``, non-decreasing; row ``b`` has tokens ``[b]`` up to ``[b + 1]``. A real row may
            have none.
        context_lens: ``[B]``, old positions of each row (its length before this forward).
        request_rows: ``[B]``, the rows that :meth:`Canary.admit` gave out, each once; negative: padding.
        groups: one item for each group of the layout, in its order; None: the group takes no part.
        positions: ``[T]``; None: consecutive from ``context_lens``.
        token_salts: int64 ``[T]``, 0: none. Binds media content to its placeholder tokens.
        expected_ids: ``[T]``, the ids that the scheduler knows; negative: no opinion.
        last_ids: ``[B]``, the id that the scheduler has at position ``context_lens - 1``; negative: no opinion.
            The one check that sees a lost carry-over between asynchronous steps.
        num_requests: ``[1]``, live rows; None: all ``B``. Rows at or after it are padding.
        linked: False for draft trees: position and token only, counted as unverified links.
    """

    input_ids: torch.Tensor
    query_start_loc: torch.Tensor
    context_lens: torch.Tensor
    request_rows: torch.Tensor
    groups: tuple[GroupBatch | None, ...]
    positions: torch.Tensor | None = None
    token_salts: torch.Tensor | None = None
    expected_ids: torch.Tensor | None = None
    last_ids: torch.Tensor | None = None
    num_requests: torch.Tensor | None = None
    linked: bool = True

    @property
    def num_tokens(self) -> int:
        """T, padding included."""
        return self.input_ids.shape[0]

    @property
    def num_rows(self) -> int:
        """B, padding included."""
        return self.request_rows.shape[0]

    def validate(self, layout: PoolLayout, max_tokens: int, max_rows: int) -> None:
        """Compare shapes, dtypes and devices; reads no element of a tensor.

        Raises:
            BatchError: naming the field, what was found and what was expected.
        """
        if not self._fits(layout, max_tokens, max_rows):
            self._judge(layout, max_tokens, max_rows)

    def _fits(self, layout: PoolLayout, max_tokens: int, max_rows: int) -> bool:
        """Whether everything agrees: several times faster than :meth:`_judge`, which says what does not."""
        try:
            tokens, rows = self.input_ids.numel(), self.request_rows.numel()
            device = layout.device
            return (
                tokens <= max_tokens
                and rows <= max_rows
                and type(self.groups) is tuple
                and len(self.groups) == len(layout.groups)
                and _is_line(self.input_ids, tokens, device)
                and _is_line(self.query_start_loc, rows + 1, device)
                and _is_line(self.context_lens, rows, device)
                and _is_line(self.request_rows, rows, device)
                and (self.positions is None or _is_line(self.positions, tokens, device))
                and (self.token_salts is None or _is_line(self.token_salts, tokens, device))
                and (self.expected_ids is None or _is_line(self.expected_ids, tokens, device))
                and (self.last_ids is None or _is_line(self.last_ids, rows, device))
                and (self.num_requests is None or _is_line(self.num_requests, 1, device))
                and all(item is None or _group_fits(item, tokens, rows, device) for item in self.groups)
            )
        except (AttributeError, TypeError):
            return False

    def _judge(self, layout: PoolLayout, max_tokens: int, max_rows: int) -> None:
        for name in ("input_ids", "query_start_loc", "context_lens", "request_rows"):
            tensor = getattr(self, name)
            if not isinstance(tensor, torch.Tensor) or tensor.dim() != 1:
                raise BatchError(f"{name} must be a tensor of one dimension, got {_shown(tensor)}")
        tokens, rows = self.num_tokens, self.num_rows
        device = layout.device
        if tokens > max_tokens or rows > max_rows:
            raise BatchError(
                f"a forward of {tokens} tokens in {rows} rows exceeds the capacity given at attach ("
                f"{max_tokens} tokens, {max_rows} rows); attach with larger max_tokens or max_batch_rows"
            )
        if not isinstance(self.groups, tuple):
            raise BatchError(f"groups must be a tuple of GroupBatch items, got {_shown(self.groups)}")
        if len(self.groups) != len(layout.groups):
            raise BatchError(
                f"groups has {len(self.groups)} items, the layout has {len(layout.groups)} groups; use None for a "
                "group that takes no part"
            )
        _expect("input_ids", self.input_ids, (tokens,), device)
        _expect("query_start_loc", self.query_start_loc, (rows + 1,), device)
        _expect("context_lens", self.context_lens, (rows,), device)
        _expect("request_rows", self.request_rows, (rows,), device)
        for name, length in (("positions", tokens), ("token_salts", tokens), ("expected_ids", tokens)):
            _expect(name, getattr(self, name), (length,), device)
        _expect("last_ids", self.last_ids, (rows,), device)
        _expect("num_requests", self.num_requests, (1,), device)
        for group, item in zip(layout.groups, self.groups, strict=True):
            if item is not None:
                _validate_group(group.name, item, tokens, rows, device)


def _is_line(tensor: torch.Tensor, length: int, device: torch.device) -> bool:
    dtype = tensor.dtype
    return (
        tensor.dim() == 1
        and tensor.numel() == length
        and (dtype is torch.int32 or dtype is torch.int64)
        and tensor.device == device
    )


def _group_fits(item: GroupBatch, tokens: int, rows: int, device: torch.device) -> bool:
    table = item.table
    return (
        isinstance(item, GroupBatch)
        and (item.slot_mapping is None or _is_line(item.slot_mapping, tokens, device))
        and (item.required_from is None or _is_line(item.required_from, rows, device))
        and (item.translation is None or _is_line(item.translation, item.translation.numel(), device))
        and (item.slot_mapping is not None if table is None else _table_fits(table, rows, device))
    )


def _table_fits(table: PageTable, rows: int, device: torch.device) -> bool:
    entries = table.entries
    return (
        isinstance(table, PageTable)
        and table.unit in ("slot", "page")
        and entries.dim() == (2 if table.row_offsets is None else 1)
        and entries.dtype in INDEX_DTYPES
        and entries.device == device
        and (table.row_offsets is None or _is_line(table.row_offsets, rows + 1, device))
        and (table.row_index is None or _is_line(table.row_index, rows, device))
        and (table.first_position is None or _is_line(table.first_position, rows, device))
    )


def _validate_group(name: str, item: GroupBatch, tokens: int, rows: int, device: torch.device) -> None:
    if not isinstance(item, GroupBatch):
        raise BatchError(f"group {name!r} takes a GroupBatch or None, got {_shown(item)}")
    if not isinstance(item.table, PageTable | None):
        raise BatchError(f"{name}.table must be a PageTable or None, got {_shown(item.table)}")
    _expect(f"{name}.slot_mapping", item.slot_mapping, (tokens,), device)
    _expect(f"{name}.required_from", item.required_from, (rows,), device)
    shape = tuple(item.translation.shape[:1]) if isinstance(item.translation, torch.Tensor) else ()
    _expect(f"{name}.translation", item.translation, shape, device)
    table = item.table
    if table is None:
        if item.slot_mapping is None:
            raise BatchError(f"group {name!r} has neither slot_mapping nor table; nothing says where its tokens go")
        return
    if table.unit not in ("slot", "page"):
        raise BatchError(f"{name}.table.unit must be 'slot' or 'page', got {table.unit!r}")
    dims = 1 if table.row_offsets is not None else 2
    if not isinstance(table.entries, torch.Tensor):
        raise BatchError(f"{name}.table.entries must be a tensor, got {_shown(table.entries)}")
    if table.entries.dim() != dims:
        raise BatchError(
            f"{name}.table.entries has {_shown(table.entries)}; expected "
            f"{'[n] with' if dims == 1 else '[rows, max] without'} row_offsets"
        )
    _expect(f"{name}.table.entries", table.entries, tuple(table.entries.shape), device)
    _expect(f"{name}.table.row_offsets", table.row_offsets, (rows + 1,), device)
    _expect(f"{name}.table.row_index", table.row_index, (rows,), device)
    _expect(f"{name}.table.first_position", table.first_position, (rows,), device)


def _expect(name: str, tensor: torch.Tensor | None, shape: tuple[int, ...], device: torch.device) -> None:
    if tensor is None:
        return
    if not isinstance(tensor, torch.Tensor):
        raise BatchError(f"{name} must be a tensor, got {_shown(tensor)}")
    if tuple(tensor.shape) != shape:
        raise BatchError(f"{name} has shape {tuple(tensor.shape)}, expected {shape}")
    if tensor.dtype not in INDEX_DTYPES:
        raise BatchError(f"{name} has dtype {tensor.dtype}, expected int32 or int64")
    if tensor.device != device:
        raise BatchError(f"{name} is on {tensor.device}, the cache is on {device}")


def _shown(value: object) -> str:
    return f"shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else f"a {type(value).__name__}"
