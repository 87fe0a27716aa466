"""The canary record: 32 bytes that say what a slot holds.

A record is two pairs of int64 words, kept in two tensors so that the check of every forward reads only
the hot half:

``links[slot]``
    word 0: ``code | position << 32`` (both 32 bits); word 1: the prefix digest *before* this token.
    The zero pair is UNKNOWN: nothing is claimed about the slot. A zero digest alone means *unlinked*:
    token and position are claimed, the prefix is not.
``seals[slot]`` (one per part)
    word 0: the fingerprint of the token's bytes; word 1: the writer word
    ``forward[0:32] | tag[32:56] | flags[56:63]``. A zero ``forward`` field means unsealed.

All 64-bit arithmetic wraps. Values are carried in *signed* int64 everywhere (torch has no full uint64),
and the functions here work on plain Python integers: they are the definition that the torch reference
and the Triton kernels follow bit for bit.

The mix is a single-key-schedule Even-Mansour cipher around the finaliser of SplitMix64 (Steele, Lea and
Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014), so that digests do not give the
text away to a reader who lacks the key.
"""

from __future__ import annotations

import hashlib
import secrets
import zlib
from collections.abc import Iterable
from enum import IntEnum, IntFlag
from typing import NamedTuple

MASK32 = 0xFFFF_FFFF
MASK64 = 0xFFFF_FFFF_FFFF_FFFF
MIX_SHIFTS = (30, 27, 31)
MIX_MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
GOLDEN = 0x9E3779B97F4A7C15

WORD_STEP = 0x9E3779B1
WORD_MULTIPLIERS = (0x7FEB352D, 0x846CA68B)

CODE_BITS = 30
SALTED = 1 << CODE_BITS
"""Codes at or above this value are hashes of (token, salt, position); below it a code is the token itself."""

FORWARD_BITS = 32
TAG_BITS = 24
TAG_SHIFT = 32
FLAG_SHIFT = 56
MAX_TAG = (1 << TAG_BITS) - 1

POISON_BYTES = 16
"""Length of the poison pattern."""
POISON_LEAST = 8
"""Runs of fewer bytes take no poison: what a model writes would equal so short a pattern by chance."""
POISON_CLEAR = 0xBFBF_BFBF_BFBF_BFBF
POISON_SET = 0x0101_0101_0101_0101
"""Eight bytes' bits that may be set, and those that are."""

OWNER_UNKNOWN = 0
OWNER_HELD = 1
OWNER_FREED = 2
"""State byte (bits 56..) of an owner word ``as_of[0:32] | tag[32:56] | state[56:63]``; 0 claims nothing."""


class SealFlag(IntFlag):
    """Flags in the writer word: what was already reported about the slot, until it is written anew."""

    POSITION = 1
    DIGEST = 2
    UNWRITTEN = 4
    CONTENT = 8
    NONFINITE = 16
    WRITE_MISSING = 32
    SUSPECT = 64
    """A scrub saw a mismatch once; the second look turns it into ``CONTENT``."""


class Kind(IntEnum):
    """Kinds of violation that the device finds. Events carry the name."""

    WRITE_CONFLICT = 0
    WRITE_FOREIGN = 1
    WRITE_FREED = 2
    TABLE_MISMATCH = 3
    INPUT_TOKEN = 4
    INPUT_POSITION = 5
    INPUT_PLACEHOLDER = 6
    SLOT_RANGE = 7
    POSITION = 8
    DIGEST = 9
    UNWRITTEN = 10
    REQUEST_DIGEST = 11
    WINDOW = 12
    WRITE_MISSING = 13
    NONFINITE = 14
    CONTENT = 15
    NULL_DIRTY = 16
    FINAL_DIGEST = 17
    DOUBLE_FREE = 18
    DOUBLE_ALLOC = 19


NUM_KINDS = len(Kind)


