"""A Prometheus server scrapes a real engine that is watched, and every query that is shipped returns data."""

from __future__ import annotations

import json
import socket
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from prometheus_client import CollectorRegistry

import kvcanary
from kvcanary.cli.models import Prompts, make_manager, make_model
from kvcanary.config import CanaryConfig
from kvcanary.faults.transformers_faults import TransformersInjector
from kvcanary.observers.metrics import METRICS
from kvcanary.observers.prometheus import PrometheusSink, prometheus_name
from tests.observability.queries import ALERTS, Query, dashboard_queries, program

pytestmark = [pytest.mark.prometheus, pytest.mark.engine]

DEADLINE_S = 60.0
CONFIG = """
global: {{scrape_interval: 250ms, scrape_timeout: 250ms, evaluation_interval: 250ms}}
rule_files: ["{rules}"]
scrape_configs:
  - job_name: llm
    static_configs: [{{targets: ["127.0.0.1:{port}"]}}]
"""
# Grafana puts these in. Windows hold several samples of so short a run; the run's beginning stays in sight.
VARIABLES = {"$job": ".*", "$instance": ".*", "$__rate_interval": "5s", "$__range": "60s", "< 60": "< 600"}


class Server:
    """A Prometheus server on the loopback."""

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"

    def get(self, path: str, **parameters: str) -> Any:
        url = f"{self.url}{path}?{urllib.parse.urlencode(parameters)}"
        with urllib.request.urlopen(url, timeout=10) as answer:  # noqa: S310 - on the loopback
            return json.loads(answer.read())["data"]

    def answers(self, query: str) -> list[Any]:
        """The series that a query returns now, with a number as their value."""
        for name, value in VARIABLES.items():
            query = query.replace(name, value)
        found = self.get("/api/v1/query", query=query)["result"]
        return [series for series in found if series["value"][1] != "NaN"]

    def is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/-/ready", timeout=10) as answer:  # noqa: S310 - as above
                return bool(answer.status == 200)
        except (urllib.error.URLError, ConnectionError):
            return False


def free_port() -> int:
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def eventually(what: str, condition: Callable[[], object], meanwhile: Callable[[], object]) -> None:
    """Do ``meanwhile`` until ``condition`` holds."""
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, f"not within {DEADLINE_S} s: {what}"
        meanwhile()


@contextmanager
def prometheus(target: int, folder: Path) -> Iterator[Server]:
    """A server that scrapes ``target``, until the block ends."""
    binary, port = program("prometheus"), free_port()
    (folder / "prometheus.yml").write_text(CONFIG.format(rules=ALERTS, port=target), "utf-8")
    command = [
        str(binary),
        f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log)
    server = Server(port)
    try:
        eventually("the server is ready", server.is_ready, lambda: time.sleep(0.1))
        yield server
    finally:
        process.terminate()
        process.wait(30)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Callable[[], None]]]:
    """A server, and a function that has the engine answer: it was clean, then one fault was planted."""
    program("prometheus")  # before the engine, which takes seconds
    torch.set_num_threads(1)
    manager, prompts = make_manager(make_model("mixed")), Prompts.make(1)
    sink = PrometheusSink(CollectorRegistry(), listen="127.0.0.1:0")
    config = CanaryConfig(mode="log", health_every=10, health_warmup=0, swa_divergence_every=5)

    def answer() -> None:
        for _ in range(4):
            prompt, length = prompts.next()
            manager.add_request(prompt, max_new_tokens=length)
        assert all(manager.get_result(timeout=60).error is None for _ in range(4))

    with kvcanary.watch(manager, config=config, observers=[sink]) as kv:
        assert kv.canary is not None
        manager.start()
        try:
            answer()
            with prometheus(sink.port, tmp_path_factory.mktemp("prometheus")) as server:
                clean = "sum(kvcanary_incidents_total) == 0 and sum(kvcanary_verified_total) > 0"
                eventually("a first scrape", lambda: server.answers(clean), answer)
                with TransformersInjector(manager, kv.canary) as injector:
                    injector.plant("stale-slot")
                    answer()
                yield server, answer
        finally:
            manager.stop(block=True, timeout=10, hard_stop=True)


@pytest.mark.parametrize("query", dashboard_queries(), ids=str)
def test_a_query_of_the_dashboard_returns_data(served: tuple[Server, Callable[[], None]], query: Query) -> None:
    server, answer = served
    eventually(query.text, lambda: server.answers(query.text), answer)


def test_the_corruption_is_counted_and_its_alert_fires(served: tuple[Server, Callable[[], None]]) -> None:
    server, answer = served

    def firing() -> set[str]:
        return {alert["labels"]["alertname"] for alert in server.get("/api/v1/alerts")["alerts"]}

    eventually("the alert fires", lambda: "KVCacheCorrupted" in firing(), answer)
    (found,) = server.answers('kvcanary_violations_total{kind="TABLE_MISMATCH",source="device"} > 0')
    assert found["metric"]["job"] == "llm"
    assert "KVCanaryKernelStalled" not in firing()


def test_the_server_could_evaluate_every_rule(served: tuple[Server, Callable[[], None]]) -> None:
    server, answer = served

    def states() -> set[str]:
        return {rule["health"] for group in server.get("/api/v1/rules")["groups"] for rule in group["rules"]}

    eventually("all rules were evaluated", lambda: states() == {"ok"}, answer)


def test_what_is_scraped_is_what_the_list_of_metrics_says(served: tuple[Server, Callable[[], None]]) -> None:
    server, _ = served
    known = server.get("/api/v1/targets/metadata", match_target='{job="llm"}')
    # The name of a counter's family ends in _total or not, by the format that the server asked for.
    found = {entry["metric"].removesuffix("_total"): entry["type"] for entry in known}
    expected = {prometheus_name(metric): metric.kind for metric in METRICS.values()}
    assert {name: kind for name, kind in found.items() if name.startswith("kvcanary_")} == expected
