"""Every event, one frozen struct each.

Types carry explicit dotted tags in ``type``, are named in the past tense, keep units in field names, write
64-bit hashes as sixteen hexadecimal digits, and are extended only by fields with defaults.

Each event carries the envelope ``seq`` (given by the drain, gapless per run), wall and monotonic time at its
origin, and ``forward``; derived ones also say ``cause`` (the ``seq`` they follow from) and ``by`` (the fold).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from kvcanary.errors import ConfigError

SCHEMA_VERSION = 1


class Event(msgspec.Struct, frozen=True, kw_only=True, gc=False, tag_field="type"):
    """The envelope.

    ``seq`` is 0 until the drain numbers the event. ``forward`` is the forward it belongs to: for facts the
    first one from which they hold, for findings the one that found them; 0 when none applies.
    """

    seq: int = 0
    time_ns: int = 0
    monotonic_ns: int = 0
    forward: int = 0


class Derived(Event, frozen=True, kw_only=True, gc=False):
    """An event that a fold concluded from others."""

    cause: int = 0
    by: str = ""


class Fact(Event, frozen=True, kw_only=True, gc=False):
    """A lifecycle fact from the engine. ``retired``: the last finished forward when it was recorded."""

    retired: int = 0


# --- the run ------------------------------------------------------------------------------------------------


class GroupInfo(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One attention group as it was attached."""

    name: str
    kind: str
    num_slots: int
    page_size: int
    token_bytes: int
    sources: int
    parts: tuple[str, ...] = ()
    window: int | None = None
    ring: int | None = None
    shares: str | None = None


