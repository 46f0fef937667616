"""A toy run to save and load: odd sizes, a bias with fewer rows than ranks, buffers of both kinds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from titan.checkpoint.manager import CheckpointManager
from titan.checkpoint.state import training_tensors
from titan.config.job_config import Checkpoint

Contents = dict[str, tuple[tuple[int, ...], str, bytes]]


class Toy(nn.Module):
    def __init__(self, width: int = 7) -> None:
        super().__init__()
        self.first = nn.Linear(5, width)
        self.second = nn.Linear(width, width, bias=False)
        self.head = nn.Linear(width, 3)
        self.register_buffer("scale", torch.tensor([0.5]))
        self.register_buffer("table", torch.arange(4.0), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.second(self.first(x).tanh()).tanh()) * self.scale


class Run:
    """Model, optimizer and checkpoints, as train.py has them.

    Args:
        layout: "plain" (every rank has everything), "fsdp", or "hsdp" (two copies).
        model: another model than the toy.
        config_toml: the whole config, of which a checkpoint keeps a copy.
        settings: fields of [checkpoint].
    """

    def __init__(
        self,
        folder: str | Path,
        layout: str = "plain",
        /,
        *,
        seed: int = 0,
        width: int = 7,
        model: nn.Module | None = None,
        config_toml: str = "[job]\n",
        **settings: Any,
    ) -> None:
        torch.manual_seed(seed)
        self.model = Toy(width) if model is None else model
        if layout != "plain":
            size = dist.get_world_size()
            shape = (size,) if layout == "fsdp" else (2, size // 2)
            mesh = init_device_mesh("cpu", shape, mesh_dim_names=("copy", "shard")[-len(shape) :])
            for module in (self.model.second, self.model):
                fully_shard(module, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1, weight_decay=0.1, fused=True)
        self.manager = CheckpointManager(
            Checkpoint(**{"enable": True, "verify": "checksum", **settings}),
            Path(folder),
            model_parts=[self.model],
            optimizer=self.optimizer,
            config_toml=config_toml,
            layout={"dp_shard": dist.get_world_size()},
        )

    def train(self, start: int, stop: int) -> list[float]:
        """Steps start + 1 … stop, the same ones whatever the layout. The learning rate is a function of the step.

        Returns:
            The losses.
        """
        losses = []
        for step in range(start + 1, stop + 1):
            self.optimizer.param_groups[0]["lr"] = 0.1 / step
            x = torch.linspace(-step, step, 10).reshape(2, 5)
            loss = self.model(x).square().sum()
            losses.append(loss.item())
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            if step == 2:
                self.model.scale += 1  # a buffer that has to be saved
        return losses

    def save(self, *steps: int) -> None:
        for step in steps:
            self.manager.save(step, {"step": step})
        self.manager.wait()

    def contents(self) -> Contents:
        """All tensors, whole and as bytes: equal if, and only if, equal bit for bit."""
        whole = {}
        for name, tensor in training_tensors([self.model], self.optimizer).items():
            full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            whole[name] = (tuple(full.shape), str(full.dtype), full.reshape(-1).view(torch.uint8).numpy().tobytes())
        return whole


def train_and_save(folder: str, layout: str, steps: int) -> Contents:
    run = Run(folder, layout)
    run.train(0, steps)
    run.save(steps)
    return run.contents()


def load(folder: str | Path, layout: str, /, **settings: Any) -> tuple[dict[str, Any] | None, Contents]:
    run = Run(folder, layout, seed=1, **settings)
    train_state = run.manager.load()
    return train_state, run.contents()
