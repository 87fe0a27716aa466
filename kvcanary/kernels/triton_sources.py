"""Sources as chunks: contiguous bytes of one token, no more than a kernel's block, that a program loads in bundles."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvcanary.errors import LayoutError
from kvcanary.kernels.descriptors import BUNDLE, CHUNK_ROW, ChunkWord, fill_row
from kvcanary.layout import KVSource, Run
from kvcanary.record import MASK32, WORD_STEP, Keys, signed, source_seed

MAX_ACCESS = 16
_EXPONENTS = {
    torch.float32: (0x7F800000, 0x80000000),
    torch.bfloat16: (0x7F807F80, 0x80008000),
    torch.float16: (0x7C007C00, 0x80008000),
    torch.float8_e5m2: (0x7C7C7C7C, 0x80808080),
    torch.float8_e4m3fn: (0x7F7F7F7F, 0x80808080),
}
"""Per dtype: the bits that are all set in a value that is not finite, and the top bit of each value in a word."""


def chunk_rows(sources: Sequence[KVSource], keys: Keys, block: int) -> list[list[int]]:
    """The runs of ``sources`` as rows of :class:`ChunkWord`: at most ``block`` words each, in whole bundles."""
    classes: dict[int, list[list[int]]] = {MAX_ACCESS: [], 4: [], 1: []}
    for source in sources:
        for run in source.runs:
            classes[_access(source, run)] += _run_chunks(source, run, keys, block)
    rows: list[list[int]] = []
    for access, chunks in classes.items():
        for chunk in chunks:
            chunk[ChunkWord.ACCESS] = access
        rows += chunks
        for _ in range(-len(chunks) % BUNDLE):
            rows.append(fill_row({ChunkWord.BASE: chunks[0][ChunkWord.BASE], ChunkWord.ACCESS: access}, CHUNK_ROW))
    return rows


def are_alike(chunks: Sequence[Sequence[int]], block: int) -> bool:
    """Whether chunks are all whole blocks that 16-byte loads may read, and differ only in their addresses and keys."""
    alike = [
        (*row[ChunkWord.PAGE_STRIDE : ChunkWord.KEY], row[ChunkWord.EXPONENT], row[ChunkWord.ACCESS]) for row in chunks
    ]
    first = chunks[0]
    whole = first[ChunkWord.NUM_BYTES] == block * 4 and first[ChunkWord.ACCESS] == MAX_ACCESS
    return whole and all(row == alike[0] for row in alike)


def _access(source: KVSource, run: Run) -> int:
    values = (source.address, source.page_stride, source.token_stride, run.offset, run.num_bytes)
    return next(size for size in (MAX_ACCESS, 4, 1) if all(value % size == 0 for value in values))


def _exponents(source: KVSource, run: Run) -> tuple[int, int]:
    if not source.dtype.is_floating_point or source.dtype is torch.float4_e2m1fn_x2:
        return 0, 0
    if source.dtype not in _EXPONENTS:
        raise LayoutError(
            f"source {source.name!r}: the triton backend cannot tell which values of {source.dtype} are not finite, "
            f"only those of {[str(dtype) for dtype in _EXPONENTS]}; give dtype=torch.uint8 to leave out that check"
        )
    if run.num_bytes % source.dtype.itemsize:
        raise LayoutError(
            f"source {source.name!r}: a run of {run.num_bytes} bytes is no whole number of {source.dtype} values of "
            f"{source.dtype.itemsize} bytes; give dtype=torch.uint8 to leave out the non-finite check"
        )
    return _EXPONENTS[source.dtype]


def _run_chunks(source: KVSource, run: Run, keys: Keys, block: int) -> list[list[int]]:
    seed = source_seed(keys, source.layer, source.component)
    mask, top = _exponents(source, run)
    rows: list[list[int]] = []
    for start in range(0, run.num_bytes, block * 4):
        words = {
            ChunkWord.BASE: source.address + run.offset + start,
            ChunkWord.PAGE_STRIDE: source.page_stride,
            ChunkWord.TOKEN_STRIDE: source.token_stride,
            ChunkWord.NUM_BYTES: min(block * 4, run.num_bytes - start),
            ChunkWord.KEY: (seed + (run.first_word + start // 4) * WORD_STEP) & MASK32,
            ChunkWord.EXPONENT: signed(mask | top << 32),
        }
        rows.append(fill_row(words, CHUNK_ROW))
    return rows


def block_words(sources: Sequence[KVSource]) -> int:
    """Words of a chunk: the power of two from 32 to 1024 that wastes the fewest lanes, the larger the better."""
    lengths = [-(-run.num_bytes // 4) for source in sources for run in source.runs]

    def cost(block: int) -> int:
        return sum(-(-length // block) for length in lengths) * (block + 48)

    return min((1 << shift for shift in range(10, 4, -1)), key=cost)
