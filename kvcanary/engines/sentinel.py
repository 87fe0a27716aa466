"""What sentinels share: bytes of an engine's cache that are written for a moment only."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager

import torch


@contextmanager
def put_back(places: Sequence[torch.Tensor]) -> Generator[None]:
    """Within it ``places``, views of an engine's cache, may be written; then they hold again what they held."""
    saved = [place.clone() for place in places]
    try:
        yield
    finally:
        for place, old in zip(places, saved, strict=True):
            place.copy_(old)
