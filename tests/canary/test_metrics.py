"""The metrics of a canary with kernels at work say what its events say."""

from __future__ import annotations

import socket
import urllib.request
from collections.abc import Callable
from contextlib import closing
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from tests.canary.conftest import Bench


def free_port() -> int:
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def scrape(port: int) -> dict[tuple[str, ...], float]:
    """All series, by their name and the values of their labels."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        families = text_string_to_metric_families(answer.read().decode())
        return {(s.name, *s.labels.values()): s.value for family in families for s in family.samples}


def test_a_configured_port_serves_what_the_canary_found(make_bench: Callable[..., Bench]) -> None:
    port = free_port()
    bench = make_bench(prometheus=f"127.0.0.1:{port}", health_every=2, health_warmup=0)
    bench.engine.admit("a", 6)
    for _ in range(4):
        bench.engine.step()
    bench.engine.flip_bit("a", 2)
    for _ in range(6):
        bench.engine.step()
    bench.engine.finish("a")
    last: Any = bench.of("SnapshotTaken")[-1]
    found = scrape(port)
    assert found["kvcanary_forwards_total",] == last.forward == 10
    assert found["kvcanary_verified_total", "links", "full"] == last.verified["links"]["full"] > 0
    assert found["kvcanary_tokens_total",] == last.new_tokens
    assert found["kvcanary_violations_total", "CONTENT", "device"] == last.violations["CONTENT"] == 1
    assert found["kvcanary_incidents_total", "CONTENT"] == found["kvcanary_affected_requests_total",] == 1
    assert (found["kvcanary_requests_total", "admitted"], found["kvcanary_requests_total", "finished"]) == (1, 1)
    assert found["kvcanary_healthy",] == 1
    assert found["kvcanary_step_host_time_seconds_count",] == 10
    assert found["kvcanary_kernel_launches_total", "seal"] == found["kvcanary_kernel_launches_due_total", "seal"] == 10


def test_a_taken_port_is_told_and_the_canary_works_on(make_bench: Callable[..., Bench]) -> None:
    with closing(socket.socket()) as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        bench = make_bench(prometheus=f"127.0.0.1:{other.getsockname()[1]}")
        bench.engine.admit("a", 6)
        bench.engine.step()
        failed = bench.of("ObserverFailed")
        report = bench.canary.status()["observers"]["prometheus"]
    assert failed[0].observer == "prometheus"
    assert "Address already in use" in failed[0].error
    assert (report["state"], report["error"]) == ("failing", failed[0].error)
    assert bench.of("SnapshotTaken")[-1].verified["sealed"]["full"] == 6
