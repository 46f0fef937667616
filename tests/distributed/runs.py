"""Functions that run within a gloo world: whole trainings, and single steps of tiny models."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import redirect_stderr
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

import tests.distributed.tiny_models  # noqa: F401  (registers the family)
from titan.config.loader import LoadedConfig, load_and_check
from titan.data.microbatch import Microbatch
from titan.observability.logging import logger
from titan.parallelisms.parallel_dims import ParallelDims
from titan.training.initialize import initialize_weights, materialize
from titan.training.optimizer import Optimizer, build_optimizer
from titan.training.optimizer_groups import plan_updates
from titan.training.step import StepOutcome, TrainStep, agree_on_step, build_model, build_stages

TINY = [
    "--experimental.custom_import=tests.distributed.tiny_models",
    "--model.name=tiny",
    "--model.flavor=untied",
    "--model.tokenizer_path=tiny",
    "--training.mixed_precision_param=float32",
    "--training.seq_len=32",
    "--lr_scheduler.warmup_steps=2",
    "--metrics.log_freq=1",
    "--metrics.progress=none",
    "--activation_checkpoint.mode=none",  # tests of something else are quicker, and count what is done once
]


def train_here(arguments: Sequence[str]) -> list[dict[str, Any]]:
    """`train.py` with these arguments on this world; the rows of its metrics.jsonl."""
    from train import train

    loaded = load_and_check(arguments, dist.get_world_size())
    train(loaded)
    dist.barrier()
    return read_metrics(loaded)


def train_and_log(folder: Path, arguments: Sequence[str]) -> str:
    """`train.py` with these arguments, in a folder; this rank's log."""
    with TemporaryFile("w+") as log:  # a real file, which the watchdog's last resort writes to
        with pytest.MonkeyPatch.context() as patch, redirect_stderr(log):
            patch.chdir(folder)
            patch.setattr(logger, "handlers", [])
            train_here(arguments)
        log.seek(0)
        return log.read()


def read_metrics(loaded: LoadedConfig) -> list[dict[str, Any]]:
    path = Path(loaded.config.job.dump_folder) / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []  # a run without a step has none
    return [json.loads(line) for line in lines]


class SmallRun:
    """A tiny model in a layout, with SGD and any gradient policy, for steps on microbatches made by hand.

    Args:
        lr: of SGD; None takes the config's own optimizer.
    """

    def __init__(self, *arguments: str, lr: float | None = 0.1) -> None:
        self.config = config = load_and_check([*TINY, *arguments], dist.get_world_size()).config
        self.dims = ParallelDims.from_config(config.parallelism, dist.get_world_size())
        self.dims.build()
        cpu = torch.device("cpu")
        model = build_model(config)
        updates = plan_updates(config, model)
        self.stages = build_stages(model, config, self.dims, cpu)
        for part in self.stages.parts:
            materialize(part, cpu, weights_on_cpu=config.training.enable_cpu_offload)
            initialize_weights(part, config.debug.seed)
        self.optimizer: Optimizer
        if lr is None:
            self.optimizer = build_optimizer(config, updates, self.stages.parts)
        else:
            self.optimizer = torch.optim.SGD(self.parameters(), lr=lr)
        self.steps = TrainStep(self.stages, self.optimizer, config, self.dims, cpu)

    @property
    def model(self) -> Any:
        """The only part."""
        (part,) = self.stages.parts
        return part

    def parameters(self) -> list[nn.Parameter]:
        return [parameter for part in self.stages.parts for parameter in part.parameters()]

    def step(self, number: int, tokens: torch.Tensor, labels: torch.Tensor) -> StepOutcome:
        """A step on a global batch `[G, S]`, of which each rank takes its rows."""
        rows = len(tokens) // self.dims.batch_degree
        start = self.dims.batch.get_local_rank() * rows
        mine, size = slice(start, start + rows), self.config.training.local_batch_size
        parts = zip(tokens[mine].split(size), labels[mine].split(size), strict=True)
        batches = [Microbatch(*part) for part in parts]
        agreed = agree_on_step(batches, self.dims.ranks_per_row, stop=False)
        return self.steps.run(number, batches, agreed.valid_tokens)

    def weights(self) -> dict[str, torch.Tensor]:
        """Every parameter of the model, unsharded, on every rank. Collective."""
        mine = {
            name: (parameter.full_tensor() if isinstance(parameter, DTensor) else parameter).detach().clone()
            for part in self.stages.parts
            for name, parameter in part.named_parameters()
        }
        by_stage: list[dict[str, torch.Tensor]] = [{} for _ in range(self.dims.pp)]
        dist.all_gather_object(by_stage, mine, group=self.dims.world.get_group("pp"))
        return {name: weight for weights in by_stage for name, weight in weights.items()}
