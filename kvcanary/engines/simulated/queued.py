"""The canary's launches on a simulated device: they run when the device gets to them, as on a real one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvcanary.engines.simulated.device import Device
from kvcanary.kernels import DeviceFact, Kernels

if TYPE_CHECKING:
    import torch

    from kvcanary.batch import ForwardBatch
    from kvcanary.state import DeviceState


class QueuedKernels:
    """Implements :class:`kvcanary.kernels.Kernels` by launching another's operations on ``device``."""

    def __init__(self, kernels: Kernels, device: Device) -> None:
        self._kernels = kernels
        self._device = device
        self.name = kernels.name

    def prepare(self, state: DeviceState) -> None:
        """At once."""
        self._kernels.prepare(state)

    def facts(self, state: DeviceState, facts: Sequence[DeviceFact]) -> None:
        """Later."""
        self._device.launch(lambda: self._kernels.facts(state, facts))

    def mark(self, state: DeviceState, batch: ForwardBatch, groups: Sequence[int], *, first: bool) -> None:
        """Later."""
        self._device.launch(lambda: self._kernels.mark(state, batch, groups, first=first))

    def check(self, state: DeviceState, batch: ForwardBatch, groups: Sequence[int]) -> None:
        """Later."""
        self._device.launch(lambda: self._kernels.check(state, batch, groups))

    def seal(self, state: DeviceState, part: str, scrub_bytes: int, *, last: bool, nonfinite: bool) -> None:
        """Later."""
        self._device.launch(lambda: self._kernels.seal(state, part, scrub_bytes, last=last, nonfinite=nonfinite))

    def abandon(self, state: DeviceState) -> None:
        """Later."""
        self._device.launch(lambda: self._kernels.abandon(state))

    def window(self, state: DeviceState, batch: ForwardBatch, full: int, swa: int, *, every: int) -> None:
        """Later."""
        self._device.launch(lambda: self._kernels.window(state, batch, full, swa, every=every))

    def fingerprint(self, state: DeviceState, group: int, part: str, slots: torch.Tensor) -> torch.Tensor:
        """Waits for the device."""
        self._device.run()
        return self._kernels.fingerprint(state, group, part, slots)
