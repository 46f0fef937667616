"""Weights & Biases: the numbers of metrics.jsonl, under the same names."""

from __future__ import annotations

import os
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from titan.observability.logging import logger
from titan.observability.metric_writers import numbers

_CONNECT_SECONDS = 30
_FINISH_SECONDS = 60
# What titan chooses where the environment doesn't: variable of W&B's -> its argument of wandb.init.
_ARGUMENTS = {"WANDB_PROJECT": "project", "WANDB_NAME": "name", "WANDB_RUN_ID": "id", "WANDB_DIR": "dir"}


class WandbWriter:
    """A W&B run, the same one after each resume. W&B's own variables (WANDB_PROJECT, WANDB_MODE, …) have the last word.

    Nothing of W&B ends or stops a training. Where its server can't be reached, or nobody is logged in, the run is kept
    in the folder for `wandb sync`; what fails later is warned of once.

    Args:
        folder: of the run; W&B keeps its files in `wandb/` of it, and the run's id is there in `wandb_run_id`.
        start_step: steps that the run has done already; at 0 a new W&B run begins.
        description: of the run, which W&B calls its config; nested.
    """

    def __init__(self, folder: Path, start_step: int, description: Mapping[str, Any]) -> None:
        chosen = {
            "WANDB_PROJECT": "titan",
            "WANDB_NAME": folder.resolve().name,
            "WANDB_RUN_ID": _run_id(folder / "wandb_run_id", start_step),
            "WANDB_DIR": str(folder),
        }
        arguments = {_ARGUMENTS[name]: value for name, value in chosen.items() if not os.environ.get(name)}
        self._run = _init(arguments, dict(description))

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Add the numbers of a step; one that W&B has already, done again after a kill, stays as it is there.

        Args:
            values: those that are unknown, or no numbers, are left out.
        """
        if self._run is None or step < self._run.starting_step:
            return
        try:
            self._run.log(numbers(values), step=step)
        except Exception as error:
            self._give_up(error)

    def close(self) -> None:
        """Send what is left, for a minute at most; may be called twice."""
        if self._run is None:
            return
        try:
            self._run.finish()
        except Exception as error:
            self._give_up(error)
        self._run = None

    def _give_up(self, error: Exception) -> None:
        logger.warning(f"W&B: {_line(error)}; from here on the run goes on without it")
        self._run = None


def _init(arguments: Mapping[str, Any], description: dict[str, Any]) -> Any:
    """A run on the server, or one that is kept here; None when neither is possible."""
    import wandb

    settings: dict[str, Any] = {
        "init_timeout": _CONNECT_SECONDS,
        "finish_timeout": _FINISH_SECONDS,
        "login_timeout": 1,  # on a terminal it would ask for a key, and wait
        "x_graphql_retry_max": 1,  # instead of trying on for minutes
        "x_graphql_timeout_seconds": _CONNECT_SECONDS / 3,
    }
    # The log is titan's own, and W&B's would have every redraw of the progress bar.
    settings |= {} if os.environ.get("WANDB_CONSOLE") else {"console": "off"}
    settings |= {} if os.environ.get("WANDB_QUIET") else {"quiet": True}
    resume: dict[str, Any] = {} if os.environ.get("WANDB_RESUME") else {"resume": "allow"}
    run = None
    try:
        run = wandb.init(**arguments, **resume, settings=wandb.Settings(**settings))
    except Exception as error:
        logger.warning(f"W&B: {_line(error)}; the run is kept in a folder instead, `wandb sync` sends it later")
        try:
            wandb.teardown()
            run = wandb.init(**arguments, mode="offline", settings=wandb.Settings(**settings))
        except Exception as error:
            logger.warning(f"W&B: {_line(error)}; the run goes on without it")
    if run is not None:
        run.config.update(description, allow_val_change=True)
        logger.info(f"W&B: {run.dir if run.offline else run.url}")
    return run


def _run_id(path: Path, start_step: int) -> str:
    """The id of the run's earlier starts, or a new one."""
    if start_step > 0 and path.exists():
        return path.read_text(encoding="utf-8").strip()
    new = uuid.uuid4().hex[:8]
    path.write_text(new + "\n", encoding="utf-8")
    return new


def _line(error: Exception) -> str:
    """The first line of what an error says."""
    return (str(error).splitlines() or [type(error).__name__])[0]
