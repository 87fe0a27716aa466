"""Which trace a finding belongs to. Needs the extra ``otel``.

Findings come to light on the canary's own thread, where no span is active. Two spans make sense all the same: that of a
request which the finding names, if the server can tell it, and the one in which the watch began.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, cast

from kvcanary.errors import words_of
from kvcanary.observers.extras import require
from kvcanary.observers.log_format import Fields, Processor

if TYPE_CHECKING:
    from opentelemetry.trace import SpanContext

SpanOf = Callable[[str], "SpanContext | None"]
"""The span of a request, by the engine's request id; called on a sink's thread."""


class TraceContext:
    """A processor for :class:`~kvcanary.observers.log.LogSink`: adds ``trace_id``, ``span_id`` and ``trace_flags``.

    Args:
        span_of: the span of a request. What it raises is told in the line as ``trace_error``, which is written all
            the same.

    The span that is active where this is made is the one for findings that name no request with a span.

    Raises:
        ConfigError: the extra is not installed.
    """

    def __init__(self, span_of: SpanOf | None = None) -> None:
        require("opentelemetry.trace", "otel", "the trace context of log lines")
        from opentelemetry.trace import get_current_span

        self._span_of = span_of
        self._around = _valid(get_current_span().get_span_context())

    def find(self, requests: Iterable[str]) -> SpanContext | None:
        """The span of the first of ``requests`` that has one, or the one around the watch."""
        if self._span_of is not None:
            for request in requests:
                found = _valid(self._span_of(request))
                if found is not None:
                    return found
        return self._around

    def __call__(self, _logger: Any, _method: str, fields: Fields) -> Fields:
        """Add what is known."""
        try:
            span = self.find(_requests(fields))
        except Exception as error:  # noqa: BLE001 - a line without its trace is better than none
            fields["trace_error"] = words_of(error)
            span = self._around
        if span is not None:
            fields["trace_id"] = f"{span.trace_id:032x}"
            fields["span_id"] = f"{span.span_id:016x}"
            fields["trace_flags"] = f"{span.trace_flags:02x}"
        return fields


def around_this() -> tuple[Processor, ...]:
    """The processor for a log that the configuration switches on: only if a span is active here and now."""
    if "opentelemetry.trace" not in sys.modules:  # then nobody has begun a span
        return ()
    context = TraceContext()
    return () if context.find(()) is None else (context,)


def _valid(span: SpanContext | None) -> SpanContext | None:
    return span if span is not None and span.is_valid else None


def _requests(fields: Fields) -> list[str]:
    """Whom a line is about."""
    named = [fields.get("request"), *cast("list[Any]", fields.get("requests") or ())]
    return [name for name in named if isinstance(name, str) and name]
