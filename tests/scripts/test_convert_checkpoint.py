"""The command line; what it does is tested in tests/checkpoint/test_conversion.py."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from scripts.convert_checkpoint import main
from tests.checkpoint.test_huggingface import strong_model
from tests.distributed.tiny_models import UNTIED

ROOT = Path(__file__).resolve().parents[2]
NAMED = ["--experimental.custom_import=tests.distributed.tiny_models", "--model.name=tiny", "--model.flavor=untied"]


def run(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    """Exit status, stdout and stderr."""
    status = 0
    try:
        main(arguments)
    except SystemExit as end:
        assert isinstance(end.code, int)
        status = end.code
    out, err = capsys.readouterr()
    return status, out, err


def test_there_and_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, file, folder = strong_model(UNTIED), tmp_path / "model.pt", tmp_path / "hf"
    torch.save(model.state_dict(), file)
    status, out, _ = run([str(file), str(folder), "--to=hf", "--export_dtype=float16", *NAMED], capsys)
    assert (status, out) == (0, f"{file} (torch) -> {folder} (hf)\n")
    assert torch.equal(load_file(folder / "model.safetensors")["lm_head.weight"], model.output.weight.half())
    status, out, _ = run([str(folder), str(tmp_path / "dcp"), "--to=dcp", *NAMED], capsys)
    assert (status, out) == (0, f"{folder} (hf) -> {tmp_path / 'dcp' / 'step-0'} (dcp)\n")
    status, out, _ = run([str(tmp_path / "dcp"), str(tmp_path / "back.pt"), "--to=torch"], capsys)
    assert (status, out) == (0, f"{tmp_path / 'dcp'} (dcp) -> {tmp_path / 'back.pt'} (torch)\n")


def test_mistakes_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run([str(tmp_path / "none"), str(tmp_path / "x"), "--to=hf"], capsys)
    assert (status, out, err) == (2, "", f"error: {tmp_path / 'none'}: no such file or folder\n")
    status, _, err = run(["a", "b", "--to=onnx"], capsys)
    assert status == 2 and "choose from" in err
    status, _, err = run(["a", "b", "--to=hf", "--exportdtype=float16"], capsys)
    assert status == 2 and "--exportdtype" in err


def test_help_needs_no_torch() -> None:
    for script in ("convert_checkpoint", "generate"):
        code = f"import sys; sys.argv = ['x', '--help']; from scripts.{script} import main\n"
        code += "try: main()\nexcept SystemExit: pass\nassert 'torch' not in sys.modules"
        done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        assert "--model.flavor" in done.stdout
