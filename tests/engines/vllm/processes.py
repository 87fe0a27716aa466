"""An engine in processes of its own, watched by nothing but the environment.

``python -m tests.engines.vllm.processes FOLDER`` prints a JSON line: this process's id and what it imported. The
folder gets the events of the worker's process, and the file that makes the stand-ins a plugin of vLLM's.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from tests.engines.vllm import cpu, serving

_ENTRY_POINTS = "[vllm.general_plugins]\ncpu_stand_ins = tests.engines.vllm.cpu:register\n"


def environ(folder: Path, *, runner: int = 2) -> dict[str, str]:
    """Variables of such an engine; ``folder`` is made a place of packages that holds the stand-ins' entry point."""
    info = folder / "cpu_stand_ins-0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: cpu-stand-ins\nVersion: 0\n")
    (info / "entry_points.txt").write_text(_ENTRY_POINTS)
    paths = [str(folder), str(Path(__file__).parents[3]), os.environ.get("PYTHONPATH", "")]
    return {
        **cpu.environ(runner=runner),
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        "VLLM_WORKER_MULTIPROCESSING_METHOD": "spawn",
        "TEST_VLLM_OUT": str(folder),
    }


def main() -> None:
    """Serve a few prompts."""
    cpu.register()
    llm = serving.make_llm(cpu.MODEL, distributed_executor_backend="mp", num_gpu_blocks_override=24)
    from vllm import SamplingParams, TokensPrompt

    prompts = [TokensPrompt(prompt_token_ids=prompt) for prompt in serving.Prompts(2).take(16)]
    outputs = llm.generate(prompts, SamplingParams(max_tokens=12, temperature=0, ignore_eos=True, detokenize=False))
    runners = [name for name in sys.modules if name.startswith("vllm.v1.worker.") and name.endswith("model_runner")]
    print(json.dumps({"pid": os.getpid(), "answers": len(outputs), "runners": runners}), flush=True)  # noqa: T201
    llm.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    main()
