"""Lifecycle calls as bytes: a scheduler in another process tells them, the worker's canary makes them.

Engines that schedule in one process and run the model in others know there, and only there, who gets which page. The
bytes ride on the engine's own message of the step, so they come in order and before the forward from which they hold.
:meth:`Canary.ingest` makes the very same calls: rows, tags, forwards and ``retired`` are the worker's own.
"""

from __future__ import annotations

import functools
import inspect
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from kvcanary.errors import BatchError, ConfigError
from kvcanary.integers import whole_numbers
from kvcanary.text import encoded

WIRE_VERSION = 2
"""Of the bytes that :meth:`FactWriter.pack` makes."""

CallName = Literal[
    "admit",
    "rewind",
    "preempt",
    "finish",
    "alloc",
    "own",
    "free",
    "publish",
    "evict",
    "reuse",
    "move",
    "restamp",
    "transfer",
    "alloc_blocks",
    "free_blocks",
    "weights_updated",
    "facts_lost",
]
"""Methods that canary and writer share. Records of pages lie on a device, so they are the worker's to export."""

Call = tuple[CallName, dict[str, Any]]
"""A method and its arguments."""


class LifecycleCalls(ABC):
    """The calls, each as a name and arguments of plain values: for whoever is told and is no canary with a device."""

    @abstractmethod
    def _put(self, name: CallName, **arguments: Any) -> None:
        """Take a call."""

    def admit(
        self,
        request: str,
        *,
        tokens: Sequence[int] = (),
        start: int = 0,
        identity: bytes | None = None,
        salts: Sequence[int] = (),
    ) -> None:
        """A request becomes active; of ``tokens`` and ``salts``, the first ``start`` travel."""
        columns = {"tokens": whole_numbers(tokens[:start], "tokens"), "salts": whole_numbers(salts[:start], "salts")}
        self._put("admit", request=request, start=start, identity=identity, **columns)

    def rewind(self, request: str, length: int, *, tokens: Sequence[int] = ()) -> None:
        """It goes on from ``length``; of ``tokens``, so many travel."""
        self._put("rewind", request=request, length=length, tokens=whole_numbers(tokens[:length], "tokens"))

    def preempt(self, request: str) -> None:
        """It lost its pages and will be admitted again."""
        self._put("preempt", request=request)

    def finish(self, request: str, *, tokens: Sequence[int] | None = None, length: int | None = None) -> None:
        """It ended; ``tokens``, prompt plus output, are compared with what the device followed."""
        self._put(
            "finish", request=request, tokens=None if tokens is None else whole_numbers(tokens, "tokens"), length=length
        )

    def alloc(self, group: str | int, request: str, pages: Sequence[int]) -> None:
        """Pages were handed out."""
        self._put("alloc", group=group, request=request, pages=whole_numbers(pages, "pages"))

    def own(self, group: str | int, request: str, pages: Sequence[int]) -> None:
        """Pages were handed on with their contents."""
        self._put("own", group=group, request=request, pages=whole_numbers(pages, "pages"))

    def free(self, group: str | int, pages: Sequence[int], request: str | None = None) -> None:
        """Pages were taken back."""
        self._put("free", group=group, pages=whole_numbers(pages, "pages"), request=request)

    def publish(self, group: str | int, pages: Sequence[int], request: str | None = None) -> None:
        """Pages can be found by other requests."""
        self._put("publish", group=group, pages=whole_numbers(pages, "pages"), request=request)

    def evict(self, group: str | int, pages: Sequence[int]) -> None:
        """Pages left the prefix index."""
        self._put("evict", group=group, pages=whole_numbers(pages, "pages"))

    def reuse(self, group: str | int, request: str, pages: Sequence[int]) -> None:
        """A request took published pages."""
        self._put("reuse", group=group, request=request, pages=whole_numbers(pages, "pages"))

    def move(
        self, group: str | int, sources: Sequence[int], targets: Sequence[int], request: str | None = None
    ) -> None:
        """Pages are copied on the device."""
        self._put(
            "move",
            group=group,
            sources=whole_numbers(sources, "sources"),
            targets=whole_numbers(targets, "targets"),
            request=request,
        )

    def restamp(self, group: str | int, pages: Sequence[int]) -> None:
        """Bytes were edited on purpose."""
        self._put("restamp", group=group, pages=whole_numbers(pages, "pages"))

    def transfer(
        self,
        transfer: str,
        event: str,
        *,
        group: str | int = 0,
        pages: Sequence[int] = (),
        direction: str = "in",
        ordered: bool = False,
        request: str | None = None,
        error: str = "",
        tier: str = "",
        blocks: Sequence[int] = (),
    ) -> None:
        """A copy started, landed or failed, in time for the step that comes.

        Whether an unordered copy came too early is judged by the forwards that are done when the worker hears of it,
        so the process that starts the copy should rather tell its own canary.
        """
        columns = {"direction": direction, "ordered": ordered, "request": request, "error": error, "tier": tier}
        places = {"group": group, "pages": whole_numbers(pages, "pages"), "blocks": whole_numbers(blocks, "blocks")}
        self._put("transfer", transfer=transfer, event=event, **places, **columns)

    def alloc_blocks(self, tier: str, request: str, blocks: Sequence[int]) -> None:
        """Blocks outside of the pool were handed out."""
        self._put("alloc_blocks", tier=tier, request=request, blocks=whole_numbers(blocks, "blocks"))

    def free_blocks(self, tier: str, blocks: Sequence[int], request: str | None = None) -> None:
        """Blocks outside of the pool were taken back."""
        self._put("free_blocks", tier=tier, blocks=whole_numbers(blocks, "blocks"), request=request)

    def weights_updated(self, epoch: int) -> None:
        """What was cached before belongs to older weights."""
        self._put("weights_updated", epoch=epoch)

    def facts_lost(self, count: int) -> None:
        """Some of these calls were never told."""
        self._put("facts_lost", count=count)


