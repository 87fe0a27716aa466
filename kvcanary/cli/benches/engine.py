"""Tokens per second of a real engine with and without a watch: transformers continuous batching, an 8B shape.

The weights are random and made on the device; nothing is downloaded.
"""

from __future__ import annotations

import importlib
import random
import statistics
import time
from typing import Any

import torch

from kvcanary.cli.benches.rows import BenchError, Measured
from kvcanary.cli.benches.running import Setting
from kvcanary.events import Event, IncidentOpened, KernelStalled, SnapshotTaken

PAIRS = 8
REQUESTS = 64
PROMPT, OUTPUT = 512, 128
BLOCKS = 512
BATCH_TOKENS = 8192
VOCABULARY = 128_256
TIMEOUT_S = 120.0

_SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 8192,
}
_TINY = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
}


def measure(setting: Setting, name: str) -> Measured:
    """Paired runs, off and on in turns; the value is the median loss of a pair in percent."""
    for kept in ("pool", "floor_forward", "latency"):
        setting.drop(kept)
    model = _make_model(setting)
    bench = _Bench(setting, model)
    bench.run(watched=False)
    bench.run(watched=True)
    pairs: list[tuple[float, float]] = []
    for number in range(setting.size(3 if setting.quick else PAIRS, 1)):
        # Whoever comes second finds the device warmer, so they take turns.
        first = bench.run(watched=bool(number % 2))
        second = bench.run(watched=not number % 2)
        pairs.append((second, first) if number % 2 else (first, second))
    losses = [100 * (1 - on / off) for off, on in pairs]
    if bench.ear.found or not bench.ear.verified:
        raise BenchError(f"{bench.ear.verified} entries verified, reported: {bench.ear.found[:3] or 'nothing'}")
    return Measured(
        name=name,
        value=statistics.median(losses),
        method=(
            f"{len(pairs)} pairs of runs, watched and not, in turns, on one model (random bf16 weights, "
            f"{sum(p.numel() for p in model.parameters()) / 1e9:.2f} G parameters): {bench.requests} requests with "
            f"prompts of {bench.prompt} and {bench.output} new tokens each, sampled; generated tokens over the time "
            "from the first request to the last token; median loss of a pair"
        ),
        details={
            "tokens_per_s_off": round(statistics.median(off for off, _ in pairs), 1),
            "tokens_per_s_on": round(statistics.median(on for _, on in pairs), 1),
            "losses_percent": [round(loss, 3) for loss in losses],
            "entries_verified": bench.ear.verified,
            "attention": str(model.config._attn_implementation),  # noqa: SLF001 - transformers' name for it
        },
    )


class _Ear:
    """Counts what was verified and keeps what was found."""

    name = "bench.engine"
    interests: tuple[type[Event], ...] = (SnapshotTaken, IncidentOpened, KernelStalled)

    def __init__(self) -> None:
        self.verified = 0
        self.found: list[str] = []

    def handle(self, event: Event) -> None:
        """Take one event."""
        if isinstance(event, SnapshotTaken):
            self.verified = max(self.verified, sum(event.verified.get("links", {}).values()))
        elif isinstance(event, IncidentOpened):
            self.found.append(event.headline)
        elif isinstance(event, KernelStalled):
            self.found.append(f"stalled: {event.role}")


class _Bench:
    """The same requests again and again, each time on a new manager and pool."""

    def __init__(self, setting: Setting, model: Any) -> None:
        self.ear = _Ear()
        self._model = model
        self._batch_tokens, self._blocks = setting.size(BATCH_TOKENS, 64), setting.size(BLOCKS, 96)
        self._page_size = setting.size(256, 16)
        self.requests = setting.size(REQUESTS, 3)
        self.prompt, self.output = setting.size(PROMPT, 20), setting.size(OUTPUT, 6)
        rng = random.Random(3)
        size = model.config.vocab_size
        self._prompts = [[rng.randrange(size) for _ in range(self.prompt)] for _ in range(self.requests)]

    def run(self, *, watched: bool) -> float:
        """Generated tokens per second of one run."""
        from kvcanary.watching import watch

        manager = self._make_manager()
        with watch(manager, "log" if watched else "off", observers=[self.ear] if watched else ()):
            if self._model.device.type == "cuda":
                manager.warmup()
            manager.start()
            try:
                return self._serve(manager)
            finally:
                manager.stop(block=True)

    def _make_manager(self) -> Any:
        transformers: Any = importlib.import_module("transformers")
        generation = transformers.GenerationConfig(do_sample=True, max_new_tokens=self.output, eos_token_id=-1)
        batching = transformers.ContinuousBatchingConfig(
            page_size=self._page_size,
            num_blocks=self._blocks,
            max_batch_tokens=self._batch_tokens,
            allow_block_sharing=False,  # the runs repeat their prompts: nothing may be left to find
        )
        return self._model.init_continuous_batching(generation_config=generation, continuous_batching_config=batching)

    def _serve(self, manager: Any) -> float:
        if self._model.device.type == "cuda":
            torch.cuda.synchronize()
        began = time.perf_counter()
        for number, prompt in enumerate(self._prompts):
            manager.add_request(prompt, request_id=f"r{number}", max_new_tokens=self.output)
        tokens = finished = 0
        while finished < self.requests:
            result = manager.get_result(timeout=TIMEOUT_S)
            if result is None:
                raise BenchError(
                    f"the engine answered {finished} of {self.requests} requests in {TIMEOUT_S:.0f} s, then nothing"
                )
            if result.error:
                raise BenchError(f"the engine failed a request: {result.error}")
            if result.is_finished():
                finished += 1
                tokens += len(result.generated_tokens)
        return tokens / (time.perf_counter() - began)


def _make_model(setting: Setting) -> Any:
    transformers: Any = importlib.import_module("transformers")
    transformers.logging.set_verbosity_error()
    config = transformers.LlamaConfig(**(_TINY if setting.rehearse else _SHAPE))
    with torch.random.fork_rng(devices=[]), torch.device(setting.device):
        torch.manual_seed(0)
        dtype = torch.bfloat16 if setting.device == "cuda" else torch.float32
        return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa").eval()
