"""What a save costs: how long training stands still, and how large the files are."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

_MEASURE = """
import sys, time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from tests.checkpoint.toy import Run
from titan.checkpoint.state import training_tensors
from titan.observability.device import configure_allocator

configure_allocator()
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(72)))
state_bytes = 0
for mode in ("disabled", "async"):
    run = Run(sys.argv[1], model=model, async_mode=mode, keep_latest_k=1)
    tensors = training_tensors([run.model], run.optimizer)
    state_bytes = sum(tensor.nbytes for tensor in tensors.values())
    for step in (1, 2):
        start = time.perf_counter()
        run.manager.save(step, {"step": step})
        stall = time.perf_counter() - start
        run.manager.wait()
        total = time.perf_counter() - start
    print(mode, stall, total)
    del tensors
files = sum(path.stat().st_size for path in Path(sys.argv[1], "checkpoint", "step-2").iterdir())
print(sum(parameter.numel() for parameter in model.parameters()), files / state_bytes)
"""


@pytest.mark.slow
def test_stall_and_size_of_300_million_parameters(tmp_path: Path) -> None:
    """The second save of each mode, in one process: the first one fills the buffers' pages."""
    script = [sys.executable, "-c", _MEASURE, str(tmp_path)]
    result = subprocess.run(script, capture_output=True, text=True, timeout=280)
    assert result.returncode == 0, result.stderr
    foreground, background, sizes = (line.split() for line in result.stdout.splitlines())
    parameters, size_ratio = int(sizes[0]), float(sizes[1])
    synchronous, stall = float(foreground[1]), float(background[1])
    print(f"{parameters:,} parameters: synchronous {synchronous:.2f} s, stall {stall:.2f} s, files {size_ratio:.4f}")
    assert parameters > 300_000_000
    assert stall <= 0.1 * synchronous
    assert size_ratio <= 1.02
