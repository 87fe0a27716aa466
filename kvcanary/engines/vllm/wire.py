"""What the scheduler's half tells the worker's half: lifecycle calls of one step, as bytes on the step's own message.

vLLM's scheduler and its workers may live in different processes. The message that it sends for each step is
pickled with all its attributes, so what hangs on it arrives with the step that it belongs to, in order.
"""

from __future__ import annotations

from typing import Any

import msgspec

from kvcanary.engines.vllm.media import Span
from kvcanary.errors import ConfigError

ATTRIBUTE = "kvcanary_facts"
"""of ``SchedulerOutput``: bytes of :func:`pack`"""
WANTED = "kvcanary_wanted"
"""of ``ModelRunnerOutput``: bytes of :func:`pack_wanted`"""


NO_GROUP = -1
"""of :class:`Blocks` that no cache group has had so far"""


class _Told(msgspec.Struct, frozen=True, array_like=True, gc=False):
    pass


class Blocks(_Told, frozen=True, array_like=True, gc=False, tag="blocks"):
    """Blocks of a cache group changed hands; ``kind`` is a lifecycle method of the canary."""

    kind: str
    group: int
    request: str
    blocks: tuple[int, ...]


class Copied(_Told, frozen=True, array_like=True, gc=False, tag="copied"):
    """The worker copies blocks before the forward."""

    group: int
    sources: tuple[int, ...]
    targets: tuple[int, ...]


class Admitted(_Told, frozen=True, array_like=True, gc=False, tag="admitted"):
    """A request runs from this step on; the worker knows its tokens.

    ``start``: those whose KV exists already. ``media``: see :data:`kvcanary.engines.vllm.media.Span`.
    """

    request: str
    start: int
    identity: bytes
    media: tuple[Span, ...] = ()


class KnownIds(_Told, frozen=True, array_like=True, gc=False, tag="known"):
    """The id before the first token that each request of the step computes, as the scheduler has it.

    ``ids``: int32, in the order of the step's ``num_scheduled_tokens``; -1: no opinion.
    """

    ids: bytes


class Preempted(_Told, frozen=True, array_like=True, gc=False, tag="preempted"):
    """A request lost its blocks."""

    request: str


class Finished(_Told, frozen=True, array_like=True, gc=False, tag="finished"):
    """A request ended. ``tokens``: prompt and output; None when they are not to be compared (it was aborted)."""

    request: str
    tokens: tuple[int, ...] | None


class Healed(_Told, frozen=True, array_like=True, gc=False, tag="healed"):
    """Quarantine took a request out; ``error`` is not empty when it could not."""

    incident: str
    request: str
    tokens_left: int
    error: str = ""


class Withdrawn(_Told, frozen=True, array_like=True, gc=False, tag="withdrawn"):
    """Quarantine took blocks out of the prefix index."""

    incident: str
    group: int
    blocks: tuple[int, ...]


Told = Blocks | Copied | Admitted | KnownIds | Preempted | Finished | Healed | Withdrawn


class Wanted(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What the worker asks the scheduler to take out of service. ``group``: -1 when no block is named."""

    incident: str
    requests: tuple[str, ...]
    group: int
    blocks: tuple[int, ...]


_ENCODE = msgspec.msgpack.Encoder().encode
_DECODE = msgspec.msgpack.Decoder(list[Told]).decode
_DECODE_WANTED = msgspec.msgpack.Decoder(list[Wanted]).decode


def pack(calls: list[Told]) -> bytes:
    """Calls as bytes; ``b""`` for none."""
    return _ENCODE(calls) if calls else b""


def starts_of(scheduler_output: Any) -> dict[str, int]:
    """The position of the first token that each request of a step computes, as the scheduler has it."""
    cached = scheduler_output.scheduled_cached_reqs
    starts = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    return starts | {new.req_id: new.num_computed_tokens for new in scheduler_output.scheduled_new_reqs}


def take(message: Any) -> list[Told] | None:
    """The calls that hang on a step's message, taken off; None when the scheduler's half is not there.

    Raises:
        ConfigError: the other half is of another version.
    """
    data: bytes | None = vars(message).pop(ATTRIBUTE, None)
    if data is None:
        return None
    try:
        return _DECODE(data) if data else []
    except msgspec.DecodeError as error:
        raise ConfigError(
            f"what the scheduler sent beside a step cannot be read ({error}); its process and the workers need the "
            "same kvcanary"
        ) from error


def pack_wanted(wanted: list[Wanted]) -> bytes:
    """Wishes as bytes."""
    return _ENCODE(wanted)


def take_wanted(output: Any) -> list[Wanted]:
    """The wishes that hang on a worker's output, taken off."""
    data: bytes | None = vars(output).pop(WANTED, None)
    return _DECODE_WANTED(data) if data else []
