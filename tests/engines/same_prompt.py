"""Forty requests with one prompt, sampled, under watch: the program that shows the silent fault of transformers 5.17.0.

``python -m tests.engines.same_prompt 16`` runs it with a prompt of 16 tokens (two pages) and prints one JSON object:
the release, what the watch reported (kinds and requests), and which answers differ from a plain forward.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections import Counter
from typing import Any

import torch

import kvcanary
from kvcanary.config import CanaryConfig
from kvcanary.events import OwnershipViolated, ViolationDetected
from tests.engines.models import VOCABULARY, make_model
from tests.engines.serving import batching
from tests.engines.transformers_cpu import cpu_stand_ins

PAGE = 8
REQUESTS = 40
TOLERANCE = 1e-2
"""In log-probability; batch shapes alone move the last bits by about 1e-6."""
DEADLINE_S = 60.0


def main(prompt_length: int) -> dict[str, Any]:
    """Run the program; what it found, as plain values."""
    import transformers

    torch.set_num_threads(1)
    dice = random.Random(1)
    prompt = [dice.randrange(30, VOCABULARY) for _ in range(prompt_length)]
    reports: list[ViolationDetected | OwnershipViolated] = []

    @kvcanary.observer(queue=1 << 16)
    def keep(event: ViolationDetected | OwnershipViolated) -> None:
        reports.append(event)

    with cpu_stand_ins(asynchronous=True):
        model = make_model("full")
        with torch.no_grad():
            model.lm_head.weight.mul_(12)  # makes sampling repeat itself, as a trained model's does
        manager = _manager(model)
        config = CanaryConfig(mode="log", redact=False, scrub_mib_per_step=1.0)
        with kvcanary.watch(manager, config=config, observers=[keep]):
            manager.start()
            try:
                outputs = _ask(manager, prompt)
            finally:
                manager.stop(block=True, timeout=10, hard_stop=True)
    wrong = {
        name: difference for name, output in outputs.items() if (difference := _differs(model, output)) > TOLERANCE
    }
    named = {name for report in reports for name in _named(report)}
    return {
        "version": transformers.__version__,
        "finished": len(outputs),
        "kinds": Counter(report.kind for report in reports),
        "named": sorted(named),
        "wrong": wrong,
    }


def _manager(model: Any) -> Any:
    from transformers import GenerationConfig

    return model.init_continuous_batching(
        generation_config=GenerationConfig(max_new_tokens=24, do_sample=True, eos_token_id=-1, pad_token_id=0),
        continuous_batching_config=batching(
            PAGE,
            num_blocks=400,
            max_batch_tokens=256,
            max_blocks_per_request=0,
            use_async_batching=True,
            return_logprobs=True,
        ),
    )


def _ask(manager: Any, prompt: list[int]) -> dict[str, Any]:
    """The first request alone, so that its pages are cached; the others one after another while earlier ones run."""
    outputs: dict[str, Any] = {}
    end = time.monotonic() + DEADLINE_S
    for number in range(REQUESTS):
        manager.add_request(prompt, request_id=f"ask-{number}", max_new_tokens=24, eos_token_id=-1, streaming=True)
        # The first one ends before the next begins; then one is added for each few tokens that stream out.
        _receive(manager, outputs, tokens=10_000 if number == 0 else 8, end=end)
    while len(outputs) < REQUESTS and time.monotonic() < end and manager.is_running():
        _receive(manager, outputs, tokens=1, end=end)
    return outputs


def _receive(manager: Any, outputs: dict[str, Any], *, tokens: int, end: float) -> None:
    while tokens > 0 and time.monotonic() < end and manager.is_running():
        output = manager.get_result(timeout=0.1)
        if output is None:
            continue
        tokens -= 1
        if output.is_finished():
            outputs[output.request_id] = output
            return


def _differs(model: Any, output: Any) -> float:
    """How far the engine's log-probabilities are from those of one plain forward of the same tokens."""
    tokens = output.prompt_ids + output.generated_tokens
    model.config._attn_implementation = "sdpa"
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]
    expected = logits.float().log_softmax(-1)[len(output.prompt_ids) - 1 : -1]
    expected = expected.gather(1, torch.tensor(output.generated_tokens)[:, None])[:, 0]
    return float((expected - torch.tensor(output.logprobs)).abs().max())


def _named(report: ViolationDetected | OwnershipViolated) -> set[str]:
    names = {report.request}
    names |= {report.other} if isinstance(report, OwnershipViolated) else {report.writer_request, report.owner_request}
    return names - {""}


if __name__ == "__main__":
    print(json.dumps(main(int(sys.argv[1]))))  # noqa: T201
