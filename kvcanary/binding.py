"""What every half of a canary stands on: the pool it is bound to, and what was made for it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from kvcanary.batch import INDEX_DTYPES
from kvcanary.config import CanaryConfig
from kvcanary.errors import BatchError
from kvcanary.integers import whole_numbers
from kvcanary.kernels import DeviceFact, Kernels
from kvcanary.layout import PoolLayout
from kvcanary.record import make_keys
from kvcanary.requests import Registry
from kvcanary.state import DeviceState, Limits, PoisonMode, Role, Word

Pages = Sequence[int] | torch.Tensor

_UNBOUND = "the canary has no pool yet; the adapter calls bind() once the engine has made one"


class Binding:
    """A configuration, and a pool once there is one.

    Attributes:
        config: as it was given.
        next_forward: number of the next forward, from 1 in each run.
        run: id of the run; "" before the first pool.
        kernels: of the pool's device; None before the first pool.
        registry: live requests with their rows and tags.
    """

    def __init__(self, config: CanaryConfig) -> None:
        self.config = config
        self.next_forward = 1
        self.run = ""
        self.kernels: Kernels | None = None
        self._layout: PoolLayout | None = None
        self._state: DeviceState | None = None
        self.registry = Registry(0)
        self._armed = False
        self._suppressed: set[Role] = set()
        self._poison: PoisonMode = "off"
        self._pending: list[DeviceFact] = []
        self._late: deque[DeviceFact] = deque()
        self._stream: Any = None
        self._places: dict[str | int, tuple[int, str, int]] = {}

    @property
    def bound(self) -> bool:
        """Whether a pool is attached."""
        return self._state is not None

    @property
    def layout(self) -> PoolLayout:
        """The attached pool's layout."""
        if self._layout is None:
            raise BatchError(_UNBOUND)
        return self._layout

    @property
    def state(self) -> DeviceState:
        """The attached pool's records, counters and rings."""
        if self._state is None:
            raise BatchError(_UNBOUND)
        return self._state

    @property
    def armed(self) -> bool:
        """Whether checks hold."""
        return self._armed

    def launch_through(self, wrap: Callable[[Kernels], Kernels]) -> None:
        """Put something between this canary and its kernels, until the next pool: a device that runs things later."""
        self.kernels = wrap(self._kernels)

    @property
    def _kernels(self) -> Kernels:
        if self.kernels is None:
            raise BatchError(_UNBOUND)
        return self.kernels

    def _on_stream(self) -> AbstractContextManager[Any]:
        return torch.cuda.stream(self._stream)

    @property
    def _scrub_bytes(self) -> int:
        if self.config.fingerprint == "off":
            return 0
        return int(self.config.scrub_mib_per_step * (1 << 20))

    def _checked(self, group: str | int, pages: Pages) -> Pages:
        """Pages of the group, as they are now: engines go on changing the very lists and tensors that they pass.

        A page that does not exist is refused here, by the call that named it; the step that applies the fact is too
        late. Tensors on the device are not read, since that would wait for it.
        """
        item = self.layout.groups[self.layout.index(group)]
        if isinstance(pages, torch.Tensor):
            if pages.dim() != 1 or pages.dtype not in INDEX_DTYPES:
                raise BatchError(
                    f"group {item.name!r}: pages must be int32 or int64 [n], got {pages.dtype} {tuple(pages.shape)}"
                )
            if pages.device.type != "cpu":
                return pages
            pages = pages.tolist()
        numbers = whole_numbers(pages, f"group {item.name!r}: pages")
        if numbers and not 0 <= min(numbers) <= max(numbers) < item.num_pages:
            bad = next(page for page in numbers if not 0 <= page < item.num_pages)
            raise BatchError(
                f"group {item.name!r}: page {bad} lies outside the pool of {item.num_pages} pages; pass page numbers "
                "of this group, not slots or bytes"
            )
        return numbers

    def _retired(self) -> int:
        """The last forward that is known to be done, from the newest header."""
        headers, newest = self.state.headers, self.next_forward - 1
        if int(headers[newest % headers.shape[0], Word.SEQUENCE]) == newest:
            return newest
        return int(headers[:, Word.SEQUENCE].max())

    def _take_pool(
        self, layout: PoolLayout, kernels: Kernels, *, max_tokens: int, max_batch_rows: int, max_rows: int
    ) -> None:
        config = self.config
        limits = Limits(
            max_tokens=max_tokens,
            max_batch_rows=max_batch_rows,
            max_rows=max_rows,
            ring_capacity=config.ring_capacity,
            ring_quota=config.ring_quota_per_kind,
            snapshots=config.snapshots,
            head_entries=config.head_entries_per_forward,
            poison=self._poison,
            gpu_time_every=config.gpu_time_every,
        )
        self._state = DeviceState(layout, make_keys(config.key), limits)
        self._layout, self.kernels = layout, kernels
        self.registry = Registry(max_rows)
        self._pending.clear()
        self._late.clear()
        self._places.clear()
        self.next_forward = 1

    def _leave_pool(self) -> None:
        self._layout = self._state = None
        self._places.clear()
        self._armed = False
