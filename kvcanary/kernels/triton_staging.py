"""The facts' way to the device."""

from __future__ import annotations

import ctypes
from array import array
from collections import deque
from collections.abc import Sequence

import torch


class Staging:
    """Words on their way to the device, in page-locked memory that the kernel reads by itself.

    The kernel stores the launch's generation when it has read them; until then their place is not used again. When
    the ring is full, a larger one takes over, so the engine's thread never waits.
    """

    def __init__(self, device: torch.device, words: int = 1 << 15) -> None:
        self._pin = device.type == "cuda"
        self._device = device
        self.progress = torch.zeros(1, dtype=torch.int64, pin_memory=self._pin)
        self._generation = 0
        self._old: list[torch.Tensor] = []
        self._make(words)

    def _make(self, words: int) -> None:
        self._words = words
        self._ring = torch.zeros(words, dtype=torch.int64, pin_memory=self._pin)
        self.target = torch.zeros(words, dtype=torch.int64, device=self._device)
        self._pending: deque[tuple[int, int]] = deque()
        self._next = 0

    def put(self, words: Sequence[int]) -> tuple[int, int, int]:
        """Copy ``words`` to the ring; (address there, address of the device's copy, generation)."""
        count = len(words)
        start = self._room(count)
        source = array("q", words)
        address = self._ring.data_ptr() + start * 8
        ctypes.memmove(address, source.buffer_info()[0], count * 8)
        self._generation += 1
        self._pending.append((self._generation, start))
        self._next = start + count
        return address, self.target.data_ptr(), self._generation

    def _room(self, count: int) -> int:
        done = int(self.progress[0])
        while self._pending and self._pending[0][0] <= done:
            self._pending.popleft()
        first = self._pending[0][1] if self._pending else None
        if first is None and count <= self._words:
            return 0
        if first is not None:
            if self._next > first and self._next + count <= self._words:
                return self._next
            start = self._next if self._next <= first else 0
            if start + count < first:
                return start
        self._old += [self._ring, self.target]
        self._make(2 * max(self._words, count))
        return 0
