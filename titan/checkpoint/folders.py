"""The folders of a run's checkpoints, and the order of operations that keeps each of them whole. Rank 0's work.

    step-100                a checkpoint, when it has a valid manifest; otherwise it isn't one, and stays as it is
    step-100/.unfinished    titan's mark while it saves or deletes the checkpoint; without a manifest nothing counts
    step-100.aside          what stood in the way, or was left behind by a resume from an earlier step; never read again

A save sets the mark first and writes the manifest last; a removal first turns the manifest into the mark. So a process
may be killed between any two operations: what it leaves is complete, or marked and without a manifest, and `recover`
deletes the latter.

Object stores can't rename folders: there, what is set aside keeps its place and loses its manifest, to manifest.aside.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from titan.checkpoint.manifest import MANIFEST_FILE, Manifest, ManifestError, find_damage, read_manifest, write_manifest
from titan.checkpoint.storage import Place, make_folder, remove_file, remove_folder, rename, write_empty
from titan.config.errors import UserError
from titan.observability.logging import logger

MARK = ".unfinished"
ASIDE_MANIFEST = "manifest.aside"

STEP_NAME = re.compile(r"step-(0|[1-9]\d*)")


class Scan(NamedTuple):
    """Complete checkpoints by step, in ascending order, and the reason why each other `step-N` is none."""

    complete: dict[int, Manifest]
    skipped: dict[int, str]


def step_folder(root: Place, step: int) -> Place:
    return root / f"step-{step}"


def scan(root: Place, after: int = -1) -> Scan:
    """Look at every `step-N` in `root`, which need not exist, with N above `after`."""
    found = Scan({}, {})
    for step in (step for step in _steps(root) if step > after):
        try:
            found.complete[step] = read_manifest(step_folder(root, step), step)
        except ManifestError as error:
            found.skipped[step] = str(error)
    return found


def find_checkpoint(path: Place) -> tuple[Place, Manifest]:
    """A checkpoint by the path of its step's folder, or the newest one in a folder of them.

    Returns:
        The folder that its `step-N` lies in, and its manifest.

    Raises:
        ManifestError: there is no complete one; says why.
    """
    found = scan(path)
    if found.complete:
        return path, found.complete[max(found.complete)]
    if match := STEP_NAME.fullmatch(path.name):
        try:
            return path.parent, read_manifest(path, int(match[1]))
        except ManifestError as error:
            raise ManifestError(f"{path.name}: {error}") from None
    if (path / MANIFEST_FILE).exists():
        raise ManifestError("the folder's name isn't step-N")
    why = "; ".join(f"step-{step}: {reason}" for step, reason in found.skipped.items())
    raise ManifestError(why or "no folder step-N")


def _steps(root: Place) -> list[int]:
    names = [path.name for path in root.iterdir()] if root.is_dir() else []
    return sorted(int(match[1]) for match in map(STEP_NAME.fullmatch, names) if match)


def start_saving(root: Place, step: int, previous: int | None) -> None:
    """Make an empty, marked folder to write the checkpoint of `step` into.

    It will be the newest: checkpoints of later steps than `previous` belong to a time line that was left by resuming
    from an earlier step, and are set aside first, so that no restart can return to it by accident. So is anything else
    that stands in the way.

    Args:
        previous: the step of this run that was loaded or saved before; None when there was none.

    Raises:
        UserError: something that isn't titan's is in the way, where it can't be renamed.
        OSError: the storage refuses.
    """
    for other in scan(root, after=-1 if previous is None else previous).complete:
        _set_aside(step_folder(root, other), f"it is of the time line that was left after step {previous}")
    folder = step_folder(root, step)
    if (folder / MARK).exists():
        _remove(folder)
    elif isinstance(folder, Path):
        if folder.exists() and not (folder.is_dir() and _is_empty(folder)):
            _set_aside(folder, "it is no complete checkpoint of titan's")
    elif (folder / ASIDE_MANIFEST).exists():
        logger.warning(f"replacing {folder}, which was set aside")
        remove_folder(folder, last=ASIDE_MANIFEST)
    elif not _is_empty(folder):
        raise UserError(f"{folder} holds something that isn't titan's: move it away, or choose another folder")
    make_folder(folder)
    write_empty(folder / MARK)


def publish(root: Place, manifest: Manifest) -> None:
    """Make `step-N` a complete checkpoint: all of its files are written."""
    folder = step_folder(root, manifest.step)
    write_manifest(folder, manifest)
    try:
        remove_file(folder / MARK)
    except Exception as error:  # the checkpoint is complete all the same
        logger.warning(f"could not delete {folder / MARK}, tried again at the next start: {error}")


def recover(root: Place) -> None:
    """Finish or undo what a killed process left: whole checkpoints lose their mark, parts of others are deleted."""
    for step in _steps(root):
        folder = step_folder(root, step)
        if (folder / MARK).exists():
            _recover(folder, step)
        elif isinstance(folder, Path) and folder.is_dir() and _is_empty(folder):
            folder.rmdir()  # a kill came before the mark was set, or after it was deleted


def _recover(folder: Place, step: int) -> None:
    if not (folder / MANIFEST_FILE).exists():
        logger.warning(f"deleting {folder}, left by an interrupted run")
        _delete(folder)
        return
    try:
        whole = not find_damage(folder, read_manifest(folder, step).files, "size")
    except ManifestError:
        whole = False
    if whole:
        remove_file(folder / MARK)


def remove_unfinished(root: Place, step: int) -> None:
    """Clear away what a failed save wrote, as far as that is possible; the next save or start tries again."""
    folder = step_folder(root, step)
    try:
        if (folder / MARK).exists() and not (folder / MANIFEST_FILE).exists():
            _delete(folder)
    except Exception as error:  # the failure that this comes after is the one to raise
        logger.warning(f"could not look into {folder}: {error}")


def keep_latest(root: Place, count: int, newest: int) -> None:
    """Delete all but the latest `count` complete checkpoints, and never `newest`. Anything else stays. 0 keeps all."""
    for step in list(scan(root).complete)[:-count] if count else []:
        if step != newest:
            _delete(step_folder(root, step))


def _delete(folder: Place) -> None:
    """Delete a checkpoint that no longer counts. A failure is no error: what was saved is safe, training can go on."""
    try:
        _remove(folder)
    except Exception as error:  # object stores raise others than OSError
        logger.warning(f"could not delete {folder}, tried again at the next start: {error}")


def _remove(folder: Place) -> None:
    if (folder / MANIFEST_FILE).exists():
        rename(folder / MANIFEST_FILE, folder / MARK)  # so that half a checkpoint can't be taken for one
    remove_folder(folder, last=MARK)


def _is_empty(folder: Place) -> bool:
    return next(iter(folder.iterdir()), None) is None


def _set_aside(folder: Place, reason: str) -> None:
    if not isinstance(folder, Path):
        logger.warning(f"setting {folder} aside: {reason}. Delete it if you don't need it")
        rename(folder / MANIFEST_FILE, folder / ASIDE_MANIFEST)
        return
    number, aside = 1, folder.with_name(f"{folder.name}.aside")
    while aside.exists():
        number += 1
        aside = folder.with_name(f"{folder.name}.aside-{number}")
    logger.warning(f"renaming {folder} to {aside.name}: {reason}. Delete it if you don't need it")
    rename(folder, aside)