class Keys(NamedTuple):
    """Secrets of one run, or of all engines that exchange records. Signed 64-bit integers.

    ``mix_in`` and ``mix_out`` key the mix; ``fingerprint`` seeds the fingerprint's per-word keys;
    ``seed`` is the digest seed of a request without an identity, never 0.
    """

    mix_in: int
    mix_out: int
    fingerprint: int
    seed: int


def signed(value: int) -> int:
    """The same 64 bits as a signed integer."""
    value &= MASK64
    return value - (1 << 64) if value >> 63 else value


def make_keys(secret: int | None = None) -> Keys:
    """Keys derived from ``secret`` (any integer), or random ones when it is None."""
    if secret is None:
        secret = secrets.randbits(64)
    words = [finalise((secret & MASK64) + GOLDEN * (i + 1)) for i in range(4)]
    return Keys(signed(words[0]), signed(words[1]), signed(words[2]), signed(words[3]) or 1)


def key_fingerprint(keys: Keys) -> str:
    """Sixteen hexadecimal digits that are the same for the same keys, and do not give them away."""
    return hashlib.blake2b(repr(tuple(keys)).encode(), digest_size=8, person=b"kvcanary").hexdigest()


def finalise(word: int) -> int:
    """SplitMix64's finaliser on the low 64 bits of ``word``; unsigned result."""
    word &= MASK64
    word = ((word ^ (word >> MIX_SHIFTS[0])) * MIX_MULTIPLIERS[0]) & MASK64
    word = ((word ^ (word >> MIX_SHIFTS[1])) * MIX_MULTIPLIERS[1]) & MASK64
    return word ^ (word >> MIX_SHIFTS[2])


def token_code(token: int, position: int, salt: int = 0) -> int:
    """The 31-bit code of a token: itself, or a salted hash for media placeholders and huge ids."""
    if salt == 0 and 0 <= token < SALTED:
        return token
    word = finalise((token & MASK32) | ((position & MASK32) << 32))
    return SALTED | (finalise(word ^ (salt & MASK64)) & (SALTED - 1))


def mix(keys: Keys, code: int, position: int) -> int:
    """The keyed 64-bit word that a token adds to the digest; signed."""
    word = (code & MASK32) | ((position & MASK32) << 32)
    return signed(finalise(word ^ (keys.mix_in & MASK64)) ^ (keys.mix_out & MASK64))


def identity_seed(keys: Keys, identity: bytes | None) -> int:
    """The digest seed of requests that share cached prefixes under ``identity``; never 0."""
    if not identity:
        return keys.seed
    word = keys.seed & MASK64
    for start in range(0, len(identity), 8):
        word = finalise(word ^ int.from_bytes(identity[start : start + 8], "little") ^ (keys.mix_in & MASK64))
    return signed(finalise(word ^ len(identity))) or 1


def prefix_digest(keys: Keys, seed: int, tokens: Iterable[int], salts: Iterable[int] | None = None) -> int:
    """``seed + sum(mix(code, position))`` over ``tokens`` from position 0; signed. The slow, exact form."""
    total = seed
    salt = iter(salts) if salts is not None else None
    for position, token in enumerate(tokens):
        total += mix(keys, token_code(token, position, next(salt) if salt is not None else 0), position)
    return signed(total)


def source_seed(keys: Keys, layer: int, component: str) -> int:
    """The 32-bit seed of the word keys of one layer and component (``"k"``, ``"v"``, ...)."""
    where = zlib.crc32(component.encode()) | ((layer & MASK32) << 32)
    return finalise((keys.fingerprint & MASK64) ^ finalise(where)) & MASK32


def word_key(seed: int, index: int) -> int:
    """The odd 32-bit key of the word with logical ``index``; C. Wellons' ``lowbias32`` permutation (2018)."""
    x = (seed + index * WORD_STEP) & MASK32
    x = ((x ^ (x >> 16)) * WORD_MULTIPLIERS[0]) & MASK32
    x = ((x ^ (x >> 15)) * WORD_MULTIPLIERS[1]) & MASK32
    return (x ^ (x >> 16)) | 1


