"""The faults that can be planted, each with the findings that must name it and the number of forwards it may take.

A description says nothing about an engine; how a fault is done there is the business of one module per engine, such
as :mod:`kvcanary.faults.transformers_faults`.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from kvcanary.errors import ConfigError
from kvcanary.events import IncidentOpened, IncidentUpdated

STALLED = "KERNEL_STALLED"
"""In ``expects``: a ``KernelStalled`` event instead of an incident."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One kind of fault.

    Attributes:
        name: as it is written on a command line.
        title: a few words, for a table.
        description: what goes wrong, in one sentence.
        expects: kinds of violation, any one of which names the fault, best first; or :data:`STALLED`.
        within: forwards after the broken one by which it must be named; 0: before that forward's model ran.
            For :data:`STALLED`: None, one period of the health check.
        names_request: the finding must name one of the requests that the fault hit.
    """

    name: str
    title: str
    description: str
    expects: tuple[str, ...]
    within: int | None = 0
    names_request: bool = True

    @property
    def stalls(self) -> bool:
        """Whether a missing launch is expected instead of an incident."""
        return STALLED in self.expects


@dataclass(frozen=True, slots=True, kw_only=True)
class Injection:
    """A fault that was done: when, and to whom.

    Attributes:
        fault: what was done.
        forward: number of the first forward that it touches.
        requests: the requests that it hits; a finding may name any of them.
        group: attention group, or "".
        slot: slot in the group's pool, or -1.
        detail: the same in words.
    """

    fault: Fault
    forward: int
    requests: tuple[str, ...] = ()
    group: str = ""
    slot: int = -1
    detail: str = ""

    def named_by(self, incident: IncidentOpened | IncidentUpdated) -> bool:
        """Whether an incident, new or one that grew, is of an expected kind, in time, and names one of the requests."""
        kinds = incident.kinds if isinstance(incident, IncidentUpdated) else (incident.kind,)
        late = incident.forward - self.forward
        in_time = late >= 0 and (self.fault.within is None or late <= self.fault.within)
        right = not self.fault.names_request or bool(set(self.requests) & set(incident.requests))
        return in_time and right and any(kind in self.fault.expects for kind in kinds)


FAULTS: tuple[Fault, ...] = (
    Fault(
        name="flipped-bit",
        title="flipped bit in one V",
        description="One bit of one layer's V of a live slot flips, as by a stray write or bad memory.",
        expects=("CONTENT",),
        within=2,
    ),
    Fault(
        name="swapped-pages",
        title="swapped page-table entry",
        description="Two rows swap one entry of their page tables for one forward.",
        expects=("DIGEST", "REQUEST_DIGEST", "POSITION"),
    ),
    Fault(
        name="shifted-table",
        title="shifted page table",
        description="One row's page table is read one entry late for one forward.",
        expects=("POSITION", "DIGEST"),
    ),
    Fault(
        name="foreign-table",
        title="another request's table",
        description="A row reads through another row's whole page table: consistent in itself, but not its context.",
        expects=("REQUEST_DIGEST", "POSITION"),
    ),
    Fault(
        name="stale-slot",
        title="stale slot mapping",
        description="A row writes its new token where it wrote in the step before.",
        expects=("TABLE_MISMATCH",),
    ),
    Fault(
        name="foreign-write",
        title="write on a foreign page",
        description="A row writes its new token into a page that belongs to another request.",
        expects=("WRITE_FOREIGN", "TABLE_MISMATCH"),
    ),
    Fault(
        name="dropped-write",
        title="dropped write",
        description="A row's new token goes to the trash slot; the slot that the table names is never written.",
        expects=("UNWRITTEN", "TABLE_MISMATCH"),
        within=1,
    ),
    Fault(
        name="wrong-token",
        title="lost carry-over",
        description="The model receives another token than the one that the scheduler recorded.",
        expects=("INPUT_TOKEN", "REQUEST_DIGEST"),
        within=1,
    ),
    Fault(
        name="wrong-position",
        title="wrong position",
        description="A token is given to the model one position too far.",
        expects=("INPUT_POSITION",),
    ),
    Fault(
        name="broken-record",
        title="damaged canary record",
        description="A bit of the canary's own record of a live slot flips.",
        expects=("DIGEST",),
    ),
    Fault(
        name="stalled-kernel",
        title="kernel that stops",
        description="The check is launched no more, as when a graph was captured without it.",
        expects=(STALLED,),
        within=None,
        names_request=False,
    ),
)
"""All of them, in the order in which the demo plants them."""


def fault(name: str) -> Fault:
    """The fault of that name.

    Raises:
        ConfigError: there is none; names a near match.
    """
    by_name = {item.name: item for item in FAULTS}
    found = by_name.get(name)
    if found is None:
        near = difflib.get_close_matches(name, by_name, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ConfigError(f"no fault {name!r}; {hint}known are {', '.join(by_name)}")
    return found
