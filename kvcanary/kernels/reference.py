"""The reference: vectorised torch, exact enough to be the oracle of the other kernels, fast enough for a CPU.

It asks tensors questions on the host (how many, any at all), so it cannot be captured in a CUDA graph, and refuses to.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch

from kvcanary.errors import ConfigError, LayoutError
from kvcanary.kernels import ref_check, ref_exit, ref_facts, ref_mark, ref_scrub, ref_window
from kvcanary.kernels.ref_bytes import PartReader
from kvcanary.kernels.ref_report import Launch
from kvcanary.state import Role, Word

if TYPE_CHECKING:
    from kvcanary.batch import ForwardBatch
    from kvcanary.kernels import DeviceFact
    from kvcanary.state import DeviceState, PoisonMode


class ReferenceKernels:
    """Implements :class:`kvcanary.kernels.Kernels`.

    All work is done in inference mode, whatever the caller's mode: caches may be inference tensors, and state
    tensors, which are none, may be updated in it. Every operation raises ConfigError while the current CUDA stream
    is being captured.
    """

    name = "reference"

    def __init__(self) -> None:
        self._readers: WeakKeyDictionary[DeviceState, dict[tuple[int, int], PartReader]] = WeakKeyDictionary()

    def prepare(self, state: DeviceState) -> None:
        """Make the views on all bytes of ``state``, so that a forward meets none that cannot be read.

        Raises:
            LayoutError: a run cuts a floating value.
        """
        reader, layout = self._reader_of(state), state.layout
        with torch.inference_mode():
            for space in set(layout.spaces):
                for part in range(len(layout.groups[space].parts)):
                    reader(space, part)

    def facts(self, state: DeviceState, facts: Sequence[DeviceFact]) -> None:
        """Apply ``facts`` in order."""
        with self._launch(state, Role.FACTS) as launch:
            ref_facts.apply(launch, facts, self._reader_of(state))

    def mark(
        self, state: DeviceState, batch: ForwardBatch, groups: Sequence[int], *, first: bool, poison: str = ""
    ) -> None:
        """Claim the slots of the new tokens; judge the inputs and open the scratch if ``first``."""
        with self._launch(state, Role.MARK) as launch:
            if launch.armed:
                ref_mark.mark(launch, batch, groups, first=first, poison=poison)

    def check(self, state: DeviceState, batch: ForwardBatch, groups: Sequence[int]) -> None:
        """Check old positions."""
        with self._launch(state, Role.CHECK) as launch:
            if launch.armed:
                ref_check.check(launch, batch, groups)

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
        """Seal new tokens, scrub, and with ``last`` end the forward."""
        with self._launch(state, Role.SEAL) as launch:
            if scrub_bytes > 0:
                launch.launched(Role.SCRUB)
            if launch.armed:
                # The scrub first: tokens of this forward have no seal yet, so it passes them over, as it must in
                # kernels that seal and scrub in one launch.
                if scrub_bytes > 0:
                    ref_scrub.scrub(launch, scrub_bytes, self._reader_of(state))
                if launch[Word.SCRATCH_TOKENS]:
                    self._seal_groups(launch, part, nonfinite=nonfinite, poison=poison)
                if last and launch[Word.SCRATCH_TOKENS]:
                    ref_exit.commit(launch)
            if last:
                ref_exit.end_forward(launch)

    def abandon(self, state: DeviceState) -> None:
        """End a forward that raised."""
        with self._launch(state, None) as launch:
            launch[Word.ABANDONED] += 1
            ref_exit.end_forward(launch)

    def window(self, state: DeviceState, batch: ForwardBatch, full: int, swa: int, *, every: int) -> None:
        """Count diverging and out-of-window positions in every ``every``-th forward."""
        _refuse_capture(state)
        if int(state.counters[Word.FORWARD]) % every:
            return
        with self._launch(state, Role.WINDOW) as launch:
            if launch.armed:
                ref_window.window(launch, batch, full, swa)

    def fingerprint(self, state: DeviceState, group: int, part: str, slots: torch.Tensor) -> torch.Tensor:
        """Fingerprints of ``slots``.

        Raises:
            LayoutError: the group has no such part.
        """
        _refuse_capture(state)
        own = state.layout.groups[state.layout.spaces[group]]
        if part not in own.parts:
            raise LayoutError(f"group {own.name!r} has no part {part!r}, it has {list(own.parts)}")
        with torch.inference_mode():
            reader = self._reader_of(state)(state.layout.spaces[group], own.parts.index(part))
            found = reader.fingerprints(slots.to(torch.int64))
        # Outside of the mode, so that the caller may do with it what it likes.
        return found.clone()

    @contextmanager
    def _launch(self, state: DeviceState, role: Role | None) -> Generator[Launch, None, None]:
        _refuse_capture(state)
        with torch.inference_mode():
            launch = Launch(state, role)
            yield launch
            launch.finish()

    def _seal_groups(self, launch: Launch, part: str, *, nonfinite: bool, poison: PoisonMode) -> None:
        layout, readers = launch.state.layout, self._reader_of(launch.state)
        for g, space in enumerate(layout.spaces):
            parts = layout.groups[space].parts
            if part in parts:
                number = parts.index(part)
                ref_exit.seal_group(launch, g, number, readers(space, number), nonfinite=nonfinite, poison=poison)

    def _reader_of(self, state: DeviceState) -> ref_scrub.Readers:
        known = self._readers.setdefault(state, {})

        def reader(space: int, part: int) -> PartReader:
            found = known.get((space, part))
            if found is None:
                group = state.layout.groups[space]
                found = known[space, part] = PartReader(group.part_sources(group.parts[part]), state.keys)
            return found

        return reader


def _refuse_capture(state: DeviceState) -> None:
    if state.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise ConfigError(
            "the reference kernels cannot be captured in a CUDA graph, since they decide on the host; set "
            "backend='triton', or run the model without graphs"
        )
