"""Records of pages that left the pool, and whether another pool can make use of them."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from kvcanary.errors import LayoutError
from kvcanary.kernels.ref_words import sealed
from kvcanary.layout import PoolLayout
from kvcanary.record import MAX_TAG, TAG_SHIFT, Keys, key_fingerprint


@dataclass(frozen=True, slots=True, eq=False)
class Records:
    """Records of pages that left the pool (offload, transfer).

    Filled by the next step's facts. Another engine takes them when that step is done on the device.

    Attributes:
        group: name of the attention group.
        pages: how many.
        words: int64 ``[pages * page_size, 2 + 2 * parts]`` on the cache's device.
        layout: the layout fingerprint they belong to.
        content: fingerprint of what the group's seals add up, wherever it lies.
        key: fingerprint of the key they were made with.
        run: the run that exported them, whose requests they name.
    """

    group: str
    pages: int
    words: torch.Tensor = field(repr=False)
    layout: str
    content: str
    key: str
    run: str


def adopted(words: torch.Tensor, tag: int) -> torch.Tensor:
    """Records of another run, written by request ``tag`` of this one: their own tags mean other requests here."""
    words = words.clone()
    writers = words[:, 3::2]
    named = (writers & ~(MAX_TAG << TAG_SHIFT)) | (tag << TAG_SHIFT)
    words[:, 3::2] = torch.where(sealed(writers), named, writers)
    return words


def refuse_strangers(records: Records, layout: PoolLayout, group: int, keys: Keys, *, relaid: bool) -> None:
    """Refuse records that say nothing about a group's bytes; ``relaid``: the bytes were laid out anew on the way.

    Raises:
        LayoutError: another layout, group, content or key.
    """
    name = layout.groups[group].name
    if records.key != key_fingerprint(keys):
        raise LayoutError(
            f"records of group {records.group!r} were made with another key; give both engines the same `key`"
        )
    if relaid and records.content != layout.content(group):
        raise LayoutError(
            f"records of group {records.group!r} are of other layers, components, dtypes or heads ({records.content}) "
            f"than group {name!r} holds ({layout.content(group)}); only the same content can be laid out anew"
        )
    if not relaid and (records.layout != layout.fingerprint or records.group != name):
        raise LayoutError(
            f"records of group {records.group!r} in layout {records.layout} cannot enter group {name!r} of layout "
            f"{layout.fingerprint}; both engines need the same layout, or relaid=True where a copy lays bytes out anew"
        )
