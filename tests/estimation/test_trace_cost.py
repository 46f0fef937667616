"""What a trace costs where it is run: CPU time and memory of `estimation.py`, whatever the size of the model."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.test_train import clean_environment
from titan.estimation.hardware import GIB
from titan.estimation.run import DOESNT_FIT_STATUS
from titan.parallelisms.schedules import SCHEDULES

ROOT = Path(__file__).parents[2]
CONFIGS = sorted(path.name for path in (ROOT / "train_configs").glob("*.toml"))
SECONDS, SECONDS_OF_PIPELINES = 15, 30


def cost(*arguments: str) -> tuple[float, float]:
    """CPU seconds and GiB."""
    command = [sys.executable, "estimation.py", "--estimation.method=trace", *arguments]
    process = subprocess.Popen(command, cwd=ROOT, env=clean_environment(), stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode in (0, DOESNT_FIT_STATUS)
    return usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024 / GIB


@pytest.mark.slow
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("config", CONFIGS)
def test_any_config(config: str, compiled: bool) -> None:
    gpus = 2048 if "405b" in config else 64
    compile = ["--compile.enable"] if compiled else []
    seconds, gib = cost(f"--job.config_file={config}", f"--estimation.gpus={gpus}", *compile)
    assert seconds <= SECONDS and gib <= 0.6


@pytest.mark.slow
def test_405b_in_three_dimensions() -> None:
    degrees = ("--parallelism.tensor_parallel_degree=8", "--parallelism.context_parallel_degree=2")
    arguments = ("--job.config_file=llama3_405b.toml", "--estimation.gpus=2048", "--compile.enable", *degrees)
    seconds, gib = cost(*arguments)
    assert seconds <= SECONDS and gib <= 0.6


@pytest.mark.slow
@pytest.mark.parametrize("windows", [32, 256])
@pytest.mark.parametrize(
    "schedule", ["1F1B", "Interleaved1F1B", "LoopedBFS", "GPipe", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"]
)
def test_pipelines(schedule: str, windows: int) -> None:
    compiled = [] if SCHEDULES[schedule].splits_backward else ["--compile.enable"]
    seconds, gib = cost(
        "--job.config_file=llama3_405b.toml",
        "--estimation.gpus=512",
        *compiled,
        "--parallelism.tensor_parallel_degree=8",
        "--parallelism.pipeline_parallel_degree=8",
        f"--parallelism.pipeline_parallel_schedule={schedule}",
        f"--training.local_batch_size={windows}",
    )
    assert seconds <= SECONDS_OF_PIPELINES and gib <= 0.6
