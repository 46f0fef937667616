"""scripts/verify_checkpoint.py finds every changed byte and names its file."""

from __future__ import annotations

import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from scripts import verify_checkpoint
from tests.checkpoint.toy import Run

ROOT = Path(__file__).parents[2]


@pytest.fixture
def checkpoints(tmp_path: Path) -> Path:
    """Steps 5 and 10."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    Run(tmp_path).save(5, 10)
    dist.destroy_process_group()
    return tmp_path / "checkpoint"


def test_every_flip_of_a_byte_is_found_and_the_file_named(
    checkpoints: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chance = random.Random(0)
    step = checkpoints / "step-10"
    files = sorted(step.iterdir())
    sizes = [file.stat().st_size for file in files]
    # Half of the positions as large files have them, the others in any file alike.
    for file in chance.choices(files, sizes, k=50) + chance.choices(files, k=50):
        content = bytearray(file.read_bytes())
        position = chance.randrange(len(content))
        before = content[position]
        content[position] = chance.choice([byte for byte in range(256) if byte != before])
        file.write_bytes(content)
        assert verify_checkpoint.main([str(step)]) == 1, (file.name, position)
        out = capsys.readouterr().out
        assert file.name in out and out.endswith("the newest intact one is of step 5\n"), (file.name, position)
        content[position] = before
        file.write_bytes(content)
    assert verify_checkpoint.main([str(checkpoints)]) == 0


def test_missing_and_cut_files_of_all_steps_are_named(checkpoints: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (checkpoints / "step-5" / ".metadata").unlink()
    data = checkpoints / "step-10" / "__0_0.distcp"
    data.write_bytes(data.read_bytes()[:-1])
    (checkpoints / "step-7").mkdir()
    assert verify_checkpoint.main([str(checkpoints), "--size"]) == 1
    out = capsys.readouterr().out
    assert "step-10: 1 of 3 files are damaged\n  - __0_0.distcp: " in out
    assert "step-5: 1 of 3 files are damaged\n  - .metadata: " in out
    assert "step-7: no checkpoint: it has no manifest.json" in out
    assert out.endswith("no checkpoint is intact\n")


def test_exit_status_and_what_it_costs_to_start(checkpoints: Path) -> None:
    code = "import sys; from scripts import verify_checkpoint as v; status = v.main(sys.argv[1:]); "
    code += "assert 'torch' not in sys.modules; sys.exit(status)"
    for path, status, said in (
        (checkpoints, 0, "step-10: 3 files, intact\n"),
        (checkpoints / "step-5", 0, "step-5: 3 files, intact\n"),
        (checkpoints / "step-6", 1, "no checkpoint in "),
        (checkpoints.parent / "none", 1, "no checkpoint in "),
    ):
        result = subprocess.run([sys.executable, "-c", code, str(path)], cwd=ROOT, capture_output=True, text=True)
        assert result.returncode == status and said in result.stdout, result.stderr
    shutil.rmtree(checkpoints)
    assert verify_checkpoint.main(["unknown://x"]) == 1
