"""One token written through the engine's own path and read back through the sources, since layouts change."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from kvcanary.engines.sentinel import put_back
from kvcanary.errors import ConfigError
from kvcanary.layout import KVSource, PoolLayout


class Writable(Protocol):
    """What the sentinel needs to know of a pool."""

    @property
    def inference(self) -> bool:
        """Whether the pool was made in inference mode, and takes writes in that mode only."""
        ...

    def trash(self, group: int) -> tuple[int, int]:
        """The index that padding writes to, and the slot it should be."""
        ...

    def layers(self, group: int) -> Sequence[int]:
        """Layers of a group."""
        ...

    def place(self, layer: int) -> int:
        """The layer number of the sources of a layer."""
        ...

    def update(
        self, key: torch.Tensor, value: torch.Tensor, layer: int, indices: list[torch.Tensor], by_dict: bool
    ) -> None:
        """Write one token through the engine's own path, reading nothing."""
        ...


def write_sentinel(pool: Writable, cache: Any, layout: PoolLayout) -> None:
    """Write a token of every layer into the write-trash slot, find it there, and put the old bytes back.

    The engine must be idle: padding writes to the same slot.

    Raises:
        ConfigError: the sources do not show what the engine wrote.
    """
    by_dict = "kwargs" in inspect.signature(cache.update).parameters
    random = torch.Generator().manual_seed(1)
    indices = [torch.tensor([pool.trash(group)[0]], device=layout.device) for group in range(len(layout.groups))]
    for group, space in enumerate(layout.spaces):
        item = layout.groups[space]
        page, offset = divmod(pool.trash(group)[1], item.page_size)
        places = [_first_run(source)[page, offset] for source in item.sources]
        with torch.inference_mode(mode=pool.inference), torch.no_grad(), put_back(places):
            for layer in pool.layers(group):
                key, value = (_sample(item.sources[0].tensor, random) for _ in range(2))
                before = [place.clone() for place in places]
                pool.update(key, value, layer, indices, by_dict)
                wrong = _wrong_sources(item.sources, places, before, pool.place(layer), {"k": key, "v": value})
                if wrong:
                    raise ConfigError(
                        f"a token written through the engine's own cache.update to layer {layer} of group "
                        f"{item.name!r} was not found where the layout says: {', '.join(wrong)} of slot "
                        f"{pool.trash(group)[1]} differ. This release lays its cache out in another way; use a tested "
                        "release or a newer kvcanary"
                    )


def _first_run(source: KVSource) -> torch.Tensor:
    """The bytes of each token in a source with a single run."""
    return source.view_bytes(source.runs[0].offset, source.runs[0].num_bytes)


def _sample(like: torch.Tensor, random: torch.Generator) -> torch.Tensor:
    """Keys or values of one token, ``[1, heads, 1, dim]``: small whole numbers, exact in every dtype."""
    heads, dim = like.shape[2:]
    return torch.randint(1, 16, (1, heads, 1, dim), generator=random).to(like.dtype).to(like.device)


def _wrong_sources(
    sources: Sequence[KVSource],
    now: Sequence[torch.Tensor],
    before: Sequence[torch.Tensor],
    layer: int,
    written: dict[str, torch.Tensor],
) -> list[str]:
    """Sources of the layer that do not hold what was written, and others that changed."""
    wrong: list[str] = []
    for source, place, old in zip(sources, now, before, strict=True):
        new = written[source.component].contiguous().view(torch.uint8).reshape(-1)
        if not torch.equal(place, new if source.layer == layer else old):
            wrong.append(source.name)
    return wrong
