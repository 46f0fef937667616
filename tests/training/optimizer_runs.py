"""Steps of the config's own optimizer in a layout, cut and resumed at will; functions that run within a gloo world."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from tests.distributed.runs import SmallRun
from tests.distributed.test_matrix import random_batch
from titan.checkpoint.manager import CheckpointManager
from titan.checkpoint.state import training_tensors
from titan.config.job_config import Checkpoint
from titan.training.optimizer import set_lr

LR = 0.01


class OptimizerRun(SmallRun):
    """A tiny model with the optimizer that the arguments name, and its checkpoints."""

    def __init__(self, arguments: list[str], folder: str | Path) -> None:
        super().__init__(*arguments, lr=None)
        self.manager = CheckpointManager(
            Checkpoint(enable=True),
            Path(folder),
            model_parts=self.stages.parts,
            optimizer=self.optimizer,
            config_toml="[job]\n",
            layout=self.dims.degrees(),
        )
        self.losses: list[float] = []
        self.norms: list[float] = []

    def train(self, start: int, stop: int) -> None:
        """Steps start + 1 … stop, the same ones whatever the layout, each at a learning rate of its own."""
        for step in range(start + 1, stop + 1):
            set_lr(self.optimizer, LR / step)
            outcome = self.step(step, *random_batch(step))
            self.losses.append(outcome.loss)
            self.norms.append(outcome.grad_norm)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Weights and the optimizer's state by name, whole, on every rank. Collective."""
        return {
            name: (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()
            for name, tensor in training_tensors(self.stages.parts, self.optimizer).items()
        }

    def outcome(self) -> dict[str, Any]:
        return {"losses": self.losses, "norms": self.norms, "tensors": self.tensors()}


def straight(arguments: list[str], folder: str, steps: int = 4) -> dict[str, Any]:
    """Some steps without a stop."""
    run = OptimizerRun(arguments, folder)
    run.train(0, steps)
    return run.outcome()


def cut(arguments: list[str], folder: str) -> None:
    """Two steps and a checkpoint of them."""
    run = OptimizerRun(arguments, folder)
    run.train(0, 2)
    run.manager.save(2, {"step": 2})


def resumed(arguments: list[str], folder: str) -> dict[str, Any]:
    """Two more steps, from the checkpoint; weights and state start as other ones, so that all must be loaded."""
    run = OptimizerRun([*arguments, "--debug.seed=1"], folder)
    assert run.manager.load() == {"step": 2}
    run.train(2, 4)
    return run.outcome()


def straight_and_resumed(arguments: list[str], folder: str) -> tuple[dict[str, Any], dict[str, Any]]:
    whole = straight(arguments, f"{folder}/straight")
    cut(arguments, f"{folder}/cut")
    return whole, resumed(arguments, f"{folder}/cut")
