"""A save, step by step, the same in the foreground and in the background.

Rank 0 makes the marked folder; all ranks write their shards into it, hashing them on the way; rank 0 adds the train
state and, last, the manifest. A kill at any moment leaves the checkpoint that was there before, or the new one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib import metadata
from typing import Any

import torch

from titan.checkpoint.collective import Alone, Ranks
from titan.checkpoint.folders import publish, remove_unfinished, start_saving, step_folder
from titan.checkpoint.manifest import TRAIN_STATE_FILE, FileRecord, Manifest, find_damage, record_of
from titan.checkpoint.storage import Place, write_whole
from titan.checkpoint.tensor_files import write_tensors
from titan.config.errors import UserError


@dataclass(frozen=True)
class Snapshot:
    """What a save writes; nothing changes it while it is written.

    Attributes:
        step: the optimizer step after which it was taken.
        previous: see Manifest.
        train_state: as JSON; rank 0's counts.
        tensors: this rank's.
        config, layout, model_only: see Manifest.
    """

    step: int
    previous: int | None
    train_state: str
    tensors: Mapping[str, torch.Tensor]
    config: str
    layout: dict[str, int]
    model_only: bool = False


def write_snapshot(root: Place, snapshot: Snapshot, ranks: Ranks | Alone, *, in_process: bool = False) -> int:
    """Write a checkpoint. Collective. What a failed save leaves is deleted as far as possible.

    Args:
        in_process: see write_tensors.

    Returns:
        The checkpoint's bytes.

    Raises:
        UserError: the ranks don't share the folder, or something foreign is in the way.
        RuntimeError: on all ranks, naming ranks and causes. Earlier checkpoints are as they were.
    """
    task = f"save step {snapshot.step} in {root}"
    try:
        ranks.on_first(task, lambda: start_saving(root, snapshot.step, snapshot.previous))
        files = write_tensors(step_folder(root, snapshot.step), snapshot.tensors, ranks.group, in_process=in_process)
        return ranks.on_first(task, lambda: _complete(root, snapshot, files, ranks.size))
    except Exception:
        if ranks.rank == 0:
            remove_unfinished(root, snapshot.step)
        raise


def _complete(root: Place, snapshot: Snapshot, tensor_files: Mapping[str, FileRecord], world_size: int) -> int:
    """Rank 0's part once all shards are written."""
    folder = step_folder(root, snapshot.step)
    write_whole(folder / TRAIN_STATE_FILE, snapshot.train_state)
    files = {**tensor_files, TRAIN_STATE_FILE: record_of(snapshot.train_state.encode())}
    if unseen := find_damage(folder, files, "size"):
        raise UserError(
            f"rank 0 doesn't see in {folder} what other ranks wrote there ({unseen[0]}): job.dump_folder has to be "
            "on a file system that all ranks share"
        )
    manifest = Manifest(
        step=snapshot.step,
        previous=snapshot.previous,
        time=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        titan=_titan_version(),
        torch=torch.__version__,
        world_size=world_size,
        layout=snapshot.layout,
        config=snapshot.config,
        files=files,
        model_only=snapshot.model_only,
    )
    publish(root, manifest)
    return manifest.total_bytes


def exact_json(train_state: Mapping[str, Any]) -> str:
    """The train state as JSON text.

    Raises:
        TypeError: reading the text would give something else, such as a list for a tuple or "1" for a key 1.
    """
    text = json.dumps(dict(train_state), indent=1)
    # By their texts, since NaN isn't equal to itself, and 1 is equal to True.
    if repr(json.loads(text)) != repr(dict(train_state)):
        raise TypeError(f"the train state doesn't survive JSON: {dict(train_state)!r}")
    return text


def _titan_version() -> str:
    try:
        return metadata.version("titan")
    except metadata.PackageNotFoundError:  # run from a checkout
        return "not installed"
