"""Prefix digests of host token lists, vectorised. Same values as :func:`kvcanary.record.prefix_digest`."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from itertools import chain, repeat

import torch

from kvcanary.kernels.ref_words import mix
from kvcanary.record import SALTED, Keys, prefix_digest, signed

_SHORT = 48
"""Below this many tokens plain integers are faster than a tensor."""


def digest_tokens(
    keys: Keys, seed: int, tokens: Sequence[int], length: int | None = None, salts: Sequence[int] = ()
) -> int:
    """``seed`` plus the mixes of ``tokens[:length]`` from position 0; signed 64 bits.

    ``salts``: of the first tokens, 0 for none; the others have none. Any thread, CPU only; about 10 ns a token for long
    lists without salts.
    """
    length = len(tokens) if length is None else length
    head = tokens if length == len(tokens) else tokens[:length]
    if any(salts):
        return prefix_digest(keys, seed, map(operator.index, head), chain(salts, repeat(0)))
    if length <= _SHORT:
        return prefix_digest(keys, seed, map(operator.index, head))
    codes = torch.tensor(head, dtype=torch.int64)
    if int(codes.min()) < 0 or int(codes.max()) >= SALTED:
        return prefix_digest(keys, seed, map(operator.index, head))
    words = mix(keys, codes | (torch.arange(length, dtype=torch.int64) << 32))
    return signed(seed + int(words.sum()))
