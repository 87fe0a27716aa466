"""Bytes of slots: gathered through views on the engine's own buffers, fingerprinted, tested for non-finite values.

A token's runs are strung together as 32-bit words, each run filled up with zeros to a whole word. Buffers and runs
that are aligned to words are read as words, all others byte by byte.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from kvcanary.errors import LayoutError
from kvcanary.kernels.ref_words import divide, modulo
from kvcanary.layout import KVSource, Run
from kvcanary.record import MASK32, WORD_MULTIPLIERS, WORD_STEP, Keys, source_seed

CHUNK_BYTES = 1 << 20
"""Bytes gathered at a time: what is made of them should stay in the processor's cache."""


class PartReader:
    """Reads the slots of one part of a group.

    Attributes:
        token_bytes: bytes of one token, without filling.
    """

    def __init__(self, sources: tuple[KVSource, ...], keys: Keys) -> None:
        # Neighbours of one type are tested together.
        ordered = sorted(sources, key=lambda source: str(source.dtype))
        self.token_bytes = sum(source.token_bytes for source in sources)
        self._views = [view for source in ordered for view in _views(source)]
        self._keys = torch.cat([_word_keys(source, keys) for source in ordered])
        self._spans = _float_spans(ordered)
        self._step = max(1, CHUNK_BYTES // (4 * self._keys.numel()))

    def fingerprints(self, slots: torch.Tensor) -> torch.Tensor:
        """Fingerprints int64 ``[n]`` of int64 ``slots``."""
        return _joined([self._fold(self._words(chunk)) for chunk in slots.split(self._step)])

    def seal(self, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Fingerprints, and which slots hold a value that is not finite (None: none does)."""
        folded: list[torch.Tensor] = []
        flawed: list[torch.Tensor | None] = []
        for chunk in slots.split(self._step):
            words = self._words(chunk)
            folded.append(self._fold(words))
            flawed.append(self._nonfinite(words))
        return _joined(folded), _flawed(flawed, folded)

    def dirty(self, slots: torch.Tensor, *, zero: bool) -> torch.Tensor | None:
        """Which slots hold a value that is not finite or, with ``zero``, any bit that is set (None: none does)."""
        flawed: list[torch.Tensor | None] = []
        chunks = slots.split(self._step)
        for chunk in chunks:
            words = self._words(chunk)
            flawed.append((words != 0).any(1) if zero else self._nonfinite(words))
        return _flawed(flawed, chunks)

    def _words(self, slots: torch.Tensor) -> torch.Tensor:
        """int32 ``[n, words]``."""
        return _joined([view.words(slots) for view in self._views], 1)

    def _fold(self, words: torch.Tensor) -> torch.Tensor:
        wide = words.to(torch.int64).bitwise_and_(MASK32)
        # torch multiplies integer matrices on CPUs only.
        return (wide * self._keys).sum(1) if wide.is_cuda else torch.mv(wide, self._keys)

    def _nonfinite(self, words: torch.Tensor) -> torch.Tensor | None:
        bad = None
        for dtype, begin, end in self._spans:
            values = words[:, begin:end].contiguous().view(dtype)
            if dtype.itemsize == 1:
                values = values.to(torch.float32)
            # One pass when all is well: the bounds of values with a NaN are NaN.
            low, high = values.aminmax()
            if not (math.isfinite(low) and math.isfinite(high)):
                flawed = ~values.isfinite().all(1)
                bad = flawed if bad is None else bad | flawed
        return bad


def _joined(pieces: list[torch.Tensor], dim: int = 0) -> torch.Tensor:
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)


def _flawed(marks: list[torch.Tensor | None], chunks: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Marks of all chunks in one; None when no chunk has any."""
    if all(mark is None for mark in marks):
        return None
    pairs = zip(marks, chunks, strict=True)
    return torch.cat([torch.zeros_like(chunk, dtype=torch.bool) if mark is None else mark for mark, chunk in pairs])


class _View(NamedTuple):
    """A strided look at ``runs`` equal runs.

    ``buffer`` is ``[slots, runs, items]``, or ``[pages, page_size, runs, items]`` where pages are set apart; a single
    run has no dimension of its own. ``filling``: bytes that lack to a whole word.
    """

    buffer: torch.Tensor
    page_size: int
    paged: bool
    filling: int

    def words(self, slots: torch.Tensor) -> torch.Tensor:
        """int32 ``[n, words]``."""
        if self.paged:
            items = self.buffer[divide(slots, self.page_size), modulo(slots, self.page_size)]
        else:
            items = self.buffer.index_select(0, slots)
        if items.dtype == torch.uint8:
            items = torch.nn.functional.pad(items, (0, self.filling)).view(torch.int32)
        return items if items.dim() == 2 else items.flatten(1)


def _views(source: KVSource) -> list[_View]:
    """Views that cover the runs in their order, with as few as their spacing allows."""
    views: list[_View] = []
    runs = list(source.runs)
    while runs:
        count = _evenly_spaced(runs)
        views.append(_view(source, runs[0], count, runs[1].offset - runs[0].offset if count > 1 else 0))
        del runs[:count]
    return views


def _evenly_spaced(runs: list[Run]) -> int:
    """How many of the first runs have one length and one distance."""
    count = 1
    for one, two in itertools.pairwise(runs):
        if two.num_bytes != one.num_bytes or two.offset - one.offset != runs[1].offset - runs[0].offset:
            break
        count += 1
    return count if count < 2 or runs[1].offset > runs[0].offset else 1


def _view(source: KVSource, run: Run, count: int, spacing: int) -> _View:
    start = source.tensor.storage_offset() * source.tensor.element_size() + run.offset
    numbers = (source.address + run.offset, start, source.page_stride, source.token_stride, spacing, run.num_bytes)
    size, dtype = (4, torch.int32) if all(number % 4 == 0 for number in numbers) else (1, torch.uint8)
    shape = [source.num_pages, source.page_size, count, run.num_bytes // size]
    strides = [source.page_stride // size, source.token_stride // size, spacing // size, 1]
    if count == 1:
        del shape[2], strides[2]
    paged = source.page_size > 1 and source.page_stride != source.page_size * source.token_stride
    if not paged:
        shape[:2] = [source.num_pages * source.page_size]
        strides[:2] = [strides[0] if source.page_size == 1 else strides[1]]
    buffer = torch.empty(0, dtype=dtype, device=source.tensor.device)
    buffer.set_(source.tensor.untyped_storage(), start // size, shape, strides)
    return _View(buffer, source.page_size, paged, -run.num_bytes % 4)


def _word_keys(source: KVSource, keys: Keys) -> torch.Tensor:
    """int64 ``[words]``: :func:`kvcanary.record.word_key` of every word of a token."""
    device = source.tensor.device
    index = torch.cat([run.first_word + torch.arange(-(-run.num_bytes // 4), device=device) for run in source.runs])
    x = (index * WORD_STEP + source_seed(keys, source.layer, source.component)) & MASK32
    x = ((x ^ (x >> 16)) * WORD_MULTIPLIERS[0]) & MASK32
    x = ((x ^ (x >> 15)) * WORD_MULTIPLIERS[1]) & MASK32
    return (x ^ (x >> 16)) | 1


def _float_spans(sources: list[KVSource]) -> list[tuple[torch.dtype, int, int]]:
    """Columns of words that hold floating values, as (type, begin, end)."""
    spans: list[tuple[torch.dtype, int, int]] = []
    begin = 0
    for source in sources:
        end = begin + sum(-(-run.num_bytes // 4) for run in source.runs)
        if source.dtype.is_floating_point and source.dtype != torch.float4_e2m1fn_x2:
            _check_runs(source)
            if spans and spans[-1][0] == source.dtype and spans[-1][2] == begin:
                spans[-1] = (source.dtype, spans[-1][1], end)
            else:
                spans.append((source.dtype, begin, end))
        begin = end
    return spans


def _check_runs(source: KVSource) -> None:
    size = source.dtype.itemsize
    broken = [run.num_bytes for run in source.runs if run.num_bytes % size]
    if broken:
        raise LayoutError(
            f"source {source.name!r}: a run of {broken[0]} bytes is no whole number of {source.dtype} values of {size} "
            "bytes; give dtype=torch.uint8 to leave out the non-finite check"
        )
