"""What a run says of itself in its first event."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import secrets
import socket
import time
from collections.abc import Mapping

import torch

from kvcanary.binding import Binding
from kvcanary.events import GroupInfo, Origin, RunStarted
from kvcanary.kernels.poison import exemption, poison_runs
from kvcanary.layout import PoolLayout
from kvcanary.record import POISON_LEAST


def describe_run(
    binding: Binding, *, engine: str, engine_version: str, unarmed: Mapping[str, str], ranks: Mapping[str, int]
) -> RunStarted:
    """The first event of a run; call after it has its layout and kernels."""
    config, layout = binding.config, binding.layout
    kernels = binding.kernels
    return RunStarted(
        time_ns=time.time_ns(),
        monotonic_ns=time.monotonic_ns(),
        run=f"{time.time_ns() // 1_000_000:012x}-{secrets.token_hex(4)}",
        origin=Origin(
            host=socket.gethostname(),
            pid=os.getpid(),
            device=_device_name(layout.device),
            engine=str(engine),
            # Engines have versions that are more than strings, and ranks of numpy: records can hold neither.
            engine_version=str(engine_version),
            **{name: int(rank) for name, rank in ranks.items()},
        ),
        versions=_versions(),
        backend=kernels.name if kernels is not None else "",
        mode=config.mode,
        config=config.describe(),
        layout_fingerprint=layout.fingerprint,
        groups=tuple(_group_info(layout)),
        uncovered=layout.uncovered,
        roles=_roles(binding),
        unarmed=_unarmed(binding, unarmed),
    )


def _roles(binding: Binding) -> tuple[str, ...]:
    config = binding.config
    roles = ["facts", "mark", "check", "seal"]
    if config.fingerprint == "full" and config.scrub_mib_per_step > 0:
        roles.append("scrub")
    if config.swa_divergence_every and binding.layout.window_pair is not None:
        roles.append("window")
    return tuple(roles)


def _unarmed(binding: Binding, given: Mapping[str, str]) -> dict[str, str]:
    config = binding.config
    reasons = dict(given)
    if config.fingerprint == "off":
        reasons.setdefault("CONTENT", "fingerprint is off")
        reasons.setdefault("NONFINITE", "fingerprint is off: the bytes of new tokens are not read")
    elif config.scrub_mib_per_step <= 0:
        reasons.setdefault("CONTENT", "scrub_mib_per_step is 0: bytes are sealed and read again only on demand")
    if config.poison == "off":
        reasons.setdefault("WRITE_MISSING", "poison is off")
    elif "WRITE_MISSING" not in reasons:
        reasons |= _without_poison(binding.layout)
    if not config.check_nonfinite:
        reasons.setdefault("NONFINITE", "check_nonfinite is off")
    return reasons


def _without_poison(layout: PoolLayout) -> dict[str, str]:
    """Groups that take no poison, each with its reason."""
    found: dict[str, str] = {}
    for index, group in enumerate(layout.groups):
        reason = exemption(group)
        parts = layout.groups[layout.spaces[index]].parts
        if not reason and not any(poison_runs(layout, index, part) for part in parts):
            reason = f"no {POISON_LEAST} bytes of a token lie together"
        if reason:
            found[f"WRITE_MISSING in {group.name}"] = f"no poison is placed: {reason}"
    if len(found) == len(layout.groups):
        found["WRITE_MISSING"] = "no group takes poison"
    return found


def _group_info(layout: PoolLayout) -> list[GroupInfo]:
    return [
        GroupInfo(
            name=group.name,
            kind=group.kind,
            num_slots=group.num_slots,
            page_size=group.page_size,
            token_bytes=group.token_bytes,
            sources=len(group.sources),
            parts=group.parts,
            window=group.window,
            ring=group.ring,
            shares=group.shares,
        )
        for group in layout.groups
    ]


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version(), "torch": str(torch.__version__)}
    for name in ("kvcanary", "triton", "msgspec", "anyio", "structlog"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return f"{device} ({torch.cuda.get_device_name(device)})"
    return str(device)
