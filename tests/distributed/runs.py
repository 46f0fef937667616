"""Functions that run within a gloo world: whole trainings, and single steps of tiny models."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

import tests.distributed.tiny_models  # noqa: F401  (registers the family)
from titan.config.derived import model_sizes
from titan.config.loader import LoadedConfig, load_and_check
from titan.data.loader import Microbatch
from titan.models.spec import model_families
from titan.parallelisms.parallel_dims import ParallelDims
from titan.training.initialize import initialize_weights, materialize
from titan.training.step import StepOutcome, TrainStep, count_valid_tokens

TINY = [
    "--experimental.custom_import=tests.distributed.tiny_models",
    "--model.name=tiny",
    "--model.flavor=untied",
    "--training.mixed_precision_param=float32",
    "--training.seq_len=32",
    "--lr_scheduler.warmup_steps=2",
    "--metrics.log_freq=1",
    "--metrics.progress=none",
]


def train_here(arguments: Sequence[str]) -> list[dict[str, Any]]:
    """`train.py` with these arguments on this world; the rows of its metrics.jsonl."""
    from train import train

    loaded = load_and_check(arguments, dist.get_world_size())
    train(loaded)
    dist.barrier()
    return read_metrics(loaded)


def read_metrics(loaded: LoadedConfig) -> list[dict[str, Any]]:
    lines = (Path(loaded.config.job.dump_folder) / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


class SmallRun:
    """A tiny model in a layout, with SGD and any gradient policy, for steps on microbatches made by hand."""

    def __init__(self, *arguments: str, lr: float = 0.1) -> None:
        config = load_and_check([*TINY, *arguments], dist.get_world_size()).config
        self.dims = ParallelDims.from_config(config.parallelism, dist.get_world_size())
        self.dims.build()
        family, sizes = model_families()[config.model.name], model_sizes(config)
        with torch.device("meta"):
            self.model = family.build(sizes)
        family.parallelize(self.model, self.dims, config)
        materialize(self.model, torch.device("cpu"))
        initialize_weights(self.model, config.debug.seed)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=lr)
        self._group = self.dims.loss.get_group()
        self.steps = TrainStep(
            self.model, self.optimizer, config.training, device=torch.device("cpu"), loss_group=self._group
        )
        self._local_batch = config.training.local_batch_size

    def microbatches(self, tokens: torch.Tensor, labels: torch.Tensor) -> list[Microbatch]:
        """This rank's part of a global batch `[G, S]`."""
        rows = len(tokens) // self.dims.batch_degree
        start = self.dims.batch.get_local_rank() * rows
        mine = slice(start, start + rows)
        return [
            Microbatch(*part)
            for part in zip(tokens[mine].split(self._local_batch), labels[mine].split(self._local_batch), strict=True)
        ]

    def step(self, number: int, tokens: torch.Tensor, labels: torch.Tensor) -> StepOutcome:
        batches = self.microbatches(tokens, labels)
        valid = count_valid_tokens(batches, self._group)
        assert valid is not None
        return self.steps.run(number, batches, valid)


def whole_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """Every parameter, unsharded. Collective."""
    return {
        name: (parameter.full_tensor() if isinstance(parameter, DTensor) else parameter).detach().clone()
        for name, parameter in model.named_parameters()
    }