def fingerprint_bytes(seed: int, data: bytes, first_word: int = 0) -> int:
    """What one run of bytes adds to a fingerprint: ``sum(key * word)`` over little-endian 32-bit words.

    A tail shorter than four bytes is filled with zeros. Signed; the slow, exact form, which tests hold the kernels to.
    """
    total = 0
    for i in range(0, len(data), 4):
        total += word_key(seed, first_word + i // 4) * int.from_bytes(data[i : i + 4], "little")
    return signed(total)


class Poison(NamedTuple):
    """What a forward puts into the new slots of one group, and where. ``pattern`` is as the bytes lie in memory."""

    choice: int
    """32 bits that choose the run"""
    block: int
    """32 bits that choose the bytes in it"""
    low: int
    high: int

    @property
    def pattern(self) -> bytes:
        """The sixteen bytes."""
        return self.low.to_bytes(8, "little") + self.high.to_bytes(8, "little")

    def start(self, num_bytes: int) -> int:
        """Where in a run of ``num_bytes`` the pattern begins; a shorter run takes the first bytes of it."""
        blocks = -(-num_bytes // POISON_BYTES)
        return min(self.block % blocks * POISON_BYTES, max(num_bytes - POISON_BYTES, 0))


def poison(keys: Keys, forward: int, group: int) -> Poison:
    """The poison of a forward and group; forward 0 stands for pages at their allotment.

    Bit 6 of every byte is clear and bit 0 is set. So no floating type of any width or alignment finds all bits of an
    exponent set, none of the types whose only NaN is negative zero finds it, and no byte is zero.
    """
    base = (keys.fingerprint & MASK64) ^ finalise((forward & MASK32) | ((group & MASK32) << 32))
    where, low, high = (finalise(base + i * GOLDEN) for i in (1, 2, 3))
    return Poison(
        where & MASK32,
        where >> 32,
        low & POISON_CLEAR | POISON_SET,
        high & POISON_CLEAR | POISON_SET,
    )


def link_word(code: int, position: int) -> int:
    """Word 0 of a link; signed. Tests hold the kernels to it."""
    return signed((code & MASK32) | ((position & MASK32) << 32))


class Link(NamedTuple):
    """Word 0 of a link taken apart: the token's code, and its position in the request."""

    code: int
    position: int


def parse_link(word: int) -> Link:
    """The parts of word 0 of a link."""
    return Link(word & MASK32, (word >> 32) & MASK32)


def writer_word(forward: int, tag: int, flags: int = 0) -> int:
    """Word 1 of a seal; signed."""
    return signed((forward & MASK32) | ((tag & MAX_TAG) << TAG_SHIFT) | (flags << FLAG_SHIFT))


class Writer(NamedTuple):
    """A writer word taken apart: forward number (mod 2^32), request tag, flags."""

    forward: int
    tag: int
    flags: SealFlag


def parse_writer(word: int) -> Writer:
    """The parts of a writer word; ``forward == 0`` means unsealed."""
    word &= MASK64
    return Writer(word & MASK32, (word >> TAG_SHIFT) & MAX_TAG, SealFlag(word >> FLAG_SHIFT & 0x7F))


class Owner(NamedTuple):
    """An owner word taken apart: the forward from which it holds, request tag, state."""

    as_of: int
    tag: int
    state: int


def owner_word(as_of: int, tag: int, state: int) -> int:
    """One entry of a group's owner table; signed."""
    return writer_word(as_of, tag, state)


def parse_owner(word: int) -> Owner:
    """The parts of an owner word."""
    word &= MASK64
    return Owner(word & MASK32, (word >> TAG_SHIFT) & MAX_TAG, word >> FLAG_SHIFT & 0x7F)


def hex64(value: int) -> str:
    """Sixteen hexadecimal digits: 64-bit values survive JSON readers that know only doubles."""
    return f"{value & MASK64:016x}"
