"""What the capture of a CUDA graph means for what the host writes on the device: it happens at the replays, not now."""

from __future__ import annotations

from typing import Generic, TypeVar

import torch

K = TypeVar("K")


def is_capturing(device: torch.device) -> bool:
    """Whether the current stream of a device is being captured in a graph: what is launched now runs at its replays."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


class Written(Generic[K]):
    """Which things on the device hold what they should.

    What graphs alone have written holds nothing until one of them is replayed, so it stays due.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._written: set[K] = set()

    def is_due(self, key: K) -> bool:
        """Whether a thing must be written; who asks writes it at once, on the current stream."""
        if key in self._written:
            return False
        if not is_capturing(self._device):
            self._written.add(key)
        return True

    def forget(self, key: K) -> None:
        """Its place holds something else from now on."""
        self._written.discard(key)
