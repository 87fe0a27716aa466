"""Small pools for the kernel tests: group specifications, layouts in many shapes, and writing bytes into them."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Literal

import torch

from kvcanary.layout import Arena, AttentionGroup, GroupKind, KVSource, PoolLayout, Run

SHAPES = ("nhd", "hnd", "packed", "latent", "odd", "tiny", "blocks")


@dataclass(frozen=True, kw_only=True)
class GroupSpec:
    """One attention group and how its engine addresses it.

    ``unit`` is None for no table at all. ``mapping``: the batch brings a slot mapping. ``offset``: first positions
    of tables are given (``first_position``), at the start of the live window. ``translated``: indices go through a
    translation table. ``shares``: number of an earlier group.
    """

    page_size: int = 16
    pages: int = 24
    shape: str = "nhd"
    dtype: torch.dtype = torch.bfloat16
    unit: Literal["slot", "page"] | None = "page"
    flat: bool = False
    mapping: bool = True
    offset: bool = False
    row_index: bool = False
    int32: bool = False
    covers_new: bool = True
    window: int | None = None
    ring: int | None = None
    max_rewind: int | None = None
    stride_gap: int = 0
    entry_stride: int = 1
    translated: bool = False
    trash: bool = False
    null: bool = False
    null_is_zero: bool = False
    shares: int | None = None
    draft: str | None = None
    arena: int | None = None
    kind: GroupKind = "full"

    @property
    def index_stride(self) -> int:
        return self.page_size + self.stride_gap


def make_layout(specs: tuple[GroupSpec, ...], device: str = "cpu", seed: int = 0) -> PoolLayout:
    """The layout of ``specs``; buffers are filled with finite values."""
    torch.manual_seed(seed)
    layout = PoolLayout(tuple(_make_group(i, spec, device) for i, spec in enumerate(specs)))
    for group in layout.groups:
        if group.null_is_zero:
            for page in group.null_pages:
                for source in group.sources:
                    for slot in range(page * group.page_size, (page + 1) * group.page_size):
                        for address, size in run_addresses(source, slot):
                            storage_bytes(source)[address : address + size] = 0
    return layout


def _make_group(index: int, spec: GroupSpec, device: str) -> AttentionGroup:
    sources: tuple[KVSource, ...] = ()
    if spec.shares is None:
        sources = make_sources(spec, spec.shape, device, "target")
        if spec.draft is not None:
            sources += make_sources(spec, spec.draft, device, "draft")
    return AttentionGroup(
        name=f"g{index}",
        kind=spec.kind,
        num_slots=spec.pages * spec.page_size,
        page_size=spec.page_size,
        sources=sources,
        window=spec.window,
        ring=spec.ring,
        max_rewind=spec.max_rewind,
        index_stride=spec.index_stride if spec.stride_gap else None,
        page_entry_stride=spec.entry_stride,
        trash_pages=(0,) if spec.trash else (),
        null_pages=(1,) if spec.null else (),
        null_is_zero=spec.null_is_zero,
        arena=Arena("arena", spec.arena) if spec.arena is not None else None,
        shares=None if spec.shares is None else f"g{spec.shares}",
        offset_follows_position=spec.unit is not None and spec.page_size > 1,
    )


def make_sources(spec: GroupSpec, shape: str, device: str, part: str) -> tuple[KVSource, ...]:
    """Sources of one part in one of the SHAPES; unaligned ones among them."""
    pages, size, dtype = spec.pages, spec.page_size, spec.dtype
    if shape in ("nhd", "blocks"):
        width = 8 if shape == "nhd" else 64 // dtype.itemsize
        views = [torch.randn(pages, size, 2, width, device=device).to(dtype) for _ in range(4)]
        return tuple(
            KVSource.from_view(f"{part}.{i}", view, layer=i // 2, component="kv"[i % 2], part=part)
            for i, view in enumerate(views)
        )
    if shape == "hnd":
        view = torch.randn(pages, 3, size, 8, device=device).to(dtype).permute(0, 2, 1, 3)
        return (KVSource.from_view(f"{part}.k", view, layer=5, first_head=2, part=part),)
    if shape == "packed":
        both = torch.randn(pages, 2, size, 2, 4, device=device).to(dtype)
        return tuple(KVSource.from_view(f"{part}.{c}", both[:, i], component=c, part=part) for i, c in enumerate("kv"))
    if shape == "latent":
        return _latent(pages, size, device, part)
    if shape == "odd":
        raw = torch.randint(0, 256, (pages * size * 11 + 5,), dtype=torch.uint8, device=device)
        runs = (Run(0, 3, 0), Run(4, 5, 1), Run(9, 2, 7))
        return (KVSource(f"{part}.odd", raw[1:], pages, size, size * 11, 11, runs, component="index", part=part),)
    if shape == "tiny":
        scales = torch.rand(pages, size, 1, device=device).to(torch.float16)
        return (KVSource.from_view(f"{part}.scale", scales, component="scale", part=part),)
    raise ValueError(f"no shape {shape!r}")


def _latent(pages: int, size: int, device: str, part: str) -> tuple[KVSource, ...]:
    """584 bytes a token in pages that end with padding, as sparse latent caches have, and a two-byte companion."""
    page_bytes = size * 584 + 8
    raw = torch.randint(0, 256, (pages, page_bytes), dtype=torch.uint8, device=device)
    rows, scales = raw, raw[0, size * 576 :]
    shape = (pages, size, page_bytes)
    data = KVSource(f"{part}.latent", rows, *shape, 576, (Run(0, 576, 0),), component="latent", part=part)
    scale = KVSource(f"{part}.scale", scales, *shape, 8, (Run(0, 8, 0),), component="scale", part=part)
    companion = torch.rand(pages, size, 1, device=device).to(torch.float16)
    return data, scale, KVSource.from_view(f"{part}.gate", companion, component="gate", part=part)


def write_tokens(sources: tuple[KVSource, ...], slots: list[int], generator: torch.Generator | None = None) -> None:
    """Write new bytes into ``slots``, as a model's layers would."""
    for source in sources:
        for slot in slots:
            for address, size in run_addresses(source, slot):
                fill_bytes(source, address, size, generator)


