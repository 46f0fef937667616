"""ck-partial: whatever a kill, a full disk or a bad disk leaves is never loaded, and always named."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint.toy import Run, load
from tests.distributed.world import Worlds
from titan.config.errors import UserError


@pytest.fixture
def two(tmp_path: Path, alone: None) -> Path:
    """A dump folder with steps 5 and 10."""
    Run(tmp_path).save(5, 10)
    return tmp_path


def _shorten(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-100])


def _empty(file: Path) -> None:
    file.write_bytes(b"")


def _remove(file: Path) -> None:
    file.unlink()


@pytest.mark.parametrize(
    ("name", "damage", "found"),
    [
        (".metadata", _remove, "the file is missing"),
        (".metadata", _empty, "0 found"),
        ("__0_0.distcp", _shorten, "bytes expected, "),
        ("__0_0.distcp", _remove, "the file is missing"),
        ("train_state.json", _remove, "the file is missing"),
    ],
)
def test_ck_partial_damaged_files(two: Path, name: str, damage: Any, found: str) -> None:
    damage(two / "checkpoint" / "step-10" / name)
    with pytest.raises(UserError) as raised:
        Run(two, verify="size").manager.load()
    text = str(raised.value)
    assert "step-10 is damaged" in text and f"- {name}: " in text and found in text
    assert text.endswith("The newest intact one is of step 5: resume from it with --checkpoint.load_step=5")
    assert Run(two, verify="size", load_step=5).manager.load() == {"step": 5}


def test_no_intact_one_is_offered_when_there_is_none(two: Path) -> None:
    for step in (5, 10):
        _empty(two / "checkpoint" / f"step-{step}" / "train_state.json")
    with pytest.raises(UserError, match=r"No other checkpoint there is intact.* another job\.dump_folder"):
        Run(two).manager.load()


@pytest.mark.parametrize(
    ("manifest", "reason"),
    [
        (None, "it has no manifest.json"),
        ("", "can't be read"),
        ('{"format": 1, "step": 10', "can't be read"),
        ("[]", "has format None, this titan reads 1"),
        ('{"format": 2}', "has format 2, this titan reads 1"),
        ('{"format": 1, "step": 10}', "incomplete or broken"),
        ("another step's", "is of step 5"),
    ],
)
def test_ck_partial_folders_without_a_valid_manifest(
    two: Path, log: pytest.LogCaptureFixture, manifest: str | None, reason: str
) -> None:
    path = two / "checkpoint" / "step-10" / "manifest.json"
    if manifest is None:
        path.unlink()
    elif manifest == "another step's":
        shutil.copy(two / "checkpoint" / "step-5" / "manifest.json", path)
    else:
        path.write_text(manifest)
    run = Run(two)
    assert run.manager.load() == {"step": 5}
    skipped = [line for line in log.messages if line.startswith("skipping")]
    assert len(skipped) == 1 and "step-10" in skipped[0] and reason in skipped[0]
    run.save(6)
    assert path.parent.exists()


@pytest.mark.parametrize("files", [7, {"train_state.json": {"size": "1", "sha256": ""}}, {"x": {}}, {}], ids=str)
def test_a_manifest_with_a_broken_list_of_files_is_none(two: Path, files: Any) -> None:
    path = two / "checkpoint" / "step-10" / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "files": files}))
    assert Run(two).manager.load() == {"step": 5}


def _save(folder: str, *steps: int) -> None:
    Run(folder, "fsdp").save(*steps)


def _message(folder: str, layout: str, **settings: Any) -> str:
    try:
        load(folder, layout, **settings)
    except UserError as error:
        return str(error)
    return "loaded"


def test_a_flipped_bit_is_found_by_its_checksum_on_all_ranks(worlds: Worlds, tmp_path: Path) -> None:
    folder = str(tmp_path)
    worlds(2).run(_save, folder, 1, 2)
    file = tmp_path / "checkpoint" / "step-2" / "__1_0.distcp"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)

    first, second = worlds(2).run(_message, folder, "fsdp", verify="checksum")
    assert first == second
    assert "__1_0.distcp: SHA-256 " in first and "--checkpoint.load_step=1" in first
    assert worlds(2).run(_message, folder, "fsdp", load_step=1) == ["loaded"] * 2


def test_without_verification_dcp_s_own_failure_names_rank_and_cause(two: Path) -> None:
    (two / "checkpoint" / "step-10" / "__0_0.distcp").unlink()
    with pytest.raises(RuntimeError, match=r"could not read the tensors: rank 0: FileNotFoundError: .*__0_0.distcp"):
        Run(two, verify="none").manager.load()


_KILLED_SAVE = """
import os, signal, sys
import torch.distributed as dist
from tests.checkpoint.toy import Run
from titan.checkpoint import {module} as module

def die(*args):
    os.kill(os.getpid(), signal.SIGKILL)

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
run = Run(sys.argv[1])
run.manager.load()
module.{function} = die
run.save(20)
"""


@pytest.mark.slow  # test_kill.py covers these instants among others, in forks
@pytest.mark.parametrize(
    ("module", "function", "survivor"),
    [("folders", "write_manifest", 10), ("folders", "remove_file", 20)],
)
def test_ck_partial_kill_in_mid_save(two: Path, module: str, function: str, survivor: int) -> None:
    script = _KILLED_SAVE.format(module=module, function=function)
    process = subprocess.run([sys.executable, "-c", script, str(two)], capture_output=True, text=True, timeout=120)
    assert process.returncode == -signal.SIGKILL, process.stderr
    root = two / "checkpoint"
    assert sorted(path.name for path in root.iterdir()) == ["step-10", "step-20", "step-5"]
    run = Run(two)
    assert run.manager.load() == {"step": survivor}
    assert (root / "step-20").exists() == (survivor == 20) and not list(root.glob("*/.*unfinished"))
    run.save(21)
    assert Run(two).manager.load() == {"step": 21}
