"""On demand: verify bytes now, look at one slot, scrub while idle. These may wait for the device."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvcanary.binding import Binding
from kvcanary.decode import OWNER_STATES
from kvcanary.errors import BatchError, ConfigError
from kvcanary.layout import KVSource
from kvcanary.record import (
    MASK32,
    SALTED,
    SealFlag,
    hex64,
    parse_link,
    parse_owner,
    parse_writer,
)
from kvcanary.state import Role

_CHUNK = 1 << 14
MOST_MIB = 1 << 20
ROLES = {role.name.lower(): role for role in Role}
"""Launch roles by the names that events give them."""


@dataclass(frozen=True, slots=True)
class Mismatch:
    """One slot whose bytes are not those that were sealed."""

    group: str
    part: str
    slot: int
    position: int
    writer: str
    writer_forward: int
    fingerprint_expected: str
    fingerprint_found: str


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """Result of reading bytes again. ``unsealed`` slots hold something that nobody vouched for: not verified."""

    verified: int
    unsealed: int
    mismatches: tuple[Mismatch, ...]

    @property
    def clean(self) -> bool:
        """No mismatch, and something was verified at all."""
        return not self.mismatches and self.verified > 0


@dataclass(frozen=True, slots=True)
class SealInfo:
    """One part's seal. ``forward == 0``: unsealed."""

    part: str
    fingerprint: str
    forward: int
    writer: str
    reported: tuple[str, ...]
    bytes_match: bool | None


@dataclass(frozen=True, slots=True)
class SlotInfo:
    """Everything that is known about one slot. ``position`` is None when nothing is claimed."""

    group: str
    slot: int
    page: int
    position: int | None
    token: int | None
    digest: str
    owner: str
    owner_state: str
    owner_since: int
    seals: tuple[SealInfo, ...]


