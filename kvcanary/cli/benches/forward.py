"""The share of a whole forward that is as short as one can be: an 8B bf16 model's weights, read once each."""

from __future__ import annotations

import torch

from kvcanary.cli.benches.decode import Case, case_workload
from kvcanary.cli.benches.reading import read_all
from kvcanary.cli.benches.rows import GIB, Measured
from kvcanary.cli.benches.running import Setting
from kvcanary.cli.benches.timing import make_timer
from kvcanary.cli.benches.workload import Shape

PARAMETERS = 8_030_261_248
"""of an 8B model with 32 layers, a hidden size of 4,096 and a vocabulary of 128,256"""
BUFFERS = 33
"""launches: a layer each, and the head"""
SHAPES = {"forward_share_percent.bs1": Shape(1, 512), "forward_share_percent.bs64": Shape(64, 1024)}


class FloorForward:
    """Streams as many bytes as the weights of an 8B model have, at the read ceiling."""

    def __init__(self, setting: Setting) -> None:
        words = setting.size(PARAMETERS // 2 // BUFFERS, 4096)
        self._weights = [
            torch.randint(-(1 << 31), (1 << 31) - 1, (words,), dtype=torch.int32, device=setting.device)
            for _ in range(BUFFERS)
        ]

    @property
    def num_bytes(self) -> int:
        """Bytes that one forward reads."""
        return sum(weight.numel() * weight.element_size() for weight in self._weights)

    def __call__(self) -> None:
        """Launch it."""
        for weight in self._weights:
            read_all(weight)


def measure(setting: Setting, name: str) -> Measured:
    """Two captured forwards replayed in turns, one with the canary around it."""
    timer = make_timer(setting)
    workload = case_workload(setting, Case(SHAPES[name]))
    forward: FloorForward = setting.keep("floor_forward", lambda: FloorForward(setting))
    before = workload.counts()

    def watched() -> None:
        workload.enter()
        forward()
        workload.leave()

    with_canary, without = timer.compare(watched, forward, setting.repeats(240))
    after = workload.judge(before)
    if name == max(SHAPES):
        setting.drop("floor_forward")
    shape = workload.shape
    return Measured(
        name=name,
        value=100 * (with_canary - without) / without,
        method=(
            f"two CUDA graphs replayed in turns, medians: {BUFFERS} launches that read {forward.num_bytes / GIB:.1f} "
            f"GiB, with and without entry and exit around them; {shape.rows} x {shape.context} old tokens, all bytes, "
            "32 MiB scrubbed"
        ),
        details={
            "forward_ms": round(without / 1000, 4),
            "with_canary_ms": round(with_canary / 1000, 4),
            "added_us": round(with_canary - without, 2),
            "forwards": after.forward - before.forward,
        },
    )
