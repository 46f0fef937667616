"""scripts/gpu_check.sh, rehearsed on a CPU: every row of its table is run, or stands there with why it was refused."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_rehearsal(tmp_path: Path) -> None:
    done = subprocess.run(
        ["scripts/gpu_check.sh", "--rehearse", str(tmp_path)],
        cwd=ROOT,
        env=os.environ | {"PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=290,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads((tmp_path / "gpu.json").read_text())["rows"]
    assert {row["name"] for row in rows} >= {"eager", "compiled", "eager, full checkpointing"}
    for row in rows:
        assert row["median"].keys() >= {"tokens_per_second", "loss"} or row["problem"].startswith("refused: "), row
        assert f"\n| {row['name']} | " in done.stdout
    assert next(row for row in rows if row["name"] == "compiled")["median"]
