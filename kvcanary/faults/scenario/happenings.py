"""What can happen in a scenario, one struct each. Numbers are slots of a pool, or blocks of a tier."""

from __future__ import annotations

import msgspec


class Term(msgspec.Struct, frozen=True):
    """Places in one space. ``numbers`` may hold -1, which is no place, and numbers that no pool has."""

    space: str
    """"" is the main pool's first group; ``r`` the remote pool's; a letter of a tier; else ``group`` or ``r.group``"""
    numbers: tuple[int, ...]
    at: int | None = None
    """position of the first number, where it is told"""
    blocks: bool = False
    """the numbers are pages and not slots"""


Places = tuple[Term, ...]


class Happening(msgspec.Struct, frozen=True, kw_only=True):
    """Anything that a line of ``events`` can say."""

    text: str = ""


class Admit(Happening, frozen=True, kw_only=True):
    """A request begins, or begins anew, with ``length`` tokens in the cache."""

    request: str
    length: int = 0


class Alloc(Happening, frozen=True, kw_only=True):
    """The allocator hands out slots."""

    request: str
    places: Places


class Free(Happening, frozen=True, kw_only=True):
    """The allocator takes slots back; it may not know whose they were."""

    places: Places
    request: str = ""


class Publish(Happening, frozen=True, kw_only=True):
    """Slots enter the prefix index under a key."""

    places: Places
    key: str
    request: str = ""


class Hit(Happening, frozen=True, kw_only=True):
    """A request takes what the prefix index has under a key."""

    request: str
    key: str


class Evict(Happening, frozen=True, kw_only=True):
    """A key leaves the prefix index."""

    key: str


class Rewind(Happening, frozen=True, kw_only=True):
    """A request goes on from an earlier length."""

    request: str
    length: int


class Preempt(Happening, frozen=True, kw_only=True):
    """A request loses its slots and will begin anew."""

    request: str


class Finish(Happening, frozen=True, kw_only=True):
    """A request ends."""

    request: str


class Move(Happening, frozen=True, kw_only=True):
    """Slots are copied within the pool, in stream order."""

    sources: Places
    targets: Places


class Restamp(Happening, frozen=True, kw_only=True):
    """The engine says that it edited bytes on purpose."""

    places: Places


class WeightsUpdated(Happening, frozen=True, kw_only=True):
    """New weights."""

    epoch: int


class Write(Happening, frozen=True, kw_only=True):
    """The bytes of one token land in a slot, and nobody is told."""

    request: str
    places: Places
    numbers: tuple[int, ...] = ()


class Change(Happening, frozen=True, kw_only=True):
    """Bytes change, and nobody is told. ``how``: ``flip``, ``spoil``, ``scramble`` or ``roll``."""

    how: str
    places: Places
    source: str = ""


class Table(Happening, frozen=True, kw_only=True):
    """The host rewrites the device table that launched forwards of a request are going to read."""

    request: str
    places: Places


class Translate(Happening, frozen=True, kw_only=True):
    """An entry of the table from full slots to window slots changes."""

    sources: Places
    targets: Places


class Verify(Happening, frozen=True, kw_only=True):
    """The engine asks for slots to be read again now."""

    places: Places


class Nonfinite(Happening, frozen=True, kw_only=True):
    """The engine asks whether all bytes of slots are finite, written or not."""

    places: Places


class Idle(Happening, frozen=True, kw_only=True):
    """A forward without requests, as idle engines make them; the scrub goes on."""


class Fault(msgspec.Struct, frozen=True):
    """How what physically happens differs from what the tables say."""

    at: int | None = None
    """position id that the model is given for the first new token"""
    token: str = ""
    """the token that the model is given for the last new one: a number, or a guess"""
    lost: bool = False
    """the bytes go nowhere"""
    nan: bool = False
    lands: Places = ()
    """where the bytes really go"""
    only: tuple[str, ...] = ()
    """sources whose bytes are written; all if there are none"""


class Row(msgspec.Struct, frozen=True):
    """One row of a forward. Without ``reads`` it reads what its request's own table names."""

    request: str
    reads: Places | None = None
    writes: Places | None = None
    fault: Fault = Fault()


class Launch(Happening, frozen=True, kw_only=True):
    """A forward is put on the device's queue."""

    name: str
    rows: tuple[Row, ...]
    part: str = "target"
    unlinked: bool = False


class Run(Happening, frozen=True, kw_only=True):
    """The device works on a forward, and on all that is queued before it."""

    name: str


class CopyStart(Happening, frozen=True, kw_only=True):
    """A copy that no stream orders is queued."""

    name: str
    sources: Places
    targets: Places
    request: str = ""
    ordered: bool = False
    relaid: bool = False
    """the bytes are laid out anew on the way, so that only their content must be the same"""
    only: tuple[str, ...] = ()
    """sources that it moves; all if there are none"""
    taking: Places = ()
    """where the bytes really come from"""


class CopyLand(Happening, frozen=True, kw_only=True):
    """Bytes of a copy become visible: all, or those of some sources, or of some of its places by their order."""

    name: str
    only: tuple[str, ...] = ()
    items: tuple[int, ...] = ()


class CopyTold(Happening, frozen=True, kw_only=True):
    """The engine takes a copy for done, or hears that it failed, whatever the bytes did."""

    name: str
    failed: bool = False
