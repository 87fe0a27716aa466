"""The bytes of one group: two or three layers of keys and values, and a scale for each."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvcanary.engines.simulated.style import Style
from kvcanary.layout import KVSource

TARGET, DRAFT = "target", "draft"
_FACTORS = (1, 0x9E3779B97F4A7C15 - (1 << 64), 0xD1B54A32D192ED03 - (1 << 64))


class Memory:
    """Real tensors, full of what was in memory before. A number stands for a token's keys and values in all layers.

    The last of three layers is a draft model's, which runs after the others.

    Attributes:
        layers: numbers of the layers of each model.
        kv: int64 ``[layers, pages, page_size, 1]``.
        scale: float32 of the same shape.
    """

    def __init__(self, style: Style, device: torch.device, generator: torch.Generator) -> None:
        self.page_size = style.page_size
        self.slots = style.pages * style.page_size
        count = 2 + style.draft_layer
        self.layers = {TARGET: slice(0, 2), DRAFT: slice(2, count)}
        shape = (count, style.pages, style.page_size, 1)
        self.kv = torch.randint(-(1 << 62), 1 << 62, shape, generator=generator).to(device)
        self.scale = torch.rand(shape, generator=generator).to(device)
        self._kv, self._scale = self.kv.view(count, -1), self.scale.view(count, -1)
        self._factors = torch.tensor(_FACTORS[:count], device=device).unsqueeze(1)

    @property
    def sources(self) -> tuple[KVSource, ...]:
        """Where the bytes of each token lie."""
        return tuple(
            KVSource.from_view(f"{component}{layer}", buffer[layer], layer=layer, component=component, part=part)
            for part, layers in self.layers.items()
            for layer in range(layers.start, layers.stop)
            for component, buffer in (("kv", self.kv), ("scale", self.scale))
        )

    def _scales(self, words: torch.Tensor) -> torch.Tensor:
        return ((words >> 16) & 0xFFFF).to(torch.float32)

    def write(self, slots: torch.Tensor, values: torch.Tensor, model: str = TARGET) -> None:
        """Fill slots in a model's layers with what ``values`` stand for."""
        layers = self.layers[model]
        words = values * self._factors[layers]
        self._kv[layers, slots] = words
        self._scale[layers, slots] = self._scales(words)

    def holds(self, slots: torch.Tensor, values: torch.Tensor, model: str = "") -> bool:
        """Whether every slot holds what its value stands for, in one model's layers or in all."""
        kv, scale, words = self._there(slots, values, model)
        return torch.equal(kv, words) and torch.equal(scale, self._scales(words))

    def differs(self, slots: torch.Tensor, values: torch.Tensor, model: str = "") -> torch.Tensor:
        """Which slots do not."""
        kv, scale, words = self._there(slots, values, model)
        return ((kv != words) | (scale != self._scales(words))).any(0)

    def _there(
        self, slots: torch.Tensor, values: torch.Tensor, model: str
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        layers = self.layers[model] if model else slice(None)
        return self._kv[layers, slots], self._scale[layers, slots], values * self._factors[layers]

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
