"""SGLang's own front door, in processes of its own, with nothing but an environment variable set."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
pytestmark = pytest.mark.timeout(600)
_SERVE = """
import sys, time
import sglang
if __name__ == "__main__":
    engine = sglang.Engine(
        model_path=sys.argv[1], device="cpu", load_format="dummy", skip_tokenizer_init=True,
        attention_backend="torch_native", disable_cuda_graph=True, sampling_backend="pytorch", dtype="float32",
        max_total_tokens=600, max_running_requests=8, context_length=300,
        log_level="warning",
    )
    answers = engine.generate(
        input_ids=[[5, 6, 7, 8] * 5, [5, 6, 7, 8] * 6],
        sampling_params={"max_new_tokens": 8, "temperature": 0, "ignore_eos": True},
    )
    print("LENGTHS", [len(answer["output_ids"]) for answer in answers])
    engine.shutdown()
"""


def serve(folder: Path, environment: dict[str, str], **variables: str) -> subprocess.CompletedProcess[str]:
    program = folder / "serve.py"
    program.write_text(_SERVE)
    model = Path(__file__).parent / "models" / "full"
    return subprocess.run(
        [sys.executable, str(program), str(model)],
        env={**environment, **variables}, capture_output=True, text=True, timeout=400, check=False,
    )  # fmt: skip


def test_one_environment_variable_switches_it_on(tmp_path: Path, environment: dict[str, str]) -> None:
    log = tmp_path / "canary.jsonl"
    done = serve(tmp_path, environment, KVCANARY_MODE="log", KVCANARY_LOG=str(log), KVCANARY_STATS_EVERY="5")
    assert "LENGTHS [8, 8]" in done.stdout, done.stderr[-4000:]
    assert "kvcanary watches this scheduler, mode=log, groups=full" in done.stdout + done.stderr
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    started, armed, *rest = [line["event"] for line in lines]
    assert (started, armed) == ("run.started", "canary.armed")
    assert "stats.reported" in rest
    assert "incident.opened" not in rest


def test_a_canary_that_cannot_attach_stops_the_start_and_says_why(environment: dict[str, str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.engines.sglang.program", "tokens"],
        cwd=ROOT,
        env={**environment, "KVCANARY_MODE": "log", "KVCANARY_STATS_EVRY": "5"},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode != 0
    assert "REPORT" not in done.stdout
    assert "did you mean KVCANARY_STATS_EVERY?" in done.stderr
