"""A kill between any two operations on folders leaves the old checkpoint or the new one; `recover` mends the rest."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from titan.checkpoint import folders, storage
from titan.checkpoint.folders import keep_latest, publish, recover, remove_unfinished, scan, start_saving, step_folder
from titan.checkpoint.manifest import Manifest, record_of, write_manifest
from titan.checkpoint.storage import ObjectPath, Place, make_folder, write_whole


class Killed(BaseException):
    pass


def _manifest(step: int, previous: int | None, content: str) -> Manifest:
    files = {"train_state.json": record_of(content.encode())}
    return Manifest(step, previous, "now", "0", "0", 1, {}, "", files)


def _write(root: Place, step: int, content: str = "") -> None:
    """A complete checkpoint."""
    make_folder(step_folder(root, step))
    write_whole(step_folder(root, step) / "train_state.json", content)
    write_manifest(step_folder(root, step), _manifest(step, None, content))


def _save(root: Place, step: int, previous: int | None, content: str) -> None:
    start_saving(root, step, previous)
    write_whole(step_folder(root, step) / "train_state.json", content)
    publish(root, _manifest(step, previous, content))


def _content(root: Place, step: int) -> str:
    return (step_folder(root, step) / "train_state.json").read_text()


def _names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


_ON_FILES = (Path, ("rename", "unlink", "rmdir", "touch", "mkdir", "open"))
_ON_OBJECTS = (MemoryFileSystem, ("pipe_file", "cat_file", "rm_file"))


def _killed_at(operation: int, work: Callable[[], None], on: tuple[type, tuple[str, ...]] = _ON_FILES) -> bool:
    """Whether a process dies that is killed before its operation of that number, reading included."""
    left = operation

    def counted(original: Callable[..., Any]) -> Callable[..., Any]:
        def count(*args: Any, **kwargs: Any) -> Any:
            nonlocal left
            if left == 0:
                raise Killed
            left -= 1
            return original(*args, **kwargs)

        return count

    with pytest.MonkeyPatch.context() as patch:
        for name in on[1]:
            patch.setattr(on[0], name, counted(getattr(on[0], name)))
        try:
            work()
        except Killed:
            return True
    return False


def test_a_kill_at_any_moment_of_a_save(tmp_path: Path) -> None:
    """Of step 10 after a resume from step 5, with the time line that was left in the way."""
    old = {5: "old 5", 10: "old 10", 15: "old 15"}
    for operation in range(200):
        root = tmp_path / str(operation)
        for step, content in old.items():
            _write(root, step, content)
        killed = _killed_at(operation, lambda root=root: _save(root, 10, 5, "new 10"))
        for second in range(100):  # and another one while the first is being mended
            again = tmp_path / f"{operation}-{second}"
            shutil.copytree(root, again)
            once_more = _killed_at(second, lambda root=again: recover(root))
            recover(again)
            found = {step: _content(again, step) for step in scan(again).complete}
            # What is on the way out goes in order, the newest last; or the new one is there.
            assert found in (old, {5: "old 5", 15: "old 15"}, {5: "old 5"}, {5: "old 5", 10: "new 10"})
            assert not list(again.glob("step-*/.unfinished")) and not scan(again).skipped
            shutil.rmtree(again)
            if not once_more:
                break
        if not killed:
            break
    else:
        pytest.fail("the save never came to its end")
    assert operation >= 9
    recover(root)
    assert list(scan(root).complete) == [5, 10] and _content(root, 10) == "new 10"
    assert _names(root) == ["step-10", "step-10.aside", "step-15.aside", "step-5"]
    assert (root / "step-10.aside" / "train_state.json").read_text() == "old 10"


def test_a_kill_at_any_moment_of_retention(tmp_path: Path) -> None:
    for operation in range(200):
        root = tmp_path / str(operation)
        for step in (9, 10, 100):
            _write(root, step, f"{step}")
        killed = _killed_at(operation, lambda root=root: keep_latest(root, 1, 100))
        for step in scan(root).complete:  # what counts as complete has all its files
            assert _content(root, step) == f"{step}"
        recover(root)
        keep_latest(root, 1, 100)
        assert _names(root) == ["step-100"]
        if not killed:
            assert operation >= 8
            return
    pytest.fail("keep_latest never came to its end")


def test_a_kill_at_any_moment_in_an_object_store(tmp_path: Path) -> None:
    """Of the same save, with older ones removed after it."""
    old = {5: "old 5", 10: "old 10", 15: "old 15"}
    for operation in range(200):
        root = ObjectPath(f"memory://{tmp_path.name}/{operation}")
        for step, content in old.items():
            _write(root, step, content)

        def work(root: ObjectPath = root) -> None:
            _save(root, 10, 5, "new 10")
            keep_latest(root, 1, 10)

        killed = _killed_at(operation, work, _ON_OBJECTS)
        _killed_at(operation // 2, lambda root=root: recover(root), _ON_OBJECTS)
        recover(root)
        found = {step: _content(root, step) for step in scan(root).complete}
        new = {5: "old 5", 10: "new 10"}
        assert found in (old, {5: "old 5", 15: "old 15"}, {5: "old 5"}, new, {10: "new 10"})
        assert not any((step_folder(root, step) / ".unfinished").exists() for step in (5, 10, 15))
        if not killed:
            assert operation > 15 and found == {10: "new 10"}
            return
    pytest.fail("the save never came to its end")


def test_half_a_save_is_deleted_and_a_whole_one_finished(tmp_path: Path) -> None:
    _write(tmp_path, 5)
    for step in (10, 15, 20):
        start_saving(tmp_path, step, 5)
    _write(tmp_path / "elsewhere", 10)
    shutil.copytree(tmp_path / "elsewhere" / "step-10", step_folder(tmp_path, 10), dirs_exist_ok=True)
    (step_folder(tmp_path, 15) / "__0_0.distcp").write_text("half")
    (step_folder(tmp_path, 20) / "manifest.json").write_text("damaged later")
    (tmp_path / "step-25").mkdir()
    recover(tmp_path)
    assert _names(tmp_path) == ["elsewhere", "step-10", "step-20", "step-5"]
    assert _names(step_folder(tmp_path, 10)) == ["manifest.json", "train_state.json"]


def test_a_new_save_starts_in_an_empty_folder(tmp_path: Path) -> None:
    root = tmp_path / "not" / "there" / "yet"
    start_saving(root, 3, None)
    (step_folder(root, 3) / "left over").touch()
    (step_folder(root, 3) / "folder").mkdir()
    start_saving(root, 3, None)
    assert _names(step_folder(root, 3)) == [".unfinished"]


def test_what_a_failed_save_wrote_is_deleted(tmp_path: Path) -> None:
    _write(tmp_path, 1)
    start_saving(tmp_path, 2, 1)
    for step in (1, 2, 3):
        remove_unfinished(tmp_path, step)
    assert _names(tmp_path) == ["step-1"]


def test_what_can_not_be_deleted_is_reported_and_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture
) -> None:
    for step in (1, 2):
        _write(tmp_path, step)

    def busy(*args: Any) -> None:
        raise OSError("busy")

    with monkeypatch.context() as patch:
        patch.setattr(storage.Path, "rmdir", busy)
        keep_latest(tmp_path, 1, 2)
    assert "could not delete" in log.text and "busy" in log.text
    assert list(scan(tmp_path).complete) == [2]
    recover(tmp_path)
    assert _names(tmp_path) == ["step-2"]
    with monkeypatch.context() as patch:
        patch.setattr(folders, "remove_file", busy)
        _save(tmp_path, 3, 2, "")
    assert list(scan(tmp_path).complete) == [2, 3]
    recover(tmp_path)
    assert _names(step_folder(tmp_path, 3)) == ["manifest.json", "train_state.json"]


def test_the_checkpoint_just_saved_is_never_removed(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        _write(tmp_path, step)
    keep_latest(tmp_path, 1, 2)
    assert list(scan(tmp_path).complete) == [2, 3]
