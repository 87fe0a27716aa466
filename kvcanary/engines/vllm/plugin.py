"""What vLLM calls in each of its processes. With ``KVCANARY_MODE`` absent or ``off`` it looks at one variable.

Registered in the entry-point group ``vllm.general_plugins``. Importing it imports nothing but ``os``.
"""

from __future__ import annotations

import os


def register() -> None:
    """Watch the schedulers and runners that this process will make. Idempotent.

    Raises:
        ConfigError: a ``KVCANARY_*`` variable does not fit, or the release of vLLM is not supported. vLLM does not
            start then.
    """
    if os.environ.get("KVCANARY_MODE", "").strip().lower() in ("", "off"):
        return
    from kvcanary.engines.vllm.installation import install

    install()
