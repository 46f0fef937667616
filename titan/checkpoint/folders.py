"""The folders of a run's checkpoints, and the renames that keep each of them whole. Rank 0's work.

    step-100               a checkpoint, when it has a valid manifest; otherwise it isn't titan's and stays as it is
    step-100.aside         what stood in the way, or was left behind by a resume from an earlier step; never read again
    .saving-step-100       being written; complete from the moment that its manifest is there
    .removing-step-100     being deleted

A process may be killed between any two operations here: what it leaves is mended by `recover` at the next start.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import NamedTuple

from titan.checkpoint.manifest import Manifest, ManifestError, find_damage, read_manifest, sync_folder
from titan.observability.logging import logger

STEP_NAME = re.compile(r"step-(0|[1-9]\d*)")
_UNFINISHED = re.compile(r"\.(saving|removing)-step-(0|[1-9]\d*)")


class Scan(NamedTuple):
    """Complete checkpoints by step, in ascending order, and the reason why each other `step-N` is none."""

    complete: dict[int, Manifest]
    skipped: dict[int, str]


def step_folder(root: Path, step: int) -> Path:
    return root / f"step-{step}"


def saving_folder(root: Path, step: int) -> Path:
    return root / f".saving-step-{step}"


def scan(root: Path) -> Scan:
    """Look at every `step-N` in `root`, which need not exist."""
    names = [path.name for path in root.iterdir()] if root.is_dir() else []
    steps = sorted(int(match[1]) for match in map(STEP_NAME.fullmatch, names) if match)
    found = Scan({}, {})
    for step in steps:
        try:
            found.complete[step] = read_manifest(step_folder(root, step), step)
        except ManifestError as error:
            found.skipped[step] = str(error)
    return found


def start_saving(root: Path, step: int) -> None:
    """Make an empty folder to write the checkpoint of `step` into."""
    folder = saving_folder(root, step)
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    sync_folder(root.parent)  # `root` itself may be new


def publish(root: Path, step: int) -> None:
    """Turn the complete `.saving-step-N` into `step-N`.

    Afterwards it is the newest: checkpoints of later steps belong to a time line that was left by resuming from an
    earlier step, and are set aside first, so that no restart can return to it by accident. A checkpoint of the very
    same step is replaced; something else of that name is set aside.

    Raises:
        ManifestError: it isn't complete.
        OSError: the file system refuses.
    """
    saved = saving_folder(root, step)
    previous = read_manifest(saved, step).previous
    complete = scan(root).complete
    for other in complete:
        if other != step and (previous is None or other > previous):
            _set_aside(step_folder(root, other), f"it is of the time line that was left after step {previous}")
    target = step_folder(root, step)
    if step in complete:
        logger.warning(f"replacing {target}, saved before the resume from step {previous}")
        doomed = _start_removing(root, step)
        _rename(saved, target)
        _delete(doomed)
        return
    if target.exists():
        _set_aside(target, "it is no complete checkpoint of titan's")
    _rename(saved, target)


def recover(root: Path) -> None:
    """Finish or undo what a killed process left: whole saves are published, parts of saves and of removals deleted."""
    unfinished = [match for path in sorted(root.glob(".*-step-*")) if (match := _UNFINISHED.fullmatch(path.name))]
    for match in unfinished:
        if match[1] == "saving" and _is_whole(root / match[0], int(match[2])):
            logger.warning(f"finishing the interrupted save of step {match[2]}")
            publish(root, int(match[2]))
    for match in unfinished:
        if (root / match[0]).exists():
            logger.warning(f"deleting {root / match[0]}, left by an interrupted run")
            _delete(root / match[0])


def _is_whole(folder: Path, step: int) -> bool:
    try:
        return not find_damage(folder, read_manifest(folder, step).files, "size")
    except ManifestError:
        return False


def keep_latest(root: Path, count: int, newest: int) -> None:
    """Delete all but the latest `count` complete checkpoints, and never `newest`. Anything else stays. 0 keeps all."""
    surplus = list(scan(root).complete)[:-count] if count else []
    for step in surplus:
        if step != newest:
            _delete(_start_removing(root, step))


def _start_removing(root: Path, step: int) -> Path:
    """Under its new name a half-deleted checkpoint can't be taken for one."""
    doomed = root / f".removing-step-{step}"
    if doomed.exists():
        shutil.rmtree(doomed)
    _rename(step_folder(root, step), doomed)
    return doomed


def _delete(doomed: Path) -> None:
    """Delete a folder that no longer counts. A failure is no error: what was saved is safe, training can go on."""
    try:
        shutil.rmtree(doomed)
    except OSError as error:
        logger.warning(f"could not delete {doomed}, tried again at the next start: {error}")


def _set_aside(path: Path, reason: str) -> None:
    number, aside = 1, path.with_name(f"{path.name}.aside")
    while aside.exists():
        number += 1
        aside = path.with_name(f"{path.name}.aside-{number}")
    logger.warning(f"renaming {path} to {aside.name}: {reason}. Delete it if you don't need it")
    _rename(path, aside)


def _rename(source: Path, target: Path) -> None:
    source.rename(target)
    sync_folder(target.parent)
