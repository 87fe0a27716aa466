"""The entry point that SGLang loads in each of its processes (group ``sglang.srt.plugins``).

Nothing happens unless ``KVCANARY_MODE`` is set and not ``off``, nor where no scheduler can run. SGLang logs and
swallows what a plugin raises, so all that can fail is done when a scheduler has been made: an error there stops it.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import logging
import os
import sys
from typing import Any

_SCHEDULER = "sglang.srt.managers.scheduler"


def register() -> None:
    """Have each scheduler of this process watched, once it is made."""
    if os.environ.get("KVCANARY_MODE", "").strip().lower() in {"", "off"}:
        return
    if _SCHEDULER not in sys.modules:  # a process that only tokenizes must not import what a scheduler needs
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(f"{_SCHEDULER}.Scheduler.__init__", _attach, HookType.AFTER)


def _attach(_: None, scheduler: Any, *_args: Any, **_kwargs: Any) -> None:
    from kvcanary.watching import install_canary

    canary = install_canary(scheduler)
    if canary is not None:
        logging.getLogger("kvcanary").warning(
            "kvcanary watches this scheduler, mode=%s, groups=%s",
            canary.config.mode,
            ",".join(group.name for group in canary.layout.groups),
        )
