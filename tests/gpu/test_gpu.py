"""What only a GPU can show. Each case is a run of train.py on one GPU; scripts/gpu_check.sh starts them."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.runs import TINY

ROOT = Path(__file__).parents[2]

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.accelerator.is_available(), reason="there is no GPU"),
]


def train(folder: Path, *arguments: str, **variables: str) -> list[dict[str, Any]]:
    """Four steps of a tiny model; the rows of its metrics."""
    command = [sys.executable, "train.py", *TINY, "--training.steps=4", f"--job.dump_folder={folder}", *arguments]
    environment = os.environ | {"PYTHONPATH": str(ROOT)} | variables
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_gpu_follows_the_cpu(tmp_path: Path) -> None:
    on_cpu = train(tmp_path / "cpu", CUDA_VISIBLE_DEVICES="", HIP_VISIBLE_DEVICES="")
    on_gpu = train(tmp_path / "gpu")
    for key in ("loss", "grad_norm"):
        assert [row[key] for row in on_gpu] == pytest.approx([row[key] for row in on_cpu], rel=1e-5), key


def test_compiled_blocks_follow_eager_ones_in_bfloat16(tmp_path: Path) -> None:
    bfloat16 = "--training.mixed_precision_param=bfloat16"
    eager = train(tmp_path / "eager", bfloat16)
    compiled = train(tmp_path / "compiled", bfloat16, "--compile.enable")
    assert [row["loss"] for row in compiled] == pytest.approx([row["loss"] for row in eager], rel=1e-3)


@pytest.mark.parametrize("backend", ["flex", "varlen"])
def test_kernels_keep_documents_apart_as_sdpa_does(tmp_path: Path, backend: str) -> None:
    own = ["--model.flavor=sixteens", "--model.attn_mask=document", "--training.mixed_precision_param=bfloat16"]
    own += ["--training.packing=best_fit", "--training.seq_len=128", "--compile.enable"]
    sdpa = train(tmp_path / "sdpa", *own)
    found = train(tmp_path / backend, *own, f"--model.attn_backend={backend}", "--activation_checkpoint.mode=selective")
    for key in ("loss", "grad_norm"):
        assert [row[key] for row in found] == pytest.approx([row[key] for row in sdpa], rel=1e-2), key


def test_memory_is_that_of_the_gpu(tmp_path: Path) -> None:
    rows = train(tmp_path)
    capacity = torch.accelerator.get_memory_info()[1]
    assert all(0 < row["memory_peak_bytes"] < capacity for row in rows)
    larger = train(tmp_path / "larger", "--training.local_batch_size=64", "--training.seq_len=128")
    assert larger[-1]["memory_peak_bytes"] > rows[-1]["memory_peak_bytes"]


def test_mfu_is_a_share_of_the_peak_where_that_is_known(tmp_path: Path) -> None:
    for row in train(tmp_path, "--training.mixed_precision_param=bfloat16", "--metrics.measure_peak_flops"):
        assert 0 < row["mfu"] < 1


@pytest.mark.parametrize("mode", ["async", "async_with_pinned_mem"])
def test_ck_async_race(tmp_path: Path, mode: str) -> None:
    """What was saved while training went on is the state at its step: from there the run goes the same way again."""
    checkpoint = ["--checkpoint.enable", "--checkpoint.interval=1", f"--checkpoint.async_mode={mode}"]
    straight = train(tmp_path, *checkpoint)
    for step in (1, 2, 3):
        again = train(tmp_path, *checkpoint, f"--checkpoint.load_step={step}", "--checkpoint.verify=checksum")
        assert [row["loss"] for row in again] == pytest.approx([row["loss"] for row in straight], rel=1e-5), step


def test_traces_show_the_gpu_and_its_memory_is_written(tmp_path: Path) -> None:
    own = ["--profiling.enable_profiling", "--profiling.profile_freq=4", "--profiling.enable_memory_snapshot"]
    train(tmp_path, *own)
    summary = (tmp_path / "profile_traces" / "step-4" / "rank-0.txt").read_text()
    assert summary.startswith("rank 0: the device in step 4\n")
    snapshot = pickle.loads((tmp_path / "memory_snapshot" / "step-4" / "rank-0.pickle").read_bytes())
    assert snapshot["segments"] and snapshot["device_traces"][0]