class Origin(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Who speaks: host, process, device, ranks, engine."""

    host: str = ""
    pid: int = 0
    device: str = ""
    engine: str = ""
    engine_version: str = ""
    dp_rank: int = 0
    tp_rank: int = 0
    pp_rank: int = 0


class RunStarted(Event, frozen=True, kw_only=True, gc=False, tag="run.started"):
    """First event of a run: one start of one canary in one process. Late subscribers get it first."""

    run: str
    origin: Origin
    versions: dict[str, str] = {}
    backend: str = ""
    mode: str = ""
    config: dict[str, Any] = {}
    layout_fingerprint: str = ""
    groups: tuple[GroupInfo, ...] = ()
    uncovered: tuple[str, ...] = ()
    roles: tuple[str, ...] = ()
    """launch roles that are active in this run"""
    unarmed: dict[str, str] = {}
    """checks that cannot be made, each with its reason"""
    schema_version: int = SCHEMA_VERSION


class CanaryArmed(Event, frozen=True, kw_only=True, gc=False, tag="canary.armed"):
    """Checks hold from this forward on."""


class CanaryDisarmed(Event, frozen=True, kw_only=True, gc=False, tag="canary.disarmed"):
    """Nothing is checked from this forward on, until ``CanaryArmed``."""

    reason: str = ""


class Ticked(Event, frozen=True, kw_only=True, gc=False, tag="run.ticked"):
    """Each second while the drain runs."""

    in_flight: int = 0
    queued_facts: int = 0
    seconds_since_snapshot: float = 0.0


class RunStopped(Event, frozen=True, kw_only=True, gc=False, tag="run.stopped"):
    """Last event of a run. ``undelivered`` counts events per sink that the deadline left behind."""

    reason: str = "stopped"
    clean: bool = True
    facts_lost: int = 0
    snapshots_skipped: int = 0
    undelivered: dict[str, int] = {}


# --- lifecycle facts ----------------------------------------------------------------------------------------


class PageRun(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """``count`` consecutive pages from ``first``, of request ``request`` (an index into the fact's ``requests``)."""

    request: int
    first: int
    count: int


class PagesFact(Fact, frozen=True, kw_only=True, gc=False):
    """Pages of one attention group, packed as runs. ``requests`` may hold ``""`` for nobody."""

    group: str
    requests: tuple[str, ...] = ()
    runs: tuple[PageRun, ...] = ()


class RequestsAdmitted(Fact, frozen=True, kw_only=True, gc=False, tag="requests.admitted"):
    """Requests got a row. ``starts``: tokens that were already there (prefix hit, resume)."""

    requests: tuple[str, ...]
    rows: tuple[int, ...]
    tags: tuple[int, ...]
    starts: tuple[int, ...]
    base_digests: tuple[str, ...] = ()
    """the digest at ``starts``; "" when it arrives later"""


class RequestsFinished(Fact, frozen=True, kw_only=True, gc=False, tag="requests.finished"):
    """Requests ended. Digests of prompt plus output, never ids."""

    requests: tuple[str, ...]
    tags: tuple[int, ...]
    lengths: tuple[int, ...]
    digests: tuple[str, ...]
    """expected digest at ``lengths``; "" when the engine did not tell"""


class RequestsPreempted(Fact, frozen=True, kw_only=True, gc=False, tag="requests.preempted"):
    """Requests lost their pages and will resume or restart."""

    requests: tuple[str, ...]
    tags: tuple[int, ...]


class RequestsRewound(Fact, frozen=True, kw_only=True, gc=False, tag="requests.rewound"):
    """Requests go on from an earlier (or otherwise new) length."""

    requests: tuple[str, ...]
    tags: tuple[int, ...]
    lengths: tuple[int, ...]


class PagesAllocated(PagesFact, frozen=True, kw_only=True, gc=False, tag="pages.allocated"):
    """The allocator handed out pages."""


class PagesFreed(PagesFact, frozen=True, kw_only=True, gc=False, tag="pages.freed"):
    """The allocator took pages back."""


class PagesMoved(Fact, frozen=True, kw_only=True, gc=False, tag="pages.moved"):
    """Pages were copied on the device; records went along. Equal lengths."""

    group: str
    sources: tuple[int, ...]
    targets: tuple[int, ...]


class RecordsRestamped(PagesFact, frozen=True, kw_only=True, gc=False, tag="records.restamped"):
    """Bytes were edited on purpose; the present bytes are trusted anew."""


class PrefixPublished(PagesFact, frozen=True, kw_only=True, gc=False, tag="prefix.published"):
    """Pages can be found by other requests from now on."""


class PrefixReused(PagesFact, frozen=True, kw_only=True, gc=False, tag="prefix.reused"):
    """Requests took published pages."""


class PrefixEvicted(PagesFact, frozen=True, kw_only=True, gc=False, tag="prefix.evicted"):
    """Pages left the prefix index."""


class ForwardLaunched(Fact, frozen=True, kw_only=True, gc=False, tag="forward.launched"):
    """A step was launched; told at its end. The batch as its change: rows that joined and left since the last one."""

    rows: int = 0
    tokens: int = 0
    joined: tuple[str, ...] = ()
    left: tuple[str, ...] = ()
    forwards: int = 1
    due: dict[str, int] = {}
    """launches per role that the host has asked for so far"""


class ForwardRetired(Event, frozen=True, kw_only=True, gc=False, tag="forward.retired"):
    """All forwards up to ``through`` are done on the device."""

    through: int


class TransferStarted(PagesFact, frozen=True, kw_only=True, gc=False, tag="transfer.started"):
    """Bytes are about to leave or enter pages, by a writer that no stream may order."""

    transfer: str
    direction: str
    """``in`` or ``out``"""
    ordered: bool = False
    """the forward's own stream orders it"""


class TransferLanded(Fact, frozen=True, kw_only=True, gc=False, tag="transfer.landed"):
    """A transfer is complete and its bytes are visible."""

    transfer: str


class TransferFailed(Fact, frozen=True, kw_only=True, gc=False, tag="transfer.failed"):
    """A transfer did not complete: what its pages hold is nobody's."""

    transfer: str
    error: str = ""


class WeightsUpdated(Fact, frozen=True, kw_only=True, gc=False, tag="weights.updated"):
    """Keys and values cached before belong to older weights."""

    epoch: int


class OwnershipCheckpointed(Event, frozen=True, kw_only=True, gc=False, tag="ownership.checkpointed"):
    """A complete picture of who holds what, from which a reader can go on after a loss."""

    state: dict[str, Any] = {}


class FactsLost(Event, frozen=True, kw_only=True, gc=False, tag="facts.lost"):
    """The fact queue was full. What depends on facts is unverified until a checkpoint."""

    count: int
    first_forward: int = 0
    last_forward: int = 0


class FaultInjected(Event, frozen=True, kw_only=True, gc=False, tag="fault.injected"):
    """Somebody broke something on purpose."""

    fault: str
    description: str = ""
    expects: tuple[str, ...] = ()
    request: str = ""
    group: str = ""
    slot: int = -1


# --- from the device ----------------------------------------------------------------------------------------


class SnapshotTaken(Event, frozen=True, kw_only=True, gc=False, tag="snapshot.taken"):
    """The device's counters after a forward. All totals since the run began."""

    launches: dict[str, int] = {}
    """per role, counted on the device"""
    due: dict[str, int] = {}
    """per role, as the host asked for them"""
    verified: dict[str, dict[str, int]] = {}
    """check, then group"""
    unverified: dict[str, dict[str, int]] = {}
    """reason, then group"""
    violations: dict[str, int] = {}
    """per kind, exact, also where single rows were dropped"""
    violations_dropped: int = 0
    violations_repeated: int = 0
    """found again at a slot, or of a row, that was reported for it; in no other count"""
    new_tokens: int = 0
    digest_sum: str = ""
    scrub_passes: dict[str, int] = {}
    scrub_pass_forwards: dict[str, int] = {}
    """forward in which each group's running pass began"""
    abandoned: int = 0
    host_us: float = 0.0
    """host time that the canary spent in this step"""
    gpu_us: float | None = None
    """device time of the canary's launches in one forward (``gpu_time_every``); None: no new sample, or no CUDA"""
    lag_us: float = 0.0
    """from the end of the step's launches to its snapshot being read; a slow forward is part of it"""
    host_forward: int = 0
    """the number the host gave the forward; differs from ``forward`` when host and device drift"""
    swa: dict[str, int] = {}
    """window counters when this forward took them"""


class ViolationDetected(Event, frozen=True, kw_only=True, gc=False, tag="violation.detected"):
    """One violation, as the device wrote it, with the request's name added. -1 and "": does not apply."""

    kind: str
    role: str
    group: str
    slot: int = -1
    page: int = -1
    row: int = -1
    tag: int = 0
    request: str = ""
    position_expected: int = -1
    position_found: int = -1
    token_expected: int | None = None
    token_found: int | None = None
    digest_expected: str = ""
    digest_found: str = ""
    fingerprint_expected: str = ""
    fingerprint_found: str = ""
    writer_tag: int = 0
    writer_request: str = ""
    writer_forward: int = 0
    owner_tag: int = 0
    owner_request: str = ""
    owner_state: str = ""
    owner_as_of: int = 0
    part: str = ""
    tainted: bool = False
    """the row had a wrong digest already; this may be its consequence"""


class ScrubCompleted(Event, frozen=True, kw_only=True, gc=False, tag="scrub.completed"):
    """Every sealed byte of a group was read again since the last one."""

    group: str
    passes: int
    forwards: int
    """forwards that the pass took: the bound within which a changed byte is seen"""


# --- derived ------------------------------------------------------------------------------------------------


class IncidentOpened(Derived, frozen=True, kw_only=True, gc=False, tag="incident.opened"):
    """What people alert on: one cause, with everything that is known at its first sign."""

    incident: str
    kind: str
    headline: str
    likely_cause: str = ""
    evidence: tuple[str, ...] = ()
    requests: tuple[str, ...] = ()
    group: str = ""
    slot: int = -1
    page: int = -1
    count: int = 1
    first: ViolationDetected | None = None
    docs: str = ""


class IncidentUpdated(Derived, frozen=True, kw_only=True, gc=False, tag="incident.updated"):
    """An open incident grew: more violations or more requests."""

    incident: str
    kind: str
    headline: str
    requests: tuple[str, ...] = ()
    kinds: dict[str, int] = {}
    count: int = 0


class OwnershipViolated(Derived, frozen=True, kw_only=True, gc=False, tag="ownership.violated"):
    """The ledger saw a rule of ownership broken. ``request`` did it, ``other`` suffers.

    ``page`` is the first of those concerned; ``page_runs`` has all of them, as (first, count), up to a bound.
    """

    kind: str
    group: str = ""
    page: int = -1
    request: str = ""
    other: str = ""
    detail: str = ""
    page_runs: tuple[tuple[int, int], ...] = ()


class HazardCounted(Derived, frozen=True, kw_only=True, gc=False, tag="hazard.counted"):
    """Legal but risky; a count, never an alarm."""

    hazard: str
    count: int


class HealthChecked(Derived, frozen=True, kw_only=True, gc=False, tag="health.checked"):
    """A health check ran. ``healthy`` is False with a problem named."""

    healthy: bool
    problems: tuple[str, ...] = ()
    active_roles: tuple[str, ...] = ()
    unverified_share: float = 0.0
    lag_ms: float = 0.0


class KernelStalled(Derived, frozen=True, kw_only=True, gc=False, tag="kernel.stalled"):
    """A launch role that is active and due did not run. Not corruption: checks are missing."""

    role: str
    launches: int
    expected: int
    since_forward: int = 0
    detail: str = ""


class StatsReported(Derived, frozen=True, kw_only=True, gc=False, tag="stats.reported"):
    """Numbers people plot, totals since the run began unless named otherwise."""

    protected_tokens: int
    verified: dict[str, int] = {}
    unverified: dict[str, int] = {}
    scrub_passes: dict[str, int] = {}
    oldest_unscrubbed_forwards: dict[str, int] = {}
    violations: dict[str, int] = {}
    active_roles: int = 0
    all_roles: int = 0
    violations_dropped: int = 0
    events_dropped: int = 0
    facts_lost: int = 0
    snapshots_skipped: int = 0
    lag_ms: float = 0.0
    host_us_per_forward: float = 0.0
    gpu_us_per_forward: float | None = None


class SwaDivergenceObserved(Derived, frozen=True, kw_only=True, gc=False, tag="swa.divergence_observed"):
    """Proof that the window path really ran; no error. ``forward_ct`` is the forward of the sample."""

    forward_ct: int
    verify_full: int
    verify_swa: int
    swa_full_idx_divergence: int
    swa_out_of_window_tokens: int


class EventsDropped(Event, frozen=True, kw_only=True, gc=False, tag="events.dropped"):
    """A sink's queue overflowed; sent to that sink before its next event, and to everybody's count."""

    observer: str
    count: int
    first_seq: int
    last_seq: int


class SnapshotsSkipped(Event, frozen=True, kw_only=True, gc=False, tag="snapshots.skipped"):
    """Headers were overwritten before they were read. Totals lose nothing but time resolution."""

    count: int


class ObserverFailed(Event, frozen=True, kw_only=True, gc=False, tag="observer.failed"):
    """An observer raised. ``action``: what happens to it now."""

    observer: str
    error: str
    event_type: str = ""
    failures: int = 1
    action: str = ""
    """``continued``, ``restarted``, ``stopped`` or ``degraded`` (a guard)"""


class QuarantineRequested(Derived, frozen=True, kw_only=True, gc=False, tag="quarantine.requested"):
    """The engine was asked to take requests and pages out of service."""

    incident: str
    requests: tuple[str, ...] = ()
    group: str = ""
    pages: tuple[int, ...] = ()


class RequestQuarantined(Event, frozen=True, kw_only=True, gc=False, tag="request.quarantined"):
    """The engine took a request out: ``healed`` (recomputed) or ``aborted``."""

    request: str
    action: str
    tokens_left: int = 0
    """tokens that had been handed to the client before"""
    tokens_dropped: int = 0
    """tokens that had been generated and were thrown away"""
    incident: str = ""


class PagesQuarantined(Event, frozen=True, kw_only=True, gc=False, tag="pages.quarantined"):
    """Pages left the prefix index: bad ones, and those computed from them. Idle ones are free again."""

    group: str
    pages: tuple[int, ...]
    incident: str = ""


class QuarantineFailed(Event, frozen=True, kw_only=True, gc=False, tag="quarantine.failed"):
    """The engine could not do it. ``request`` is empty where it failed as a whole."""

    request: str
    error: str
    incident: str = ""
    group: str = ""
    pages: tuple[int, ...] = ()


class UnknownEvent(Event, frozen=True, kw_only=True, tag="unknown"):
    """An event of a type this version does not know; ``raw`` is re-encoded byte for byte."""

    type_name: str = ""
    raw: bytes = b""


# --- registry and codec -------------------------------------------------------------------------------------

E = TypeVar("E", bound=type[Event])
_ABSTRACT = {Event, Derived, Fact, PagesFact}


@functools.cache  # msgspec makes a new object at each look at a type's configuration
def _tag(cls: type[Event]) -> str:
    return str(cls.__struct_config__.tag)


def _concrete(cls: type[Event]) -> list[type[Event]]:
    own = [] if cls in _ABSTRACT or cls is UnknownEvent else [cls]
    return own + [found for child in cls.__subclasses__() for found in _concrete(child)]


_BY_TAG: dict[str, type[Event]] = {_tag(cls): cls for cls in _concrete(Event)}


def event_types() -> tuple[type[Event], ...]:
    """All registered event types, built-in ones first."""
    return tuple(_BY_TAG.values())


def event_name(event: Event | type[Event]) -> str:
    """The dotted tag, such as ``"violation.detected"``."""
    if isinstance(event, UnknownEvent):
        return event.type_name
    return _tag(event if isinstance(event, type) else type(event))


def register_event(cls: E) -> E:
    """Class decorator for a user's own event, so that journals and logs can decode it again.

    Raises:
        ConfigError: no explicit string tag, not frozen, or the tag is taken.
    """
    tag = cls.__struct_config__.tag
    if not isinstance(tag, str) or not cls.__struct_config__.frozen:
        raise ConfigError(
            f"{cls.__name__}: an event needs frozen=True and an explicit tag, such as "
            f'class {cls.__name__}(Event, frozen=True, kw_only=True, tag="mine.happened")'
        )
    if _BY_TAG.get(tag, cls) is not cls:
        raise ConfigError(f"event tag {tag!r} already belongs to {_BY_TAG[tag].__name__}; choose another")
    _BY_TAG[tag] = cls
    return cls


class _Envelope(msgspec.Struct, gc=False):
    type: str
    seq: int = 0
    time_ns: int = 0
    monotonic_ns: int = 0
    forward: int = 0


class Codec:
    """Encodes and decodes events in one format. Not thread-safe: one for each user."""

    def __init__(self, encoder: Any, decoder: Callable[[type], Any]) -> None:
        self._encoder = encoder
        self._envelope = decoder(_Envelope)
        self._make = decoder
        self._decoders: dict[str, Any] = {}

    def encode(self, event: Event) -> bytes:
        """One event as bytes; an :class:`UnknownEvent` gives back the bytes it came from."""
        if isinstance(event, UnknownEvent):
            return event.raw
        return bytes(self._encoder.encode(event))

    def decode(self, data: bytes) -> Event:
        """One event; of unknown type: an :class:`UnknownEvent`.

        Raises:
            msgspec.DecodeError: not an event at all, or a known type with wrong fields.
        """
        envelope = self._envelope.decode(data)
        decoder = self._decoders.get(envelope.type)
        if decoder is None:
            cls = _BY_TAG.get(envelope.type)
            if cls is None:
                return UnknownEvent(
                    seq=envelope.seq,
                    time_ns=envelope.time_ns,
                    monotonic_ns=envelope.monotonic_ns,
                    forward=envelope.forward,
                    type_name=envelope.type,
                    raw=bytes(data),
                )
            decoder = self._decoders[envelope.type] = self._make(cls)
        event: Event = decoder.decode(data)
        return event


def json_codec() -> Codec:
    """Events as JSON objects."""
    return Codec(msgspec.json.Encoder(), msgspec.json.Decoder)


def msgpack_codec() -> Codec:
    """Events as MessagePack maps."""
    return Codec(msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder)


def json_schemas() -> dict[str, Any]:
    """JSON Schema of all registered events, by their tags."""
    types = event_types()
    schemas, components = msgspec.json.schema_components(types, ref_template="#/$defs/{name}")
    return {"events": {event_name(t): s for t, s in zip(types, schemas, strict=True)}, "$defs": components}
