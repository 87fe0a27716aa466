"""Events as an async iterator, on asyncio, uvloop and trio alike."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING

import anyio

from kvcanary.events import Event

if TYPE_CHECKING:
    from anyio.streams.memory import MemoryObjectSendStream

    from kvcanary.bus import Bus

_BUFFERED_BATCHES = 16


class _Forwarder:
    """A sink that hands batches to a memory stream; what does not fit waits in the sink's own counted queue."""

    name = "event_stream"

    def __init__(self, types: tuple[type[Event], ...], send: MemoryObjectSendStream[Sequence[Event]]) -> None:
        self.interests = types or (Event,)
        self._send = send

    async def handle_batch(self, events: Sequence[Event]) -> None:
        with contextlib.suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):  # the reader has left
            await self._send.send(events)

    def close(self) -> None:
        self._send.close()


async def event_stream(bus: Bus, types: tuple[type[Event], ...]) -> AsyncIterator[Event]:
    """Events of ``types`` from now on, until the bus closes or the iterator is left."""
    send, receive = anyio.create_memory_object_stream[Sequence[Event]](_BUFFERED_BATCHES)
    subscription = bus.subscribe(_Forwarder(types, send))
    try:
        with receive:
            async for batch in receive:
                for event in batch:
                    yield event
    finally:
        subscription.close()
        send.close()
