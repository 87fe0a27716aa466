"""Numbers that several Triton kernels know: places of words, sizes of rows, kinds. Kernels see no other globals.

A name says which enumeration it comes from: ``GROUP_LINKS`` is ``GroupWord.LINKS``.
"""

from __future__ import annotations

import triton.language as tl

from kvcanary import record, state
from kvcanary.kernels import batch_descriptors, descriptors
from kvcanary.kernels.batch_descriptors import ItemFlag, ItemWord
from kvcanary.kernels.descriptors import FactWord, GroupWord, RegionKind, RegionWord, StateWord
from kvcanary.record import Kind
from kvcanary.state import BatchWord, Check, DigestSource, Reason, Role, RowFlag, RowWord, Word

# Sizes and places of whole tables.
BATCH_WORDS = tl.constexpr(state.BATCH_WORDS)
GROUP_WORDS = tl.constexpr(state.GROUP_WORDS)
HISTORY = tl.constexpr(state.HISTORY)
ITEM_ROW = tl.constexpr(batch_descriptors.ITEM_ROW)
REGION_ROW = tl.constexpr(descriptors.REGION_ROW)
ROW_WORDS = tl.constexpr(state.ROW_WORDS)
SCRUB_CURSOR_AT = tl.constexpr(state.GLOBAL_WORDS + state.SCRUB_CURSOR)
STATE_ROW = tl.constexpr(descriptors.ROW)
SUSPECT_ROWS = tl.constexpr(state.SUSPECT_ROWS)

# Fields of words.
MASK32 = tl.constexpr(record.MASK32)
PART_SHIFT = tl.constexpr(state.PART_SHIFT)
SLOT_MASK = tl.constexpr((1 << state.SPACE_SHIFT) - 1)
SPACE_SHIFT = tl.constexpr(state.SPACE_SHIFT)
TAG_SHIFT = tl.constexpr(record.TAG_SHIFT)

# Counters that belong to no group, in a state's counters and in a header.
WORD_ARMED = tl.constexpr(int(Word.ARMED))
WORD_FORWARD = tl.constexpr(int(Word.FORWARD))
WORD_SCRATCH_ROWS = tl.constexpr(int(Word.SCRATCH_ROWS))
WORD_SCRATCH_TOKENS = tl.constexpr(int(Word.SCRATCH_TOKENS))
WORD_SEQUENCE = tl.constexpr(int(Word.SEQUENCE))
WORD_SUSPECTS = tl.constexpr(int(Word.SUSPECTS))
WORD_SUSPECTS_DONE = tl.constexpr(int(Word.SUSPECTS_DONE))

# Words of a state's row.
STATE_SUSPECTS = tl.constexpr(int(StateWord.SUSPECTS))

# Words of a group's row.
GROUP_LINKS = tl.constexpr(int(GroupWord.LINKS))
GROUP_NUM_PAGES = tl.constexpr(int(GroupWord.NUM_PAGES))
GROUP_NUM_SLOTS = tl.constexpr(int(GroupWord.NUM_SLOTS))
GROUP_OWNER = tl.constexpr(int(GroupWord.OWNER))
GROUP_PAGE_SHIFT = tl.constexpr(int(GroupWord.PAGE_SHIFT))
GROUP_PAGE_SIZE = tl.constexpr(int(GroupWord.PAGE_SIZE))
GROUP_PARTS = tl.constexpr(int(GroupWord.PARTS))
GROUP_RESERVED = tl.constexpr(int(GroupWord.RESERVED))
GROUP_RING = tl.constexpr(int(GroupWord.RING))
GROUP_SEALS = tl.constexpr(int(GroupWord.SEALS))

# Words of a batch item's row, and its flags.
ITEM_FIRST = tl.constexpr(int(ItemWord.FIRST))
ITEM_FLAGS = tl.constexpr(int(ItemWord.FLAGS))
ITEM_FLAG_TABLE = tl.constexpr(int(ItemFlag.TABLE))
ITEM_WIDE = tl.constexpr(int(ItemWord.WIDE))

