"""Device functions that all Triton kernels share: words of a record, integers at addresses, the reporter.

Addresses travel as int64 and become pointers in the kernel, so one compiled kernel serves every dtype and every
optional tensor, and nothing compiles in the middle of serving. Index tensors may be int32 or int64 (``wide``).
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from kvcanary.kernels.descriptors import StateWord
from kvcanary.kernels.triton_constants import (
    GROUP_WORDS,
    MASK32,
    ROW_FLAGS,
    ROW_TAG,
    ROW_WORDS,
    TAG_SHIFT,
    WORD_FORWARD,
    WORD_SEQUENCE,
)
from kvcanary.record import CODE_BITS, FLAG_SHIFT, MAX_TAG, NUM_KINDS, SALTED
from kvcanary.state import (
    GLOBAL_WORDS,
    KIND_COUNTS,
    REPEATS,
    UNVERIFIED,
    VERIFIED,
    VIOLATION_WORDS,
    RowFlag,
    RowWord,
    ViolationWord,
    Word,
)

NONE = tl.constexpr(-1)
OUTSIDE = tl.constexpr(-2)
_MAX_TAG = tl.constexpr(MAX_TAG)
_FLAG_SHIFT = tl.constexpr(FLAG_SHIFT)
_SALTED = tl.constexpr(SALTED)
_CODE_BITS = tl.constexpr(CODE_BITS)
_NUM_KINDS = tl.constexpr(NUM_KINDS)

_REPEATS = tl.constexpr(GLOBAL_WORDS + REPEATS)
_KIND_COUNTS = tl.constexpr(GLOBAL_WORDS + KIND_COUNTS)
_VERIFIED = tl.constexpr(GLOBAL_WORDS + VERIFIED)
_UNVERIFIED = tl.constexpr(GLOBAL_WORDS + UNVERIFIED)
_STORED = tl.constexpr(int(Word.STORED))
_HIGHEST = tl.constexpr(1 << 30)

_ROW_REPORTED = tl.constexpr(int(RowWord.REPORTED))
_TAINTED = tl.constexpr(int(RowFlag.TAINTED))

_VIOLATIONS = tl.constexpr(int(StateWord.VIOLATIONS))
_ACKED = tl.constexpr(int(StateWord.ACKED))
_CAPACITY = tl.constexpr(int(StateWord.RING_CAPACITY))
_QUOTA = tl.constexpr(int(StateWord.RING_QUOTA))
_GROUPS = tl.constexpr(int(StateWord.GROUPS))

_VIOLATION_WORDS = tl.constexpr(VIOLATION_WORDS)
_KIND = tl.constexpr(int(ViolationWord.KIND))
_ROLE = tl.constexpr(int(ViolationWord.ROLE))
_GROUP = tl.constexpr(int(ViolationWord.GROUP))
_SLOT = tl.constexpr(int(ViolationWord.SLOT))
_PAGE = tl.constexpr(int(ViolationWord.PAGE))
_ROW = tl.constexpr(int(ViolationWord.ROW))
_TAG = tl.constexpr(int(ViolationWord.TAG))
_POSITION_EXPECTED = tl.constexpr(int(ViolationWord.POSITION_EXPECTED))
_POSITION_FOUND = tl.constexpr(int(ViolationWord.POSITION_FOUND))
_CODE_EXPECTED = tl.constexpr(int(ViolationWord.CODE_EXPECTED))
_CODE_FOUND = tl.constexpr(int(ViolationWord.CODE_FOUND))
_DIGEST_EXPECTED = tl.constexpr(int(ViolationWord.DIGEST_EXPECTED))
_DIGEST_FOUND = tl.constexpr(int(ViolationWord.DIGEST_FOUND))
_FINGERPRINT_EXPECTED = tl.constexpr(int(ViolationWord.FINGERPRINT_EXPECTED))
_FINGERPRINT_FOUND = tl.constexpr(int(ViolationWord.FINGERPRINT_FOUND))
_WRITER = tl.constexpr(int(ViolationWord.WRITER))
_OWNER = tl.constexpr(int(ViolationWord.OWNER))
_VIOLATION_FORWARD = tl.constexpr(int(ViolationWord.FORWARD))
_PART = tl.constexpr(int(ViolationWord.PART))
_VIOLATION_TAINTED = tl.constexpr(int(ViolationWord.TAINTED))


@triton.jit
def words_at(address):
    """A pointer to int64 words from an integer address."""
    return address.to(tl.int64).to(tl.pointer_type(tl.int64))


@triton.jit
def index_at(address, i, wide, mask):
    """Element ``i`` of an int32 (int64 when ``wide``) tensor as int64; 0 where masked."""
    start = address.to(tl.int64)
    at = i.to(tl.int64)
    long = (at * 0 + wide) != 0
    narrow = tl.load((start + at * 4).to(tl.pointer_type(tl.int32)), mask=mask & (long == 0), other=0).to(tl.int64)
    full = tl.load((start + at * 8).to(tl.pointer_type(tl.int64)), mask=mask & long, other=0)
    return narrow | full


@triton.jit
def flag(condition):
    """A scalar condition that may meet lanes: the interpreter would take it for its operands' type."""
    return tl.where(condition, True, False)


