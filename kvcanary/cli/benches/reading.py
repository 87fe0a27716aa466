"""A kernel that reads memory and does nothing else: the flush of the cache, the ceiling, the stand-in for weights."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# pyright: reportMissingParameterType=false, reportUnknownParameterType=false

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

BLOCK = 8192
"""words a program; with 8 warps each thread has eight 16-byte loads under way"""
WARPS = 8


@triton.jit
def _read(words_ptr, count, BLOCK: tl.constexpr):  # noqa: ANN001, ANN202, N803 - Triton resolves annotations as code
    """Sum ``count`` words; the store never happens, but the compiler cannot know."""
    program = tl.program_id(0)
    offsets = program.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    words = tl.load(words_ptr + offsets, mask=offsets < count, other=0)
    total = tl.sum(words)
    tl.store(words_ptr, total, mask=(total == 0x5EED0BAD) & (program == count))


def read_all(buffer: torch.Tensor, *, block: int = BLOCK, warps: int = WARPS) -> None:
    """Read every byte of ``buffer`` (contiguous, a multiple of 4 bytes) once."""
    words = buffer.view(torch.int32).flatten()
    if buffer.device.type != "cuda":
        words.sum()
        return
    count = words.numel()
    launch: Any = _read
    launch[(triton.cdiv(count, block),)](words, count, BLOCK=block, num_warps=warps)
