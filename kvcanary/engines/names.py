"""Names that an adapter uses of its engine: looked up before anything is wrapped, so that what moved can be named."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

Names = Mapping[str, Sequence[str] | None]
"""Dotted paths, each with the parameters that a method must have; None: it need only be there."""


def find_missing(root: Any, names: Names, where: str) -> list[str]:
    """Names that ``root``, called ``where``, lacks, and methods that lack a parameter."""
    lacking: list[str] = []
    for path, parameters in names.items():
        found = root
        try:
            for name in path.split("."):
                found = getattr(found, name)
        except AttributeError:
            lacking.append(f"{where}.{path}")
            continue
        if parameters is None:
            continue
        have = inspect.signature(found).parameters if callable(found) else {}
        gone = [name for name in parameters if name not in have]
        if not callable(found) or gone:
            lacking.append(f"{where}.{path}({', '.join(gone)})")
    return lacking
