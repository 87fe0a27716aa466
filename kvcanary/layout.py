"""What the memory looks like: sources, attention groups, the pool's layout.

Nothing here copies a byte of the engine's cache. A :class:`KVSource` is a live view, and what cannot be
viewed is refused with a :class:`~kvcanary.errors.LayoutError`, because a source that was silently
copied would stay clean for ever.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, NamedTuple

import torch

from kvcanary.errors import LayoutError

GroupKind = Literal["full", "swa", "state"]
DEFAULT_PART = "target"


class Run(NamedTuple):
    """Contiguous bytes of one token in a source.

    ``offset`` is in bytes from the token's start; ``first_word`` is the logical index (within layer and
    component, over all heads of all ranks) of the run's first 32-bit word.
    """

    offset: int
    num_bytes: int
    first_word: int


@dataclass(frozen=True, slots=True, eq=False)
class KVSource:
    """Where the bytes of each token lie in one buffer.

    Token ``offset`` of page ``page`` starts ``page * page_stride + offset * token_stride`` bytes after the
    first byte of ``tensor``.

    Attributes:
        name: unique in its group.
        tensor: any tensor on the buffer, kept alive and never copied; any dtype, any device.
        num_pages: pages that exist in this buffer.
        page_size: tokens a page.
        page_stride, token_stride: in bytes.
        runs: the token's contiguous pieces.
        layer, component: logical coordinates (``"k"``, ``"v"``, ``"scale"``, ``"index"``, ``"latent"``...).
        dtype: of the values, for the non-finite check; ``torch.uint8`` switches that check off.
        part: sources of one part are sealed by the same forward (a draft model's layers are another part).
    """

    name: str
    tensor: torch.Tensor
    num_pages: int
    page_size: int
    page_stride: int
    token_stride: int
    runs: tuple[Run, ...]
    layer: int = 0
    component: str = "k"
    dtype: torch.dtype = torch.uint8
    part: str = DEFAULT_PART

    def __post_init__(self) -> None:
        if not self.runs or any(run.num_bytes <= 0 or run.offset < 0 for run in self.runs):
            raise LayoutError(f"source {self.name!r}: runs must be non-empty and start at or after 0, got {self.runs}")
        if self.num_pages <= 0 or self.page_size <= 0 or self.page_stride < 0 or self.token_stride < 0:
            raise LayoutError(
                f"source {self.name!r}: num_pages={self.num_pages}, page_size={self.page_size}, page_stride="
                f"{self.page_stride}, token_stride={self.token_stride}: sizes must be positive, strides not negative"
            )
        last = (self.num_pages - 1) * self.page_stride + (self.page_size - 1) * self.token_stride
        last += max(run.offset + run.num_bytes for run in self.runs)
        if last > self.bytes_available:
            raise LayoutError(
                f"source {self.name!r}: {self.num_pages} pages of {self.page_size} tokens reach {last} bytes after the "
                f"tensor's start, but only {self.bytes_available} bytes of its storage follow; "
                f"check strides and num_pages"
            )

    @property
    def bytes_available(self) -> int:
        """Bytes of the storage from the tensor's first element on."""
        storage = self.tensor.untyped_storage().nbytes()
        return storage - int(self.tensor.storage_offset()) * self.tensor.element_size()

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in this source."""
        return sum(run.num_bytes for run in self.runs)

    def view_bytes(self, offset: int, size: int) -> torch.Tensor:
        """``size`` bytes of every token from its byte ``offset`` on: uint8 ``[pages, page_size, size]``, a view."""
        start = self.tensor.storage_offset() * self.tensor.element_size() + offset
        view = torch.empty(0, dtype=torch.uint8, device=self.tensor.device)
        shape, strides = (self.num_pages, self.page_size, size), (self.page_stride, self.token_stride, 1)
        return view.set_(self.tensor.untyped_storage(), start, shape, strides)

    @property
    def address(self) -> int:
        """Address of the first byte."""
        return self.tensor.data_ptr()

    @classmethod
    def from_view(
        cls,
        name: str,
        view: torch.Tensor,
        *,
        layer: int = 0,
        component: str = "k",
        first_head: int = 0,
        part: str = DEFAULT_PART,
        dtype: torch.dtype | None = None,
    ) -> KVSource:
        """A source from a view of shape ``[pages, page_size, ...token dims]`` with any strides.

        ``first_head`` is the global number of this rank's first head, where the third dimension counts heads, so
        that the partial sums of tensor-parallel ranks add up.

        Raises:
            LayoutError: the view has fewer than three dimensions, or its elements are not contiguous.
        """
        if view.dim() < 3:
            raise LayoutError(f"source {name!r}: expected [pages, page_size, ...], got shape {tuple(view.shape)}")
        size = view.element_size()
        outer, num_bytes = _contiguous_tail(name, view)
        offsets = [0]
        for length, stride in outer:
            offsets = [base + i * stride * size for base in offsets for i in range(length)]
        words = -(-num_bytes // 4)
        # Heads count from the first of all ranks, whether a run holds one, several or a part of one.
        head_bytes = math.prod(view.shape[3:]) * size if view.dim() > 3 else num_bytes
        first = first_head * -(-head_bytes // 4)
        runs = tuple(Run(offset, num_bytes, first + i * words) for i, offset in enumerate(offsets))
        return cls(
            name=name,
            tensor=view,
            num_pages=view.shape[0],
            page_size=view.shape[1],
            page_stride=view.stride(0) * size,
            token_stride=view.stride(1) * size,
            runs=runs,
            layer=layer,
            component=component,
            dtype=view.dtype if dtype is None else dtype,
            part=part,
        )


def _contiguous_tail(name: str, view: torch.Tensor) -> tuple[list[tuple[int, int]], int]:
    """Leading token dimensions as (length, stride in elements), and the bytes of one contiguous run."""
    dims = [(view.shape[d], view.stride(d)) for d in range(2, view.dim())]
    run = 1
    while dims and (dims[-1][0] == 1 or dims[-1][1] == run):
        run *= dims.pop()[0]
    if run == 1 and dims and dims[-1][0] > 1:
        raise LayoutError(
            f"source {name!r}: the last dimension has stride {dims[-1][1]}, so a token is no run of contiguous bytes; "
            "permute the view so that contiguous elements come last"
        )
    return dims, run * view.element_size()


class Arena(NamedTuple):
    """Bytes that groups trade among each other.

    A group's page ``p`` lies in arena page ``p // pages_per_arena_page``; all groups that name the same
    arena overlay each other arena page by arena page.
    """

    name: str
    pages_per_arena_page: int


@dataclass(frozen=True, slots=True, eq=False)
class AttentionGroup:
    """Layers that share one slot space, with one record per slot.

    A slot is ``page * page_size + offset``. An engine's index becomes a slot by
    ``(index // index_stride) * page_size + index % index_stride``, which is the identity by default; an entry
    of a page table becomes a page by ``entry // page_entry_stride``.

    Attributes:
        name: unique in the layout.
        kind: ``"full"``, ``"swa"`` or ``"state"``.
        num_slots: a multiple of ``page_size``.
        sources: at least one, unless ``shares`` names another group.
        window: tokens that attention sees, for ``"swa"``.
        ring: positions wrap at this number of slots (``position % ring``), and the group's layers read
            before they write.
        max_rewind: tokens that a row may go back without losing its window; None: any number.
        trash_pages: pages that may hold anything (padding writes).
        null_pages: pages that attention may fetch and nobody owns; their bytes must stay finite, or
            exactly zero with ``null_is_zero``.
        arena: set when the group's bytes may be handed to another group.
        shares: name of an earlier group whose slots, records and sources this one uses (several index
            lists over one pool of blocks).
        offset_follows_position: a slot's offset in its page is its position modulo the page size (modulo
            ``ring`` first); switch off for engines that place tokens freely.
        zero_on_allot: the engine clears pages when it hands them out, and its kernels read places that no forward
            wrote; no poison is put there.
    """

    name: str
    kind: GroupKind
    num_slots: int
    page_size: int
    sources: tuple[KVSource, ...] = ()
    window: int | None = None
    ring: int | None = None
    max_rewind: int | None = None
    index_stride: int | None = None
    page_entry_stride: int = 1
    trash_pages: tuple[int, ...] = ()
    null_pages: tuple[int, ...] = ()
    null_is_zero: bool = False
    arena: Arena | None = None
    shares: str | None = None
    offset_follows_position: bool = False
    zero_on_allot: bool = False
    parts: tuple[str, ...] = field(init=False, default=())
    """names of the parts, in the order of their first source"""

    def __post_init__(self) -> None:
        object.__setattr__(self, "parts", tuple(dict.fromkeys(source.part for source in self.sources)))
        _check_numbers(self)
        for source in self.sources:
            if source.page_size != self.page_size or source.num_pages * source.page_size < self.num_slots:
                raise LayoutError(
                    f"group {self.name!r}: source {source.name!r} holds {source.num_pages} pages of {source.page_size} "
                    f"tokens, but the group has {self.num_slots} slots in pages of {self.page_size}"
                )
        names = [source.name for source in self.sources]
        if len(set(names)) != len(names):
            raise LayoutError(f"group {self.name!r}: two sources have the same name among {names}")

    @property
    def num_pages(self) -> int:
        """Pages of the slot space."""
        return self.num_slots // self.page_size

    @property
    def token_bytes(self) -> int:
        """Bytes of one token over all sources."""
        return sum(source.token_bytes for source in self.sources)

    def part_sources(self, part: str) -> tuple[KVSource, ...]:
        """Sources of one part."""
        return tuple(source for source in self.sources if source.part == part)


def _check_numbers(group: AttentionGroup) -> None:
    where = f"group {group.name!r}"
    if group.kind not in ("full", "swa", "state"):
        raise LayoutError(f"{where}: kind must be 'full', 'swa' or 'state', got {group.kind!r}")
    if group.page_size <= 0 or group.num_slots <= 0 or group.num_slots % group.page_size:
        raise LayoutError(
            f"{where}: num_slots={group.num_slots} must be a positive multiple of page_size={group.page_size}"
        )
    if not group.sources and group.shares is None:
        raise LayoutError(f"{where}: no sources; give at least one, or the group it shares them with")
    if group.sources and group.shares is not None:
        raise LayoutError(f"{where}: has sources of its own and also shares those of {group.shares!r}; choose one")
    for name in ("window", "ring", "index_stride", "page_entry_stride"):
        value = getattr(group, name)
        if value is not None and value <= 0:
            raise LayoutError(f"{where}: {name} must be positive, got {value}")
    if group.index_stride is not None and group.index_stride < group.page_size:
        raise LayoutError(f"{where}: index_stride={group.index_stride} is smaller than page_size={group.page_size}")
    for page in itertools.chain(group.trash_pages, group.null_pages):
        if not 0 <= page < group.num_slots // group.page_size:
            raise LayoutError(f"{where}: reserved page {page} lies outside 0..{group.num_slots // group.page_size - 1}")


@dataclass(frozen=True, eq=False)
class PoolLayout:
    """All of an engine's cache, as far as it can be viewed.

    Attributes:
        groups: in the order in which a forward's :class:`~kvcanary.batch.GroupBatch` items come.
        uncovered: what the engine has and no source covers, in words. Absent is never the same as verified.
    """

    groups: tuple[AttentionGroup, ...]
    uncovered: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.groups:
            raise LayoutError("a layout needs at least one attention group")
        names = [group.name for group in self.groups]
        if len(set(names)) != len(names):
            raise LayoutError(f"two groups have the same name among {names}")
        devices = {source.tensor.device for group in self.groups for source in group.sources}
        if len(devices) > 1:
            raise LayoutError(
                f"sources lie on different devices ({sorted(map(str, devices))}); use one canary a device"
            )
        for i, group in enumerate(self.groups):
            owner = next((g for g in self.groups[:i] if g.name == group.shares), None)
            if group.shares is not None and owner is None:
                raise LayoutError(f"group {group.name!r} shares {group.shares!r}, which is no earlier group of {names}")
            if owner is not None and (owner.num_slots, owner.page_size) != (group.num_slots, group.page_size):
                raise LayoutError(f"group {group.name!r} shares {owner.name!r} but differs in num_slots or page_size")

    @cached_property
    def device(self) -> torch.device:
        """The device of all sources."""
        return next(source.tensor.device for group in self.groups for source in group.sources)

    @cached_property
    def spaces(self) -> tuple[int, ...]:
        """For each group the index of the group whose slots and records it uses (its own, unless shared)."""
        index = {group.name: i for i, group in enumerate(self.groups)}
        spaces: list[int] = []
        for i, group in enumerate(self.groups):
            spaces.append(i if group.shares is None else spaces[index[group.shares]])
        return tuple(spaces)

    @cached_property
    def _numbers(self) -> dict[str | int, int]:
        return {key: i for i, group in enumerate(self.groups) for key in (group.name, i)}

    @property
    def window_pair(self) -> tuple[int, int] | None:
        """The first full and the first window group; None without both."""
        full = next((i for i, group in enumerate(self.groups) if group.kind == "full"), None)
        swa = next((i for i, group in enumerate(self.groups) if group.kind == "swa"), None)
        return None if full is None or swa is None else (full, swa)

    def index(self, group: str | int) -> int:
        """The number of a group given by name or number.

        Raises:
            LayoutError: there is no such group.
        """
        number = self._numbers.get(group) if isinstance(group, str | int) else None
        if number is not None:
            return number
        raise LayoutError(f"no attention group {group!r}; this layout has {[g.name for g in self.groups]}")

    def content(self, group: int) -> str:
        """Sixteen hexadecimal digits over what a group's seals add up: its parts, each with the words of its sources.

        Where the bytes lie (strides, order of heads and tokens in memory) does not count.
        """
        own = self.groups[self.spaces[group]]
        words = [(part, sorted(map(_logical, own.part_sources(part)))) for part in own.parts]
        return hashlib.blake2b(repr((own.page_size, words)).encode(), digest_size=8).hexdigest()

    @cached_property
    def fingerprint(self) -> str:
        """Sixteen hexadecimal digits over shapes, strides, dtypes and layer order; no addresses."""
        digest = hashlib.blake2b(digest_size=8)
        for group in self.groups:
            digest.update(
                repr((group.name, group.kind, group.page_size, group.window, group.ring, group.shares)).encode()
            )
            for s in group.sources:
                row = (
                    s.name,
                    s.page_size,
                    s.page_stride,
                    s.token_stride,
                    s.runs,
                    s.layer,
                    s.component,
                    str(s.dtype),
                    s.part,
                )
                digest.update(repr(row).encode())
        return digest.hexdigest()


def _logical(source: KVSource) -> tuple[int, str, str, list[tuple[int, int]]]:
    """A source's coordinates, and its runs joined where their words are neighbours, whatever lies between them."""
    runs: list[tuple[int, int]] = []
    for run in sorted(source.runs, key=lambda run: run.first_word):
        if runs and runs[-1][1] % 4 == 0 and runs[-1][0] + runs[-1][1] // 4 == run.first_word:
            runs[-1] = (runs[-1][0], runs[-1][1] + run.num_bytes)
        else:
            runs.append((run.first_word, run.num_bytes))
    return source.layer, source.component, str(source.dtype), runs
