"""The operations on the device, behind one registry.

``reference`` is vectorised torch and the oracle; ``triton`` is the fast one. Both follow the semantics that
the docstrings of :class:`Kernels` state, bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING, Protocol

from kvcanary.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from kvcanary.batch import ForwardBatch
    from kvcanary.state import DeviceState, PoisonMode


class FactOp(IntEnum):
    """What a device fact changes. Facts are applied in order, on the forward's own stream, before a forward."""

    ALLOC = 0
    """pages get owner (tag, HELD, now); their records are wiped, and those of other groups whose bytes they overlay
    when the arena page changed hands. ``judged``: DOUBLE_ALLOC for a page that is HELD, or named twice. With tag 0 a
    page belongs to the row that writes into it first"""
    FREE = 1
    """pages get owner state FREED (tag kept); records stay until the next ALLOC, since engines may free first and copy
    the bytes out afterwards. ``judged``: DOUBLE_FREE for a page that is FREED, or named twice"""
    OWN = 2
    """pages get owner (tag, HELD, now); records stay (a page handed on with its contents)"""
    ADMIT = 3
    """row starts: tag, ``seed``; ``position`` and ``digest`` are its armed base if ``armed``, else it
    has none yet"""
    ANCHOR = 4
    """the base of an unarmed row arrived: compare with what it assumed at ``position``, report or arm; if the row has
    not started, or ``armed``, set it"""
    FINISH = 5
    """put (tag, ``position``, digest there) into the outbox; free the row if its tag is still ``tag``"""
    COPY = 6
    """records of ``pages`` go to ``targets``: links as they are; sealed ones keep their fingerprint and get the present
    forward as writer, and no flags, since who reads the copy must hear of it too; others become unsealed"""
    EXPORT = 7
    """records of ``pages`` go to ``records`` [pages * page_size, 2 + 2 * parts]: link, then each part's seal"""
    IMPORT = 8
    """the reverse; sealed ones get the present forward, owner becomes (tag, HELD, now), slots join the scrub queue"""
    WIPE = 9
    """records of pages become UNKNOWN (bytes are about to be written by a transfer)"""
    RESTAMP = 10
    """fingerprints of all linked slots of ``pages`` are taken anew from the bytes"""
    QUEUE = 11
    """slots of ``pages`` go to the front of the scrub"""
    POISON = 12
    """pages were just handed out and hold nothing: their bytes are filled with poison"""


@dataclass(slots=True)
class DeviceFact:
    """One lifecycle fact for the device; see :class:`FactOp` for which fields count.

    ``judged``: nobody on the host has seen the numbers in ``pages``; those that are no pages are passed over.
    """

    op: FactOp
    group: int = 0
    pages: Sequence[int] | torch.Tensor = ()
    targets: Sequence[int] | torch.Tensor = ()
    row: int = -1
    tag: int = 0
    position: int = 0
    digest: int = 0
    seed: int = 0
    armed: bool = False
    judged: bool = False
    records: torch.Tensor | None = field(default=None, repr=False)


class Kernels(Protocol):
    """The operations. None but :meth:`prepare` may block the host; none but :meth:`fingerprint` returns anything."""

    name: str

    def prepare(self, state: DeviceState) -> None:
        """Make and compile what serving ``state`` needs, so that nothing of that happens in a forward."""

    def facts(self, state: DeviceState, facts: Sequence[DeviceFact]) -> None:
        """Apply ``facts`` in order."""

    def mark(
        self, state: DeviceState, batch: ForwardBatch, groups: Sequence[int], *, first: bool, poison: str = ""
    ) -> None:
        """Write the links of the new tokens of ``groups`` and clear their seals; fill the scratch.

        ``first`` is True for the first mark of a forward: it judges the inputs (ids, positions) and fills the
        scratch that all groups share. ``poison`` names the part in whose sources the new slots take poison; none: "".
        """

    def check(self, state: DeviceState, batch: ForwardBatch, groups: Sequence[int]) -> None:
        """Check the old positions of every row in ``groups`` through the tables of the batch."""

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
        """Fingerprint the tokens in the scratch for sources of ``part``, scrub up to ``scrub_bytes``.

        ``last`` is True for the last seal of a forward: it commits the rows' histories, writes the header and
        advances the forward number. ``poison``: what this forward's mark put into this part, to be looked for.
        """

    def abandon(self, state: DeviceState) -> None:
        """End a forward that raised: no seal, no commit; the forward number advances and a header is written."""

    def window(self, state: DeviceState, batch: ForwardBatch, full: int, swa: int, *, every: int) -> None:
        """Count diverging and out-of-window positions of a full and a window group in every ``every``-th forward.

        In other forwards it does nothing and counts no launch; the forward number is read on the device, so that
        a captured graph keeps the period.
        """

    def fingerprint(self, state: DeviceState, group: int, part: str, slots: torch.Tensor) -> torch.Tensor:
        """Fingerprints int64 ``[n]`` of ``slots`` int64 ``[n]`` (all within the pool)."""
        ...


def load_kernels(backend: str, device_type: str) -> Kernels:
    """The kernels called ``backend`` (``auto``, ``triton``, ``reference``) for a device type.

    Raises:
        ConfigError: the backend is unknown or cannot run here. An explicit choice never falls back.
    """
    if backend == "auto":
        backend = "triton" if device_type == "cuda" else "reference"
    if backend == "reference":
        from kvcanary.kernels.reference import ReferenceKernels

        return ReferenceKernels()
    if backend == "triton":
        return _load_triton()
    raise ConfigError(f"backend must be 'auto', 'triton' or 'reference', got {backend!r}")


def _load_triton() -> Kernels:
    try:
        from kvcanary.kernels.triton_backend import TritonKernels
    except ImportError as error:
        raise ConfigError(
            f"the triton backend cannot be imported ({error}); install triton beside torch, or set backend='reference'"
        ) from error
    return TritonKernels()
