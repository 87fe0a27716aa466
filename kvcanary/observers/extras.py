"""Libraries that only some users need."""

from __future__ import annotations

import importlib

from kvcanary.errors import ConfigError


def require(module: str, extra: str, purpose: str) -> None:
    """Make sure that ``module`` can be imported.

    Raises:
        ConfigError: it cannot; the message names the extra that brings it.
    """
    try:
        importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"{purpose} needs {module}, which cannot be imported ({error}); install kvcanary with its extra: "
            f"pip install 'kvcanary[{extra}]'"
        ) from error
