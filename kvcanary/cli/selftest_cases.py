"""Random cases for ``kvcanary selftest``: small pools in many layouts, traffic over them, and things that go wrong.

A case is held twice, once for the reference on the CPU and once for the backend on its device, with the same bytes,
records and batches. Nothing here makes two tokens of one forward claim one slot: which of them stays is then a race
that both sides may decide as they like.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, NamedTuple, TypeVar, cast

import torch

from kvcanary.cli.benches.traffic import Addressing, Forward, Traffic
from kvcanary.kernels import DeviceFact, FactOp, Kernels
from kvcanary.layout import AttentionGroup, KVSource, PoolLayout, Run
from kvcanary.record import Keys, make_keys
from kvcanary.state import DeviceState, Limits, PoisonMode, RowWord, Word

T = TypeVar("T")

ROWS, LONGEST, CHUNK = 5, 90, 30
_TOKENS = ROWS * (CHUNK + 1) + 4
_POISONS: tuple[PoisonMode, ...] = ("off", "sample", "full")
_SIZES = (1, 2, 4, 8, 16, 64)
_SHAPES = ("layers", "heads", "bytes", "scaled")


class Side(NamedTuple):
    """One of the two that are compared: kernels, their state, and the device of both."""

    kernels: Kernels
    state: DeviceState
    device: str


@dataclass(frozen=True, slots=True)
class GroupShape:
    """How one group's bytes lie."""

    how: Addressing
    bytes_shape: str
    draft: bool
    reserved: str
    """what page 0 is: ``""``, ``"trash"`` or ``"null"``"""


class Case:
    """One random pool with its traffic.

    Args:
        seed: all randomness comes from it.
        reference: runs on the CPU.
        candidate: what is tested, on ``device``.

    Attributes:
        sides: the reference first.
        broken: what was disturbed so far, in words.
        poison: what both sides place.
        spoiled: write no numbers into this many new slots of the next forward.
        dropped: write nothing into this many.
    """

    def __init__(self, seed: int, reference: Kernels, candidate: Kernels, device: str) -> None:
        self.rng = random.Random(seed)
        self.keys: Keys = make_keys(seed + 1)
        self.shapes = _random_shapes(self.rng)
        self.crowded = self.rng.random() < 0.15
        limits = Limits(
            max_tokens=_TOKENS,
            max_batch_rows=ROWS + 2,
            max_rows=ROWS,
            ring_capacity=16 if self.crowded else 4096,
            ring_quota=3 if self.crowded else 4096,
            snapshots=4,
            head_entries=300 if self.rng.random() < 0.2 else 1 << 20,
            poison=self.rng.choice(_POISONS),
        )
        self.poison: PoisonMode = limits.poison
        self.sides = tuple(
            Side(kernels, DeviceState(_layout(self.shapes, where, seed), self.keys, limits), where)
            for kernels, where in ((reference, "cpu"), (candidate, device))
        )
        for side in self.sides:
            side.state.counters[Word.ARMED] = 1
        self.traffic = Traffic(
            [shape.how for shape in self.shapes],
            self.keys,
            self.rng,
            rows=ROWS,
            longest=LONGEST,
            chunk=CHUNK,
            salted=self.rng.random() < 0.3,
        )
        self._bytes = torch.Generator().manual_seed(seed)
        self.broken: list[str] = []
        self.spoiled = 0
        self.dropped = 0

    @property
    def layout(self) -> PoolLayout:
        """The layout on the CPU."""
        return self.sides[0].state.layout

    def write(self, forward: Forward) -> None:
        """The model's part: new bytes in the slots of the new tokens, the same on both sides."""
        for group, slots in enumerate(forward.writes):
            if slots:
                self._fill(group, torch.tensor(slots[self.dropped :], dtype=torch.int64))
                for slot in slots[: self.spoiled]:
                    self.spoil(group, slot)
        self.spoiled = self.dropped = 0

    def filling(self, facts: Sequence[DeviceFact]) -> list[DeviceFact]:
        """What fills the pages that ``facts`` hand out."""
        handed_out = [fact for fact in facts if fact.op is FactOp.ALLOC] if self.poison == "full" else []
        return [DeviceFact(FactOp.POISON, group=fact.group, pages=fact.pages) for fact in handed_out]

    def extra_facts(self) -> list[DeviceFact]:
        """Facts that engines send now and then, on random pages."""
        group = self.rng.randrange(len(self.shapes))
        pages = self.rng.sample(range(self.layout.groups[group].num_pages), 4)
        op = self.rng.choice(
            (
                FactOp.QUEUE,
                FactOp.RESTAMP,
                FactOp.COPY,
                FactOp.OWN,
                FactOp.WIPE,
                FactOp.FREE,
                FactOp.ANCHOR,
            )
        )
        if op == FactOp.COPY:
            return [DeviceFact(op, group=group, pages=pages[:2], targets=pages[2:])]
        if op == FactOp.ANCHOR:
            row = self.rng.randrange(ROWS)
            tag = int(self.sides[0].state.rows[row, RowWord.TAG])
            return [DeviceFact(op, row=row, tag=tag, position=self.rng.randrange(40), digest=self.rng.getrandbits(62))]
        return [DeviceFact(op, group=group, pages=pages[:2], tag=self.rng.randrange(1, 9))]

    # --- bytes --------------------------------------------------------------------------------------------

    def _fill(self, group: int, slots: torch.Tensor, value: int | None = None) -> None:
        """Finite random values, or one byte value, in all sources of ``slots``."""
        space = self.layout.spaces[group]
        for number, source in enumerate(self.layout.groups[space].sources):
            for run in source.runs:
                new = _random_bytes(source, len(slots), run.num_bytes, self._bytes)
                if value is not None:
                    new.fill_(value)
                where = _addresses(source, slots, run)
                for side in self.sides:
                    twin = side.state.layout.groups[space].sources[number]
                    storage_of(twin)[where.to(side.device)] = new.to(side.device)

    def flip_byte(self, group: int, slot: int) -> None:
        """Change one byte of one source of a slot."""
        space = self.layout.spaces[group]
        number = self.rng.randrange(len(self.layout.groups[space].sources))
        run = self.rng.choice(self.layout.groups[space].sources[number].runs)
        bits = 1 << self.rng.randrange(8)
        byte = self.rng.randrange(run.num_bytes)
        for side in self.sides:
            source = side.state.layout.groups[space].sources[number]
            where = int(_addresses(source, torch.tensor([slot]), run)[0, byte])
            storage_of(source)[where] ^= bits

    def spoil(self, group: int, slot: int) -> None:
        """All ones: not a number in every floating type."""
        self._fill(group, torch.tensor([slot]), value=0xFF)


