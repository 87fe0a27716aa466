"""Hooks on vLLM's classes, so that whatever a process makes of them is watched from its making on.

A process that never makes a scheduler or a runner (the API server) must not import their modules for our sake: classes
are patched when their modules are imported by whoever needs them.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from kvcanary.config import CanaryConfig
from kvcanary.errors import ConfigError

_DONE = "_kvcanary_installed"


def install() -> None:
    """Patch the classes that are imported already, and those that will be. Idempotent.

    Raises:
        ConfigError: a setting does not fit, or the release of vLLM is not supported.
    """
    from kvcanary.engines.vllm.attach import vllm_version

    config, version = CanaryConfig.from_env(), vllm_version()
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    patches = _patches(config, version)
    for name, patch in patches.items():
        if name in sys.modules:
            patch(sys.modules[name])
    sys.meta_path.insert(0, _Finder(patches))


def _patches(config: CanaryConfig, version: str) -> dict[str, Callable[[ModuleType], None]]:
    def runner(module: ModuleType) -> None:
        _hook(module.GPUModelRunner, "initialize_kv_cache", lambda self, call: _pool_made(self, call, config, version))

    def worker(name: str) -> Callable[[ModuleType], None]:
        def patch(module: ModuleType) -> None:
            cls = getattr(module, name)
            for method, then in _WORKER.items():
                if method in vars(cls):
                    _hook(cls, method, then)
            if "shutdown" in vars(cls):
                _hook(cls, "shutdown", lambda self, _: _shut_down(self), before=True)

        return patch

    def scheduler(module: ModuleType) -> None:
        _hook(module.Scheduler, "__init__", lambda self, _: _scheduler_made(self, version))

    return {
        "vllm.v1.worker.gpu.model_runner": runner,
        "vllm.v1.worker.gpu_model_runner": runner,
        "vllm.v1.worker.gpu_worker": worker("Worker"),
        "vllm.v1.worker.cpu_worker": worker("CPUWorker"),
        "vllm.v1.core.sched.scheduler": scheduler,
    }


def _hook(cls: type, name: str, tell: Callable[[Any, dict[str, Any]], None], *, before: bool = False) -> None:
    """Call ``tell`` with the object and the arguments by name when a method returned, or before it runs."""
    original = getattr(cls, name, None)
    if not callable(original):
        raise ConfigError(
            f"{cls.__module__}.{cls.__qualname__} has no method {name!r} to hook; use a release of vLLM that this "
            "adapter supports, or set KVCANARY_MODE=off"
        )
    if getattr(original, _DONE, False):
        return

    signature = inspect.signature(original)

    @functools.wraps(original)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        arguments = signature.bind(self, *args, **kwargs).arguments
        if before:
            tell(self, arguments)
            return original(self, *args, **kwargs)
        result = original(self, *args, **kwargs)
        tell(self, arguments)
        return result

    setattr(wrapper, _DONE, True)
    setattr(cls, name, wrapper)


def _scheduler_made(scheduler: Any, version: str) -> None:
    from kvcanary.engines.vllm.scheduler import SchedulerWatch

    SchedulerWatch(scheduler, version).begin()


_WATCHES: dict[int, Any] = {}
"""by the id of a runner: its watch, which keeps the runner alive"""


def _pool_made(runner: Any, call: dict[str, Any], config: CanaryConfig, version: str) -> None:
    if call.get("is_profiling", False):
        return
    from kvcanary.canary import Canary
    from kvcanary.engines.vllm.attach import watch_runner

    _leave(runner)  # the engine makes its pool anew, for example with a size that fits
    canary = Canary(config)
    # The stream runs before the pool is bound, so that the first event finds its readers.
    canary.start()
    try:
        _WATCHES[id(runner)] = watch_runner(runner, canary, version)
    except BaseException:
        canary.stop()
        raise


def _leave(runner: Any) -> None:
    watch = _WATCHES.pop(id(runner), None)
    if watch is not None:
        watch.end()
        watch.canary.stop()


def _shut_down(worker: Any) -> None:
    _leave(getattr(worker, "model_runner", None))


def _warm(worker: Any, _: dict[str, Any]) -> None:
    watch = _WATCHES.get(id(worker.model_runner))
    if watch is not None:
        watch.arm()


def _new_weights(worker: Any, _: dict[str, Any]) -> None:
    watch = _WATCHES.get(id(worker.model_runner))
    if watch is not None:
        watch.weights_changed()


_WORKER = {"compile_or_warm_up_model": _warm, "wake_up": _warm, "finish_weight_update": _new_weights}
"""Methods of workers, and what follows them"""


class _Finder(MetaPathFinder):
    """Lets others find a module, and has its classes patched once it is loaded."""

    def __init__(self, patches: dict[str, Callable[[ModuleType], None]]) -> None:
        self._patches = patches
        self._looking = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        patch = self._patches.get(fullname)
        if patch is None or self._looking:
            return None
        self._looking = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._looking = False
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, patch)
        return spec


class _Loader(Loader):
    def __init__(self, loader: Loader, patch: Callable[[ModuleType], None]) -> None:
        self._loader = loader
        self._patch = patch

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        self._patch(module)

    def __getattr__(self, name: str) -> Any:
        # Source, paths and resources are asked of a module's loader.
        return getattr(self._loader, name)
