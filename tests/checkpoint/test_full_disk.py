"""Disks that are full or read-only in a save: every rank says so, older checkpoints stay, the next save is tried."""

from __future__ import annotations

import resource
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint.toy import Contents, Run, load
from tests.distributed.world import Worlds


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 KiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(folder)]
    try:
        mounted = subprocess.run(command, capture_output=True, text=True)
    except OSError as error:
        pytest.skip(f"there is no mount(8): {error}")
    if mounted.returncode != 0:
        pytest.skip(f"mounting a small tmpfs isn't permitted here: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def _save(folder: str, step: int, settings: dict[str, Any]) -> tuple[str, Contents]:
    run = Run(folder, "fsdp", **settings)
    run.manager.load()
    run.train(step - 1, step)
    try:
        run.save(step)
    except RuntimeError as error:
        return str(error), run.contents()
    return "went on", run.contents()


def _saves(worlds: Worlds, folder: Path, step: int, **settings: Any) -> tuple[str, Contents]:
    first, second = worlds(2).run(_save, str(folder), step, settings)
    assert first == second
    return first[0], first[1]


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoint").iterdir())


@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_a_full_disk_and_a_read_only_one(worlds: Worlds, disk: Path, alone: None, mode: str) -> None:
    _, contents = _saves(worlds, disk, 1, async_mode=mode)
    with pytest.raises(OSError, match="No space left"), (disk / "filler").open("wb", buffering=0) as filler:
        while True:
            filler.write(bytes(4096))
    message, _ = _saves(worlds, disk, 2, async_mode=mode)
    assert "No space left on device" in message and "could not" in message
    assert _saves(worlds, disk, 2, async_mode=mode, on_failure="continue")[0] == "went on"
    assert _names(disk) == ["step-1"] and load(disk, "plain") == ({"step": 1}, contents)

    (disk / "filler").unlink()
    _, contents = _saves(worlds, disk, 2, async_mode=mode)
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    message, _ = _saves(worlds, disk, 3, async_mode=mode)
    assert "Read-only file system" in message
    assert _saves(worlds, disk, 3, async_mode=mode, on_failure="continue")[0] == "went on"
    assert load(disk, "plain") == ({"step": 2}, contents)
    subprocess.run(["mount", "-o", "remount,rw", str(disk)], check=True)
    _, contents = _saves(worlds, disk, 3, async_mode=mode)
    assert _names(disk) == ["step-1", "step-2", "step-3"] and load(disk, "plain") == ({"step": 3}, contents)


def _save_with_a_limit(folder: str) -> list[str]:
    """No file may grow beyond 2000 bytes during the second save."""
    run = Run(folder, "fsdp", on_failure="continue")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    for step in (1, 2, 3):
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (2000 if step == 2 else soft, hard))
            run.save(step)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    return _names(Path(folder))


def test_a_limit_of_file_sizes(worlds: Worlds, tmp_path: Path) -> None:
    assert worlds(2).run(_save_with_a_limit, str(tmp_path)) == [["step-1", "step-3"]] * 2


def test_a_file_in_place_of_the_folder(tmp_path: Path, alone: None, log: pytest.LogCaptureFixture) -> None:
    (tmp_path / "checkpoint").write_text("in the way")
    with pytest.raises(RuntimeError, match=r"could not save step 1 in .*checkpoint: rank 0: "):
        Run(tmp_path).save(1)
    Run(tmp_path, on_failure="continue").save(1)
    assert "Training goes on without this checkpoint" in log.text
    assert (tmp_path / "checkpoint").read_text() == "in the way"
