"""Sizes of the Triton kernels' work."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """Sizes that cost or save time and change no result.

    Attributes:
        mark_tile, check_tile, commit_tile, window_tile, facts_tile: lanes of one program; decode_tile: those of a mark
            whose rows have few tokens; sum_tile: tokens added up at a time for a prefix digest.
        programs: how many programs a mark or check aims at, and the least a long row gets of them (``row_programs``).
        check_warps: most warps of a check's program; one needs no barrier.
        small, large: (items a program, bundles a program, warps, registers) of the byte kernel; large from
            ``large_items`` items on. A thread with too few registers spills, and local memory is slow to come cold.
        mark_registers, check_registers: bounds of those kernels, see :class:`kvcanary.kernels.triton_launch.Kernel`.
        sum_programs: most programs of a byte kernel; suspect_programs: those that wait for the scrub's queue, mostly
            in vain.
    """

    mark_tile: int = 512
    decode_tile: int = 32
    mark_registers: int = 255
    sum_tile: int = 2048
    check_tile: int = 32
    check_registers: int = 96
    check_warps: int = 1
    commit_tile: int = 256
    window_tile: int = 256
    facts_tile: int = 512
    programs: int = 2112
    row_programs: int = 8
    small: tuple[int, int, int, int] = (1, 2, 1, 128)
    large: tuple[int, int, int, int] = (1, 24, 1, 128)
    large_items: int = 1536
    sum_programs: int = 1 << 20
    suspect_programs: int = 132


INTERPRETED = Tuning(
    sum_programs=8, programs=2, row_programs=1, small=(64, 16, 1, 0), large=(64, 16, 1, 0), suspect_programs=1
)
"""For Triton's interpreter, which runs one program after the other and takes its time over each."""
