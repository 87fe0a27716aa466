"""What a user writes, as strict type checkers see it; ``test_typing.py`` checks it, and runs it as a program."""

# pyright: strict
from __future__ import annotations

from collections.abc import Sequence
from typing import assert_type

from prometheus_client import CollectorRegistry

from kvcanary.config import CanaryConfig
from kvcanary.events import Event, IncidentOpened, KernelStalled, SwaDivergenceObserved, register_event
from kvcanary.observers.base import BatchSink, Fold, Observer, Sink, as_observer, observer
from kvcanary.observers.log import LogSink
from kvcanary.observers.otel import OTelLogs, OTelMetrics
from kvcanary.observers.prometheus import PrometheusSink
from kvcanary.observers.swa_divergence import find_all, parse
from kvcanary.observers.trace_context import TraceContext
from kvcanary.testing import EventRecorder, MemoryCanary, assert_swa_divergence_observed, assert_violation
from kvcanary.wire import FactWriter

pages: list[str] = []
Alert = IncidentOpened | KernelStalled


@observer
def tell_me(event: IncidentOpened | KernelStalled) -> None:
    """A function observer; the annotation is the filter."""
    if isinstance(event, IncidentOpened):
        pages.append(event.headline)
    else:
        pages.append(event.role)


@observer(name="pager", queue=100, on_full="drop_newest", restart="stop")
async def page_someone(event: Alert) -> str:
    """An async observer with options."""
    return event.by


@observer
def in_batches(events: Sequence[IncidentOpened]) -> int:
    """Takes all that is queued."""
    return len(events)


class Tally:
    """A class observer."""

    name = "tally"
    interests = (IncidentOpened, KernelStalled)

    def __init__(self) -> None:
        self.count = 0

    def handle(self, event: IncidentOpened | KernelStalled) -> None:
        """Called for each event."""
        self.count += 1


class Shipper:
    """An async class observer that takes batches and has a life cycle."""

    interests: tuple[type[Event], ...] = (Event,)

    async def open(self) -> None:
        """Called first."""

    async def handle_batch(self, events: Sequence[Event]) -> None:
        """Called with all that is queued."""

    async def close(self) -> None:
        """Called last."""


@register_event
class TemperatureMeasured(Event, frozen=True, kw_only=True, tag="mine.temperature_measured"):
    """A user's own event."""

    celsius: float


temperatures: list[float] = []


@observer
async def note_temperature(event: TemperatureMeasured) -> None:
    """An async observer of a user's own event."""
    temperatures.append(event.celsius)


class Thermometer:
    """A user's own fold, which derives a user's own event."""

    name = "thermometer"
    interests = (KernelStalled,)
    guard = False

    def handle(self, event: KernelStalled) -> list[TemperatureMeasured]:
        """Called inline for each event."""
        return [TemperatureMeasured(celsius=40.0 + event.launches)]


def use(recorder: EventRecorder) -> None:
    """Types are kept all the way through."""
    assert_type(tell_me(KernelStalled(role="check", launches=1, expected=2)), None)
    assert_type(in_batches([]), int)
    assert_type(recorder.of(TemperatureMeasured), list[TemperatureMeasured])
    assert_type(recorder.wait_for(IncidentOpened, lambda incident: incident.count > 1), IncidentOpened)
    assert_type(assert_swa_divergence_observed(recorder), SwaDivergenceObserved)
    assert_type(parse("{}"), SwaDivergenceObserved | None)
    assert_type(find_all(["{}"]), list[SwaDivergenceObserved])
    assert_type(as_observer(tell_me).wants(IncidentOpened), bool)
    assert_type(CanaryConfig(mode="raise").stats_every, int)


async def use_async() -> None:
    """An async observer stays a coroutine function."""
    assert_type(await page_someone(KernelStalled(role="check", launches=1, expected=2)), str)


observers: list[Observer] = [tell_me, page_someone, in_batches, note_temperature, Tally(), Shipper(), EventRecorder()]
exporters: list[Observer] = [
    LogSink("-", processors=[TraceContext()]),
    PrometheusSink(CollectorRegistry()),
    OTelMetrics(),
    OTelLogs(span_of=lambda _request: None),
]
sink: Sink = Tally()
batches: BatchSink = Shipper()
fold: Fold = Thermometer()


def scheduler(tell: FactWriter | MemoryCanary) -> None:
    """One that lives in another process, or in a test."""
    tell.admit("7", tokens=[1, 2, 3])
    tell.alloc("full", "7", [4])


def main() -> None:
    """All observers at work."""
    tally, writer = Tally(), FactWriter()
    scheduler(writer)
    with MemoryCanary(observers=[*observers, *exporters, tally]) as canary:
        scheduler(canary)
        canary.ingest(writer.pack())
        canary.forward()
        canary.find("CONTENT", request="7", slot=65)
        canary.emit(TemperatureMeasured(celsius=41.5))
    assert_type(canary.error, BaseException | None)
    found = assert_violation(canary.events, kind="CONTENT")
    print(found.request, tally.count, len(pages), temperatures)  # noqa: T201


if __name__ == "__main__":
    main()
