"""The rows and tokens of a batch, and the digest at each row's end."""

from __future__ import annotations

from copy import copy

import torch

from kvcanary.batch import ForwardBatch
from kvcanary.kernels.ref_tables import SlotMap
from kvcanary.kernels.ref_words import mix, positions_of
from kvcanary.state import HISTORY, DeviceState, DigestSource, RowFlag, RowWord


class BatchRows:
    """Batch rows, ``[B]`` each. Dead rows (padding, or a row that the row table does not have) read as row 0.

    Attributes:
        live: which rows count; all_live: whether all do.
        row: number in the row table.
        words: that row of the row table, ``[B, ROW_WORDS]``.
        context: old positions.
        starts: ``[B + 1]``, first token.
        high: the length that the row should have, -1: unknown.
        held: the history knows the digest at ``context``; digest: that digest, else garbage.
        armed: the history goes back to a digest that the host vouched for.
    """

    def __init__(self, state: DeviceState, batch: ForwardBatch) -> None:
        self.state = state
        self.batch = batch
        row = batch.request_rows.to(torch.int64)
        self.live = (row >= 0).logical_and_(row < state.limits.max_rows)
        if batch.num_requests is not None:
            self.live &= torch.arange(batch.num_rows, device=row.device) < batch.num_requests
        self.num_live = int(self.live.sum())
        self.all_live = self.num_live == batch.num_rows
        self.row = row if self.all_live else torch.where(self.live, row, 0)
        self.words = state.rows.index_select(0, self.row)
        self.context = batch.context_lens.to(torch.int64)
        self.starts = batch.query_start_loc.to(torch.int64).clamp(0, batch.num_tokens)
        low, self.high = self.words[:, RowWord.LOW], self.words[:, RowWord.HIGH]
        # LOW is never negative, so nothing is held while HIGH is -1.
        self.held = (low <= self.context).logical_and_(self.context <= self.high)
        self.digest = self.past(self.context)
        self.armed = (self.words[:, RowWord.FLAGS] & RowFlag.ARMED) != 0

    def past(self, positions: torch.Tensor) -> torch.Tensor:
        """What the history has for one position of each row; whether that is its digest, LOW and HIGH say."""
        return self.state.history.take((positions & (HISTORY - 1)).add_(self.row, alpha=HISTORY))

    @property
    def seed(self) -> torch.Tensor:
        """Seeds of the rows; 0: unknown."""
        return self.words[:, RowWord.SEED]

    @property
    def tag(self) -> torch.Tensor:
        """Tags of the rows; 0: nothing known."""
        return self.words[:, RowWord.TAG]

    def digests(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Digest at ``context`` (0: unknown) and its :class:`DigestSource`."""
        seeded = (self.context == 0).logical_and_(self.seed != 0)
        # HISTORY is 1 and SEED is 3: a seeded row's number wins.
        source = torch.maximum(self.held * int(DigestSource.HISTORY), seeded * int(DigestSource.SEED))
        digest = torch.where(seeded, self.seed, self.digest * self.held)
        lost = (source == DigestSource.UNKNOWN).logical_and_(self.live).logical_and_(self.context > 0)
        if bool(lost.any()):
            self._from_slots(lost.nonzero().squeeze(1), digest, source)
        return digest, source

    def _from_slots(self, rows: torch.Tensor, digest: torch.Tensor, source: torch.Tensor) -> None:
        """Take digests from the records of the last old positions, where these can be found."""
        layout = self.state.layout
        for g, item in enumerate(self.batch.groups):
            if item is None or item.table is None:
                continue
            last = self.context[rows] - 1
            places = SlotMap(layout.groups[g], item, self.batch).at(rows, last)
            links = self.state.groups[g].links[places.slot.clamp(min=0)]
            known = (places.slot >= 0) & (links[:, 1] != 0) & (positions_of(links[:, 0]) == last)
            rows, links = rows[known], links[known]
            digest[rows] = links[:, 1] + mix(self.state.keys, links[:, 0])
            source[rows] = int(DigestSource.SLOTS)
            return


class Tokens:
    """Live tokens, ``[n]`` each, in batch order.

    Attributes:
        token: number in the batch; batch_row: its row there; row: its row in the row table.
        place: number within the row's new tokens.
        position: ``context + place``, which is also where the row's table names its slot.
        all_live: these are all tokens of the batch.
    """

    def __init__(self, rows: BatchRows) -> None:
        batch = rows.batch
        token = torch.arange(batch.num_tokens, device=rows.row.device)
        owner = torch.searchsorted(rows.starts, token, right=True).sub_(1)
        inside = (owner >= 0).logical_and_(owner < batch.num_rows)
        if not rows.all_live:
            inside.logical_and_(rows.live.index_select(0, owner.clamp(0, batch.num_rows - 1)))
        self.all_live = bool(inside.all())
        if not self.all_live:
            token = inside.nonzero().squeeze(1)
            owner = owner.index_select(0, token)
        self.token = token
        self.batch_row = owner
        self.place = token - rows.starts.index_select(0, owner)
        self.position = rows.context.index_select(0, owner).add_(self.place)
        self.row = rows.row.index_select(0, owner)

    def __len__(self) -> int:
        return self.token.shape[0]

    def pick(self, column: torch.Tensor) -> torch.Tensor:
        """These tokens' entries of a ``[T]`` tensor, as int64."""
        return (column if self.all_live else column.index_select(0, self.token)).to(torch.int64)

    def only(self, mask: torch.Tensor) -> Tokens:
        """Those for which ``mask`` ``[n]`` is True."""
        chosen = copy(self)
        chosen.all_live = False
        for name in ("token", "batch_row", "place", "position", "row"):
            setattr(chosen, name, getattr(self, name)[mask])
        return chosen
