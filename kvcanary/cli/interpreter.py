"""Triton without a GPU."""

from __future__ import annotations

import os
import sys

from kvcanary.errors import ConfigError


def interpret_triton() -> None:
    """Have Triton's kernels interpreted in this process.

    Raises:
        ConfigError: they were compiled for a GPU here already.
    """
    # Read when the kernels are defined, so it must be set before they are imported.
    if "kvcanary.kernels.triton_backend" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1":
        raise ConfigError(
            "the Triton kernels were loaded for a GPU in this process already; run this in a process of its own, or "
            "with TRITON_INTERPRET=1"
        )
    os.environ["TRITON_INTERPRET"] = "1"