@triton.jit
def divide(value, by, shift, POW2: tl.constexpr):
    """``value // by`` of values that are not negative."""
    if POW2:
        quotient = value >> shift
    else:
        quotient = value // by
    return quotient


@triton.jit
def finalise(word):
    """SplitMix64's finaliser on uint64."""
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB
    return word ^ (word >> 31)


@triton.jit
def mix(link, mix_in, mix_out):
    """What a token adds to the digest; word 0 of its link is the mix's argument already."""
    word = finalise((link ^ mix_in).to(tl.uint64, bitcast=True))
    return word.to(tl.int64, bitcast=True) ^ mix_out


@triton.jit
def link_of(code, position):
    """Word 0 of a link."""
    return (code & MASK32) | (position << 32)


@triton.jit
def token_code(token, position, salt):
    """The 31-bit code of an int64 token."""
    word = finalise(link_of(token, position).to(tl.uint64, bitcast=True)).to(tl.int64, bitcast=True)
    word = finalise((word ^ salt).to(tl.uint64, bitcast=True)).to(tl.int64, bitcast=True)
    plain = (salt == 0) & ((token >> _CODE_BITS) == 0)
    return tl.where(plain, token, _SALTED | (word & (_SALTED - 1)))


@triton.jit
def code_of(link):
    """The code in word 0 of a link."""
    return link & MASK32


@triton.jit
def position_of(link):
    """The position in word 0 of a link."""
    return link >> 32


@triton.jit
def writer_of(forward, tag):
    """A writer word without flags."""
    return (forward & MASK32) | ((tag & _MAX_TAG) << TAG_SHIFT)


@triton.jit
def tag_of(word):
    """The tag in a writer or owner word."""
    return (word >> TAG_SHIFT) & _MAX_TAG


@triton.jit
def state_of(owner):
    """The state in an owner word."""
    return owner >> _FLAG_SHIFT


@triton.jit
def is_sealed(writer):
    """Whether a writer word belongs to a seal."""
    return (writer & MASK32) != 0


@triton.jit
def count_verified(counters, group, check, amount):
    """Add to a group's count of what was verified; free when there is nothing to add."""
    tl.atomic_add(counters + _VERIFIED + group * GROUP_WORDS + check, amount, mask=amount != 0, sem="relaxed")


@triton.jit
def count_unverified(counters, group, reason, amount):
    """Add to a group's count of what was not verified."""
    tl.atomic_add(counters + _UNVERIFIED + group * GROUP_WORDS + reason, amount, mask=amount != 0, sem="relaxed")


