"""What ``watch`` refuses, and what it leaves behind: an asynchronous engine on the earlier runner.

``python -m tests.engines.vllm.attaching`` prints a JSON object.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import kvcanary
from kvcanary.engines.base import find_adapter
from kvcanary.errors import ConfigError
from tests.engines.vllm import serving
from tests.engines.vllm.clean import Mode, close, engine


def _refusal(llm: Any, mode: str = "log") -> str:
    try:
        with kvcanary.watch(llm, mode=mode):
            return ""
    except ConfigError as error:
        return str(error)


def _objects(traffic: serving.Traffic) -> Iterator[Any]:
    manager = traffic.scheduler.kv_cache_manager
    yield from (traffic.scheduler, traffic.runner, manager, manager.block_pool)
    yield from manager.coordinator.single_type_managers


def main() -> None:
    """Ask for what cannot be had."""
    serving.start(runner=1, asynchronous=True)
    llm = engine(Mode("attaching", runner=1, asynchronous=True))
    traffic = serving.Traffic(llm)
    before = [set(vars(one)) for one in _objects(traffic)]
    told: dict[str, Any] = {"quarantine": _refusal(llm, "quarantine")}
    with kvcanary.watch(llm, mode="log"):
        told["twice"] = _refusal(llm)
        during = [set(vars(one)) for one in _objects(traffic)]
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
    traffic.add([[5] * 20], max_tokens=3)
    traffic.run()
    told["serves_on"] = len(traffic.answers)
    told["matches"] = find_adapter(llm).name
    close(llm)
    print(json.dumps(told))  # noqa: T201


if __name__ == "__main__":
    main()