class Tools(Binding):
    """The on-demand half of :class:`kvcanary.canary.Canary`."""

    def verify(self, group: str | int | None = None, pages: Sequence[int] | None = None) -> VerifyReport:
        """Read sealed bytes again, now, and compare.

        Args:
            group: one group, or None for all.
            pages: pages of that group, or None for all of them.

        Raises:
            BatchError: ``pages`` without ``group``, or a page outside the pool.
        """
        if pages is not None and group is None:
            raise BatchError("verify(pages=...) needs the group that the pages belong to")
        groups = [self.layout.index(group)] if group is not None else sorted(set(self.layout.spaces))
        verified = unsealed = 0
        found: list[Mismatch] = []
        for index in groups:
            for part in range(self.state.groups[index].seals.shape[0]):
                counts = self._verify_part(index, part, self._slots(index, pages), found)
                verified, unsealed = verified + counts[0], unsealed + counts[1]
        return VerifyReport(verified, unsealed, tuple(found))

    def nonfinite(self, group: str | int, pages: Sequence[int]) -> tuple[int, ...]:
        """Slots of pages that hold NaN or infinity now, whether anybody wrote them or not.

        For engines whose kernels fetch whole pages and mask what was not written yet by a product with zero: look at
        pages that were just handed out. Sources of other dtypes than floating ones are passed over.

        Raises:
            BatchError: a page outside the pool.
        """
        index = self.layout.index(group)
        slots = self._slots(index, pages)
        bad = torch.zeros(len(slots), dtype=torch.bool, device=slots.device)
        space = self.layout.groups[self.layout.spaces[index]]
        for source in space.sources:
            bad |= _nonfinite(source, slots)
        return tuple(slots[bad].tolist())

    def inspect(self, group: str | int, slot: int) -> SlotInfo:
        """One slot's record, its owner, and whether its bytes are still the sealed ones.

        Raises:
            BatchError: the slot lies outside the pool.
        """
        index = self.layout.index(group)
        item = self.layout.groups[index]
        if not 0 <= operator.index(slot) < item.num_slots:
            raise BatchError(f"group {item.name!r}: slot {slot} lies outside 0..{item.num_slots - 1}")
        records = self.state.groups[index]
        link, digest = records.links[slot].tolist()
        known = bool(link or digest)
        owner = parse_owner(int(records.owner[slot // item.page_size]))
        code, position = parse_link(link)
        return SlotInfo(
            group=item.name,
            slot=slot,
            page=slot // item.page_size,
            position=position if known else None,
            token=code if known and code < SALTED else None,
            digest=hex64(digest),
            owner=self.registry.name_of(owner.tag),
            owner_state=OWNER_STATES.get(owner.state, "unknown"),
            owner_since=owner.as_of,
            seals=tuple(self._seal_info(index, part, slot) for part in range(records.seals.shape[0])),
        )

    def scrub(self, mib: float | None = None) -> None:
        """Read and compare up to ``mib`` MiB of sealed bytes (default: one step's budget), while the engine is idle.

        What it finds is in the next snapshot. A first mismatch is a suspicion; the second look reports it.

        Raises:
            BatchError: ``mib`` is no such number.
        """
        if mib is not None and not 0 <= mib <= MOST_MIB:
            raise BatchError(f"scrub() takes a number of MiB from 0 to {MOST_MIB}, got {mib!r}")
        budget = self._scrub_bytes if mib is None else int(mib * (1 << 20))
        if budget > 0:
            self._kernels.seal(self.state, "", budget, last=False, nonfinite=False)

    def suppress(self, role: str, *, suppressed: bool = True) -> None:
        """Stop launching one role, to see that health reports it. For tests and drills.

        Raises:
            ConfigError: no such role.
        """
        if role not in ROLES:
            raise ConfigError(f"no launch role {role!r}; roles are {', '.join(ROLES)}")
        (self._suppressed.add if suppressed else self._suppressed.discard)(ROLES[role])

    def _slots(self, group: int, pages: Sequence[int] | None) -> torch.Tensor:
        item = self.layout.groups[group]
        device = self.state.device
        if pages is None:
            return torch.arange(item.num_slots, device=device)
        first = torch.as_tensor(self._checked(group, pages), dtype=torch.int64, device=device) * item.page_size
        return (first[:, None] + torch.arange(item.page_size, device=device)).flatten()

    def _verify_part(self, group: int, part: int, slots: torch.Tensor, found: list[Mismatch]) -> tuple[int, int]:
        seals = self.state.groups[group].seals[part][slots]
        sealed = (seals[:, 1] & MASK32) != 0
        kept, expected = slots[sealed], seals[sealed]
        for start in range(0, len(kept), _CHUNK):
            chunk = kept[start : start + _CHUNK]
            now = self._kernels.fingerprint(self.state, group, self._part_names(group)[part], chunk)
            want = expected[start : start + _CHUNK]
            wrong = (now != want[:, 0]).nonzero().flatten().tolist()
            found += [self._mismatch(group, part, int(chunk[i]), want[i].tolist(), int(now[i])) for i in wrong]
        return len(kept), len(slots) - len(kept)

    def _mismatch(self, group: int, part: int, slot: int, seal: list[int], now: int) -> Mismatch:
        writer = parse_writer(seal[1])
        link = int(self.state.groups[group].links[slot, 0])
        return Mismatch(
            group=self.layout.groups[group].name,
            part=self._part_names(group)[part],
            slot=slot,
            position=parse_link(link).position,
            writer=self.registry.name_of(writer.tag),
            writer_forward=writer.forward,
            fingerprint_expected=hex64(seal[0]),
            fingerprint_found=hex64(now),
        )

    def _seal_info(self, group: int, part: int, slot: int) -> SealInfo:
        fingerprint, word = self.state.groups[group].seals[part, slot].tolist()
        writer = parse_writer(word)
        name = self._part_names(group)[part]
        match: bool | None = None
        if writer.forward:
            here = torch.tensor([slot], device=self.state.device)
            match = int(self._kernels.fingerprint(self.state, group, name, here)[0]) == fingerprint
        return SealInfo(
            part=name,
            fingerprint=hex64(fingerprint),
            forward=writer.forward,
            writer=self.registry.name_of(writer.tag),
            reported=tuple(flag.name or "" for flag in SealFlag if flag in writer.flags),
            bytes_match=match,
        )

    def _part_names(self, group: int) -> tuple[str, ...]:
        return self.layout.groups[self.layout.spaces[group]].parts


def _nonfinite(source: KVSource, slots: torch.Tensor) -> torch.Tensor:
    """Which slots hold numbers that are not finite; bool ``[n]``."""
    bad = torch.zeros(len(slots), dtype=torch.bool, device=slots.device)
    if not source.dtype.is_floating_point:
        return bad
    size = source.dtype.itemsize
    pages, offsets = slots // source.page_size, slots % source.page_size
    for run in source.runs:
        found = source.view_bytes(run.offset, run.num_bytes - run.num_bytes % size)[pages, offsets]
        bad |= ~found.view(source.dtype).isfinite().all(1)
    return bad
