"""Watching an engine that exists already, in this process."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any

from kvcanary.engines.vllm.contract import check_version
from kvcanary.errors import ConfigError

if TYPE_CHECKING:
    from kvcanary.canary import Canary
    from kvcanary.engines.vllm.worker import WorkerWatch

_RUNNER_2 = "vllm.v1.worker.gpu.model_runner"
_RUNNER_1 = "vllm.v1.worker.gpu_model_runner"


def attach(engine: Any, canary: Canary) -> Callable[[], None]:
    """Watch the scheduler and the worker of ``engine``; returns what undoes it.

    Raises:
        ConfigError: they are out of reach, or cannot be watched; the engine is left as it was.
    """
    from kvcanary.engines.vllm.scheduler import SchedulerWatch

    version = vllm_version()
    core = _core(engine)
    owner = _worker(core)
    scheduler = SchedulerWatch(core.scheduler, version)
    worker: WorkerWatch | None = None
    try:
        scheduler.begin()
        worker = watch_runner(owner.model_runner, canary, version)
        worker.patches.after(owner, "finish_weight_update", worker.weights_changed)
        worker.arm()
    except BaseException:
        scheduler.end()
        if worker is not None:
            worker.end()
        raise

    def undo() -> None:
        scheduler.end()
        worker.end()

    return undo


def vllm_version() -> str:
    """The release that is installed.

    Raises:
        ConfigError: the adapter does not support it.
    """
    version = str(import_module("vllm.version").__version__)
    check_version(version)
    return version


def watch_runner(runner: Any, canary: Canary, version: str) -> WorkerWatch:
    """Watch a runner of either kind.

    Raises:
        ConfigError: it is of neither kind, or cannot be watched.
    """
    homes = [base.__module__ for base in type(runner).__mro__ if base.__qualname__ == "GPUModelRunner"]
    if _RUNNER_2 in homes:
        from kvcanary.engines.vllm.runner_2 import watch_runner_2

        return watch_runner_2(runner, canary, version)
    if _RUNNER_1 in homes:
        from kvcanary.engines.vllm.runner_1 import watch_runner_1

        return watch_runner_1(runner, canary, version)
    raise ConfigError(
        f"the worker's model runner is a {type(runner).__module__}.{type(runner).__qualname__}; this adapter knows "
        f"GPUModelRunner of {_RUNNER_2} and of {_RUNNER_1}"
    )


def _core(engine: Any) -> Any:
    """The engine core with its scheduler, below whatever front door was given."""
    core = engine
    for name in ("llm_engine", "engine_core", "engine_core"):
        core = getattr(core, name, core)
    if not hasattr(core, "scheduler") or not hasattr(core, "model_executor"):
        raise ConfigError(
            f"the scheduler of this {type(engine).__qualname__} lives in another process ({type(core).__qualname__}), "
            "where no watch() reaches it. Set KVCANARY_MODE before the engine starts, which watches every process; or "
            "VLLM_ENABLE_V1_MULTIPROCESSING=0 for an LLM in this one"
        )
    return core


def _worker(core: Any) -> Any:
    worker = getattr(getattr(core.model_executor, "driver_worker", None), "worker", None)
    if getattr(worker, "model_runner", None) is None:
        raise ConfigError(
            f"the workers of a {type(core.model_executor).__qualname__} live in other processes, where no watch() "
            "reaches them. Set KVCANARY_MODE before the engine starts, which watches every process"
        )
    return worker
