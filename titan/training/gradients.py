"""The gradient's norm and its clipping, over the whole model, whatever its layout."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor


class GradientNorm:
    """2-norm of gradients as one vector; they may come one after another, and be freed.

    Gradients are grouped by the dimensions of the mesh that they are split over. What a rank's shards of a group add
    is summed over just those dimensions, since over all others the group is the same on every rank.
    """

    def __init__(self) -> None:
        self._squares: dict[tuple[dist.ProcessGroup, ...], torch.Tensor] = {}

    @torch.no_grad()
    def add(self, grads: Iterable[torch.Tensor]) -> None:
        """Add complete gradients, of any float types."""
        groups: dict[tuple[dist.ProcessGroup, ...], list[torch.Tensor]] = defaultdict(list)
        for grad in grads:
            groups[_split_over(grad)].append(local_part(grad))
        for split_over, parts in groups.items():
            norms = torch._foreach_norm(parts, 2, dtype=torch.float32)
            square = torch.linalg.vector_norm(torch.stack(norms)).double().square()
            self._squares[split_over] = self._squares[split_over] + square if split_over in self._squares else square

    @torch.no_grad()
    def take(self, pipeline: dist.ProcessGroup | None = None) -> torch.Tensor:
        """The norm of what was added since last asked: a scalar, fp32, the same on every rank. Collective.

        Args:
            pipeline: ranks that hold other parameters.
        """
        squares, self._squares = self._squares, {}
        total = torch.zeros((), dtype=torch.float64, device=next((s.device for s in squares.values()), None))
        for split_over, square in squares.items():
            for group in split_over:
                dist.all_reduce(square, group=group)
            total += square
        if pipeline is not None:
            dist.all_reduce(total, group=pipeline)
        return total.sqrt().float()


def gradient_norm(parameters: Iterable[nn.Parameter], pipeline: dist.ProcessGroup | None = None) -> torch.Tensor:
    """2-norm of all gradients as one vector: a scalar, the same on every rank. Collective.

    Args:
        parameters: those of this rank.
        pipeline: ranks that hold other parameters.
    """
    norm = GradientNorm()
    norm.add(parameter.grad for parameter in parameters if parameter.grad is not None)
    return norm.take(pipeline)


def _split_over(grad: torch.Tensor) -> tuple[dist.ProcessGroup, ...]:
    if not isinstance(grad, DTensor):
        return ()
    mesh = grad.device_mesh
    assert not any(placement.is_partial() for placement in grad.placements)
    return tuple(mesh.get_group(dim) for dim, placement in enumerate(grad.placements) if not placement.is_replicate())


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of a tensor, which may be sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def clip_gradients(parameters: Iterable[nn.Parameter], norm: torch.Tensor, max_norm: float) -> None:
    """Scale all gradients by min(1, max_norm / (norm + 1e-6)), in place.

    Args:
        norm: `gradient_norm` of the same parameters.
    """
    coefficient = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    # The factor is the same for every element: the local shards need no DTensor arithmetic.
    grads = [local_part(parameter.grad) for parameter in parameters if parameter.grad is not None]
    if grads:
        torch._foreach_mul_(grads, coefficient)
