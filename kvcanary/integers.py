"""Whole numbers that an engine passes, taken as they are now."""

from __future__ import annotations

import operator
import reprlib
from collections.abc import Iterable

from kvcanary.errors import BatchError


def whole_numbers(values: Iterable[int], what: str) -> tuple[int, ...]:
    """A copy: engines go on changing the very lists that they pass.

    Raises:
        BatchError: they are no whole numbers; the message begins with ``what``.
    """
    try:
        return tuple(map(operator.index, values))
    except TypeError:
        raise BatchError(f"{what} must be whole numbers, got {reprlib.repr(values)}") from None
