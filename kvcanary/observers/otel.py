"""Metrics and log records for OpenTelemetry, through its API. Needs the extra ``otel``.

Which SDK stands behind it, where it exports to and how often, is the host's choice: nothing is set up here.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from kvcanary._version import __version__
from kvcanary.events import Event, RunStarted, event_name
from kvcanary.observers.extras import require
from kvcanary.observers.log import DEFAULT_INTERESTS, level_number
from kvcanary.observers.log_format import PREFIX, describe, flat_fields, level_of, severity_number
from kvcanary.observers.metrics import METRICS, Metric
from kvcanary.observers.redact import redact as withhold
from kvcanary.observers.tally import Tally
from kvcanary.observers.trace_context import SpanOf, TraceContext
from kvcanary.text import encodable

if TYPE_CHECKING:
    from opentelemetry._logs import LoggerProvider
    from opentelemetry.metrics import CallbackOptions, Histogram, MeterProvider, Observation

SCOPE = "kvcanary"
_SINKS = itertools.count(1)


class OTelMetrics:
    """Metrics of one canary, from the beginning of the watch to its end: observable instruments named ``kvcanary.*``.

    Args:
        meter_provider: None: the one that the process has set, or will set.

    Raises:
        ConfigError: the extra is not installed.
    """

    name = "otel_metrics"

    def __init__(self, meter_provider: MeterProvider | None = None) -> None:
        require("opentelemetry.metrics", "otel", "metrics for OpenTelemetry")
        from opentelemetry.metrics import get_meter_provider

        # Instruments cannot be taken back, and their callbacks not be replaced: each sink needs a scope of its own.
        scope = {"kvcanary.sink": next(_SINKS)}
        self._meter = (meter_provider or get_meter_provider()).get_meter(SCOPE, __version__, attributes=scope)
        self._tally = Tally(self._record)
        self.interests = self._tally.interests
        self._histograms: dict[str, Histogram] = {}
        self._watching = False

    def open(self) -> None:
        """Make the instruments; once, because the API cannot take them back."""
        self._watching = True
        if not self._histograms:
            for metric in METRICS.values():
                self._make(metric)

    def handle_batch(self, events: Sequence[Event]) -> None:
        """Count what the events tell."""
        self._tally.handle_batch(events)

    def close(self) -> None:
        """Report nothing more."""
        self._watching = False

    def _make(self, metric: Metric) -> None:
        name, meter = PREFIX + metric.name, self._meter
        if metric.kind == "histogram":
            self._histograms[metric.name] = meter.create_histogram(
                name, metric.unit, metric.description, explicit_bucket_boundaries_advisory=metric.buckets
            )
        else:
            make = meter.create_observable_counter if metric.kind == "counter" else meter.create_observable_gauge
            make(name, [self._callback(metric)], metric.unit, metric.description)

    def _callback(self, metric: Metric) -> Callable[[CallbackOptions], Iterator[Observation]]:
        from opentelemetry.metrics import Observation

        names = tuple(PREFIX + label for label in metric.labels)

        def observe(_options: CallbackOptions) -> Iterator[Observation]:
            if self._watching:
                for labels, value in self._tally.values(metric.name).items():
                    yield Observation(value, dict(zip(names, labels, strict=True)))

        return observe

    def _record(self, name: str, value: float) -> None:
        self._histograms[name].record(value)


class OTelLogs:
    """Log records with a name, a severity, a sentence as body, and the event's fields as ``kvcanary.*`` attributes.

    Args:
        logger_provider: None: the one that the process has set.
        redact: withhold token ids and digests.
        level: the least level that is emitted; healthy checks are ``debug``.
        interests: event types to emit.
        span_of: the span of a request, so that a finding is shown with that request's trace; see
            :class:`~kvcanary.observers.trace_context.TraceContext`.

    Raises:
        ConfigError: the extra is not installed, or there is no such level.
    """

    name = "otel_logs"

    def __init__(
        self,
        logger_provider: LoggerProvider | None = None,
        *,
        redact: bool = True,
        level: str = "info",
        interests: tuple[type[Event], ...] = DEFAULT_INTERESTS,
        span_of: SpanOf | None = None,
    ) -> None:
        require("opentelemetry._logs", "otel", "log records for OpenTelemetry")
        from opentelemetry._logs import get_logger_provider

        self.interests = interests
        self._logger = (logger_provider or get_logger_provider()).get_logger(SCOPE, __version__)
        self._redact = redact
        self._least = level_number(level)
        self._trace = TraceContext(span_of)
        self._run = ""

    def handle_batch(self, events: Sequence[Event]) -> None:
        """Emit a record for each event that is loud enough."""
        for event in events:
            if isinstance(event, RunStarted):
                self._run = event.run
            if level_number(level_of(event)) >= self._least:
                self._emit(withhold(event) if self._redact else event)

    def _emit(self, event: Event) -> None:
        from opentelemetry._logs import SeverityNumber

        level = level_of(event)
        fields: dict[str, Any] = dict(self._trace(None, level, flat_fields(event, {"run": self._run})))
        context = self._context(fields)
        self._logger.emit(
            timestamp=event.time_ns,
            observed_timestamp=time.time_ns(),
            context=context,
            severity_number=SeverityNumber(severity_number(level)),
            severity_text=level.upper(),
            body=encodable(describe(event)),
            attributes={PREFIX + name: encodable(value) for name, value in fields.items() if value is not None},
            event_name=PREFIX + event_name(event),
        )

    @staticmethod
    def _context(fields: dict[str, Any]) -> Any:
        """The context of the span that the fields name; they are taken out."""
        from opentelemetry.context import Context
        from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, set_span_in_context

        if "trace_id" not in fields:
            return Context()
        trace, span, flags = (int(fields.pop(name), 16) for name in ("trace_id", "span_id", "trace_flags"))
        found = SpanContext(trace_id=trace, span_id=span, is_remote=False, trace_flags=TraceFlags(flags))
        return set_span_in_context(NonRecordingSpan(found), Context())
