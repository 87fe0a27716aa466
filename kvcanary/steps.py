"""The context manager around an engine's step, made once for each canary."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Step(Generic[T]):
    """Reusable: a step allocates nothing. Of nested ones only the outermost counts.

    Args:
        inside: what ``with`` gives.
        begin: called on entry.
        end: called on exit, with the type of what was raised or None.
    """

    __slots__ = ("_begin", "_depth", "_end", "_inside")

    def __init__(self, inside: T, begin: Callable[[], None], end: Callable[[type[BaseException] | None], None]) -> None:
        self._inside, self._begin, self._end = inside, begin, end
        self._depth = 0

    def __enter__(self) -> T:
        if self._depth == 0:
            self._begin()
        self._depth += 1
        return self._inside

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._end(kind)
