"""Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon): momentum, made orthogonal.

Orthogonalising takes whole matrices and some 30 n³ operations for one of n × n, while ranks hold shards. On shards it
would cost a dozen collectives per matrix, and rounding would depend on the layout; on every rank, the same work many
times. Here each matrix goes whole to one rank, the next matrix to the next rank, and the results come back:

    momentum, sharded ──reduce──▶ whole, on its owner ──orthogonalise──▶ ──broadcast──▶ this rank's shard of it
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim._muon import _zeropower_via_newtonschulz

from titan.training.gradients import local_part
from titan.training.initialize import local_shard


class Muon(torch.optim.Muon):
    """torch's Muon for sharded matrices, with the learning rate of AdamW (arXiv 2502.16982: "match RMS").

    An orthogonal matrix `[A, B]` has entries of RMS 1/√max(A, B), AdamW's updates of 0.2 or so: the learning rate is
    multiplied by 0.2·√max(A, B), so that one schedule, and one weight decay, fit both.
    """

    def __init__(self, params: Iterable[Any], lr: float, *, state_dtype: torch.dtype) -> None:
        """
        Args:
            params: matrices, or groups of them.
            state_dtype: of the momentum.
        """
        super().__init__(params, lr=lr, adjust_lr_fn="match_rms_adamw")
        self._state_dtype = state_dtype

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every matrix that has a gradient. Collective over the matrices' meshes."""
        for group in self.param_groups:
            ready = [parameter for parameter in group["params"] if parameter.grad is not None]
            for mesh, matrices in itertools.groupby(ready, key=_mesh):
                for batch in _batches(list(matrices), 1 if mesh is None else mesh.size()):
                    updates = [self._momentum(matrix, group) for matrix in batch]
                    for matrix, direction in zip(batch, _orthogonal(updates, mesh, group), strict=True):
                        _move(matrix, direction, group)

    def _momentum(self, parameter: torch.Tensor, group: dict[str, Any]) -> _Shard:
        """Add the gradient to the momentum. What is to be made orthogonal is in bf16, torch's type for that."""
        assert parameter.grad is not None
        state = self.state[parameter]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(parameter, dtype=self._state_dtype)
        kept, grad = local_part(state["momentum_buffer"]), local_part(parameter.grad).float()
        momentum = kept.float().lerp_(grad, 1 - group["momentum"])
        kept.copy_(momentum)
        shard, offset = local_shard(parameter)
        box = tuple(slice(start, start + size) for start, size in zip(offset, shard.shape, strict=True))
        return _Shard(grad.lerp(momentum, group["momentum"]).bfloat16(), parameter, box)


class _Shard(NamedTuple):
    """A shard of an update.

    Attributes:
        shard: this rank's part, bf16.
        parameter: the matrix that is updated.
        box: where the part is in the whole matrix.
    """

    shard: torch.Tensor
    parameter: torch.Tensor
    box: tuple[slice, ...]

    def whole(self) -> torch.Tensor:
        """The whole matrix with zeros where other ranks' parts are."""
        matrix = self.shard.new_zeros(self.parameter.shape)
        matrix[self.box] = self.shard
        return matrix


def _here(mesh: DeviceMesh) -> tuple[int, ...]:
    """This rank's place in each dimension."""
    return tuple(mesh.get_coordinate() or ())


def _mesh(parameter: torch.Tensor) -> DeviceMesh | None:
    return parameter.device_mesh if isinstance(parameter, DTensor) else None


def _batches(parameters: list[torch.Tensor], size: int) -> Iterator[list[torch.Tensor]]:
    for start in range(0, len(parameters), size):
        yield parameters[start : start + size]


def _orthogonal(updates: Sequence[_Shard], mesh: DeviceMesh | None, group: dict[str, Any]) -> Iterator[torch.Tensor]:
    """This rank's part of each update's orthogonal factor. There are at most as many updates as ranks, one for each."""
    if mesh is None:
        yield from (_newton_schulz(update.shard, group) for update in updates)
        return
    owners = list(itertools.product(*(range(size) for size in mesh.shape)))[: len(updates)]
    here, mine = _here(mesh), None
    for update, owner in zip(updates, owners, strict=True):
        whole = update.whole()
        _sum_at(whole, update.parameter, mesh, owner)
        if owner == here:
            mine = whole
    if mine is not None:
        mine = _newton_schulz(mine, group)
    for update, owner in zip(updates, owners, strict=True):
        result = mine if mine is not None and owner == here else update.shard.new_empty(update.parameter.shape)
        _broadcast(result, mesh, owner)
        yield result[update.box]


def _newton_schulz(matrix: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
    return _zeropower_via_newtonschulz(matrix, group["ns_coefficients"], group["ns_steps"], group["eps"]).contiguous()


def _sum_at(whole: torch.Tensor, parameter: torch.Tensor, mesh: DeviceMesh, owner: tuple[int, ...]) -> None:
    """Sum over the ranks that hold different parts, at the rank of these coordinates: one dimension after another."""
    assert isinstance(parameter, DTensor)
    here = _here(mesh)
    for dim in reversed(range(mesh.ndim)):
        in_line = here[dim + 1 :] == owner[dim + 1 :]
        if in_line and mesh.size(dim) > 1 and not parameter.placements[dim].is_replicate():
            dist.reduce(whole, group=mesh.get_group(dim), group_dst=owner[dim])


def _broadcast(whole: torch.Tensor, mesh: DeviceMesh, owner: tuple[int, ...]) -> None:
    """From the rank of these coordinates to all of the mesh: along its line in the first dimension, and so on."""
    here = _here(mesh)
    for dim in range(mesh.ndim):
        if here[dim + 1 :] == owner[dim + 1 :] and mesh.size(dim) > 1:
            dist.broadcast(whole, group=mesh.get_group(dim), group_src=owner[dim])


def _move(parameter: torch.Tensor, direction: torch.Tensor, group: dict[str, Any]) -> None:
    """Decay the weight, then step against the direction, in fp32."""
    lr, weight = group["lr"], local_part(parameter)
    moved = weight.float().mul_(1 - lr * group["weight_decay"])
    moved.add_(direction, alpha=-lr * 0.2 * math.sqrt(max(parameter.shape)))
    weight.copy_(moved)
