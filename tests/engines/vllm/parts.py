"""Programs of this folder one after the other, in one process: what is dear is importing vLLM.

``python -m tests.engines.vllm.parts RUNNER NAME...`` prints the JSON lines of each named part, with ``part`` in them;
for a part that failed, its traceback in ``failed``.
"""

from __future__ import annotations

import json
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

from tests.engines.vllm import serving


def _parts() -> dict[str, Callable[[int], Iterator[dict[str, Any]]]]:
    from tests.engines.vllm import attaching, failed_load, faults, heal, weights

    return {
        "attaching": attaching.run_all,
        "faults": faults.run_all,
        "healed": heal.run_all,
        "failed_load": failed_load.run_all,
        "weights": weights.run_all,
    }


def main(runner: int, names: list[str]) -> None:
    """Run the named parts on engines of one runner."""
    serving.start(runner=runner)
    parts = _parts()
    for name in names:
        try:
            before = time.process_time()
            for line in parts[name](runner):
                spent = round(time.process_time() - before, 1)
                print(json.dumps({"part": name, "cpu_s": spent, **line}), flush=True)  # noqa: T201
        except Exception:  # noqa: BLE001 - the other parts are to run
            print(json.dumps({"part": name, "failed": traceback.format_exc()}), flush=True)  # noqa: T201


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
