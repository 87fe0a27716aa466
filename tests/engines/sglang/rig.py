"""A real SGLang scheduler in this process, driven between two turns of its own event loop.

SGLang keeps its settings in the process, so a process makes one rig.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

MODELS = Path(__file__).parent / "models"
VOCABULARY = 500
Turn = Callable[[], bool]
"""Called before each turn of the loop; True ends it once the engine is idle."""


def _randomise(model: Any, seed: int) -> None:
    """Weights that make something of their input: SGLang's dummy ones answer everything with one token."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(0, 0.1, generator=generator)


class Rig:
    """One scheduler on the CPU.

    Attributes:
        scheduler: the real one.
        finished: output ids of the requests that ended, by name.
    """

    def __init__(self, model: str = "full", **settings: Any) -> None:
        from sglang.srt.managers.scheduler import Scheduler, configure_scheduler_process
        from sglang.srt.plugins import load_plugins
        from sglang.srt.runtime_context import SpawnRanks, publish, spawn_world_rank
        from sglang.srt.server_args import PortArgs, ServerArgs

        load_plugins()
        arguments = {
            "device": "cpu",
            "load_format": "dummy",
            "skip_tokenizer_init": True,
            "attention_backend": "torch_native",
            "disable_cuda_graph": True,
            "sampling_backend": "pytorch",
            "dtype": "float32",
            "max_total_tokens": 600,
            "max_running_requests": 8,
            "context_length": 300,
            "random_seed": 1,
            "log_level": "error",
            **settings,
        }
        server = ServerArgs(model_path=str(MODELS / model), **arguments)
        server.resolve_once()
        server.check_server_args()
        ports = PortArgs.init_new(server)
        ranks = SpawnRanks(world_rank=spawn_world_rank(server, tp_rank=0, pp_rank=0), dp_rank=None, gpu_id=0)
        publish(server, role="scheduler", ranks=ranks)
        configure_scheduler_process(server, 0)
        self.scheduler: Any = Scheduler(server, ports)
        for seed, runner in enumerate(self._runners()):
            _randomise(runner.model, seed)
        self.scheduler.ipc_channels.send_to_detokenizer.send_output = self._take
        self.scheduler.ingest_requests = self._ingest
        self.random = random.Random(1)
        self.finished: dict[str, list[int]] = {}
        self._outputs: dict[str, list[int]] = {}
        self._turn: Turn = lambda: True
        self.turns = 0

    def _runners(self) -> list[Any]:
        """The target model's, and the draft model's where there is one."""
        drafts = self.scheduler.draft_worker
        return [self.scheduler.tp_worker.model_runner, *([] if drafts is None else [drafts.draft_worker.draft_runner])]

    def prompt(self, length: int) -> list[int]:
        """Random token ids."""
        return [self.random.randrange(10, VOCABULARY) for _ in range(length)]

    def submit(self, name: str, tokens: list[int], new_tokens: int, **fields: Any) -> None:
        """Queue a request."""
        from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
        from sglang.srt.sampling.sampling_params import SamplingParams

        sampling = SamplingParams(max_new_tokens=new_tokens, temperature=0.0, ignore_eos=True)
        sampling.normalize(None)
        request = TokenizedGenerateReqInput(
            rid=name,
            input_text=None,
            input_ids=array("q", tokens),
            input_embeds=None,
            mm_inputs=None,
            token_type_ids=None,
            sampling_params=sampling,
            return_logprob=False,
            logprob_start_len=-1,
            top_logprobs_num=0,
            token_ids_logprob=None,
            stream=False,
            **fields,
        )
        self.scheduler.process_input_requests([request])

    def run(self, turn: Turn = lambda: True) -> None:
        """Let the loop turn until ``turn`` has nothing more to do and no request is left."""
        self._turn = turn
        self.scheduler.gracefully_exit = False
        self.scheduler.run_event_loop()

    @property
    def idle(self) -> bool:
        """Whether no request waits or runs."""
        return bool(self.scheduler.is_fully_idle())

    def _ingest(self, stop_at_pause: bool = False) -> list[Any]:
        self.turns += 1
        if self._turn() and self.idle:
            self.scheduler.gracefully_exit = True
        return []

    def _take(self, output: Any, *_: Any) -> None:
        for name, ids, reason in zip(output.rids, output.output_ids, output.finished_reasons, strict=True):
            self._outputs.setdefault(name, []).extend(ids)
            if reason is not None:
                self.finished[name] = self._outputs.pop(name)
