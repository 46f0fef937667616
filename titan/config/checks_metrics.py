"""Rules about [metrics]."""

from __future__ import annotations

import importlib.util

from titan.config.job_config import JobConfig
from titan.config.rules import Mistakes, Rule


def _wandb(config: JobConfig, world_size: int) -> Mistakes:
    if config.metrics.enable_wandb and importlib.util.find_spec("wandb") is None:
        yield "metrics.enable_wandb = true: wandb isn't installed: pip install 'titan[wandb]'"


def _layer_norms(config: JobConfig, world_size: int) -> Mistakes:
    if config.metrics.layer_norms and config.optimizer.early_step_in_backward:
        yield (
            "metrics.layer_norms = true with optimizer.early_step_in_backward = true, which frees each gradient before "
            "the others are there; set one of the two to false"
        )


def _rank_logs(config: JobConfig, world_size: int) -> Mistakes:
    if config.metrics.rank_log_folder is not None and config.checkpoint.load_only:
        yield (
            f'metrics.rank_log_folder = "{config.metrics.rank_log_folder}" is in job.dump_folder, in which '
            "checkpoint.load_only = true writes nothing; leave one of them out"
        )


RULES = (
    Rule(_wandb, ("metrics.enable_wandb",), local=True),
    Rule(_layer_norms, ("metrics.layer_norms", "optimizer.early_step_in_backward")),
    Rule(_rank_logs, ("metrics.rank_log_folder", "checkpoint.load_only")),
)
