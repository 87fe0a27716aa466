"""A request as the scheduler sees it, and what is true of it."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class Request:
    """One request.

    Attributes:
        name: unique.
        tokens: prompt and output, as far as the scheduler knows.
        limit: tokens at which it ends.
        identity: what separates cached prefixes (an adapter, a tenant); b"": nothing.
        salts: for each token of media, by position, the hash of its content.
        computed: tokens whose keys and values exist, or will once the launched forwards are done.
        pending: tokens that launched forwards will sample.
        pages: per group, in order of position; 0 where a window has passed.
        epoch: of the weights that it began with.
        live: neither finished nor aborted.
        real: the tokens that were really sampled; what the scheduler learns later.
        values: what each token's keys and values should be, one number a token.
        fed: what the forwards made of the tokens they got.
    """

    name: str
    tokens: list[int]
    limit: int
    identity: bytes = b""
    salts: dict[int, int] = field(default_factory=dict[int, int])
    computed: int = 0
    pending: int = 0
    pages: dict[str, list[int]] = field(default_factory=dict[str, list[int]])
    epoch: int = 0
    live: bool = True
    real: list[int] = field(default_factory=list[int])
    values: list[int] = field(default_factory=list[int])
    fed: list[int] = field(default_factory=list[int])

    def __post_init__(self) -> None:
        self.real = list(self.tokens)

    @property
    def length(self) -> int:
        """Tokens, those included that nobody knows yet."""
        return len(self.tokens) + self.pending

    @property
    def origin(self) -> int:
        """What the first token follows."""
        return hash((int.from_bytes(self.identity, "little"), 7))

    def salt_list(self) -> list[int]:
        """A salt for each known token, or nothing when there is none."""
        return [self.salts.get(position, 0) for position in range(len(self.tokens))] if self.salts else []

    def expected(self, length: int) -> list[int]:
        """:attr:`values` of at least the first ``length`` tokens."""
        values = self.values
        while len(values) < length:
            position = len(values)
            before = values[-1] if values else self.origin
            values.append(value_of(before, self.real[position], position, self.salts.get(position, 0)))
        return values


def value_of(before: int, token: int, position: int, salt: int) -> int:
    """What keys and values come to: they depend on the token, its position and all that went before it."""
    return hash((before, token, position, salt))
