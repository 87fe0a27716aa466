"""New weights on the real engine: what older ones cached is found out when it is used.

``python -m tests.engines.vllm.parts RUNNER weights`` prints a JSON line a way of bringing weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from tests.engines.vllm import serving
from tests.engines.vllm.clean import Mode, engine

PROMPT = list(range(10, 60))


def _in_place(traffic: serving.Traffic) -> None:
    """As trainers of the engine's own kind do, through the worker."""
    weights = [(name, weight.detach().clone()) for name, weight in traffic.runner.get_model().named_parameters()]
    arguments = {"weights_iterator": iter(weights), "is_checkpoint_format": False}
    with torch.no_grad():
        traffic.core.collective_rpc("reload_weights", kwargs=arguments)


def _by_the_model(traffic: serving.Traffic) -> None:
    """As workers of other trainers do, a few weights at a time."""
    model = traffic.runner.get_model()
    for name in ("lm_head.weight", "model.norm.weight"):
        model.load_weights([(name, model.get_parameter(name).detach().clone())])


def _serve(llm: Any, bring: Callable[[serving.Traffic], None], *, reset: bool) -> serving.Found:
    traffic = serving.Traffic(llm)
    with serving.watched(llm) as (found, _):
        traffic.add([PROMPT], max_tokens=4)
        traffic.run()
        bring(traffic)
        if reset:
            traffic.engine.reset_prefix_cache()
        traffic.add([PROMPT], max_tokens=4)
        traffic.run()
        traffic.core.step()
    traffic.reset()
    return found


def run_all(runner: int) -> Iterator[dict[str, Any]]:
    """Each way, with what is cached kept and dropped."""
    with engine(Mode("weights", runner=runner)) as llm:
        for bring in (_in_place, _by_the_model):
            kept, dropped = _serve(llm, bring, reset=False), _serve(llm, bring, reset=True)
            yield {
                "way": bring.__name__.strip("_"),
                "kept": sorted(kept.kinds),
                "epochs": kept.epochs,
                "dropped": sorted(dropped.kinds),
            }