def to_device(value: T, device: str) -> T:
    """A copy of a batch, or of facts, with its tensors on ``device``."""
    return cast("T", _moved(value, device))


def _moved(value: Any, device: str) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(device, copy=True)
    if isinstance(value, (tuple, list)):
        return type(value)(_moved(item, device) for item in cast("Sequence[Any]", value))
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{item.name: _moved(getattr(value, item.name), device) for item in fields(value)})
    return value


# --- layouts ------------------------------------------------------------------------------------------------


def _random_shapes(rng: random.Random) -> tuple[GroupShape, ...]:
    shapes = [_random_shape(rng, space) for space in range(rng.choice((1, 1, 2)))]
    if rng.random() < 0.2 and shapes[0].how.ring is None:
        # A second list of indices over the first group's slots, as where layers of several kinds share blocks.
        how = replace(shapes[0].how, unit="page", flat=False, window=None, dtype=torch.int64)
        shapes[0] = replace(shapes[0], how=replace(shapes[0].how, window=None))
        shapes.append(GroupShape(how, "", draft=False, reserved=""))
    if rng.random() < 0.4:
        # Kernels take a shorter way where the bytes of all groups come in blocks of one size.
        shapes = [replace(shape, bytes_shape="blocks", draft=False) for shape in shapes]
    return tuple(shapes)


