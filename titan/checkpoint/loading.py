"""What a run starts from: its own newest checkpoint, weights or a whole checkpoint from elsewhere, or nothing."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from titan.checkpoint.choice import choose, find_initial, refuse_damaged
from titan.checkpoint.collective import Ranks
from titan.checkpoint.drift import differences, read_config, refuse_other_model
from titan.checkpoint.folders import scan, step_folder
from titan.checkpoint.manifest import TRAIN_STATE_FILE, Manifest
from titan.checkpoint.state import MODEL_PREFIX, TensorInfo, check_same_model, describe
from titan.checkpoint.storage import Place, at
from titan.checkpoint.tensor_files import read_tensors, stored_tensors
from titan.config.errors import UserError
from titan.config.job_config import Checkpoint
from titan.observability.logging import logger

# Keys of the train state, by the name that checkpoint.exclude_from_loading gives them together.
TRAIN_STATE_PARTS = {"train_state": ("step", "tokens_seen", "health"), "dataloader": ("data",)}

_ALL_BUT_WEIGHTS = ("optimizer", *TRAIN_STATE_PARTS)


class Start(NamedTuple):
    """Where a run starts.

    Attributes:
        train_state: what `CheckpointManager.save` was given, without what isn't to be loaded; empty with weights alone.
        resumed_step: the step of the run's own checkpoint that was loaded; None when it wasn't its own.
    """

    train_state: dict[str, Any]
    resumed_step: int | None


class Loader:
    """Fills the live tensors of a run. Every method is called by all ranks, in the same order."""

    def __init__(
        self,
        settings: Checkpoint,
        root: Place,
        config_toml: str,
        ranks: Ranks,
        live_tensors: Callable[[], dict[str, torch.Tensor]],
    ) -> None:
        """
        Args:
            root: the folder of the run's own checkpoints.
            config_toml: the resolved config.
            live_tensors: collects weights and optimizer state, as `training_tensors` names them. Collective.
        """
        self._settings = settings
        self._root = root
        self._config = read_config(config_toml)
        self._ranks = ranks
        self._live_tensors = live_tensors

    def load(self) -> Start | None:
        """Load the run's own checkpoint, or else what checkpoint.initial_load_path names; None when there is neither.

        Raises:
            UserError: the step isn't there, it is damaged, of another model, or the folder belongs to another run.
            RuntimeError: reading failed; it names ranks and causes. Weights may be half loaded.
        """
        settings, own = self._settings, None
        if settings.enable:
            own = self._ranks.on_first(f"look for checkpoints in {self._root}", lambda: choose(self._root, settings))
        elif not settings.load_only:
            self._ranks.on_first(f"look for checkpoints in {self._root}", self._refuse_folder_of_another_run)
        if own is not None:
            if settings.initial_load_path is not None:
                logger.info(f"checkpoint.initial_load_path isn't used: {self._root} has checkpoints of this run")
            excluded = self._excluded(own)
            state = self._read(self._root, own, excluded)
            return Start(state, None if "train_state" in excluded else own.step)
        if (path := settings.initial_load_path) is not None and not settings.initial_load_in_hf:
            alone = settings.initial_load_model_only
            root, manifest = self._ranks.on_first(f"look for {path}", lambda: find_initial(at(path), alone))
            return Start(self._read(root, manifest, _ALL_BUT_WEIGHTS if alone else self._excluded(manifest)), None)
        if settings.enable:
            logger.info(f"No checkpoint in {self._root}: training starts anew")
        return None

    def _excluded(self, manifest: Manifest) -> Sequence[str]:
        """The parts that aren't loaded of a checkpoint: once, and not again of what was saved afterwards."""
        excluded = self._settings.exclude_from_loading
        if excluded and read_config(manifest.config).get("checkpoint.exclude_from_loading") == excluded:
            names = ", ".join(excluded)
            logger.info(f"checkpoint.exclude_from_loading = {names}: was left out before step {manifest.step}")
            return ()
        return excluded

    def _read(self, root: Place, manifest: Manifest, excluded: Sequence[str]) -> dict[str, Any]:
        """Fill weights and, unless excluded, the optimizer's state. Returns the train state without excluded parts."""
        started = time.monotonic()
        refuse_damaged(root, manifest, self._settings.verify, self._ranks)
        folder = step_folder(root, manifest.step)
        tensors = self._live_tensors()
        if "optimizer" in excluded:
            tensors = {name: tensor for name, tensor in tensors.items() if name.startswith(MODEL_PREFIX)}
        train_state = self._ranks.on_each(
            f"read {folder}",
            lambda: describe(tensors),
            lambda by_rank: self._check(folder, manifest, excluded, by_rank),
        )
        read_tensors(folder, tensors, self._ranks.group)
        layout = ", ".join(f"{name} {degree}" for name, degree in manifest.layout.items())
        origin = f"saved at {manifest.time} with world size {manifest.world_size}: {layout}"
        what = f"step {manifest.step}" if not excluded else f"step {manifest.step}, without {', '.join(excluded)},"
        logger.info(
            f"Loaded {what} from {folder} in {time.monotonic() - started:.1f} s ({readable(manifest.total_bytes)}; "
            f"{origin})"
        )
        left_out = {key for part in excluded for key in TRAIN_STATE_PARTS.get(part, ())}
        return {key: value for key, value in train_state.items() if key not in left_out}

    def _check(
        self,
        folder: Place,
        manifest: Manifest,
        excluded: Sequence[str],
        ours_by_rank: Sequence[Mapping[str, TensorInfo]],
    ) -> dict[str, Any]:
        """Rank 0's look at whether the checkpoint is of this run's kind. Returns its train state.

        Args:
            ours_by_rank: the live tensors of each rank; with a pipeline each has some.
        """
        saved = read_config(manifest.config)
        refuse_other_model(str(folder), saved, self._config)
        ours = {name: info for described in ours_by_rank for name, info in described.items()}
        stored = stored_tensors(folder)
        if "optimizer" in excluded:
            stored = {name: info for name, info in stored.items() if name.startswith(MODEL_PREFIX)}
        check_same_model(str(folder), stored, ours)
        if (changed := differences(saved, self._config)) and list(excluded) != list(_ALL_BUT_WEIGHTS):
            logger.info("\n".join([f"The config isn't the one of {folder}:", *(f"  {line}" for line in changed)]))
        train_state: dict[str, Any] = json.loads((folder / TRAIN_STATE_FILE).read_text(encoding="utf-8"))
        return train_state

    def _refuse_folder_of_another_run(self) -> None:
        if complete := scan(self._root).complete:
            raise UserError(
                f"{self._root} holds the checkpoints of a run, up to step {max(complete)}; with checkpoint.enable = "
                "false this one would start anew and overwrite its metrics. Choose another job.dump_folder, or go on "
                "with that run by --checkpoint.enable"
            )


def readable(size: int) -> str:
    """A number of bytes for people."""
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.2f} MiB"
