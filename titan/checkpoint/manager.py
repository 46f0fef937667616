"""When to save, and saving and loading as one act of all ranks.

A save, step by step: rank 0 makes `.saving-step-N`; all ranks write their shards into it and hash them; rank 0 adds the
train state and, last, the manifest, and renames the folder to `step-N`. A kill at any moment leaves the checkpoint that
was there before, or the new one.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import nn

from titan.checkpoint.collective import Ranks
from titan.checkpoint.folders import keep_latest, publish, saving_folder, start_saving
from titan.checkpoint.loading import Loader, readable
from titan.checkpoint.manifest import (
    TRAIN_STATE_FILE,
    FileRecord,
    Manifest,
    find_damage,
    record_files,
    write_manifest,
    write_synced,
)
from titan.checkpoint.state import MODEL_PREFIX, training_tensors
from titan.checkpoint.tensor_files import files_written_by, write_tensors
from titan.config.errors import UserError
from titan.config.job_config import Checkpoint
from titan.observability.logging import logger
from titan.training.optimizer import Optimizer

# A rank may wait this long for the slowest one's share of a save or of a check.
_TIME_LIMIT = timedelta(hours=1)


class CheckpointManager:
    """Saves and resumes a run. Every method is called by all ranks, in the same order."""

    def __init__(
        self,
        settings: Checkpoint,
        dump_folder: Path,
        *,
        model_parts: Sequence[nn.Module],
        optimizer: Optimizer,
        config_toml: str,
        layout: Mapping[str, int],
    ) -> None:
        """
        Args:
            settings: the config's [checkpoint] section.
            dump_folder: job.dump_folder; all ranks have to see the same files in it.
            model_parts: the modules of this rank; parameter names are unique across them.
            optimizer: the one over all parameters of all parts.
            config_toml: the resolved config, kept in the manifest.
            layout: the degrees of parallelism by name, kept in the manifest.
        """
        self._settings = settings
        self._root = dump_folder / settings.folder
        self._model_parts = model_parts
        self._optimizer = optimizer
        self._config_toml = config_toml
        self._layout = dict(layout)
        self._ranks = Ranks(_TIME_LIMIT)
        self._last_step: int | None = None  # loaded or saved
        self._last_time = time.monotonic()

    def load(self) -> dict[str, Any] | None:
        """Fill weights and optimizer from the run's own checkpoint, or else from checkpoint.initial_load_path.

        The checkpoint is that of `load_step`, -1 being the newest complete one. Finishes or clears away first what an
        interrupted save left, unless `load_only`: another run may be saving.

        Returns:
            The train state given to `save`, without what `exclude_from_loading` names; empty when only weights were
            loaded; None when nothing was.

        Raises:
            UserError: the step isn't there, it is damaged, of another model, or the folder belongs to another run.
            RuntimeError: reading failed; it names ranks and causes. Weights may be half loaded.
        """
        loader = Loader(self._settings, self._root, self._config_toml, self._ranks, self._live_tensors)
        start = loader.load()
        self._last_time = time.monotonic()
        if start is None:
            return None
        self._last_step = start.resumed_step
        return start.train_state

    def due(self, step: int, *, last: bool) -> bool:
        """Whether to save after `step`, the same answer on all ranks. Never for a step that was loaded or saved.

        Args:
            last: it is the run's last step, which is saved in any case.
        """
        settings = self._settings
        if not settings.enable or settings.load_only or step == self._last_step:
            return False
        if last or (step == 1 and settings.enable_first_step_checkpoint):
            return True
        if settings.interval_type == "steps":
            return step % settings.interval == 0
        return self._ranks.agree(time.monotonic() - self._last_time >= settings.interval)

    def save(self, step: int, train_state: Mapping[str, Any], *, last: bool = False) -> None:
        """Save the weights and the optimizer as they are, and delete what `keep_latest_k` no longer keeps.

        Args:
            last: no step comes after it: the optimizer is left out if `last_save_model_only`.
            train_state: anything else that a resume needs, as JSON: dicts with text keys, lists, texts, numbers,
                booleans, None. Rank 0's is saved.

        Raises:
            UserError: the ranks don't share the folder.
            RuntimeError: saving failed, or the train state wouldn't come back as it is; it names ranks and causes.
                Earlier checkpoints are as they were.
        """
        started = time.monotonic()
        task = f"save step {step} in {self._root}"
        train_state_text = self._ranks.on_first(task, lambda: self._prepare(step, train_state))
        folder = saving_folder(self._root, step)
        model_only = last and self._settings.last_save_model_only
        write_tensors(folder, self._exported_weights() if model_only else self._live_tensors(), self._ranks.group)
        size = self._ranks.on_each(
            task,
            lambda: record_files(files_written_by(self._ranks.rank, folder)),
            lambda by_rank: self._complete(step, train_state_text, model_only, by_rank),
        )
        self._last_step = step
        self._last_time = time.monotonic()
        logger.info(f"Saved step {step} in {self._last_time - started:.1f} s ({readable(size)})")

    def _live_tensors(self) -> dict[str, torch.Tensor]:
        # Collected at each call, never kept: a save has to hold what the optimizer and the modules hold by then.
        tensors: dict[str, torch.Tensor] = {}
        self._ranks.on_each(
            "collect the tensors",
            lambda: tensors.update(training_tensors(self._model_parts, self._optimizer)),
            lambda _: None,
        )
        return tensors

    def _exported_weights(self) -> dict[str, torch.Tensor]:
        """The model's tensors, those of floating point as `export_dtype`; the live ones stay as they are."""
        dtype: torch.dtype = getattr(torch, self._settings.export_dtype)
        return {
            name: tensor.to(dtype) if tensor.is_floating_point() else tensor
            for name, tensor in self._live_tensors().items()
            if name.startswith(MODEL_PREFIX)
        }

    def _prepare(self, step: int, train_state: Mapping[str, Any]) -> str:
        text = _exact_json(train_state)
        start_saving(self._root, step)
        return text

    def _complete(
        self, step: int, train_state_text: str, model_only: bool, by_rank: Sequence[Mapping[str, FileRecord]]
    ) -> int:
        """Rank 0's part once all shards are written. Returns the checkpoint's bytes."""
        folder = saving_folder(self._root, step)
        train_state_file = folder / TRAIN_STATE_FILE
        write_synced(train_state_file, train_state_text)
        files = {
            name: record for records in [*by_rank, record_files([train_state_file])] for name, record in records.items()
        }
        if unseen := find_damage(folder, files, "size"):
            raise UserError(
                f"rank 0 doesn't see in {folder} what other ranks wrote there ({unseen[0]}): job.dump_folder has to be "
                "on a file system that all ranks share"
            )
        manifest = Manifest(
            step=step,
            previous=self._last_step,
            time=datetime.now(timezone.utc).isoformat(timespec="seconds"),
            titan=_titan_version(),
            torch=torch.__version__,
            world_size=self._ranks.size,
            layout=self._layout,
            config=self._config_toml,
            model_only=model_only,
            files=files,
        )
        write_manifest(folder, manifest)
        publish(self._root, step)
        keep_latest(self._root, self._settings.keep_latest_k, step)
        return manifest.total_bytes


def _exact_json(train_state: Mapping[str, Any]) -> str:
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
