"""Triton's kernels on this machine: on its GPU, or where there is none in Triton's interpreter on the CPU.

Import it before anything else imports triton: the interpreter takes over when triton is loaded.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import pytest
import torch

from kvcanary.kernels import Kernels
from kvcanary.record import Kind
from kvcanary.state import GLOBAL_WORDS, GROUP_WORDS, REPEATS, DeviceState, ViolationWord, Word
from tests.kernels.cases import state_tensors

CUDA = torch.cuda.is_available()
DEVICES = [
    pytest.param("cpu", marks=pytest.mark.skipif(CUDA, reason="the interpreter would take the GPU's kernels over")),
    pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not CUDA, reason="needs a CUDA device")]),
]
SEEDS = int(os.environ.get("KVCANARY_SEEDS", "0"))


def _interpret() -> None:
    if "triton" in sys.modules:
        return
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        # Gluon is imported at the first launch, and insists on the interpreter then.
        import triton.experimental.gluon  # noqa: F401
        from triton.runtime import interpreter

        import kvcanary.kernels.triton_backend  # noqa: F401  (decorated while the interpreter is on)
    finally:
        del os.environ["TRITON_INTERPRET"]
    _patch_once(interpreter)


def _patch_once(interpreter: Any) -> None:
    """The interpreter replaces the language's functions at every call of a device function; once is enough."""
    original, patched = interpreter._patch_lang, {}

    class Kept:
        def restore(self) -> None:
            pass

    def patch(function: Any) -> Kept:
        if function not in patched:
            patched[function] = original(function)
        return Kept()

    interpreter._patch_lang = patch


if not CUDA:
    _interpret()


def make_kernels(**tuning: Any) -> Kernels:
    """The kernels under test, with other sizes if given."""
    from kvcanary.kernels.triton_backend import TritonKernels
    from kvcanary.kernels.triton_launch import Kernel
    from kvcanary.kernels.triton_mark import mark_kernel
    from kvcanary.kernels.triton_tuning import INTERPRETED, Tuning

    if not CUDA and type(mark_kernel).__name__ != "InterpretedFunction":
        raise RuntimeError(f"triton was imported before {__name__}, so {Kernel.__name__}s would be compiled for a GPU")
    if not tuning:
        return TritonKernels()
    base = Tuning() if CUDA else INTERPRETED
    fields = {name: getattr(base, name) for name in Tuning.__dataclass_fields__}
    return TritonKernels(Tuning(**{**fields, **tuning}))


def violations(state: DeviceState, *, exact: bool) -> list[tuple[int, ...]]:
    """What the ring holds, in no order: whole rows, or kind, row and (see :func:`_without_speaker`) group only."""
    count = min(int(state.counters[Word.STORED]), len(state.violations))
    rows = state.violations[:count].tolist()
    if exact:
        return sorted(tuple(row[1:]) for row in rows)
    return sorted(
        (row[ViolationWord.KIND], 0 if CUDA else row[ViolationWord.GROUP], row[ViolationWord.ROW]) for row in rows
    )


def _without_speaker(counters: torch.Tensor) -> torch.Tensor:
    """Counters whose counts of violations are added up over groups.

    What is found about one row in several groups is reported by the first to see it, and on a GPU they see it at once.
    """
    counters = counters.clone()
    groups = counters[..., GLOBAL_WORDS:].unflatten(-1, (-1, GROUP_WORDS))
    groups[..., 0, REPEATS:] = groups[..., REPEATS:].sum(-2)
    groups[..., 1:, REPEATS:] = 0
    return counters


def kinds(state: DeviceState) -> set[str]:
    """Names of what was reported."""
    return {Kind(row[0]).name for row in violations(state, exact=False)}


def assert_same(found: DeviceState, wanted: DeviceState, *, exact: bool = True) -> None:
    """All state tensors are equal bit for bit; the violation ring as a set, the queue without its order."""
    ours, theirs = state_tensors(found), state_tensors(wanted)
    for name in ours.keys() - {"violations"}:
        one, two = ours[name].cpu(), theirs[name].cpu()
        if name in ("counters", "headers") and CUDA:
            one, two = _without_speaker(one), _without_speaker(two)
        if name == "suspects":
            one, two = one.sort().values, two.sort().values
        places = (one != two).nonzero().tolist()
        pairs = [(place, int(one[tuple(place)]), int(two[tuple(place)])) for place in places[:5]]
        assert not places, f"{name} differs at {len(places)} places, (place, found, wanted): {pairs}"
    assert violations(found, exact=exact) == violations(wanted, exact=exact)
