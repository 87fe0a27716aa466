"""Rows of a forward: which requests, how long, what the scheduler knows; uploaded in one small copy a forward."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from kvcanary.batch import ForwardBatch, GroupBatch, PageTable

if TYPE_CHECKING:
    from kvcanary.engines.transformers.requests import Requests

_LENGTHS, _ROWS, _LAST, _COUNT, _FIRST = range(5)
_IN_FLIGHT = 4
"""Host buffers. The engine has at most two forwards launched and not updated, so the oldest is long copied."""


@dataclass(frozen=True, slots=True)
class GroupView:
    """Where a forward's keywords have one attention group.

    Attributes:
        index: number of its index lists and block table.
        kind: key of its lengths (``"full_attention"``, ``"sliding_attention"``).
        ring: sliding window in tokens, or None.
    """

    index: int
    kind: str
    ring: int | None = None


def ring_of(owner: Any) -> int | None:
    """The sliding window of what hands out a group's blocks, in tokens."""
    window = getattr(owner, "sliding_window", None)
    return None if window is None else int(window)


class Rows:
    """Fills the rows when the engine fixes its batch, and makes the :class:`ForwardBatch` when its model runs.

    The device buffer lies at one address for ever, so captured graphs can read it: int32 ``[4 or 5, max_rows]``
    with old lengths, rows, last known ids, the count, and for rings the first position of the read lists.
    """

    def __init__(self, requests: Requests, views: Sequence[GroupView], max_rows: int, device: torch.device) -> None:
        self._requests = requests
        self._views = tuple(views)
        self._ring = next((view.ring for view in views if view.ring is not None), None)
        lines = _FIRST + (self._ring is not None)
        pin = device.type == "cuda"
        self._host = deque(torch.zeros(lines, max_rows, dtype=torch.int32, pin_memory=pin) for _ in range(_IN_FLIGHT))
        self._device = torch.zeros(lines, max_rows, dtype=torch.int32, device=device)
        self.filled = False

    def fill(self, batch: Sequence[Any]) -> None:
        """Note the rows of ``batch``, before the engine advances their positions."""
        self._host.rotate()
        host = self._host[0].numpy()
        states = [item.state for item in batch]
        lengths = [state.position_offset for state in states]
        count = len(lengths)
        # numpy takes a packed array several times faster than a list.
        host[_LENGTHS, :count] = array("i", lengths)
        host[_ROWS, :count] = array("i", self._requests.rows(states))
        host[_LAST, :count] = array("i", _last_ids(states, lengths))
        host[_COUNT, 0] = count
        if self._ring is not None:
            past = self._ring - 1
            host[_FIRST, :count] = array("i", [length - past if length > past else 0 for length in lengths])
        self.filled = True

    def upload(self) -> None:
        """Copy the rows to the device, on the current stream."""
        self._device.copy_(self._host[0], non_blocking=True)

    def batch(self, kwargs: Mapping[str, Any]) -> ForwardBatch:
        """The forward that the model is about to run with these keywords."""
        starts = kwargs["cu_seq_lens_q"]
        rows = starts.shape[0] - 1
        return ForwardBatch(
            input_ids=kwargs["input_ids"][0],
            positions=kwargs["position_ids"][0],
            query_start_loc=starts,
            context_lens=self._device[_LENGTHS, :rows],
            request_rows=self._device[_ROWS, :rows],
            last_ids=self._device[_LAST, :rows],
            num_requests=self._device[_COUNT, :1],
            groups=tuple(self._group(view, kwargs, rows) for view in self._views),
        )

    def _group(self, view: GroupView, kwargs: Mapping[str, Any], rows: int) -> GroupBatch:
        tables = kwargs["block_table"]
        if tables is not None:
            # The index lists still hold an earlier batch then: only the block table is sent.
            return GroupBatch(table=PageTable(entries=tables[view.index]))
        written, read = kwargs["write_index"][view.index], kwargs["read_index"][view.index]
        if read.shape[0] == 0:
            return GroupBatch(slot_mapping=written)
        ends = kwargs["cu_seq_lens_k"]
        table = PageTable(
            entries=read,
            unit="slot",
            row_offsets=ends[view.kind] if isinstance(ends, Mapping) else ends,
            first_position=None if view.ring is None else self._device[_FIRST, :rows],
            # A ring's read list ends with sentinels where the new tokens are put in.
            covers_new=view.ring is None,
        )
        return GroupBatch(slot_mapping=written, table=table)


def _last_ids(states: Sequence[Any], lengths: Sequence[int]) -> list[int]:
    """For each row the id that the scheduler knows at its last old position, -1 if it knows none."""
    found: list[int] = []
    for state, length in zip(states, lengths, strict=True):
        prompt, generated = state.initial_tokens, state.generated_tokens
        place = length - 1 - len(prompt)
        if place < 0:
            found.append(prompt[place] if length else -1)
        else:
            found.append(generated[place] if place < len(generated) else -1)
    return found


def known_tokens(state: Any, length: int) -> Sequence[int]:
    """Known ids, at least ``length`` of them if the scheduler knows so many."""
    prompt: list[int] = state.initial_tokens
    return prompt if length <= len(prompt) else prompt + state.generated_tokens
