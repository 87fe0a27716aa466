"""What the requests of a scenario say: token ids made up from their names, the same in every run.

Unpredictable on purpose: where a guess and the truth agree, a fault hides.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping

from kvcanary.faults.scenario.parse import Request

VOCABULARY = 50_000
PLACEHOLDER = 7
"""The token that stands for every kind of media."""


class Texts:
    """Tokens, salts and identities by request."""

    def __init__(self, requests: Mapping[str, Request]) -> None:
        self._requests = requests

    def token(self, request: str, position: int) -> int:
        """The token at a position."""
        about = self.about(request)
        if self.salt(request, position):
            return PLACEHOLDER
        if about.like and (about.until is None or position < about.until):
            return self.token(about.like, position + about.shift)
        return random.Random(f"{request} {position}").randrange(100, VOCABULARY)

    def tokens(self, request: str, length: int) -> list[int]:
        """The first tokens."""
        return [self.token(request, position) for position in range(length)]

    def guess(self, request: str, position: int) -> int:
        """A token that a model might have taken for the one at a position, and that it is not."""
        return self.token(request, position) % (VOCABULARY - 1) + 1

    def salt(self, request: str, position: int) -> int:
        """The salt of what a placeholder stands for; 0: it is text."""
        for span, content in self.about(request).media.items():
            first, _, last = span.partition("..")
            if int(first) <= position <= int(last or first):
                return int.from_bytes(hashlib.blake2b(content.encode(), digest_size=7).digest(), "little") | 1
        return 0

    def salts(self, request: str) -> list[int]:
        """Salts up to the last placeholder; none where all of it is text."""
        ends = [int(span.rpartition("..")[2]) + 1 for span in self.about(request).media]
        return [self.salt(request, position) for position in range(max(ends, default=0))]

    def identity(self, request: str) -> bytes | None:
        """What the engine separates cached prefixes by."""
        return self.about(request).identity.encode() or None

    def known(self, request: str, position: int) -> bool:
        """Whether the scheduler knows the token when it launches a forward."""
        prompt = self.about(request).prompt
        return prompt is None or position < prompt

    def about(self, request: str) -> Request:
        """What the file says of a request."""
        return self._requests.get(request, _PLAIN)


_PLAIN = Request()
