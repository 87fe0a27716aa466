"""An engine that nobody asked to watch, then what ``watch`` does to it, what it refuses, and what it leaves behind.

``python -m tests.engines.vllm.parts RUNNER attaching`` prints a JSON line.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import kvcanary
from kvcanary.engines.base import find_adapter
from kvcanary.errors import ConfigError
from tests.engines.vllm import serving
from tests.engines.vllm.clean import Mode, engine


def _refusal(llm: Any, mode: str = "log") -> str:
    try:
        with kvcanary.watch(llm, mode=mode):
            return ""
    except ConfigError as error:
        return str(error)


def _objects(traffic: serving.Traffic) -> Iterator[Any]:
    manager = traffic.scheduler.kv_cache_manager
    worker = traffic.core.model_executor.driver_worker.worker
    yield from (traffic.scheduler, worker, traffic.runner, traffic.runner.get_model(), manager, manager.block_pool)
    yield from manager.coordinator.single_type_managers


def _touched(traffic: serving.Traffic) -> list[str]:
    """What vLLM's own call of the plugin has hooked, imported or left."""
    found = [type(finder).__qualname__ for finder in sys.meta_path if "kvcanary" in type(finder).__module__]
    found += [name for name in sys.modules if name == "kvcanary.engines.vllm.installation"]
    marked = "_kvcanary_installed"
    for one in (traffic.core, *_objects(traffic)):
        for cls in type(one).__mro__:
            found += [f"{cls.__qualname__}.{name}" for name, what in vars(cls).items() if hasattr(what, marked)]
        found += [name for name in vars(one) if "kvcanary" in str(name)]
    return found


def _answers(llm: Any) -> list[list[int]]:
    traffic = serving.Traffic(llm)
    names = traffic.add(serving.Prompts(3).take(3), max_tokens=6)
    traffic.run()
    traffic.reset()
    return [traffic.answers[name] for name in names]


def run_all(runner: int) -> Iterator[dict[str, Any]]:
    """Ask for what cannot be had, too."""
    with engine(Mode("attaching", runner=runner, asynchronous=True)) as llm:
        yield _attach(llm)


def _attach(llm: Any) -> dict[str, Any]:
    traffic = serving.Traffic(llm)
    told: dict[str, Any] = {
        "plugin": "kvcanary.engines.vllm.plugin" in sys.modules,
        "touched": _touched(traffic),
    }
    answers = _answers(llm)
    before = [set(vars(one)) for one in _objects(traffic)]
    with kvcanary.watch(llm, mode="log"):
        told["twice"] = _refusal(llm)
        during = [set(vars(one)) for one in _objects(traffic)]
        told["same_watched"] = _answers(llm) == answers
    told["hooked"] = sum(len(now - then) for now, then in zip(during, before, strict=True))
    after = [set(vars(one)) for one in _objects(traffic)]
    told["left"] = sorted(str(name) for now, then in zip(after, before, strict=True) for name in now - then)

    scheduler: Any = next(base for base in type(traffic.scheduler).__mro__ if "_preempt_request" in vars(base))
    preempt = scheduler._preempt_request
    del scheduler._preempt_request
    told["renamed"] = _refusal(llm)
    scheduler._preempt_request = preempt

    import vllm.version

    version, vllm.version.__version__ = vllm.version.__version__, "0.34.1"
    told["version"] = _refusal(llm)
    vllm.version.__version__ = version
    told["same_after"] = _answers(llm) == answers
    told["matches"] = find_adapter(llm).name
    return told
