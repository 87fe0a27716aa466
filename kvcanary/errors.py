"""Errors. Each names the value that was found, what was expected, and what to do."""

from __future__ import annotations

from typing import Any

_MOST_WORDS = 2000


class KVCanaryError(Exception):
    """Base of all errors of this library."""


class ConfigError(KVCanaryError, ValueError):
    """A setting, an engine, its version or a combination that cannot be watched."""


class LayoutError(KVCanaryError, ValueError):
    """Tensors and numbers of a pool layout disagree, or a source cannot be viewed without a copy."""


class BatchError(KVCanaryError, ValueError):
    """A forward's tensors disagree in shape, type, device or capacity, or a call came out of order."""


class CanaryStalledError(KVCanaryError, RuntimeError):
    """A kernel or a guard stopped working in ``raise`` mode. It says nothing about the cache itself."""


class KVCorruptionError(KVCanaryError, RuntimeError):
    """The KV cache holds, or a forward addressed, something other than it should.

    Attributes:
        kind: kind of violation, such as ``"CONTENT"``.
        request: the request concerned, or None when nobody can be named.
        group: attention group.
        slot: slot index in the group's pool.
        position: sequence position that was checked.
        found: what was found, in words.
        expected: what was expected, in words.
        forward: number of the forward that found it.
        details: everything else that is known, as plain values.
        journal_flushed: True or False once a journal was told to write before the error was shown;
            None without a journal.
    """

    def __init__(
        self,
        headline: str,
        *,
        kind: str,
        request: str | None = None,
        group: str | None = None,
        slot: int | None = None,
        position: int | None = None,
        found: str | None = None,
        expected: str | None = None,
        forward: int | None = None,
        details: dict[str, Any] | None = None,
        journal_flushed: bool | None = None,
    ) -> None:
        super().__init__(headline)
        self.headline = headline
        self.kind = kind
        self.request = request
        self.group = group
        self.slot = slot
        self.position = position
        self.found = found
        self.expected = expected
        self.forward = forward
        self.details = dict(details or {})
        self.journal_flushed = journal_flushed

    def __reduce__(self) -> tuple[Any, ...]:
        # Exceptions pickle by their positional arguments; keyword-only fields need help to survive
        # a trip through a process pool or a queue.
        return _rebuild_corruption, (self.headline, {**self.__dict__})


def words_of(error: BaseException) -> str:
    """Type and text of somebody else's exception, for an event: bounded, and encodable whatever it holds."""
    kind = type(error).__name__
    try:
        text = str(error).encode(errors="backslashreplace").decode()
    except Exception:  # noqa: BLE001 - its own code
        return f"{kind} (and no text, since its __str__ raises)"
    if len(text) > _MOST_WORDS:
        text = f"{text[:_MOST_WORDS]}... ({len(text):,} characters)"
    return f"{kind}: {text}"


def _rebuild_corruption(headline: str, state: dict[str, Any]) -> KVCorruptionError:
    error = KVCorruptionError(headline, kind=state["kind"])
    error.__dict__.update(state)
    return error
