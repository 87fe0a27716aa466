"""Nothing compiles while serving: integers of a launch never make a new kernel, and no size needs one of its own."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kernels.triton_rig import CUDA, make_kernels  # before triton can be loaded

# isort: split
from kvcanary.kernels.triton_backend import TritonKernels
from tests.kernels.cases import LIMITS, World
from tests.kernels.pools import GroupSpec

ROOT = Path(__file__).parents[2]
MODULES = sorted((ROOT / "kvcanary" / "kernels").glob("triton_*.py"))
SIZES = (1, 2, 15, 16, 17, 31, 32, 33, 64, 65, 128)

LISTING = """
import importlib, json, sys
from triton.runtime.jit import JITFunction

found = {}
for name in json.loads(sys.argv[1]):
    for value in vars(importlib.import_module(f"kvcanary.kernels.{name}")).values():
        if isinstance(value, JITFunction) and value.__name__.endswith("_kernel"):
            found[value.__name__] = [
                p.name for p in value.params
                if not p.is_constexpr and not (p.do_not_specialize and p.annotation_type == "i64")
            ]
print(json.dumps(found))
"""


def decorators(function: ast.FunctionDef) -> set[str]:
    return {ast.unparse(decorator) for decorator in function.decorator_list}


def kernels_in_source() -> dict[str, set[str]]:
    return {
        node.name: decorators(node)
        for module in MODULES
        for node in ast.parse(module.read_text("utf-8")).body
        if isinstance(node, ast.FunctionDef) and node.name.endswith("_kernel")
    }


def test_every_kernel_is_an_entry_point() -> None:
    found = kernels_in_source()
    assert len(found) >= 10
    assert {name: names for name, names in found.items() if names != {"entry"}} == {}


def test_kernels_are_launched_by_their_wrapper_only() -> None:
    launching = {
        module.name
        for module in MODULES
        for node in ast.walk(ast.parse(module.read_text("utf-8")))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Subscript)
        and "grid" in ast.unparse(node.func.slice)
    }
    assert launching == {"triton_launch.py"}


def test_no_integer_of_a_launch_is_specialised_or_narrowed() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    names = json.dumps([module.stem for module in MODULES])
    command = [sys.executable, "-c", LISTING, names]
    result = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=ROOT, env={**environment, "PYTHONPATH": str(ROOT)}
    )
    assert result.returncode == 0, result.stderr[-3000:]
    found = json.loads(result.stdout)
    assert set(found) == set(kernels_in_source())
    assert {name: integers for name, integers in found.items() if integers} == {}


@pytest.mark.skipif(CUDA, reason="this world lives on the CPU")
def test_no_size_needs_a_kernel_that_was_not_prepared() -> None:
    world = World(3, (GroupSpec(page_size=16, pages=200),), limits=LIMITS, plain=True)
    state, kernels = world.new_state(), make_kernels()
    assert isinstance(kernels, TritonKernels)
    kernels.prepare(state)
    known = kernels._of(state).kernels._known
    before = set(known)
    request, facts = world.admit()
    for size in SIZES:
        world.run(world.plan([(request, request.length, size)], facts), (kernels, state), scrub_bytes=size * 300)
        facts = []
    assert set(known) == before
