"""Put this folder on PYTHONPATH and SGLang runs on a CPU: loaded by every Python process before anything else.

PyPI's torchvision does not load beside a CPU build of torch, and a text model needs none of it, so a name that can
be imported stands in.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import MutableSequence
from typing import Any


class _Name(type):
    """A class whose attributes are strings: enums such as ``InterpolationMode`` are asked for their members."""

    def __getattr__(cls, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return f"{cls.__name__}.{name}"


class _Module(types.ModuleType):
    __path__: MutableSequence[str] = []  # noqa: RUF012 - what the import system looks for
    __version__ = "0.0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Name(name, (), {})


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, fullname: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] != "torchvision":
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """There is nothing to run."""


sys.meta_path.insert(0, _Finder())
