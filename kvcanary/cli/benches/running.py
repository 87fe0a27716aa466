"""Runs rows one by one: what fails or cannot run here is a row with its reason, never one that holds."""

from __future__ import annotations

import gc
import importlib
import math
import os
import platform
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any, TypeVar

from kvcanary.cli.benches.rows import Measured, Row
from kvcanary.errors import ConfigError

T = TypeVar("T")

VERSIONS = ("kvcanary", "torch", "triton", "transformers", "msgspec", "structlog", "anyio")


@dataclass(slots=True)
class Setting:
    """Where and how thoroughly to measure.

    Attributes:
        device: ``"cuda"`` or ``"cpu"``.
        quick: fewer repetitions; sizes stay.
        rehearse: tiny sizes on any device, to try the bench itself. Nothing is judged.
        kept: what several rows share (pools, read ceiling), by name.
    """

    device: str
    quick: bool = False
    rehearse: bool = False
    kept: dict[str, Any] = field(default_factory=dict[str, Any], repr=False)

    def repeats(self, full: int) -> int:
        """How often to repeat what is repeated ``full`` times at full length."""
        if self.rehearse:
            return 2
        return max(8, full // 6) if self.quick else full

    def size(self, full: int, tiny: int) -> int:
        """A size that only a rehearsal changes."""
        return min(full, tiny) if self.rehearse else full

    def keep(self, name: str, make: Callable[[], T]) -> T:
        """``make()``, once for all rows of a run."""
        if name not in self.kept:
            self.kept[name] = make()
        kept: T = self.kept[name]
        return kept

    def drop(self, name: str) -> None:
        """Give back what :meth:`keep` holds under ``name``, and its device memory."""
        if self.kept.pop(name, None) is not None and self.device == "cuda":
            import torch

            gc.collect()
            torch.cuda.empty_cache()


@dataclass(frozen=True, slots=True)
class Outcome:
    """A row after the run. Without ``measured`` there is a ``reason``."""

    row: Row
    measured: Measured | None = None
    reason: str = ""
    failed: bool = False
    rehearsal: bool = False

    @property
    def holds(self) -> bool | None:
        """Whether the target is reached; None for rows without one, False for rows that did not run."""
        if self.measured is None or self.rehearsal:
            return False
        return self.row.holds(self.measured.value)

    def as_json(self) -> dict[str, Any]:
        """The row in the fixed form, with what else is known after it."""
        row, measured = self.row, self.measured
        plain: dict[str, Any] = {
            "name": row.name,
            "value": None if measured is None else _plain(measured.value),
            "unit": row.unit,
            "target": row.target,
            "holds": self.holds,
            "better": row.better,
            "title": row.title,
        }
        if measured is not None:
            plain["method"] = measured.method
            if measured.details:
                plain["details"] = measured.details
            if measured.series is not None:
                plain["series"] = measured.series
        if row.prior:
            plain["prior_art"] = row.prior
        if self.reason:
            plain["reason"] = self.reason
        if self.rehearsal:
            plain["rehearsal"] = True
        return plain


def run(rows: Sequence[Row], setting: Setting) -> Iterator[Outcome]:
    """Measure ``rows`` in order, yielding each as it is ready."""
    for row in rows:
        yield _run_row(row, setting)


def _run_row(row: Row, setting: Setting) -> Outcome:
    if row.needs == "cuda" and setting.device != "cuda" and not setting.rehearse:
        return Outcome(row, reason="needs a CUDA device; this run is on the CPU")
    try:
        measured = load_bench(row.bench)(setting, row.name)
    except Exception as error:  # noqa: BLE001 - one row that fails must not cost the others a scarce machine
        return Outcome(row, reason=_reason(error), failed=not _is_lacking(error))
    return Outcome(row, measured, rehearsal=setting.rehearse)


def load_bench(name: str) -> Callable[[Setting, str], Measured]:
    """The ``measure`` function of a module of this package."""
    measure: Callable[[Setting, str], Measured] = importlib.import_module(f"kvcanary.cli.benches.{name}").measure
    return measure


def _is_lacking(error: Exception) -> bool:
    """Whether the row failed for want of memory or of somebody else's package, and not by its own fault."""
    if isinstance(error, ModuleNotFoundError):
        return error.name is not None and not error.name.startswith("kvcanary")
    return isinstance(error, ConfigError)


def _reason(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0] if text else 'no message'}"


def _plain(value: float) -> float | int | None:
    if not math.isfinite(value):
        return None
    return int(value) if float(value).is_integer() and abs(value) >= 1000 else float(f"{value:.6g}")


def describe_machine(setting: Setting) -> dict[str, Any]:
    """Processor, device, system and versions: without them no figure means anything."""
    machine: dict[str, Any] = {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "device": setting.device,
        "versions": dict(_versions()),
    }
    if setting.device == "cuda":
        import torch

        found: Any = torch.cuda.get_device_properties(0)
        machine["gpu"] = {
            "name": found.name,
            "memory_gib": round(found.total_memory / (1 << 30), 1),
            "multiprocessors": found.multi_processor_count,
            "capability": f"{found.major}.{found.minor}",
            "l2_mib": round(found.L2_cache_size / (1 << 20), 1),
            "cuda": torch.version.cuda,
            "driver": _driver(),
        }
    return machine


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:  # noqa: PTH123 - a pseudo file
            for line in file:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _versions() -> Iterator[tuple[str, str]]:
    from kvcanary._version import __version__

    for name in VERSIONS:
        try:
            yield name, version(name)
        except PackageNotFoundError:
            if name == "kvcanary":
                yield name, __version__


def _driver() -> str:
    """The driver's version as its kernel module tells; "" where it does not."""
    try:
        with open("/proc/driver/nvidia/version", encoding="utf-8") as file:  # noqa: PTH123 - a pseudo file
            words = file.readline().split()
    except OSError:
        return ""
    return next((word for word in words if word[0].isdigit() and "." in word), "")
