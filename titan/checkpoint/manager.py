"""When to save, in the foreground or beside training, and loading, as acts of all ranks. The steps are in saving.py."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from titan.checkpoint.background import Background
from titan.checkpoint.collective import Ranks
from titan.checkpoint.folders import keep_latest
from titan.checkpoint.loading import Loader, readable
from titan.checkpoint.saving import Snapshot, exact_json, write_snapshot
from titan.checkpoint.staging import Staging
from titan.checkpoint.state import MODEL_PREFIX, model_tensors, training_tensors
from titan.checkpoint.storage import place
from titan.checkpoint.tensor_files import end_writing_process
from titan.config.job_config import Checkpoint
from titan.models.spec import HuggingFaceFormat
from titan.observability.logging import logger
from titan.training.optimizer import Optimizer

# A rank may wait this long for the slowest one's share of a save or of a check.
_TIME_LIMIT = timedelta(hours=1)
# Seconds that a run which failed gives its save in flight. It must not outlast the launcher's patience.
_LAST_WAIT = 20.0


class _InFlight(NamedTuple):
    """A save in the background."""

    step: int
    writing: Background


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
        self._root = place(dump_folder, settings.folder)
        self._model_parts = model_parts
        self._optimizer = optimizer
        self._config_toml = config_toml
        self._layout = dict(layout)
        self._ranks = Ranks(_TIME_LIMIT)
        self._in_process = settings.async_mode == "async_with_pinned_mem"
        self._staging: Staging | None = None
        if settings.async_mode != "disabled":
            self._staging = Staging(for_another_process=self._in_process)
            # A group of its own: messages of two threads on one group would be mixed up.
            self._saving_ranks = Ranks(_TIME_LIMIT)
        self._in_flight: _InFlight | None = None
        self._removing: Background | None = None  # rank 0's
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
        self.wait()
        loader = Loader(self._settings, self._root, self._config_toml, self._ranks, self._live_tensors)
        start = loader.load()
        self._last_time = time.monotonic()
        if start is None:
            return None
        self._last_step = start.resumed_step
        return start.train_state

    def load_huggingface(self, folder: str, sizes: Any, form: HuggingFaceFormat[Any]) -> None:
        """Fill the weights from a Hugging Face folder; see `load_weights`."""
        from titan.checkpoint.huggingface_load import load_weights

        load_weights(folder, self._weights_by_name(), self._ranks, sizes=sizes, hf=form)
        logger.info(f"Loaded the weights in {folder}")

    def save_huggingface(
        self, folder: Path, sizes: Any, form: HuggingFaceFormat[Any], tokenizer_path: str | None
    ) -> None:
        """Write the weights as a Hugging Face folder, in `export_dtype`, unless it is there; see `save_weights`."""
        from titan.checkpoint.huggingface_save import save_weights
        from titan.checkpoint.weights import LiveWeights

        if self._ranks.on_first(f"look for {folder}", folder.exists):
            return
        dtype: torch.dtype = getattr(torch, self._settings.export_dtype)
        weights = LiveWeights(self._weights_by_name())
        save_weights(folder, weights, self._ranks, sizes=sizes, hf=form, dtype=dtype, tokenizer_path=tokenizer_path)
        logger.info(f"Wrote the weights to {folder} for Hugging Face's libraries")

    def _weights_by_name(self) -> dict[str, torch.Tensor]:
        tensors = model_tensors(self._model_parts)
        return {name.removeprefix(MODEL_PREFIX): tensor for name, tensor in tensors.items()}

    def may_be_due(self, step: int, *, last: bool) -> bool:
        """Whether `due` has anything to find out, which may take as long as a save. Answers at once; mostly no."""
        settings = self._settings
        if not settings.enable or settings.load_only:
            return False
        by_time = settings.interval_type != "steps"
        return last or by_time or step == 1 or step % settings.interval == 0 or self._in_flight is not None

    def due(self, step: int, *, last: bool) -> bool:
        """Whether to save after `step`, the same answer on all ranks. Never for a step that was loaded or saved.

        Args:
            last: it is the run's last step, which is saved in any case.

        Raises:
            UserError, RuntimeError: what `save` raises, when the save in flight failed.
        """
        settings = self._settings
        if not self.may_be_due(step, last=last):
            return False
        if self._in_flight is not None and (last or self._ranks.agree(self._in_flight.writing.done)):
            self._land()
        if step == self._last_step:
            return False
        if last or (step == 1 and settings.enable_first_step_checkpoint):
            return True
        if settings.interval_type == "steps":
            return step % settings.interval == 0
        return self._ranks.agree(time.monotonic() - self._last_time >= settings.interval)

    def save(self, step: int, train_state: Mapping[str, Any], *, finished: bool = False) -> None:
        """Save the weights and the optimizer as they are, and delete what `keep_latest_k` no longer keeps.

        With `async_mode`, everything is copied before this returns, and written afterwards; a save that is still in
        flight is waited for first. Its failure is raised here too, or by `due` or `wait`, whichever comes first.

        Args:
            train_state: anything else that a resume needs, as JSON: dicts with text keys, lists, texts, numbers,
                booleans, None. Rank 0's is saved.
            finished: no step will come after it: the optimizer is left out if `last_save_model_only`.

        Raises:
            UserError: the ranks don't share the folder, or something foreign is in the way.
            RuntimeError: saving failed and `on_failure` says "stop", or the train state wouldn't come back as it is; it
                names ranks and causes. Earlier checkpoints are as they were.
        """
        started = time.monotonic()
        self.wait()
        snapshot = self._snapshot(step, train_state, finished and self._settings.last_save_model_only)
        if self._staging is None:
            self._settle(step, partial(self._write, snapshot, self._ranks, started))
        else:
            stalled = time.monotonic() - started
            work = partial(self._write, snapshot, self._saving_ranks, started, stalled)
            self._in_flight = _InFlight(step, Background(work, "save-checkpoint"))
        self._last_time = time.monotonic()

    def wait(self) -> None:
        """Wait until nothing runs in the background any more. Every rank calls it; the run's end has to.

        Raises:
            UserError, RuntimeError: what `save` raises, when the save in flight failed.
        """
        self._land()
        if self._removing is not None:
            self._removing.join()

    def close(self) -> None:
        """Give the save in flight a moment to end, after a failure of training too. Talks to no rank, never raises."""
        deadline = time.monotonic() + _LAST_WAIT
        for work in (self._in_flight and self._in_flight.writing, self._removing):
            if work is not None:
                work.join(max(0, deadline - time.monotonic()))
        if self._in_process:
            end_writing_process()

    def _snapshot(self, step: int, train_state: Mapping[str, Any], model_only: bool) -> Snapshot:
        snapshot = Snapshot(step, self._last_step, "", {}, self._config_toml, self._layout, model_only)

        def take() -> None:
            nonlocal snapshot
            text = exact_json(train_state) if self._ranks.rank == 0 else ""
            tensors = self._exported_weights() if model_only else self._tensors()
            staged = tensors if self._staging is None else self._staging.copy(tensors)
            snapshot = replace(snapshot, train_state=text, tensors=staged)

        self._ranks.on_each(f"save step {step} in {self._root}", take, lambda _: None)
        return snapshot

    def _write(self, snapshot: Snapshot, ranks: Ranks, started: float, stalled: float | None = None) -> None:
        size = write_snapshot(self._root, snapshot, ranks, in_process=self._in_process)
        in_background = "" if stalled is None else f", for {stalled:.2f} s of which training stood still"
        logger.info(
            f"Saved step {snapshot.step} in {time.monotonic() - started:.1f} s{in_background} ({readable(size)})"
        )
        if ranks.rank == 0 and self._settings.keep_latest_k:
            self._removing = Background(partial(self._remove_surplus, snapshot.step), "remove-checkpoints")

    def _land(self) -> None:
        """Wait for the save in flight, if there is one."""
        in_flight, self._in_flight = self._in_flight, None
        if in_flight is not None:
            self._settle(in_flight.step, in_flight.writing.result)

    def _settle(self, step: int, outcome: Callable[[], None]) -> None:
        """Take note of how a save ended; all ranks got the same error."""
        try:
            outcome()
        except RuntimeError as error:
            if self._settings.on_failure == "stop":
                raise
            logger.error(f'{error}. Training goes on without this checkpoint (checkpoint.on_failure = "continue")')
        else:
            self._last_step = step

    def _remove_surplus(self, newest: int) -> None:
        try:
            keep_latest(self._root, self._settings.keep_latest_k, newest)
        except Exception as error:  # nothing of this is worth ending a run
            logger.warning(f"could not look for older checkpoints in {self._root}: {error}")

    def _live_tensors(self) -> dict[str, torch.Tensor]:
        tensors: dict[str, torch.Tensor] = {}
        self._ranks.on_each("collect the tensors", lambda: tensors.update(self._tensors()), lambda _: None)
        return tensors

    def _tensors(self) -> dict[str, torch.Tensor]:
        # Collected at each call, never kept: a save has to hold what the optimizer and the modules hold by then.
        return training_tensors(self._model_parts, self._optimizer)

    def _exported_weights(self) -> dict[str, torch.Tensor]:
        """The model's tensors, those of floating point as `export_dtype`; the live ones stay as they are."""
        dtype: torch.dtype = getattr(torch, self._settings.export_dtype)
        return {
            name: tensor.to(dtype) if tensor.is_floating_point() else tensor
            for name, tensor in model_tensors(self._model_parts).items()
        }
