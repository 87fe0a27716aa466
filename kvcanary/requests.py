"""Who is who: requests, their tags and rows. Host side, engine's thread; names are read by the drain."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from kvcanary.errors import BatchError
from kvcanary.record import MAX_TAG

_REMEMBERED = 1 << 16
"""Finished requests whose names are kept, so that a late violation can still name its writer."""


@dataclass(slots=True)
class Request:
    """A live request. ``seed``: digest seed of its identity; ``salts``: of its first tokens, 0 for none."""

    name: str
    tag: int
    row: int
    seed: int
    salts: Sequence[int] = ()


class Registry:
    """Tags and rows of requests.

    A tag is given once per admission (and reused after 2^24 of them); a row is reused as soon as its
    request finished, since rows change hands by facts that the forward's stream orders.
    """

    def __init__(self, max_rows: int) -> None:
        self._live: dict[str, Request] = {}
        self._free = deque(range(max_rows))
        self._max_rows = max_rows
        self._next_tag = 0
        self._names: dict[int, str] = {}

    def __len__(self) -> int:
        return len(self._live)

    def admit(self, name: str, seed: int, salts: Sequence[int] = ()) -> Request:
        """A new tag, and the row the name already has or a free one.

        Raises:
            BatchError: no row is free.
        """
        old = self._live.get(name)
        if old is None and not self._free:
            raise BatchError(
                f"request {name!r} needs a row, but all {self._max_rows} are taken; call finish() for requests "
                "that ended, or bind with a larger max_rows"
            )
        row = old.row if old is not None else self._free.popleft()
        self._next_tag = self._next_tag % MAX_TAG + 1
        request = Request(name, self._next_tag, row, seed, salts)
        self._live[name] = request
        self._names[request.tag] = name
        if len(self._names) > _REMEMBERED + len(self._live):
            self._forget()
        return request

    def get(self, name: str) -> Request | None:
        """The live request of that name."""
        return self._live.get(name)

    def require(self, name: str) -> Request:
        """The live request of that name.

        Raises:
            BatchError: it was never admitted, or has finished.
        """
        request = self._live.get(name)
        if request is None:
            raise BatchError(f"request {name!r} is not live; call admit() first ({len(self._live)} requests are live)")
        return request

    def finish(self, name: str) -> Request | None:
        """Take a request out and free its row; None if it was not live."""
        request = self._live.pop(name, None)
        if request is not None:
            self._free.append(request.row)
        return request

    def name_of(self, tag: int) -> str:
        """The name that goes with a tag; "" when unknown or long gone. Any thread."""
        return self._names.get(tag, "")

    def live(self) -> list[Request]:
        """All live requests."""
        return list(self._live.values())

    def _forget(self) -> None:
        kept = {request.tag for request in self._live.values()}
        for tag in list(self._names)[: _REMEMBERED // 4]:
            if tag not in kept:
                del self._names[tag]
