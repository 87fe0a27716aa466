"""The bytes of one group: two layers of keys and values, and a scale for each."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvcanary.engines.simulated.style import Style
from kvcanary.layout import KVSource

LAYERS = 2
_TURN = 0x9E3779B97F4A7C15 - (1 << 64)


class Memory:
    """Real tensors, full of what was in memory before. A number stands for a token's keys and values in all layers.

    Attributes:
        kv: int64 ``[layers, pages, page_size, 1]``.
        scale: float32 of the same shape.
    """

    def __init__(self, style: Style, device: torch.device, generator: torch.Generator) -> None:
        self.page_size = style.page_size
        self.slots = style.pages * style.page_size
        shape = (LAYERS, style.pages, style.page_size, 1)
        self.kv = torch.randint(-(1 << 62), 1 << 62, shape, generator=generator).to(device)
        self.scale = torch.rand(shape, generator=generator).to(device)
        self._kv, self._scale = self.kv.view(LAYERS, -1), self.scale.view(LAYERS, -1)
        self._factors = torch.tensor([[1], [_TURN]], device=device)

    @property
    def sources(self) -> tuple[KVSource, ...]:
        """Where the bytes of each token lie."""
        return tuple(
            KVSource.from_view(f"{component}{layer}", buffer[layer], layer=layer, component=component)
            for layer in range(LAYERS)
            for component, buffer in (("kv", self.kv), ("scale", self.scale))
        )

    def _scales(self, words: torch.Tensor) -> torch.Tensor:
        return ((words >> 16) & 0xFFFF).to(torch.float32)

    def write(self, slots: torch.Tensor, values: torch.Tensor) -> None:
        """Fill slots with what ``values`` stand for."""
        words = values * self._factors
        self._kv[:, slots] = words
        self._scale[:, slots] = self._scales(words)

    def holds(self, slots: torch.Tensor, values: torch.Tensor) -> bool:
        """Whether every slot holds what its value stands for."""
        words = values * self._factors
        return torch.equal(self._kv[:, slots], words) and torch.equal(self._scale[:, slots], self._scales(words))

    def differs(self, slots: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """Which slots do not."""
        words = values * self._factors
        return ((self._kv[:, slots] != words) | (self._scale[:, slots] != self._scales(words))).any(0)

    def save(self, pages: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """A copy of pages."""
        where = list(pages)
        return self.kv[:, where].clone(), self.scale[:, where].clone()

    def load(self, pages: Sequence[int], saved: tuple[torch.Tensor, torch.Tensor]) -> None:
        """Fill pages with a copy; of a longer one, with its beginning."""
        where = list(pages)
        self.kv[:, where] = saved[0][:, : len(where)].to(self.kv.device)
        self.scale[:, where] = saved[1][:, : len(where)].to(self.kv.device)

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy pages."""
        self.load(targets, self.save(sources))
