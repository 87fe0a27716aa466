"""A small real engine on the CPU, asked by tests; every wait has an end."""

from __future__ import annotations

import logging
import math
import random
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from tests.engines.models import VOCABULARY, make_model
from tests.engines.transformers_cpu import cpu_stand_ins

DEADLINE_S = 30.0


def blocks_are_shared_by_groups() -> bool:
    """Whether this is 5.17, where all attention groups draw their blocks from one pool."""
    from transformers.generation.configuration_utils import ContinuousBatchingConfig

    return "page_size" not in ContinuousBatchingConfig.__dataclass_fields__


def batching(page: int, **options: Any) -> Any:
    """The engine's own settings; the size of a page has another name in 5.17."""
    from transformers.generation.configuration_utils import ContinuousBatchingConfig

    name = "block_size" if blocks_are_shared_by_groups() else "page_size"
    return ContinuousBatchingConfig(**{name: page, **options})


def pool_groups(config: Any) -> int:
    """How many groups draw their blocks from one pool."""
    if not blocks_are_shared_by_groups():
        return 1
    counts = list(Counter(getattr(config, "layer_types", None) or ["one"]).values())
    return sum(counts) // math.gcd(*counts)


class Served:
    """A manager over a tiny model."""

    def __init__(self, kind: str, *, asynchronous: bool = False, sampled: bool = True, **options: Any) -> None:
        from transformers import GenerationConfig

        self.random = random.Random(3)
        self.model = make_model(kind)
        settings: dict[str, Any] = {
            "num_blocks": 200,
            "max_batch_tokens": 128,
            "max_requests_per_batch": 16,
            "max_blocks_per_request": 0,
            "use_async_batching": asynchronous,
        }
        self.batching = batching(8, **{**settings, **options})
        self.generation = GenerationConfig(max_new_tokens=12, do_sample=sampled, eos_token_id=-1, pad_token_id=0)
        self.manager = self.new_manager()
        self.outputs: dict[str, Any] = {}

    def new_manager(self) -> Any:
        """Another manager of the same model."""
        return self.model.init_continuous_batching(
            generation_config=self.generation, continuous_batching_config=self.batching
        )

    def prompt(self, length: int = 30) -> list[int]:
        """Random token ids."""
        return [self.random.randrange(30, VOCABULARY) for _ in range(length)]

    def ask(self, prompts: list[list[int]], *, new_tokens: int = 12) -> list[Any]:
        """Send requests and wait for their answers, or for the engine's end."""
        names = [self.manager.add_request(prompt, max_new_tokens=new_tokens) for prompt in prompts]
        end = time.monotonic() + DEADLINE_S
        while not self.outputs.keys() >= set(names):
            output = self.manager.get_result(timeout=0.1)
            if output is not None and output.is_finished():
                self.outputs[output.request_id] = output
            elif output is None and not self.manager.is_running():
                break
            assert time.monotonic() < end, f"the engine did not answer within {DEADLINE_S} seconds"
        return [self.outputs.get(name) for name in names]

    def stop(self) -> None:
        """Stop the engine, whatever it does."""
        self.manager.stop(block=True, timeout=10, hard_stop=True)


@contextmanager
def serve(kind: str = "full", *, asynchronous: bool = False, padded: bool = False, **options: Any) -> Iterator[Served]:
    """An engine that is not started yet, and is stopped at the end."""
    torch.set_num_threads(1)
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.CRITICAL)
    with cpu_stand_ins(asynchronous=asynchronous, padded=padded):
        served = Served(kind, asynchronous=asynchronous, **options)
        try:
            yield served
        finally:
            served.stop()
