"""Metrics for Prometheus: a collector that is asked when somebody scrapes. Needs the extra ``prometheus``.

Values are those of this process. A custom collector takes no part in ``prometheus_client``'s multiprocess mode: where
several workers run, scrape each of them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, cast

from kvcanary.errors import ConfigError
from kvcanary.events import Event
from kvcanary.observers.base import Restart
from kvcanary.observers.extras import require
from kvcanary.observers.metrics import METRICS, Metric
from kvcanary.observers.tally import Tally
from kvcanary.text import encodable

if TYPE_CHECKING:
    from wsgiref.simple_server import WSGIServer

    from prometheus_client import CollectorRegistry
    from prometheus_client import Metric as Family

_EXTRA = ("prometheus", "metrics for Prometheus")


class PrometheusSink:
    """Gives a registry the metrics of one canary, from the beginning of the watch to its end.

    Args:
        registry: where the metrics are found; the exporter that serves it is yours.
        listen: serve ``registry`` as well, on a thread of ``prometheus_client``: a port of this host, or
            ``"address:port"`` (``"0.0.0.0:9464"``: all addresses; port 0: any, see :attr:`port`).

    Attributes:
        port: where it is served; 0 while it is not.

    Raises:
        ConfigError: the extra is not installed, or ``listen`` is no such address. Once the watch begins: the registry
            has metrics of another canary, or the port is taken.
    """

    name = "prometheus"
    restart: Restart = "restart"

    def __init__(self, registry: CollectorRegistry, *, listen: str | int | None = None) -> None:
        require("prometheus_client", *_EXTRA)
        self._registry = registry
        self._address = None if listen is None else _parse(listen)
        self._tally = Tally()
        self.interests = self._tally.interests
        self._server: tuple[WSGIServer, threading.Thread] | None = None
        self.port = 0

    def open(self) -> None:
        """Register, and serve if asked to."""
        try:
            self._registry.register(self)
        except ValueError as error:
            raise ConfigError(
                "this registry has kvcanary's metrics already; give each canary of a process a registry of its own"
            ) from error
        if self._address is not None:
            try:
                self._serve(*self._address)
            except OSError as error:
                self._registry.unregister(self)
                host, port = self._address
                raise ConfigError(f"metrics cannot be served on {host}:{port}: {error.strerror}") from error

    def handle_batch(self, events: Sequence[Event]) -> None:
        """Count what the events tell."""
        self._tally.handle_batch(events)

    def close(self) -> None:
        """Take the metrics out of the registry: nothing is known of a cache that nobody watches."""
        self._registry.unregister(self)
        server, self._server, self.port = self._server, None, 0
        if server is not None:
            server[0].shutdown()
            server[0].server_close()
            server[1].join()

    def describe(self) -> Iterator[Family]:
        """The families without values, so that a registry refuses what would clash."""
        return map(_family, METRICS.values())

    def collect(self) -> Iterator[Family]:
        """The families with their present values."""
        for metric in METRICS.values():
            family: Any = _family(metric)
            if metric.kind == "histogram":
                found = self._tally.histogram(metric.name)
                bounds = (*map(str, metric.buckets), "+Inf")
                family.add_metric((), list(zip(bounds, found.counts, strict=True)), found.total)
            else:
                for labels, value in self._tally.values(metric.name).items():
                    family.add_metric(encodable(labels), value)
            yield family

    def _serve(self, host: str, port: int) -> None:
        from prometheus_client import start_http_server

        self._server = start_http_server(port, host, self._registry)
        self.port = self._server[0].server_port


class DefaultRegistrySink(PrometheusSink):
    """For ``KVCANARY_OBSERVERS=kvcanary.observers.prometheus:DefaultRegistrySink``: the registry that a process has."""

    def __init__(self) -> None:
        require("prometheus_client", *_EXTRA)
        from prometheus_client import REGISTRY

        super().__init__(REGISTRY)


def served(listen: str) -> PrometheusSink:
    """A sink with a registry of its own, served at ``listen``; what ``CanaryConfig.prometheus`` switches on.

    Raises:
        ConfigError: as :class:`PrometheusSink`.
    """
    require("prometheus_client", *_EXTRA)
    from prometheus_client import CollectorRegistry

    return PrometheusSink(CollectorRegistry(), listen=listen)


def prometheus_name(metric: Metric) -> str:
    """The name of a metric's family, without ``_total``: that belongs to a counter's series."""
    return f"kvcanary_{metric.name.replace('.', '_')}{'_seconds' if metric.unit == 's' else ''}"


def series_names(metric: Metric) -> tuple[str, ...]:
    """The names that queries use."""
    endings = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_count", "_sum")}
    return tuple(prometheus_name(metric) + ending for ending in endings[metric.kind])


def _family(metric: Metric) -> Family:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

    kinds = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily, "histogram": HistogramMetricFamily}
    make = cast("Callable[..., Family]", kinds[metric.kind])
    return make(prometheus_name(metric), metric.description, labels=metric.labels)


def _parse(listen: str | int) -> tuple[str, int]:
    host, _, port = str(listen).rpartition(":")
    if not port.isascii() or not port.isdecimal() or int(port) > 65535:
        raise ConfigError(f"prometheus is {listen!r}; expected a port, such as 9464, or address:port")
    return host.strip("[]") or "127.0.0.1", int(port)
