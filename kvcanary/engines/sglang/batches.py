"""SGLang's forward batches in the canary's terms. One small copy a forward; nothing is read from the device."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from kvcanary.batch import ForwardBatch, GroupBatch, PageTable
from kvcanary.engines.sglang.pools import Space
from kvcanary.engines.sglang.requests import Requests, known_tokens

if TYPE_CHECKING:
    from collections.abc import Iterator

_IN_FLIGHT = 4
"""Host buffers. SGLang has at most two forwards launched and not processed, so the oldest is long copied."""


class Batches:
    """Makes a :class:`ForwardBatch` of SGLang's, which is made for each forward and not padded yet.

    The device buffer, int32 ``[2 * max_rows + max_tokens]``, holds rows, last known ids and expected ids.
    """

    def __init__(
        self,
        requests: Requests,
        table: Any,
        spaces: Sequence[Space],
        *,
        max_rows: int,
        max_tokens: int,
        device: torch.device,
    ) -> None:
        self._requests = requests
        self._table = table
        self._spaces = tuple(spaces)
        self._max_rows = max_rows
        size = 2 * max_rows + max_tokens
        pin = device.type == "cuda"
        self._host = deque(torch.zeros(size, dtype=torch.int32, pin_memory=pin) for _ in range(_IN_FLIGHT))
        self._device = torch.zeros(size, dtype=torch.int32, device=device)
        self._lengths = torch.zeros(max_rows, dtype=torch.int64, device=device)
        self._numbers = torch.arange(max_rows + 1, dtype=torch.int64, device=device)
        self._starts = torch.zeros(max_rows + 1, dtype=torch.int64, device=device)
        self._used = 0

    def fill(self, batch: Any, forward_batch: Any) -> None:
        """Find the rows and what the scheduler knows of the ids; may admit requests."""
        mode, reqs = forward_batch.forward_mode, batch.reqs
        rows = len(reqs)
        self._host.rotate()
        host = self._host[0].numpy()
        verify = mode.is_target_verify()
        if mode.is_decode() or verify:
            lengths = _decode_lengths(reqs, forward_batch.seq_lens_cpu, new=not verify)
        else:
            lengths = batch.prefix_lens
        # The lengths that the host has while drafts are verified may be those of an earlier round.
        host[:rows] = array("i", self._requests.rows(reqs, lengths, settled=not verify))
        last = [-1] * rows if verify else [_id_at(req, length - 1) for req, length in zip(reqs, lengths, strict=True)]
        host[self._max_rows : self._max_rows + rows] = array("i", last)
        self._used = 2 * self._max_rows
        if not mode.is_decode() and not verify:
            expected = array("i", _expected(reqs, lengths, batch.extend_lens))
            host[self._used : self._used + len(expected)] = expected
            self._used += len(expected)

    def make(self, forward_batch: Any) -> ForwardBatch:
        """The batch, on the current stream."""
        mode, rows, tokens = forward_batch.forward_mode, forward_batch.batch_size, forward_batch.input_ids.shape[0]
        buffer, used = self._device, self._used
        buffer[:used].copy_(self._host[0][:used], non_blocking=True)
        starts, linked = self._starts[: rows + 1], True
        if mode.is_decode():
            starts = self._numbers[: rows + 1]
            lengths = torch.sub(forward_batch.seq_lens, 1, out=self._lengths[:rows])
        elif mode.is_target_verify():
            torch.mul(self._numbers[: rows + 1], forward_batch.spec_info.draft_token_num, out=starts)
            lengths, linked = forward_batch.seq_lens, is_chain(forward_batch.spec_info)
        else:
            torch.cumsum(forward_batch.extend_seq_lens, 0, dtype=torch.int64, out=starts[1:])
            lengths = forward_batch.extend_prefix_lens
        table = PageTable(entries=self._table.req_to_token, unit="slot", row_index=forward_batch.req_pool_indices)
        expected = 2 * self._max_rows
        return ForwardBatch(
            input_ids=forward_batch.input_ids,
            positions=forward_batch.positions,
            query_start_loc=starts,
            context_lens=lengths,
            request_rows=buffer[:rows],
            last_ids=buffer[self._max_rows : self._max_rows + rows],
            expected_ids=buffer[expected : expected + tokens] if used > expected else None,
            linked=linked,
            groups=tuple(
                GroupBatch(slot_mapping=forward_batch.out_cache_loc, table=table, translation=space.translation)
                for space in self._spaces
            ),
        )


def is_chain(spec_info: Any) -> bool:
    """Whether drafts follow one another, so that each has one prefix."""
    return getattr(spec_info, "topk", None) == 1


def _decode_lengths(reqs: Sequence[Any], known: torch.Tensor | None, *, new: bool) -> list[int]:
    """Cached tokens of each request; ``new``: what is known counts the new token."""
    totals: list[int] = [req.kv.kv_committed_len for req in reqs] if known is None else known.tolist()
    return [total - 1 for total in totals] if new else totals


def _id_at(request: Any, position: int) -> int:
    """The id that the scheduler has at a position; -1: none yet."""
    if position < 0:
        return -1
    prompt, output = request.origin_input_ids, request.output_ids
    place = position - len(prompt)
    if place < 0:
        return int(prompt[position])
    return int(output[place]) if place < len(output) else -1


def _expected(reqs: Sequence[Any], lengths: Sequence[int], counts: Sequence[int]) -> Iterator[int]:
    """The ids that the scheduler has for the new tokens of a prefill; -1 where it has none."""
    for request, start, count in zip(reqs, lengths, counts, strict=True):
        known = known_tokens(request, start + count)[start : start + count]
        yield from known
        for _ in range(count - len(known)):
            yield -1
