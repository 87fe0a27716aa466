"""The cache that the rows are measured on: 48 layers x (K, V) x 1 KiB a token, random bytes, never zeros."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvcanary.cli.benches.rows import GIB
from kvcanary.cli.benches.running import Setting
from kvcanary.errors import ConfigError
from kvcanary.layout import AttentionGroup, KVSource, PoolLayout

LAYERS = 48
RUN_BYTES = 1024
TOKEN_BYTES = LAYERS * 2 * RUN_BYTES
SPARE_BYTES = 4 * GIB
"""left for records, batches and graphs"""


@dataclass(frozen=True, slots=True, eq=False)
class Pool:
    """Buffers of K and V, one tensor a layer and component, bf16 ``[slots, run]``.

    Attributes:
        buffers: K and V in turns, layer by layer.
        slots: tokens that each buffer holds.
    """

    buffers: tuple[torch.Tensor, ...]
    slots: int

    @property
    def device(self) -> torch.device:
        """Where the buffers lie."""
        return self.buffers[0].device

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in all buffers."""
        return sum(buffer[0].numel() * buffer.element_size() for buffer in self.buffers)

    def layout(self, slots: int, page_size: int) -> PoolLayout:
        """One full-attention group over the first ``slots`` tokens (rounded down to whole pages) of all buffers.

        Raises:
            ConfigError: the buffers hold fewer.
        """
        if slots > self.slots:
            raise ConfigError(f"a layout of {slots} slots was asked of a pool of {self.slots}")
        pages = slots // page_size
        sources = tuple(
            KVSource.from_view(
                f"layer{i // 2}.{'kv'[i % 2]}",
                buffer[: pages * page_size].view(pages, page_size, buffer.shape[1]),
                layer=i // 2,
                component="kv"[i % 2],
            )
            for i, buffer in enumerate(self.buffers)
        )
        return PoolLayout((AttentionGroup("full", "full", pages * page_size, page_size, sources=sources),))


def slots_of(gib: float, setting: Setting) -> int:
    """Slots of a pool of that size; a rehearsal takes one slot for each 64 MiB."""
    slots = int(gib * GIB) // TOKEN_BYTES
    return max(256, slots * TOKEN_BYTES // (64 << 20)) if setting.rehearse else slots


def make_pool(gib: float, setting: Setting) -> Pool:
    """The pool shared by all rows of a run, at least ``gib`` large; made anew when a row needs a larger one.

    Raises:
        ConfigError: the device has too little memory free.
    """
    slots = slots_of(gib, setting)
    kept: Pool | None = setting.kept.get("pool")
    if kept is not None and kept.slots >= slots:
        return kept
    del kept
    setting.drop("pool")
    shape = (2, 32) if setting.rehearse else (LAYERS, RUN_BYTES)
    if setting.device == "cuda":
        _expect_free(slots * TOKEN_BYTES + SPARE_BYTES)
    return setting.keep("pool", lambda: _random_pool(slots, setting.device, *shape))


def thin_pool(slots: int, setting: Setting) -> Pool:
    """A pool of 16 bytes a token, for rows that are about records alone."""
    return _random_pool(slots, setting.device, 1, 8)


def _random_pool(slots: int, device: str, layers: int, run_bytes: int) -> Pool:
    buffers = tuple(torch.empty(slots, run_bytes // 2, dtype=torch.bfloat16, device=device) for _ in range(2 * layers))
    for buffer in buffers:
        buffer.normal_()
    return Pool(buffers, slots)


def _expect_free(num_bytes: int) -> None:
    free, total = torch.cuda.mem_get_info()
    free += torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    if free < num_bytes:
        raise ConfigError(
            f"needs {num_bytes / GIB:.0f} GiB of device memory; {free / GIB:.0f} of {total / GIB:.0f} GiB are free"
        )