@triton.jit
def report(
    counters,
    rows,
    meta,
    mask,
    kind,
    role,
    group,
    reported,
    bit,
    row,
    slot,
    page,
    position_expected,
    position_found,
    code_expected,
    code_found,
    digest_expected,
    digest_found,
    fingerprint_expected,
    fingerprint_found,
    writer,
    owner,
    part,
    taints,
):
    """Report one finding a lane (``mask``), unless ``bit`` of the word at address ``reported`` says that it was.

    ``kind``, ``reported`` and ``bit`` are int64 with the lanes' shape; all other fields may be scalars. ``row`` is
    negative for findings that name none; ``taints`` marks the row once it has been reported.
    """
    lane = kind * 0
    one = lane + 1
    row = lane + row
    old = tl.atomic_or(words_at(reported), bit, mask=mask, sem="relaxed")
    fresh = mask & ((old & bit) == 0)
    tl.atomic_add(counters + _REPEATS + group * GROUP_WORDS + lane, one, mask=mask & ((old & bit) != 0), sem="relaxed")
    count = tl.atomic_add(counters + _KIND_COUNTS + group * GROUP_WORDS + kind, one, mask=fresh, sem="relaxed")
    acked = words_at(tl.load(meta + _ACKED))
    seen = tl.load(acked + group * _NUM_KINDS + kind, mask=fresh, other=0, volatile=True)
    stored = fresh & (count - seen < tl.load(meta + _QUOTA))
    number = tl.atomic_add(counters + _STORED + lane, one, mask=stored, sem="relaxed")
    taken = tl.load(acked + tl.load(meta + _GROUPS) * _NUM_KINDS + lane, mask=stored, other=0, volatile=True)
    capacity = tl.load(meta + _CAPACITY)
    written = stored & (number - taken < capacity)

    named = row >= 0
    words = rows + row * ROW_WORDS
    tag = tl.load(words + ROW_TAG, mask=written & named, other=0)
    flags = tl.load(words + ROW_FLAGS, mask=written & named, other=0, volatile=True)
    out = words_at(tl.load(meta + _VIOLATIONS)) + (number % capacity) * _VIOLATION_WORDS
    tl.store(out + _KIND, kind, mask=written)
    tl.store(out + _ROLE, lane + role, mask=written)
    tl.store(out + _GROUP, lane + group, mask=written)
    tl.store(out + _SLOT, lane + slot, mask=written)
    tl.store(out + _PAGE, lane + page, mask=written)
    tl.store(out + _ROW, row, mask=written)
    tl.store(out + _TAG, tag, mask=written)
    tl.store(out + _POSITION_EXPECTED, lane + position_expected, mask=written)
    tl.store(out + _POSITION_FOUND, lane + position_found, mask=written)
    tl.store(out + _CODE_EXPECTED, lane + code_expected, mask=written)
    tl.store(out + _CODE_FOUND, lane + code_found, mask=written)
    tl.store(out + _DIGEST_EXPECTED, lane + digest_expected, mask=written)
    tl.store(out + _DIGEST_FOUND, lane + digest_found, mask=written)
    tl.store(out + _FINGERPRINT_EXPECTED, lane + fingerprint_expected, mask=written)
    tl.store(out + _FINGERPRINT_FOUND, lane + fingerprint_found, mask=written)
    tl.store(out + _WRITER, lane + writer, mask=written)
    tl.store(out + _OWNER, lane + owner, mask=written)
    tl.store(out + _VIOLATION_FORWARD, lane + tl.load(counters + WORD_FORWARD), mask=written)
    tl.store(out + _PART, lane + part, mask=written)
    tl.store(out + _VIOLATION_TAINTED, ((flags & _TAINTED) != 0).to(tl.int64), mask=written)
    # An atomic that adds nothing is the fence: the sequence word must not overtake the row on its way to the host.
    tl.atomic_add(counters + WORD_SEQUENCE + lane, lane, mask=written, sem="acq_rel", scope="sys")
    tl.store(out, number + 1, mask=written)
    tl.atomic_or(words + ROW_FLAGS, lane + _TAINTED, mask=mask & named & taints, sem="relaxed")


@triton.jit
def lowest_fault(faults):
    """The lowest bit that any lane has, in the lanes that have it: kinds are reported in turn, not lanes."""
    low = faults & -faults
    current = tl.min(tl.where(faults != 0, low, _HIGHEST), 0)
    return tl.where(low == current, low, 0)


@triton.jit
def holds(low, high, position):
    """Whether a row's history has the digest before ``position``; ``low`` and ``high`` as its words say."""
    return (high >= 0) & (low <= position) & (position <= high)


@triton.jit
def row_flag(rows, row, lane):
    """Address of the word that remembers what was reported about a row."""
    return (rows + row * ROW_WORDS + _ROW_REPORTED).to(tl.int64) + lane
