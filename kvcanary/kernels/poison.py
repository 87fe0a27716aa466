"""Which bytes may take poison: a pattern that a forward's own writes must overwrite.

A seal vouches for the bytes it finds, not that somebody wrote them. So the mark puts a pattern into a few bytes of each
new slot, and bytes that still hold it at the exit were never written.

Not every slot may take it. Layers of ring and state groups read a slot before they write it, and engines that clear
pages at allotment read what no forward wrote. Nor may a slot whose page is not the row's own, or whose record was there
already: the bytes of a legal rewrite may be in use.
"""

from __future__ import annotations

from kvcanary.layout import AttentionGroup, KVSource, PoolLayout, Run
from kvcanary.record import POISON_BYTES, POISON_LEAST


def exemption(group: AttentionGroup) -> str:
    """Why a group takes no poison, in words; empty when it does."""
    if group.ring is not None:
        return "its layers read the old window before they write"
    if group.kind == "state":
        return "its layers read the old state before they write"
    if group.zero_on_allot:
        return "the engine clears pages when it hands them out, and reads what no forward wrote"
    return ""


def poison_runs(layout: PoolLayout, group: int, part: str) -> list[tuple[KVSource, Run]]:
    """Runs of ``part`` that take poison when ``group`` writes: those of a whole pattern if there are any."""
    if exemption(layout.groups[group]):
        return []
    sources = layout.groups[layout.spaces[group]].part_sources(part)
    runs = [(source, run) for source in sources for run in source.runs]
    whole = [(source, run) for source, run in runs if run.num_bytes >= POISON_BYTES]
    return whole or [(source, run) for source, run in runs if run.num_bytes >= POISON_LEAST]


def fill_runs(layout: PoolLayout, space: int) -> list[tuple[KVSource, Run]]:
    """Runs that are filled when pages of ``space`` are handed out: none if any group in it takes no poison."""
    if any(exemption(group) for group, own in zip(layout.groups, layout.spaces, strict=True) if own == space):
        return []
    return [pair for part in layout.groups[space].parts for pair in poison_runs(layout, space, part)]
