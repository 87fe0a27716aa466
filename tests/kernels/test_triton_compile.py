"""Every kernel compiles for a Hopper GPU, without one: Triton brings its own assembler.

Run as a program it compiles and prints what it saw, since the interpreter may be on in the tests' own process.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kvcanary.layout import AttentionGroup, KVSource, PoolLayout
from kvcanary.state import PoisonMode
from tests.kernels.cases import LIMITS
from tests.kernels.pools import GroupSpec, make_layout

ROOT = Path(__file__).parents[2]
SERVING = (
    "describe_kernel",
    "abandon_kernel",
    "check_kernel",
    "commit_kernel",
    "facts_kernel",
    "mark_kernel",
    "sum_kernel",
)


def aligned() -> PoolLayout:
    """One KiB a token in each of four sources, as an 8B model's keys and values have."""
    views = [torch.zeros(4, 16, 4, 128, dtype=torch.bfloat16) for _ in range(4)]
    sources = tuple(
        KVSource.from_view(f"l{i // 2}.{'kv'[i % 2]}", view, layer=i // 2, component="kv"[i % 2])
        for i, view in enumerate(views)
    )
    return PoolLayout((AttentionGroup("full", "full", 64, 16, sources, null_pages=(0,)),))


def awkward() -> PoolLayout:
    """Rings, bytes at odd places, sizes that are no powers of two, a second part."""
    return make_layout(
        (
            GroupSpec(page_size=4, pages=8, window=8, ring=16, kind="swa", trash=True),
            GroupSpec(page_size=3, pages=4, shape="odd", stride_gap=2, translated=True, draft="nhd"),
        )
    )


def compile_apart(layout: str, poison: PoisonMode) -> dict[str, dict[str, Any]]:
    """What the compiler made of all kernels of a layout, in a process without the interpreter."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(ROOT)
    command = [sys.executable, "-m", "tests.kernels.test_triton_compile", layout, poison]
    result = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, cwd=ROOT)
    assert result.returncode == 0, result.stderr[-4000:]
    seen: dict[str, dict[str, Any]] = json.loads(result.stdout)
    return seen


@pytest.fixture(scope="module")
def compiled() -> dict[str, dict[str, Any]]:
    return compile_apart("aligned", "off")


@pytest.mark.timeout(600)
def test_what_serving_needs_compiles_ahead_of_time(compiled: dict[str, dict[str, Any]]) -> None:
    assert {key.split("/")[0] for key in compiled} == set(SERVING)


@pytest.mark.timeout(600)
def test_aligned_sources_are_read_with_128_bit_loads(compiled: dict[str, dict[str, Any]]) -> None:
    loads = [seen for key, seen in compiled.items() if key.startswith("sum_kernel")]
    assert len(loads) == 4
    assert all(seen["wide_loads"] >= 4 and seen["narrow_loads"] == 0 for seen in loads)


@pytest.mark.timeout(600)
def test_no_kernel_specialises_its_arguments(compiled: dict[str, dict[str, Any]]) -> None:
    assert {seen["argument_types"] for seen in compiled.values()} == {"i64"}


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("layout", ["aligned", "awkward"])
def test_every_form_of_every_kernel_compiles(layout: str) -> None:
    seen = compile_apart(layout, "full")
    window = {"window_kernel"} if layout == "awkward" else set()
    assert {key.split("/")[0] for key in seen} == {*SERVING, "fill_kernel", "search_kernel", *window}


def main(layout: str, poison: PoisonMode) -> None:
    """Compile and print."""
    from kvcanary.kernels.triton_backend import TritonKernels
    from kvcanary.kernels.triton_tuning import Tuning
    from kvcanary.record import make_keys
    from kvcanary.state import DeviceState

    state = DeviceState(
        {"aligned": aligned, "awkward": awkward}[layout](), make_keys(1), replace(LIMITS, poison=poison)
    )
    kernels = TritonKernels(Tuning()).variants(state)
    json.dump({f"{kernel.name}/{i}": _compile(kernel) for i, kernel in enumerate(kernels)}, sys.stdout)


def _compile(kernel: Any) -> dict[str, Any]:
    from triton import compile as compile_kernel
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    function, constants, options = kernel.source()
    runtime = [parameter for parameter in function.params if parameter.name not in constants]
    signature = {name: "constexpr" if name in constants else "i64" for name in function.arg_names}
    types = {parameter.annotation_type if parameter.do_not_specialize else parameter.name for parameter in runtime}
    source = ASTSource(fn=function, signature=signature, constexprs=constants)
    ptx = compile_kernel(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]
    loads = [line for line in ptx.splitlines() if "ld.global" in line]
    return {
        "argument_types": ",".join(sorted(types)),
        "wide_loads": sum(".v4." in line for line in loads),
        "narrow_loads": sum(".b32" in line and ".v" not in line for line in loads),
    }


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])  # type: ignore[arg-type]
