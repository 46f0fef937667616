"""A kill between any two operations on folders leaves the old checkpoint or the new one; `recover` mends the rest."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from titan.checkpoint import folders
from titan.checkpoint.folders import keep_latest, publish, recover, saving_folder, scan, start_saving, step_folder
from titan.checkpoint.manifest import Manifest, record_files, write_manifest


class Killed(BaseException):
    pass


def _write(folder: Path, step: int, previous: int | None, content: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "train_state.json").write_text(content)
    files = record_files([folder / "train_state.json"])
    write_manifest(folder, Manifest(step, previous, "now", "0", "0", 1, {}, "", files))


def _content(root: Path, step: int) -> str:
    return (step_folder(root, step) / "train_state.json").read_text()


def _kill_at(monkeypatch: pytest.MonkeyPatch, operation: int) -> None:
    """Die before the operation of that number: a rename, or the deletion of one file or folder within a tree."""
    left = operation
    rename, rmtree = Path.rename, shutil.rmtree

    def count() -> None:
        nonlocal left
        if left == 0:
            raise Killed
        left -= 1

    def counted_rename(self: Path, target: Path) -> Path:
        count()
        return rename(self, target)

    def counted_rmtree(path: Path) -> None:
        for child in sorted(Path(path).iterdir()):
            count()
            child.unlink()
        count()
        rmtree(path)

    monkeypatch.setattr(Path, "rename", counted_rename)
    monkeypatch.setattr(folders.shutil, "rmtree", counted_rmtree)


def test_a_kill_at_any_moment_of_a_replacement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for operation in range(20):
        root = tmp_path / str(operation)
        for step, previous in ((5, None), (10, 5), (15, 10), (20, 15)):
            _write(step_folder(root, step), step, previous, f"old {step}")
        _write(saving_folder(root, 10), 10, 5, "new 10")
        with monkeypatch.context() as patch:
            _kill_at(patch, operation)
            try:
                publish(root, 10)
                killed = False
            except Killed:
                killed = True
        for second in range(20):  # and another one while the first is being mended
            again = tmp_path / f"{operation}-{second}"
            shutil.copytree(root, again)
            with monkeypatch.context() as patch:
                _kill_at(patch, second)
                try:
                    recover(again)
                    break
                except Killed:
                    pass
            recover(again)
            assert list(scan(again).complete) == [5, 10] and _content(again, 10) == "new 10"
            assert not list(again.glob(".*"))
        recover(root)
        assert list(scan(root).complete) == [5, 10] and _content(root, 10) == "new 10"
        names = sorted(path.name for path in root.iterdir())
        assert names == ["step-10", "step-15.aside", "step-20.aside", "step-5"]
        if not killed:
            break
    else:
        pytest.fail("publish never came to its end")
    assert operation > 4


def test_a_kill_at_any_moment_of_retention(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for operation in range(20):
        root = tmp_path / str(operation)
        for step in (9, 10, 100):
            _write(step_folder(root, step), step, None, f"{step}")
        with monkeypatch.context() as patch:
            _kill_at(patch, operation)
            try:
                keep_latest(root, 1, 100)
                killed = False
            except Killed:
                killed = True
        for step in scan(root).complete:  # what counts as complete has all its files
            assert _content(root, step) == f"{step}"
        recover(root)
        keep_latest(root, 1, 100)
        assert sorted(path.name for path in root.iterdir()) == ["step-100"]
        if not killed:
            return
    pytest.fail("keep_latest never came to its end")


def test_half_a_save_is_deleted_and_a_whole_one_finished(tmp_path: Path) -> None:
    _write(step_folder(tmp_path, 5), 5, None, "5")
    _write(saving_folder(tmp_path, 10), 10, 5, "10")
    _write(saving_folder(tmp_path, 15), 15, 10, "15")
    (saving_folder(tmp_path, 15) / "train_state.json").write_text("cut")
    (tmp_path / ".saving-step-20").mkdir()
    (tmp_path / ".saving-step-x").mkdir()
    recover(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".saving-step-x", "step-10", "step-5"]


def test_a_new_save_starts_in_an_empty_folder(tmp_path: Path) -> None:
    root = tmp_path / "not" / "there" / "yet"
    start_saving(root, 3)
    (saving_folder(root, 3) / "left over").touch()
    start_saving(root, 3)
    assert list(saving_folder(root, 3).iterdir()) == []


def test_what_can_not_be_deleted_is_reported_and_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture
) -> None:
    for step in (1, 2):
        _write(step_folder(tmp_path, step), step, None, "")

    def busy(path: Any) -> None:
        raise OSError("busy")

    with monkeypatch.context() as patch:
        patch.setattr(folders.shutil, "rmtree", busy)
        keep_latest(tmp_path, 1, 2)
    assert "could not delete" in log.text and "busy" in log.text
    assert list(scan(tmp_path).complete) == [2]
    recover(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["step-2"]


def test_the_checkpoint_just_saved_is_never_removed(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        _write(step_folder(tmp_path, step), step, None, "")
    keep_latest(tmp_path, 1, 2)
    assert list(scan(tmp_path).complete) == [2, 3]
