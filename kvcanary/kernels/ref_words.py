"""64-bit words on signed int64 tensors: the functions of :mod:`kvcanary.record`, vectorised.

torch has no full uint64, and ``>>`` on int64 is arithmetic, so logical shifts mask the copies of the sign away.
Products and sums wrap, as they should.
"""

from __future__ import annotations

import torch

from kvcanary.record import (
    CODE_BITS,
    FLAG_SHIFT,
    MASK32,
    MAX_TAG,
    MIX_MULTIPLIERS,
    MIX_SHIFTS,
    SALTED,
    TAG_SHIFT,
    Keys,
    SealFlag,
    signed,
)

_MULTIPLIERS = (signed(MIX_MULTIPLIERS[0]), signed(MIX_MULTIPLIERS[1]))
_MASKS = tuple((1 << (64 - shift)) - 1 for shift in MIX_SHIFTS)


def xor_shift(words: torch.Tensor, step: int) -> torch.Tensor:
    """``words ^ (words >> MIX_SHIFTS[step])`` with a logical shift."""
    return (words >> MIX_SHIFTS[step]).bitwise_and_(_MASKS[step]).bitwise_xor_(words)


def finalise(words: torch.Tensor) -> torch.Tensor:
    """SplitMix64's finaliser."""
    words = xor_shift(words, 0).mul_(_MULTIPLIERS[0])
    words = xor_shift(words, 1).mul_(_MULTIPLIERS[1])
    return xor_shift(words, 2)


def mix(keys: Keys, link_words: torch.Tensor) -> torch.Tensor:
    """The keyed words that tokens add to a digest; word 0 of a link is ``code | position << 32`` already."""
    return finalise(link_words ^ keys.mix_in).bitwise_xor_(keys.mix_out)


def token_codes(tokens: torch.Tensor, positions: torch.Tensor, salts: torch.Tensor | None) -> torch.Tensor:
    """31-bit codes of int64 ``tokens``: themselves, or salted hashes."""
    plain = (tokens >> CODE_BITS) == 0
    if salts is not None:
        plain &= salts == 0
    if bool(plain.all()):
        return tokens
    words = finalise(link_words(tokens, positions))
    if salts is not None:
        words = words ^ salts
    hashed = finalise(words).bitwise_and_(SALTED - 1).bitwise_or_(SALTED)
    return torch.where(plain, tokens, hashed)


def link_words(codes: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Word 0 of links."""
    return (codes & MASK32).bitwise_or_(positions << 32)


def codes_of(words: torch.Tensor) -> torch.Tensor:
    """Codes in word 0 of links."""
    return words & MASK32


def positions_of(words: torch.Tensor) -> torch.Tensor:
    """Positions in word 0 of links, as signed 32-bit numbers."""
    return words >> 32


def writer_words(forward: int, tags: torch.Tensor) -> torch.Tensor:
    """Writer words of one forward without flags."""
    return ((tags & MAX_TAG) << TAG_SHIFT).bitwise_or_(forward & MASK32)


def tags_of(words: torch.Tensor) -> torch.Tensor:
    """Tags in writer or owner words."""
    return (words >> TAG_SHIFT) & MAX_TAG


def states_of(words: torch.Tensor) -> torch.Tensor:
    """States of owner words."""
    return words >> FLAG_SHIFT


def sealed(writers: torch.Tensor) -> torch.Tensor:
    """Which writer words belong to a seal."""
    return (writers & MASK32) != 0


def flag_bits(flags: SealFlag) -> int:
    """``flags`` at their place in a writer word."""
    return int(flags) << FLAG_SHIFT


def divide(values: torch.Tensor, by: int) -> torch.Tensor:
    """Floor division; a shift where it can be, since 64-bit division is slow."""
    if by & (by - 1) == 0:
        return values >> (by.bit_length() - 1) if by > 1 else values
    return torch.div(values, by, rounding_mode="floor")


def modulo(values: torch.Tensor, by: int) -> torch.Tensor:
    """Remainder of :func:`divide`, never negative."""
    if by & (by - 1) == 0:
        return values & (by - 1)
    return torch.remainder(values, by)
