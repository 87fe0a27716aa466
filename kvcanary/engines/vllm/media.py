"""Images and other media: which placeholder tokens stand for which content.

The prompt of a request holds the same ids for every image. What tells two of them apart is vLLM's identifier of each
medium, by which it also separates cached blocks; a salt on each placeholder token carries it into the digests.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from hashlib import blake2b
from typing import Any

Span = tuple[int, int, int]
"""First position, the one after the last, and the salt of all between them; never 0."""


def spans_of(request: Any) -> tuple[Span, ...]:
    """Where media stand in the prompt of a scheduler's request, in order."""
    places = ((feature.mm_position, feature.identifier) for feature in request.mm_features)
    return tuple((place.offset, place.offset + place.length, _salt(name)) for place, name in places)


def salts_between(spans: Sequence[Span], start: int, end: int) -> list[int]:
    """The salts of the tokens at positions ``start`` up to ``end``, 0 for none."""
    salts = [0] * (end - start)
    for first, stop, salt in spans:
        low, high = max(first, start), min(stop, end)
        if low < high:
            salts[low - start : high - start] = [salt] * (high - low)
    return salts


def salts_of_prompt(spans: Sequence[Span]) -> list[int]:
    """The salts of a prompt's tokens, as far as there are any."""
    return salts_between(spans, 0, spans[-1][1]) if spans else []


def salts_of_batch(rows: Sequence[tuple[Sequence[Span], int, int]]) -> list[int] | None:
    """The salts of a forward's tokens; None when it has none. ``rows``: spans, first position and number of tokens."""
    if not any(_reaches(spans, start, start + count) for spans, start, count in rows):
        return None
    return [salt for spans, start, count in rows for salt in salts_between(spans, start, start + count)]


def is_salted(spans: Sequence[Span], position: int) -> bool:
    """Whether the token at a position stands for media."""
    return _reaches(spans, position, position + 1)


def _reaches(spans: Sequence[Span], start: int, end: int) -> bool:
    return any(first < end and start < stop for first, stop, _ in _late(spans, start))


def _late(spans: Sequence[Span], start: int) -> Iterator[Span]:
    # Spans are in order: past the last one, which is where requests spend their lives, nothing needs a look.
    return iter(spans if spans and start < spans[-1][1] else ())


def _salt(identifier: str) -> int:
    return int.from_bytes(blake2b(identifier.encode(), digest_size=8).digest(), "little", signed=True) or 1
