"""Rows of a forward: which requests it holds and how long they are, as the canary needs them on the device."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import torch

from kvcanary.batch import ForwardBatch, GroupBatch, PageTable

_IN_FLIGHT = 4
"""Host buffers. The engine has at most two forwards launched and not updated, so the oldest is long copied."""


class Known(NamedTuple):
    """What the host knows of the requests of a forward.

    Attributes:
        rows: the canary's row of each request, -1 for one that it does not know.
        last_ids: the id before the first new token of each, -1: no opinion.
        salts: of each new token, 0: none; None when there are none at all.
    """

    rows: Sequence[int]
    last_ids: Sequence[int]
    salts: Sequence[int] | None = None


class Rows:
    """Makes the :class:`ForwardBatch` of a forward. Its device buffers lie at one address for ever.

    Args:
        max_rows: most rows of one forward.
        max_tokens: most tokens of one forward.
        device: of the cache.

    Attributes:
        drafts, taken: for counts of each row of a forward with drafts, ``[max_rows]``.
    """

    def __init__(self, max_rows: int, max_tokens: int, device: torch.device) -> None:
        self._known = Upload(2 * max_rows, torch.int32, device)
        self._salts = Upload(max_tokens, torch.int64, device)
        self._context = torch.zeros(max_rows, dtype=torch.int32, device=device)
        self.drafts = Upload(max_rows, torch.int64, device)
        self.taken = Upload(max_rows, torch.int64, device)

    def batch(
        self,
        known: Known,
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
            known: of the batch's requests.
            input_ids: ``[T]``, without padding, as all that follow.
            positions: ``[T]``.
            query_start_loc: ``[B + 1]``.
            seq_lens: int32 ``[B]``, lengths after this forward, as the device knows them.
            slot_mappings: ``[T]`` for each group of the layout.
            tables: ``[B, max blocks]`` for each group of the layout.
        """
        count = len(known.rows)
        on_device = self._known.send([*known.rows, *known.last_ids])
        context = self._context[:count]
        torch.sub(query_start_loc[:count], query_start_loc[1 : count + 1], out=context)
        context.add_(seq_lens)
        return ForwardBatch(
            input_ids=input_ids,
            positions=positions,
            query_start_loc=query_start_loc,
            context_lens=context,
            request_rows=on_device[:count],
            last_ids=on_device[count:],
            token_salts=None if known.salts is None else self._salts.send(known.salts),
            groups=tuple(
                GroupBatch(slot_mapping=slots, table=PageTable(entries=table))
                for slots, table in zip(slot_mappings, tables, strict=True)
            ),
        )


class Upload:
    """Numbers that change with each forward, on their way to one place on the device."""

    def __init__(self, size: int, dtype: torch.dtype, device: torch.device) -> None:
        pin = device.type == "cuda"
        self._host = deque(torch.zeros(size, dtype=dtype, pin_memory=pin) for _ in range(_IN_FLIGHT))
        self._device = torch.zeros(size, dtype=dtype, device=device)

    def send(self, numbers: Sequence[int]) -> torch.Tensor:
        """The numbers on the device, without a wait. They are overwritten by the next ones."""
        self._host.rotate()
        count, host = len(numbers), self._host[0]
        host[:count] = torch.tensor(numbers, dtype=host.dtype)
        return self._device[:count].copy_(host[:count], non_blocking=True)
