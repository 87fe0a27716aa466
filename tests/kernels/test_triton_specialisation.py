"""Nothing compiles while serving: integers of a launch never make a new kernel, and no size needs one of its own."""

from __future__ import annotations

import ast
import itertools
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.kernels.triton_rig import CUDA, make_kernels  # before triton can be loaded

# isort: split
from kvcanary.batch import ForwardBatch
from kvcanary.canary import Canary
from kvcanary.config import CanaryConfig
from kvcanary.kernels import DeviceFact, FactOp, Kernels
from kvcanary.kernels.triton_backend import TritonKernels
from kvcanary.kernels.triton_launch import Kernel
from kvcanary.state import DeviceState, PoisonMode
from tests.canary.hand import HandEngine
from tests.kernels.cases import LIMITS, POISONED, World, with_group
from tests.kernels.pools import GroupSpec

ROOT = Path(__file__).parents[2]
MODULES = sorted((ROOT / "kvcanary" / "kernels").glob("triton_*.py"))
ON_CPU = pytest.mark.skipif(CUDA, reason="these worlds live on the CPU")
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


class Watch:
    """Which compiled forms were made ready, and which were asked for; which form a call takes is the host's choice."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, launch: bool) -> None:
        self.ready: set[Kernel] = set()
        self.launched: set[Kernel] = set()
        self._preparing = False
        prepare, compile_, call = TritonKernels.prepare, Kernel.compile, Kernel.__call__

        def watched_prepare(kernels: TritonKernels, state: DeviceState) -> None:
            self._preparing = True
            prepare(kernels, state)
            self._preparing = False

        def watched_compile(kernel: Kernel) -> None:
            if self._preparing:  # the interpreter, which has nothing to compile, asks at every launch
                self.ready.add(kernel)
            compile_(kernel)

        def watched_call(kernel: Kernel, grid: tuple[int, int, int], *arguments: int) -> None:
            self.launched.add(kernel)
            if launch:
                call(kernel, grid, *arguments)

        monkeypatch.setattr(TritonKernels, "prepare", watched_prepare)
        monkeypatch.setattr(Kernel, "compile", watched_compile)
        monkeypatch.setattr(Kernel, "__call__", watched_call)

    def late(self) -> list[str]:
        """Forms that were launched without having been made ready."""
        return sorted(f"{kernel.name} {kernel.source()[1]}" for kernel in self.launched - self.ready)

    def idle(self) -> list[str]:
        """Forms that were made ready for nothing."""
        return sorted(f"{kernel.name} {kernel.source()[1]}" for kernel in self.ready - self.launched)


@ON_CPU
def test_no_size_needs_a_kernel_that_was_not_prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(3, (GroupSpec(page_size=16, pages=200),), limits=LIMITS, plain=True)
    state, kernels = world.new_state(), make_kernels()
    watch = Watch(monkeypatch, launch=True)
    kernels.prepare(state)
    request, facts = world.admit()
    for size in SIZES:
        world.run(world.plan([(request, request.length, size)], facts), (kernels, state), scrub_bytes=size * 300)
        facts = []
    assert watch.launched
    assert watch.late() == []


LAYOUTS = {
    "one group": (GroupSpec(page_size=4, pages=60),),
    "one group with reserved pages": (GroupSpec(page_size=4, pages=60, null=True, trash=True),),
    "full and window": (
        GroupSpec(page_size=4, pages=60, draft="tiny"),
        GroupSpec(page_size=4, pages=60, kind="swa", window=8, translated=True),
    ),
    "full and ring": (
        GroupSpec(page_size=4, pages=60),
        GroupSpec(page_size=4, pages=20, kind="swa", window=8, ring=16, max_rewind=4),
    ),
    "rings alone": (GroupSpec(page_size=4, pages=20, kind="swa", window=8, ring=16, max_rewind=4),),
    "more regions than one launch takes": tuple(GroupSpec(page_size=4, pages=20, shape="tiny") for _ in range(9)),
}


def ask_for_everything(world: World, kernels: Kernels, state: DeviceState) -> None:
    """All that differs between configurations and batches, in as few calls as show it."""
    request, facts = world.admit()
    poisons = {"", POISONED if state.limits.poison != "off" else ""}
    for tokens in (3, 30):
        batch = world.plan([(request, 0, tokens)], facts).batch
        given = batch.groups
        batches = [
            batch,
            replace(batch, linked=False),
            replace(batch, groups=(None,) * len(given)),
            replace(batch, groups=(given[0], *[None] * (len(given) - 1))),
            *(with_group(batch, g, translation=torch.arange(900)) for g in range(len(given))),
        ]
        for batch, poison in itertools.product(batches, poisons):
            enter(kernels, state, batch, poison)
    for part, poison, scrub, nonfinite, last in itertools.product(
        (POISONED, "draft", ""), {"off", state.limits.poison}, (0, 600), (True, False), (True, False)
    ):
        kernels.seal(state, part, scrub, last=last, nonfinite=nonfinite, poison=poison)
    kernels.abandon(state)
    fill = [DeviceFact(FactOp.POISON, pages=[2])] if state.limits.poison == "full" else []
    kernels.facts(state, [*facts, DeviceFact(FactOp.RESTAMP, pages=[2]), *fill])
    for count in (7, 5000):
        kernels.fingerprint(state, 0, POISONED, torch.arange(count))


def enter(kernels: Kernels, state: DeviceState, batch: ForwardBatch, poison: str) -> None:
    groups = state.layout.groups
    rings = [g for g, group in enumerate(groups) if group.ring is not None]
    full = [g for g, group in enumerate(groups) if group.ring is None]
    if full:
        kernels.mark(state, batch, full, first=True, poison=poison)
    kernels.check(state, batch, full + rings)
    if rings:
        kernels.mark(state, batch, rings, first=not full, poison=poison)
    if state.layout.window_pair is not None:
        kernels.window(state, batch, *state.layout.window_pair, every=1)


@ON_CPU
@pytest.mark.parametrize("poison", ["off", "sample", "full"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_call_needs_a_kernel_that_was_not_prepared(
    layout: str, poison: PoisonMode, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert watch_calls(LAYOUTS[layout], poison, monkeypatch).late() == []


@ON_CPU
def test_no_kernel_is_prepared_that_no_call_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = watch_calls((*LAYOUTS["full and window"], *LAYOUTS["rings alone"]), "full", monkeypatch)
    assert watch.ready
    assert watch.idle() == []


def watch_calls(specs: tuple[GroupSpec, ...], poison: PoisonMode, monkeypatch: pytest.MonkeyPatch) -> Watch:
    world = World(3, specs, limits=replace(LIMITS, poison=poison), plain=True)
    state, kernels = world.new_state(), make_kernels(large_items=1000)
    watch = Watch(monkeypatch, launch=False)
    kernels.prepare(state)
    ask_for_everything(world, kernels, state)
    return watch


@ON_CPU
@pytest.mark.parametrize(
    "settings",
    [{}, {"check_nonfinite": False}, {"fingerprint": "off"}, {"poison": "sample"}, {"poison": "full"}],
    ids=str,
)
def test_no_configuration_needs_a_kernel_that_was_not_prepared(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = Watch(monkeypatch, launch=True)
    canary = Canary(CanaryConfig(mode="log", backend="triton", **settings)).start()
    try:
        engine = HandEngine(canary, pages=16)
        engine.admit("a", 9)
        engine.step()
        canary.scrub(0.01)
        with canary.step():
            canary.enter(engine.batch)
            canary.turn_to("")
            canary.leave()
    finally:
        canary.stop(5)
    assert len(watch.launched) > 4
    assert watch.late() == []
