"""Norms of the gradient and of the weights by layer, the same numbers in every layout."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from titan.checkpoint.state import plain_name
from titan.parallelisms.parallel_dims import ParallelDims
from titan.training.gradients import local_part


class LayerNorms:
    """2-norms of all parameters of a layer as one vector, and of their gradients. Making one is collective.

    A layer is a block, such as `layers.3`, or what stands beside the blocks, such as `output`.

    Args:
        parts: the modules whose parameters this rank trains.
    """

    def __init__(self, parts: Sequence[nn.Module], dims: ParallelDims) -> None:
        self._layers: dict[str, list[nn.Parameter]] = {}
        for part in parts:
            for name, parameter in part.named_parameters():
                if parameter.requires_grad:
                    self._layers.setdefault(_layer(plain_name(name)), []).append(parameter)
        stages: list[list[str]] = [[] for _ in range(dims.pp)]
        dist.all_gather_object(stages, list(self._layers), group=dims.world.get_group("pp"))
        self._names = list(dict.fromkeys(name for stage in stages for name in stage))
        self._device = next(parameter.device for part in parts for parameter in part.parameters())
        self._ranks_of_a_stage = dims.world_size // dims.pp

    @torch.no_grad()
    def take(self) -> dict[str, float]:
        """`grad_norm/<layer>` and `weight_norm/<layer>` of each layer, on every rank. Collective, one message."""
        names = [*(f"grad_norm/{name}" for name in self._names), *(f"weight_norm/{name}" for name in self._names)]
        squares: dict[str, torch.Tensor] = {}
        for layer, parameters in self._layers.items():
            gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
            squares[f"grad_norm/{layer}"] = self._share(gradients)
            squares[f"weight_norm/{layer}"] = self._share(parameters)
        nothing = torch.zeros((), dtype=torch.float64)
        sums = torch.stack([squares.get(name, nothing).to(self._device) for name in names])
        dist.all_reduce(sums)
        return dict(zip(names, sums.sqrt().tolist(), strict=True))

    def _share(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """What this rank adds to the sum of squares over the job's ranks: fp64, of its shards, its part of one copy."""
        if not tensors:
            return torch.zeros((), dtype=torch.float64)
        norms = torch.stack(torch._foreach_norm([local_part(tensor) for tensor in tensors], 2, dtype=torch.float32))
        # Ranks of this stage beyond those that share one copy hold copies.
        parts = [_shards(tensor) / self._ranks_of_a_stage for tensor in tensors]
        return norms.double().square().dot(torch.tensor(parts, dtype=torch.float64, device=norms.device))


def _shards(tensor: torch.Tensor) -> int:
    """In how many parts the ranks hold a tensor; those that hold the same part hold copies."""
    if not isinstance(tensor, DTensor):
        return 1
    assert not any(placement.is_partial() for placement in tensor.placements)
    sizes = zip(tensor.placements, tensor.device_mesh.shape, strict=True)
    return math.prod(size for placement, size in sizes if not placement.is_replicate())


def _layer(name: str) -> str:
    """`layers.3` of `layers.3.attention.wq.weight`, `output` of `output.weight`."""
    first, *rest = name.split(".")
    return f"{first}.{rest[0]}" if rest and rest[0].isdecimal() else first