# Words of a region's row; where its slots come from.
REGION_FLAGS = tl.constexpr(int(RegionWord.FLAGS))
REGION_ITEMS = tl.constexpr(int(RegionWord.ITEMS))
REGION_KIND = tl.constexpr(int(RegionWord.KIND))
REGION_NUM_SLOTS = tl.constexpr(int(RegionWord.NUM_SLOTS))
REGION_PAGE_SHIFT = tl.constexpr(int(RegionWord.PAGE_SHIFT))
REGION_PAGE_SIZE = tl.constexpr(int(RegionWord.PAGE_SIZE))
REGION_PART = tl.constexpr(int(RegionWord.PART))
REGION_SEALS = tl.constexpr(int(RegionWord.SEALS))
REGION_SLOTS = tl.constexpr(int(RegionWord.SLOTS))
REGION_SPACE = tl.constexpr(int(RegionWord.SPACE))
REGION_SUMS = tl.constexpr(int(RegionWord.SUMS))
REGION_WRITERS = tl.constexpr(int(RegionWord.WRITERS))
KIND_OF_SUSPECTS = tl.constexpr(int(RegionKind.SUSPECTS))
KIND_OF_TOKENS = tl.constexpr(int(RegionKind.TOKENS))

# Words of a fact.
FACT_OP = tl.constexpr(int(FactWord.OP))
FACT_TAG = tl.constexpr(int(FactWord.TAG))

# Columns of the row table, and its flags.
ROW_ANCHOR_DIGEST = tl.constexpr(int(RowWord.ANCHOR_DIGEST))
ROW_ANCHOR_POSITION = tl.constexpr(int(RowWord.ANCHOR_POSITION))
ROW_FLAGS = tl.constexpr(int(RowWord.FLAGS))
ROW_FLAG_ARMED = tl.constexpr(int(RowFlag.ARMED))
ROW_HIGH = tl.constexpr(int(RowWord.HIGH))
ROW_LOW = tl.constexpr(int(RowWord.LOW))
ROW_SEED = tl.constexpr(int(RowWord.SEED))
ROW_TAG = tl.constexpr(int(RowWord.TAG))

# Columns of the scratch that holds a batch's rows; where their digests come from.
BATCH_CONTEXT = tl.constexpr(int(BatchWord.CONTEXT))
BATCH_DIGEST = tl.constexpr(int(BatchWord.DIGEST))
BATCH_NEW = tl.constexpr(int(BatchWord.NEW))
BATCH_ROW = tl.constexpr(int(BatchWord.ROW))
BATCH_SOURCE = tl.constexpr(int(BatchWord.SOURCE))
SOURCE_HISTORY = tl.constexpr(int(DigestSource.HISTORY))
SOURCE_SEED = tl.constexpr(int(DigestSource.SEED))
SOURCE_SLOTS = tl.constexpr(int(DigestSource.SLOTS))
SOURCE_UNKNOWN = tl.constexpr(int(DigestSource.UNKNOWN))

# States of an owner word.
OWNER_FREED = tl.constexpr(record.OWNER_FREED)
OWNER_HELD = tl.constexpr(record.OWNER_HELD)
OWNER_NULL = tl.constexpr(state.OWNER_NULL)
OWNER_TRASH = tl.constexpr(state.OWNER_TRASH)

# Kinds of violation, what was verified or not, launch roles.
KIND_REQUEST_DIGEST = tl.constexpr(int(Kind.REQUEST_DIGEST))
KIND_SLOT_RANGE = tl.constexpr(int(Kind.SLOT_RANGE))
CHECK_LINKS = tl.constexpr(int(Check.LINKS))
CHECK_ROW_ENDS = tl.constexpr(int(Check.ROW_ENDS))
REASON_UNARMED_ROW = tl.constexpr(int(Reason.UNARMED_ROW))
ROLE_CHECK = tl.constexpr(int(Role.CHECK))
ROLE_FACTS = tl.constexpr(int(Role.FACTS))
ROLE_MARK = tl.constexpr(int(Role.MARK))
ROLE_SEAL = tl.constexpr(int(Role.SEAL))
