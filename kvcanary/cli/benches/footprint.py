"""What the canary takes before it does anything: bytes beside each slot, and nothing at all when it is off."""

from __future__ import annotations

import subprocess
import sys

from kvcanary.cli.benches.rows import BenchError, Measured
from kvcanary.cli.benches.running import Setting

_PROBE = """
import sys
before = set(sys.modules)
import kvcanary

class Engine:
    def __init__(self):
        self.forward = lambda: None

engine = Engine()
was = dict(vars(engine))
with kvcanary.watch(engine, mode="off") as kv:
    changed = [name for name, value in vars(engine).items() if was.get(name) is not value]
    started = kv.canary is not None
heavy = ("torch", "numpy", "triton", "kvcanary.canary", "kvcanary.engines", "kvcanary.kernels", "kvcanary.bus")
loaded = [name for name in heavy if name in sys.modules and name not in before]
print(*changed, *loaded, *["canary"] * started)
"""


def measure(setting: Setting, name: str) -> Measured:
    """One of the two rows."""
    return _mode_off(name) if name == "mode_off_traces" else _record(setting, name)


def _mode_off(name: str) -> Measured:
    done = subprocess.run(  # noqa: S603 - this interpreter, a program of our own
        [sys.executable, "-c", _PROBE], capture_output=True, text=True, timeout=60, check=False
    )
    if done.returncode != 0:
        raise BenchError(f"the probe failed: {done.stderr.strip().splitlines()[-1:]}")
    traces = done.stdout.split()
    return Measured(
        name=name,
        value=len(traces),
        method=(
            "watch(engine, mode='off') in a fresh interpreter: attributes of the engine that changed, device or engine "
            "modules that were imported, and a canary if one was made"
        ),
        details={"found": traces},
    )


def _record(setting: Setting, name: str) -> Measured:
    from kvcanary.cli.benches.pool import thin_pool
    from kvcanary.record import make_keys
    from kvcanary.state import DeviceState, Limits

    slots, page_size = 4096, 16
    pool = thin_pool(slots, setting)
    state = DeviceState(pool.layout(slots, page_size), make_keys(1), Limits(max_tokens=1, max_batch_rows=1, max_rows=1))
    records = state.groups[0]
    per_slot = sum(tensor.numel() * tensor.element_size() for tensor in (records.links, records.seals)) / slots
    return Measured(
        name=name,
        value=per_slot,
        method="bytes of the link and seal tensors of one group with one part, over its slots",
        details={"owner_table_bytes_per_page": records.owner.element_size()},
    )
