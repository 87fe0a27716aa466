"""Rows of a forward: which requests it holds and how long they are, as the canary needs them on the device."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch

from kvcanary.batch import ForwardBatch, GroupBatch, PageTable

_IN_FLIGHT = 4
"""Host buffers. The engine has at most two forwards launched and not updated, so the oldest is long copied."""


class Rows:
    """Makes the :class:`ForwardBatch` of a forward. Its device buffers lie at one address for ever.

    Args:
        max_rows: most rows of one forward.
        device: of the cache.
    """

    def __init__(self, max_rows: int, device: torch.device) -> None:
        pin = device.type == "cuda"
        self._host = deque(torch.zeros(max_rows, dtype=torch.int32, pin_memory=pin) for _ in range(_IN_FLIGHT))
        self._rows = torch.zeros(max_rows, dtype=torch.int32, device=device)
        self._context = torch.zeros(max_rows, dtype=torch.int32, device=device)

    def batch(
        self,
        rows: Sequence[int],
        *,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        query_start_loc: torch.Tensor,
        seq_lens: torch.Tensor,
        slot_mappings: Sequence[torch.Tensor],
        tables: Sequence[torch.Tensor],
    ) -> ForwardBatch:
        """The forward that is about to run.

        Args:
            rows: the canary's row of each request in the batch, -1 for one that it does not know.
            input_ids: ``[T]``, without padding, as all that follow.
            positions: ``[T]``.
            query_start_loc: ``[B + 1]``.
            seq_lens: int32 ``[B]``, lengths after this forward, as the device knows them.
            slot_mappings: ``[T]`` for each group of the layout.
            tables: ``[B, max blocks]`` for each group of the layout.
        """
        count = len(rows)
        self._host.rotate()
        host = self._host[0]
        host[:count] = torch.tensor(rows, dtype=torch.int32)
        self._rows[:count].copy_(host[:count], non_blocking=True)
        context = self._context[:count]
        torch.sub(query_start_loc[:count], query_start_loc[1 : count + 1], out=context)
        context.add_(seq_lens)
        return ForwardBatch(
            input_ids=input_ids,
            positions=positions,
            query_start_loc=query_start_loc,
            context_lens=context,
            request_rows=self._rows[:count],
            groups=tuple(
                GroupBatch(slot_mapping=slots, table=PageTable(entries=table))
                for slots, table in zip(slot_mappings, tables, strict=True)
            ),
        )
