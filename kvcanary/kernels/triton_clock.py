"""The canary's own device time: stamps of the GPU's clock, in every n-th forward, also in the replay of a graph.

The first program of the entry's first launch starts the clock; every program of the entry's launches stamps its end,
and the latest counts; the first program of the exit starts anew, and its last one adds both stretches up. A forward
that is not due pays a load or two. Stretches run from the first program's start to the last one's end, so gaps between
launches count, and what a launch costs before its first program does not. Triton's interpreter has no clock.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer

from kvcanary.kernels.descriptors import StateWord
from kvcanary.kernels.triton_constants import WORD_FORWARD
from kvcanary.state import Word

_TICKS = tl.constexpr(not triton.knobs.runtime.interpret)
_EVERY = tl.constexpr(int(StateWord.GPU_TIME_EVERY))
_BEGAN = tl.constexpr(int(Word.CLOCK_BEGAN))
_ENTERED = tl.constexpr(int(Word.CLOCK_ENTERED))
_LEAVING = tl.constexpr(int(Word.CLOCK_LEAVING))
_GPU_NS = tl.constexpr(int(Word.GPU_NS))
_GPU_FORWARD = tl.constexpr(int(Word.GPU_FORWARD))


@triton.jit
def start_clock(counters, meta, first):
    """``first``: this is the first program of a launch of the entry. Starts the clock if the forward is due."""
    if _TICKS:
        if first:
            every = tl.load(meta + _EVERY)
            if every > 0:
                if (tl.load(counters + WORD_FORWARD) % every == 0) & (tl.load(counters + _BEGAN) == 0):
                    tl.store(counters + _BEGAN, globaltimer())


@triton.jit
def is_timed(counters):
    """Whether the clock runs; ask at a program's start, where the load hides behind others."""
    timed = 0
    if _TICKS:
        timed = tl.load(counters + _BEGAN, volatile=True)
    return timed != 0


@triton.jit
def stamp_entry(counters, timed):
    """The end of a program of the entry."""
    if _TICKS:
        if timed:
            tl.atomic_max(counters + _ENTERED, globaltimer(), sem="relaxed")


@triton.jit
def start_exit(counters, first):
    """``first``: this is the first program of a launch of the exit."""
    if _TICKS:
        if first:
            if (tl.load(counters + _BEGAN) != 0) & (tl.load(counters + _LEAVING) == 0):
                tl.store(counters + _LEAVING, globaltimer())


@triton.jit
def take_time(counters, forward):
    """The last program of the exit: add up."""
    if _TICKS:
        began = tl.load(counters + _BEGAN)
        if began != 0:
            now = globaltimer()
            entry = tl.maximum(tl.load(counters + _ENTERED, volatile=True) - began, 0)
            leaving = tl.load(counters + _LEAVING, volatile=True)
            tl.store(counters + _GPU_NS, entry + tl.maximum(now - leaving, 0))
            tl.store(counters + _GPU_FORWARD, forward)
            # The header is copied next, by other threads.
            tl.debug_barrier()


@triton.jit
def reset_clock(counters, forward):
    """For the next forward, whatever became of this one."""
    if _TICKS:
        tl.store(counters + _BEGAN, forward * 0)
        tl.store(counters + _ENTERED, forward * 0)
        tl.store(counters + _LEAVING, forward * 0)
