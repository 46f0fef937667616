"""The gradient's norm and its clipping, over the whole model, whatever its layout."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor


@torch.no_grad()
def gradient_norm(parameters: Iterable[nn.Parameter], pipeline: dist.ProcessGroup | None = None) -> torch.Tensor:
    """2-norm of all gradients as one vector: a scalar, the same on every rank.

    Gradients are grouped by the dimensions of the mesh that they are split over. What a rank's shards of a group add
    is summed over just those dimensions, since over all others the group is the same on every rank.

    Args:
        parameters: those of this rank.
        pipeline: ranks that hold other parameters.
    """
    groups: dict[tuple[dist.ProcessGroup, ...], list[torch.Tensor]] = defaultdict(list)
    for parameter in parameters:
        if (grad := parameter.grad) is not None:
            groups[_split_over(grad)].append(_local(grad))
    total = torch.zeros((), dtype=torch.float64, device=next((g[0].device for g in groups.values()), None))
    for split_over, grads in groups.items():
        square = nn.utils.get_total_norm(grads).double().square()
        for group in split_over:
            dist.all_reduce(square, group=group)
        total += square
    if pipeline is not None:
        dist.all_reduce(total, group=pipeline)
    return total.sqrt().float()


def _split_over(grad: torch.Tensor) -> tuple[dist.ProcessGroup, ...]:
    if not isinstance(grad, DTensor):
        return ()
    mesh = grad.device_mesh
    assert not any(placement.is_partial() for placement in grad.placements)
    return tuple(mesh.get_group(dim) for dim, placement in enumerate(grad.placements) if not placement.is_replicate())


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def clip_gradients(parameters: Iterable[nn.Parameter], norm: torch.Tensor, max_norm: float) -> None:
    """Scale all gradients by min(1, max_norm / (norm + 1e-6)), in place.

    Args:
        norm: `gradient_norm` of the same parameters.
    """
    coefficient = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    # The factor is the same for every element: the local shards need no DTensor arithmetic.
    grads = [_local(parameter.grad) for parameter in parameters if parameter.grad is not None]
    if grads:
        torch._foreach_mul_(grads, coefficient)