class FactWriter(LifecycleCalls):
    """Takes the lifecycle calls of a scheduler. One thread calls; needs no torch.

    Call it as you would the canary, and put :meth:`pack` into each message to the worker. What the arguments mean, and
    that they fit the pool, is checked there: only the worker knows the pool.

    Args:
        capacity: most calls that wait to be packed. More mean that no message leaves: then all are forgotten, and the
            worker's canary is told that it missed something.

    Raises:
        ConfigError: no such capacity.
    """

    def __init__(self, capacity: int = 65536) -> None:
        if capacity < 1:
            raise ConfigError(f"capacity of the fact writer is {capacity}; expected at least 1")
        self._capacity = capacity
        self._calls: list[Call] = []
        self._lost = 0

    @property
    def waiting(self) -> int:
        """Calls that wait to be packed."""
        return len(self._calls)

    def pack(self) -> bytes:
        """All calls since the last time; ``b""`` when there are none.

        Raises:
            BatchError: an argument of one of them is no plain value; they are then as good as lost, and counted so.
        """
        if self._lost:
            self._calls.insert(0, ("facts_lost", {"count": self._lost}))
        if not self._calls:
            return b""
        calls, self._calls, self._lost = self._calls, [], 0
        try:
            return encoded(msgspec.msgpack.encode, (WIRE_VERSION, calls))
        except (TypeError, OverflowError) as error:
            self._lost = len(calls)
            raise BatchError(f"facts for another process must be plain values; {error}") from error

    def _put(self, name: CallName, **arguments: Any) -> None:
        self._calls.append((name, arguments))
        if len(self._calls) > self._capacity:
            # What follows a gap is of little use without what fell into it.
            self._lost += len(self._calls)
            self._calls.clear()


def unpack(data: bytes) -> list[Call]:
    """The calls that :meth:`FactWriter.pack` packed, in order: names of methods and their arguments.

    Raises:
        ConfigError: not such bytes, or those of another version; a call that is not one of these.
    """
    if not data:
        return []
    try:
        version, packed = msgspec.msgpack.decode(data, type=tuple[int, msgspec.Raw])
        calls = msgspec.msgpack.decode(packed, type=list[Call]) if version == WIRE_VERSION else []
    except msgspec.DecodeError as error:
        raise ConfigError(
            f"{len(data)} bytes are no packed facts ({error}); pass what FactWriter.pack() made"
        ) from error
    if version != WIRE_VERSION:
        raise ConfigError(
            f"packed facts have version {version}, expected {WIRE_VERSION}; scheduler and worker need the same kvcanary"
        )
    for name, arguments in calls:
        if arguments.keys() != _arguments(name):
            raise ConfigError(
                f"packed facts hold {name}() with {', '.join(sorted(arguments)) or 'nothing'}; expected "
                f"{', '.join(sorted(_arguments(name)))}, as FactWriter.pack() makes it"
            )
    return calls


@functools.cache
def _arguments(name: CallName) -> frozenset[str]:
    return frozenset(inspect.signature(getattr(LifecycleCalls, name)).parameters) - {"self"}
