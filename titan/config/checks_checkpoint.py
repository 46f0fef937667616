"""Rules of checkpoints: what a run starts from, and what it leaves."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from titan.config.job_config import JobConfig
from titan.config.nearest import did_you_mean
from titan.config.rules import Mistakes, Rule


def _load_step(config: JobConfig, world_size: int) -> Mistakes:
    if config.checkpoint.load_step != -1 and not config.checkpoint.enable:
        yield (
            f"checkpoint.load_step = {config.checkpoint.load_step}: nothing is loaded while checkpoint.enable = false; "
            "set checkpoint.enable = true, or leave load_step at -1"
        )


def _initial_load(config: JobConfig, world_size: int) -> Mistakes:
    path = config.checkpoint.initial_load_path
    if path is not None and not Path(path).is_dir():
        beside = [str(entry) for entry in Path(path).parent.glob("*")]
        yield f'checkpoint.initial_load_path = "{path}": no such folder{did_you_mean(path, beside)}'


def _exclusions(config: JobConfig, world_size: int) -> Mistakes:
    excluded = config.checkpoint.exclude_from_loading
    pair = {"optimizer": "train_state", "train_state": "optimizer"}
    for name in excluded:
        if (other := pair.get(name, name)) not in excluded:
            yield (
                f"checkpoint.exclude_from_loading = {', '.join(excluded)}: moments and learning rate belong together "
                f"(the rate follows from the step, which is in train_state); name {other} too"
            )


def _seed_checkpoint(config: JobConfig, world_size: int) -> Mistakes:
    settings = config.checkpoint
    if settings.create_seed_checkpoint and (settings.load_only or not settings.enable):
        reason = "checkpoint.load_only = true" if settings.load_only else "checkpoint.enable = false"
        yield f"checkpoint.create_seed_checkpoint = true: nothing is saved with {reason}; change one of them"


RULES = (
    Rule(_load_step, ("checkpoint.load_step", "checkpoint.enable")),
    Rule(_initial_load, ("checkpoint.initial_load_path",)),
    Rule(_exclusions, ("checkpoint.exclude_from_loading",)),
    Rule(_seed_checkpoint, ("checkpoint.create_seed_checkpoint", "checkpoint.enable", "checkpoint.load_only")),
)


def warnings(config: JobConfig) -> Iterator[str]:
    settings = config.checkpoint
    if settings.export_dtype != "float32" and not settings.last_save_model_only:
        yield (
            f'checkpoint.export_dtype = "{settings.export_dtype}" changes nothing while '
            "checkpoint.last_save_model_only = false: a whole checkpoint keeps every type as it is"
        )