def run_addresses(source: KVSource, slot: int) -> list[tuple[int, int]]:
    """(byte offset from the tensor's first byte, length) of each run of a slot."""
    start = (slot // source.page_size) * source.page_stride + (slot % source.page_size) * source.token_stride
    return [(start + run.offset, run.num_bytes) for run in source.runs]


def storage_bytes(source: KVSource) -> torch.Tensor:
    """The buffer from the tensor's first byte on, as bytes that can be written."""
    base = source.tensor.storage_offset() * source.tensor.element_size()
    raw = torch.empty(0, dtype=torch.uint8, device=source.tensor.device)
    return raw.set_(source.tensor.untyped_storage(), base, (source.bytes_available,), (1,))


def fill_bytes(source: KVSource, address: int, size: int, generator: torch.Generator | None = None) -> None:
    """Finite random values (or random bytes) at ``address``."""
    if source.dtype.is_floating_point:
        count = size // source.dtype.itemsize
        data = torch.randn(count, generator=generator).to(source.dtype).view(torch.uint8)
    else:
        data = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator)
    storage_bytes(source)[address : address + size] = data.to(source.tensor.device)


def flip_bit(source: KVSource, slot: int, byte: int = 0, bit: int = 0) -> None:
    """Flip one bit of one byte (counted over the runs) of a slot."""
    for address, size in run_addresses(source, slot):
        if byte < size:
            storage_bytes(source)[address + byte] ^= 1 << bit
            return
        byte -= size
    raise ValueError(f"slot {slot} of source {source.name!r} has no byte {byte}")


def random_specs(rng: random.Random) -> tuple[GroupSpec, ...]:
    """One to three groups of random make."""
    specs = [_random_spec(rng)]
    for _ in range(rng.choice((0, 1, 1, 2))):
        if rng.random() < 0.2 and specs[0].ring is None:
            specs.append(_sharing(specs[0], rng))
        else:
            specs.append(_random_spec(rng))
    if rng.random() < 0.3:
        # Kernels take a shorter way where all chunks of all groups are whole blocks.
        specs = [replace(spec, shape="blocks", draft="blocks" if spec.draft else None) for spec in specs]
    return tuple(specs)


def _random_spec(rng: random.Random) -> GroupSpec:
    size = rng.choice((1, 1, 2, 4, 8, 16, 16, 64, 256))
    ring = rng.choice((None, None, None, None, max(size, 32)))
    window = 24 if ring else rng.choice((None, None, 20, 70))
    if rng.random() < 0.08:
        size, ring, window = 1, 1, None
    unit: Literal["slot", "page"] | None = rng.choice(("page", "page", "page", "slot", "slot", None))
    flat = ring is None and rng.random() < 0.35
    return GroupSpec(
        page_size=size,
        pages=-(-700 // size) + 16,
        shape=rng.choice(SHAPES),
        dtype=rng.choice((torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn, torch.float8_e5m2)),
        unit=unit,
        flat=flat,
        mapping=unit is None or rng.random() < 0.8,
        offset=window is not None and ring is None and rng.random() < 0.5,
        row_index=not flat and rng.random() < 0.5,
        int32=rng.random() < 0.5,
        covers_new=True,
        window=window,
        ring=ring,
        max_rewind=0 if ring == 1 else 4 if window else None,
        stride_gap=rng.choice((0, 0, 0, 3)),
        entry_stride=rng.choice((1, 1, 1, 3)) if unit == "page" else 1,
        translated=rng.random() < 0.2,
        trash=rng.random() < 0.6,
        null=rng.random() < 0.4,
        null_is_zero=rng.random() < 0.3,
        draft=rng.choice((None, None, "tiny", "odd")),
        kind="state" if ring == 1 else "swa" if window else "full",
    )


def _sharing(first: GroupSpec, rng: random.Random) -> GroupSpec:
    window = rng.choice((None, 24))
    return GroupSpec(
        page_size=first.page_size,
        pages=first.pages,
        shares=0,
        unit="page",
        window=window,
        max_rewind=4 if window else None,
        int32=rng.random() < 0.5,
        trash=first.trash,
        null=first.null,
        kind="swa" if window else "full",
    )
