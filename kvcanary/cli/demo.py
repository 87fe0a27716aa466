"""``kvcanary demo``: a real engine serves two tiny models, clean and broken on purpose, and every fault is named."""

from __future__ import annotations

import logging
import sys
import time
from typing import TYPE_CHECKING, Literal, get_args

from kvcanary.cli.models import ModelName
from kvcanary.cli.report import Results
from kvcanary.faults.injectors import FAULTS, Fault, fault

if TYPE_CHECKING:
    from kvcanary.cli.session import Options, Output


def demo(
    *,
    seconds: float = 2.0,
    seed: int = 0,
    json: bool = False,
    model: Literal["both", "full", "mixed"] = "both",
    faults: str = "all",
) -> int:
    """Serve two small models, clean and then with planted faults, and watch each fault being named.

    The engine is the continuous batching of transformers, the models have random weights; nothing is downloaded.
    The exit status is 1 if a fault is missed, or a clean phase is not silent or verifies too little.

    Examples:
      kvcanary demo                                    a live view, then a table
      kvcanary demo --json > demo.jsonl                one JSON object a line
      kvcanary demo --model mixed --seconds 10         one model, longer
      kvcanary demo --faults flipped-bit,stale-slot    these two faults only
      kvcanary demo --faults none                      clean traffic only

    Args:
        seconds: length of each clean phase, before and after the faults of each model.
        seed: of weights, prompts and victims.
        json: JSON lines instead of the live view; also when the output is no terminal.
        model: which model to serve.
        faults: names separated by commas, or all, or none; a wrong name lists the right ones.

    Returns:
        The exit status.
    """
    from kvcanary.cli.session import Options

    options = Options(
        seconds=seconds,
        seed=seed,
        models=get_args(ModelName) if model == "both" else (model,),
        faults=_choose(faults),
    )
    return _play(options, _output(json=json))


def _choose(names: str) -> tuple[Fault, ...]:
    if names in ("all", "none"):
        return FAULTS if names == "all" else ()
    return tuple(fault(name.strip()) for name in names.split(","))


def _output(*, json: bool) -> Output:
    if json or not sys.stdout.isatty():
        from kvcanary.cli.json_lines import JsonLines

        return JsonLines(sys.stdout.buffer)
    from kvcanary.cli.live import LiveView

    return LiveView()


def _play(options: Options, output: Output) -> int:
    import anyio
    import torch
    from transformers.utils.logging import set_verbosity_error

    from kvcanary.cli.session import serve

    # Tiny models run many times slower when threads have to meet after each of their operations.
    torch.set_num_threads(1)
    set_verbosity_error()
    # The engine's scheduler has a logger of its own, and warns when Ctrl-C stops it before it has begun.
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.ERROR)
    began = time.perf_counter()
    results = Results()
    try:
        anyio.run(serve, options, output, results)
        output.closing(results, time.perf_counter() - began)
    except ExceptionGroup as group:
        raise _innermost(group) from group
    return 1 if results.problems else 0


def _innermost(group: ExceptionGroup[Exception]) -> Exception:
    error: Exception = group
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    return error
