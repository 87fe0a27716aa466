"""Launches that run later: for devices that are simulated, where the order of work is what is looked at."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from kvcanary.kernels import DeviceFact, Kernels

if TYPE_CHECKING:
    import torch

    from kvcanary.batch import ForwardBatch
    from kvcanary.state import DeviceState, PoisonMode


class QueuedKernels:
    """Implements :class:`kvcanary.kernels.Kernels` by handing another's operations to ``launch``, to be run in order.

    Args:
        kernels: what does the work.
        launch: takes an operation; whoever asks for a fingerprint has waited until all of them ran.
    """

    def __init__(self, kernels: Kernels, launch: Callable[[Callable[[], None]], None]) -> None:
        self._kernels = kernels
        self._launch = launch
        self.name = kernels.name

    def prepare(self, state: DeviceState) -> None:
        """At once."""
        self._kernels.prepare(state)

    def facts(self, state: DeviceState, facts: Sequence[DeviceFact]) -> None:
        """Queued."""
        self._launch(lambda: self._kernels.facts(state, facts))

    def mark(
        self, state: DeviceState, batch: ForwardBatch, groups: Sequence[int], *, first: bool, poison: str = ""
    ) -> None:
        """Queued."""
        self._launch(lambda: self._kernels.mark(state, batch, groups, first=first, poison=poison))

    def check(self, state: DeviceState, batch: ForwardBatch, groups: Sequence[int]) -> None:
        """Queued."""
        self._launch(lambda: self._kernels.check(state, batch, groups))

    def seal(
        self,
        state: DeviceState,
        part: str,
        scrub_bytes: int,
        *,
        last: bool,
        nonfinite: bool,
        poison: PoisonMode = "off",
    ) -> None:
        """Queued."""
        self._launch(
            lambda: self._kernels.seal(state, part, scrub_bytes, last=last, nonfinite=nonfinite, poison=poison)
        )

    def abandon(self, state: DeviceState) -> None:
        """Queued."""
        self._launch(lambda: self._kernels.abandon(state))

    def window(self, state: DeviceState, batch: ForwardBatch, full: int, swa: int, *, every: int) -> None:
        """Queued."""
        self._launch(lambda: self._kernels.window(state, batch, full, swa, every=every))

    def fingerprint(self, state: DeviceState, group: int, part: str, slots: torch.Tensor) -> torch.Tensor:
        """Of the bytes as they are now."""
        return self._kernels.fingerprint(state, group, part, slots)
