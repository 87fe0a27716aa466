"""The log sink: one flat JSON object a line, through a structlog logger of its own or the host's logger."""

from __future__ import annotations

import io
import logging
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol, cast

import msgspec
import structlog

from kvcanary.errors import ConfigError
from kvcanary.events import (
    CanaryArmed,
    CanaryDisarmed,
    Event,
    EventsDropped,
    FactsLost,
    HealthChecked,
    IncidentOpened,
    IncidentUpdated,
    KernelStalled,
    ObserverFailed,
    OwnershipViolated,
    PagesQuarantined,
    QuarantineFailed,
    QuarantineRequested,
    RequestQuarantined,
    RunStarted,
    RunStopped,
    SnapshotsSkipped,
    StatsReported,
    SwaDivergenceObserved,
    event_name,
)
from kvcanary.observers.base import Restart
from kvcanary.observers.log_format import Processor, describe, flat_fields, iso_time, level_of, rename
from kvcanary.observers.log_format import profile as shape
from kvcanary.observers.redact import redact as withhold
from kvcanary.text import encoded

LOGGER_NAME = "kvcanary"
DEFAULT_INTERESTS: tuple[type[Event], ...] = (
    RunStarted,
    CanaryArmed,
    CanaryDisarmed,
    RunStopped,
    IncidentOpened,
    IncidentUpdated,
    OwnershipViolated,
    KernelStalled,
    HealthChecked,
    StatsReported,
    SwaDivergenceObserved,
    FactsLost,
    EventsDropped,
    SnapshotsSkipped,
    ObserverFailed,
    QuarantineRequested,
    RequestQuarantined,
    PagesQuarantined,
    QuarantineFailed,
)


class ByteStream(Protocol):
    """A binary stream."""

    def write(self, data: bytes, /) -> object:
        """Take bytes."""

    def flush(self) -> object:
        """Pass on what was taken."""


class _Writer(Protocol):
    """Where lines go."""

    def open(self) -> None: ...

    def write(self, level: str, event: Event, run: str, /) -> None: ...

    def commit(self) -> None: ...

    def close(self) -> None: ...


class LogSink:
    """Logs events. Lines of one batch are written with one call.

    Args:
        target: a file path (appended to), ``"-"`` or ``"stderr"``, ``"stdout"``, a binary stream, or a logger of
            the host: a structlog one gets the event's name and its fields, a standard one the headline, with the
            fields in ``extra={"kvcanary": ...}``.
        profile: field names: ``default``, ``ecs``, ``datadog`` or ``otel``. The host's logger has its own.
        service: the service that these name.
        redact: withhold token ids and digests.
        level: the least level that is written; healthy checks are ``debug``.
        interests: event types to log.
        processors: structlog processors to run before the fields are named and written.

    Raises:
        ConfigError: an unknown target, profile or level, or a file whose directory does not exist.
    """

    name = "log"
    restart: Restart = "restart"

    def __init__(
        self,
        target: object,
        *,
        profile: str = "default",
        service: str = LOGGER_NAME,
        redact: bool = True,
        level: str = "info",
        interests: tuple[type[Event], ...] = DEFAULT_INTERESTS,
        processors: Sequence[Processor] = (),
    ) -> None:
        self.interests = interests
        self._least = level_number(level)
        self._redact = redact
        self._run = ""
        self._writer = _writer(target, rename(shape(profile), service), tuple(processors))

    def open(self) -> None:
        """Open the file, if it is one."""
        self._writer.open()

    def handle_batch(self, events: Sequence[Event]) -> None:
        """Write a line for each event that is loud enough."""
        write = self._writer.write
        for event in events:
            level = level_of(event)
            if isinstance(event, RunStarted):
                self._run = event.run
            if _LEVELS[level] >= self._least:
                write(level, withhold(event) if self._redact else event, self._run)
        self._writer.commit()

    def close(self) -> None:
        """Close the file, if this sink opened it."""
        self._writer.close()


