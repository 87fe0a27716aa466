"""The examples under ``docs/examples`` run as they stand, with a tiny model in the place of a big one."""

from __future__ import annotations

import ast
import importlib.util
import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from kvcanary.cli.models import Prompts, make_manager, make_model

pytestmark = pytest.mark.engine

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
DEADLINE_S = 30.0


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def lines_of_code(name: str) -> int:
    """Lines that are neither blank nor part of the module's docstring."""
    text = (EXAMPLES / f"{name}.py").read_text("utf-8")
    first = ast.parse(text).body[1]
    return sum(bool(line.strip()) for line in text.splitlines()[first.lineno - 1 :])


@pytest.fixture
def manager() -> Iterator[Any]:
    torch.set_num_threads(1)
    made = make_manager(make_model("full"))
    yield made
    if made.is_running():
        made.stop(block=True, timeout=DEADLINE_S, hard_stop=True)


def answer(engine: Any, requests: int = 8) -> list[Any]:
    """Start the engine if need be, and have it answer so many prompts."""
    prompts = Prompts.make(1)
    if not engine.is_running():
        engine.start()
    for _ in range(requests):
        prompt, new = prompts.next()
        engine.add_request(prompt, max_new_tokens=new)
    outputs = [engine.get_result(timeout=DEADLINE_S) for _ in range(requests)]
    assert all(output is not None and output.error is None for output in outputs)
    return outputs


def spoil(engine: Any) -> None:
    """Flip a bit of one layer's V of the second token of a row, before the tenth forward that reads the cache."""
    reads = 0

    def flip(_module: Any, _args: Any, kwargs: Any) -> None:
        nonlocal reads
        reads += bool(kwargs["read_index"][0].numel())
        if reads == 10:
            reads += 1
            allocator = next(iter(kwargs["cache"].cache_allocators.values()))
            _, values = allocator._kv_token_views[allocator.layer_indices[0]]
            values[kwargs["read_index"][0][1], 0, 0] += 1.0

    engine.model.register_forward_pre_hook(flip, with_kwargs=True, prepend=True)


def answer_with_a_flipped_bit(engine: Any) -> list[Any]:
    spoil(engine)
    return answer(engine)


def test_the_custom_observer_takes_at_most_12_lines_and_tells_what_went_wrong(
    manager: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert lines_of_code("custom_observer") <= 12
    assert len(load("custom_observer").serve(manager, answer_with_a_flipped_bit)) == 8
    told = capsys.readouterr().out
    assert told.startswith("forward ")
    assert "CONTENT" in told


def test_the_custom_observer_is_silent_on_clean_traffic(manager: Any, capsys: pytest.CaptureFixture[str]) -> None:
    load("custom_observer").serve(manager, answer)
    assert capsys.readouterr().out == ""


def test_json_logs_take_at_most_6_lines_and_hold_the_incident(manager: Any, tmp_path: Path) -> None:
    assert lines_of_code("json_logs") <= 6
    log = tmp_path / "kvcanary.jsonl"
    load("json_logs").serve(manager, answer_with_a_flipped_bit, str(log))
    lines = [json.loads(line) for line in log.read_text("utf-8").splitlines()]
    assert [lines[0]["event"], lines[-1]["event"]] == ["run.started", "run.stopped"]
    opened = [line for line in lines if line["event"] == "incident.opened"]
    assert [line["kind"] for line in opened] == ["CONTENT"]
    assert opened[0]["level"] == "error"


@pytest.mark.parametrize("mode", ["log", "off"])
def test_the_environment_alone_switches_json_logs_on_and_off(
    mode: str, manager: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert lines_of_code("json_logs_from_environment") <= 6
    log = tmp_path / "kvcanary.jsonl"
    monkeypatch.setenv("KVCANARY_MODE", mode)
    monkeypatch.setenv("KVCANARY_LOG", str(log))
    assert len(load("json_logs_from_environment").serve(manager, answer)) == 8
    if mode == "off":
        assert not log.exists()
        return
    events = [json.loads(line)["event"] for line in log.read_text("utf-8").splitlines()]
    assert {"run.started", "canary.armed", "run.stopped"} <= set(events)
    assert "incident.opened" not in events


def wait_until(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + DEADLINE_S
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()


def test_the_server_is_ready_while_its_cache_is_right_and_not_once_it_is_wrong(manager: Any) -> None:
    from fastapi.testclient import TestClient

    with TestClient(load("fastapi_app").create_app(manager)) as client:
        prompt, _ = Prompts.make(2).next()
        assert len(client.post("/generate", json=prompt).json()) == 16
        assert client.get("/ready").status_code == 200
        spoil(manager)
        client.post("/generate", json=prompt)
        assert wait_until(lambda: client.get("/ready").status_code == 503)
        (incident,) = client.get("/ready").json()["incidents"]
        assert incident.startswith("CONTENT")
    assert not manager.is_running()


def test_a_handler_that_blocks_the_server_does_not_delay_the_watch(
    manager: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fastapi.testclient import TestClient

    module = load("fastapi_app")
    blocked, release = threading.Event(), threading.Event()

    def block() -> str:
        blocked.set()
        return "released" if release.wait(DEADLINE_S) else "never released"

    monkeypatch.setattr(module, "write_report", block)
    app = module.create_app(manager)
    with TestClient(app) as client:
        client.post("/generate", json=Prompts.make(2).next()[0])
        answers: list[Any] = []
        handler = threading.Thread(target=lambda: answers.append(client.get("/report").json()))
        handler.start()
        try:
            assert blocked.wait(DEADLINE_S)
            # The server's loop hangs in the handler; the engine and the watch go on.
            answer_with_a_flipped_bit(manager)
            assert wait_until(lambda: bool(app.state.incidents))
        finally:
            release.set()
            handler.join(DEADLINE_S)
        assert answers == ["released"]