def _random_shape(rng: random.Random, space: int) -> GroupShape:
    size = rng.choice(_SIZES)
    ring = max(size, 40) if rng.random() < 0.2 else None
    if ring is not None and ring % size:
        ring = size * -(-ring // size)
    unit = rng.choice(("page", "page", "slot"))
    return GroupShape(
        Addressing(
            page_size=size,
            # All rows at their longest, pages that are partly filled, and page 0.
            pages=(ROWS + 1) * -(-(LONGEST + CHUNK + size) // size) + 2,
            unit="slot" if unit == "slot" else "page",
            flat=ring is None and rng.random() < 0.35,
            mapping=rng.random() < 0.8,
            dtype=rng.choice((torch.int32, torch.int64)),
            window=24 if ring else rng.choice((None, None, 20)),
            ring=ring,
            index_stride=size + rng.choice((0, 0, 3)),
            entry_stride=rng.choice((1, 1, 3)),
            translated=rng.random() < 0.2,
            space=space,
        ),
        rng.choice(_SHAPES),
        draft=rng.random() < 0.3,
        reserved=rng.choice(("", "trash", "null")),
    )


def _layout(shapes: Sequence[GroupShape], device: str, seed: int) -> PoolLayout:
    generator = torch.Generator().manual_seed(seed)
    groups: list[AttentionGroup] = []
    for number, shape in enumerate(shapes):
        how = shape.how
        shared = number != how.space
        sources = () if shared else _sources(shape, device, generator)
        groups.append(
            AttentionGroup(
                name=f"g{number}",
                kind="swa" if how.window else "full",
                num_slots=how.pages * how.page_size,
                page_size=how.page_size,
                sources=sources,
                window=how.window,
                ring=how.ring,
                max_rewind=4 if how.window else None,
                index_stride=how.index_stride,
                page_entry_stride=how.entry_stride if how.unit == "page" else 1,
                trash_pages=(0,) if shapes[how.space].reserved == "trash" else (),
                null_pages=(0,) if shapes[how.space].reserved == "null" else (),
                shares=f"g{how.space}" if shared else None,
                offset_follows_position=how.page_size > 1,
            )
        )
    return PoolLayout(tuple(groups))


def _sources(shape: GroupShape, device: str, generator: torch.Generator) -> tuple[KVSource, ...]:
    pages, size = shape.how.pages, shape.how.page_size

    def values(*dims: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.rand(pages, *dims, generator=generator).to(dtype).to(device)

    match shape.bytes_shape:
        case "layers":
            views = [values(size, 2, 8, dtype=torch.bfloat16) for _ in range(4)]
            found = [KVSource.from_view(f"s{i}", v, layer=i // 2, component="kv"[i % 2]) for i, v in enumerate(views)]
        case "blocks":
            views = [values(size, 64, dtype=torch.bfloat16) for _ in range(4)]
            found = [KVSource.from_view(f"b{i}", v, layer=i // 2, component="kv"[i % 2]) for i, v in enumerate(views)]
        case "heads":
            view = values(3, size, 8, dtype=torch.float16).permute(0, 2, 1, 3)
            found = [KVSource.from_view("heads", view, layer=5, first_head=2)]
        case "bytes":
            count = pages * size * 11 + 5
            raw = torch.randint(0, 256, (count,), dtype=torch.uint8, generator=generator).to(device)
            runs = (Run(0, 3, 0), Run(4, 5, 1), Run(9, 2, 7))
            found = [KVSource("odd", raw[1:], pages, size, size * 11, 11, runs, component="index")]
        case _:
            data = values(size, 32, dtype=torch.float32).to(torch.float8_e4m3fn)
            found = [
                KVSource.from_view("data", data, component="latent"),
                KVSource.from_view("scale", values(size, 1, dtype=torch.float16), component="scale"),
            ]
    if shape.draft:
        found.append(KVSource.from_view("draft", values(size, 5, dtype=torch.float32), layer=9, part="draft"))
    return tuple(found)


def _addresses(source: KVSource, slots: torch.Tensor, run: Run) -> torch.Tensor:
    """Offsets of a run's bytes from the tensor's first byte, ``[slots, bytes]``."""
    pages = slots.div(source.page_size, rounding_mode="floor")
    first = pages * source.page_stride + (slots % source.page_size) * source.token_stride + run.offset
    return first[:, None] + torch.arange(run.num_bytes)


def storage_of(source: KVSource) -> torch.Tensor:
    """The source's bytes from the tensor's first one on, as a view that can be written."""
    tensor = source.tensor
    base = tensor.storage_offset() * tensor.element_size()
    flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return flat.set_(tensor.untyped_storage(), base, (source.bytes_available,), (1,))


def _random_bytes(source: KVSource, count: int, num_bytes: int, generator: torch.Generator) -> torch.Tensor:
    if not source.dtype.is_floating_point:
        return torch.randint(0, 256, (count, num_bytes), dtype=torch.uint8, generator=generator)
    values = torch.rand(count, num_bytes // source.dtype.itemsize, generator=generator) - 0.5
    return values.to(source.dtype).view(torch.uint8)