class _JsonLines:
    """A structlog logger of our own, whose lines go to a stream a batch at a time."""

    def __init__(
        self,
        open_stream: Callable[[], ByteStream],
        *,
        owned: bool,
        naming: tuple[Processor, ...],
        extra: tuple[Processor, ...],
    ) -> None:
        self._open_stream = open_stream
        self._owned = owned
        self._stream: ByteStream | None = None
        self._lines = _Lines()
        # Every argument is given, so that nothing comes from the host's structlog.configure().
        log: Any = structlog.wrap_logger(
            cast("Any", self._lines),
            processors=[*cast("Any", (*extra, *naming)), _render],
            wrapper_class=_EventLogger,
            context_class=dict,
            cache_logger_on_first_use=True,
        ).bind()
        self.write: Callable[[str, Event, str], None] = log.tell

    def open(self) -> None:
        if self._stream is None:
            self._stream = self._open_stream()

    def commit(self) -> None:
        pending = self._lines.take()
        if not pending:
            return
        self.open()
        if self._stream is not None:
            self._stream.write(pending)
            self._stream.flush()

    def close(self) -> None:
        stream, self._stream = self._stream, None
        if self._owned and stream is not None:
            cast("Any", stream).close()


class _EventLogger(structlog.BoundLoggerBase):
    """Makes the fields of a line itself: as keyword arguments, thirty of them would cost more than their JSON."""

    def tell(self, level: str, event: Event, run: str) -> None:
        """Log one event."""
        fields: Any = flat_fields(
            event,
            {
                "timestamp": iso_time(event.time_ns),
                "level": level,
                "event": event_name(event),
                "logger": LOGGER_NAME,
                "run": run,
            },
        )
        try:
            for process in self._processors:
                fields = process(self._logger, level, fields)
        except structlog.DropEvent:
            return
        self._logger.msg(fields)


class _Lines:
    """What structlog writes to: rendered lines, until the batch is complete.

    Not ``structlog.BytesLogger``: that flushes each line, and keeps a lock for its file as long as the process lives.
    """

    def __init__(self) -> None:
        self._lines: list[bytes] = []

    def msg(self, line: bytes) -> None:
        self._lines.append(line)

    def take(self) -> bytes:
        self._lines.append(b"")  # so that the last line ends as the others do
        lines, self._lines = self._lines, []
        return b"\n".join(lines)


class _HostLogger:
    """The host's own logger. It sets times and names as its owner wants them."""

    def __init__(self, logger: Any, extra: tuple[Processor, ...]) -> None:
        self._logger = logger
        self._extra = extra
        self._standard = isinstance(logger, (logging.Logger, logging.LoggerAdapter))

    def open(self) -> None:
        """Nothing to open."""

    def write(self, level: str, event: Event, run: str) -> None:
        line: Any = flat_fields(event, {"event_time": iso_time(event.time_ns), "run": run})
        for process in self._extra:
            line = process(self._logger, level, line)
        if self._standard:
            line = {"event": event_name(event), **line}
            self._logger.log(level_number(level), "%s", describe(event), extra={LOGGER_NAME: line})
        else:
            getattr(self._logger, level)(event_name(event), **line)

    def commit(self) -> None:
        """Lines are written as they come."""

    def close(self) -> None:
        """It is not ours to close."""


def _writer(target: object, naming: tuple[Processor, ...], extra: tuple[Processor, ...]) -> _Writer:
    if isinstance(target, (logging.Logger, logging.LoggerAdapter)) or hasattr(target, "bind"):
        return _HostLogger(target, extra)
    if target in ("-", "stderr"):
        return _JsonLines(lambda: sys.stderr.buffer, owned=False, naming=naming, extra=extra)
    if target == "stdout":
        return _JsonLines(lambda: sys.stdout.buffer, owned=False, naming=naming, extra=extra)
    if isinstance(target, (str, os.PathLike)):
        path = Path(cast("str", target))
        if not path.parent.is_dir():
            raise ConfigError(f"log is {str(path)!r}, but there is no directory {str(path.parent)!r}; make it first")
        return _JsonLines(lambda: path.open("ab"), owned=True, naming=naming, extra=extra)
    if _is_binary(target):
        stream = cast("ByteStream", target)
        return _JsonLines(lambda: stream, owned=False, naming=naming, extra=extra)
    raise ConfigError(
        f"log is {target!r}; expected a file path, '-' (standard error), 'stdout', a binary stream, or a logger"
    )


def _is_binary(target: object) -> bool:
    return callable(getattr(target, "write", None)) and not isinstance(target, io.TextIOBase)


def level_number(level: str) -> int:
    """The number that the standard library gives a level.

    Raises:
        ConfigError: there is no such level.
    """
    number = _LEVELS.get(level)
    if number is None:
        raise ConfigError(f"log level is {level!r}; expected one of {', '.join(_LEVELS)}")
    return number


_LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40, "critical": 50}
_ENCODER = msgspec.json.Encoder()


def _render(_logger: Any, _method: str, fields: Any) -> bytes:
    return encoded(_ENCODER.encode, fields)
