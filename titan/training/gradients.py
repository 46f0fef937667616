"""The gradient's norm and its clipping, over the whole model, whatever its layout."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor


@torch.no_grad()
def gradient_norm(parameters: Iterable[nn.Parameter]) -> torch.Tensor:
    """2-norm of all gradients as one vector: a scalar, the same on every rank.

    Gradients are grouped by the mesh they lie on (plain ones are a group too), since torch can't combine tensors of
    two meshes; each group's norm is made whole before the groups are put together.
    """
    groups: dict[DeviceMesh | None, list[torch.Tensor]] = defaultdict(list)
    for parameter in parameters:
        if (grad := parameter.grad) is not None:
            groups[grad.device_mesh if isinstance(grad, DTensor) else None].append(grad)
    if not groups:
        return torch.zeros(())
    norms = (nn.utils.get_total_norm(grads) for grads in groups.values())
    whole = [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]
    return torch.linalg.vector_norm(torch.stack(whole))


@torch.no_grad()
def clip_gradients(parameters: Iterable[nn.Parameter], norm: torch.Tensor, max_norm: float) -> None:
    """Scale all gradients by min(1, max_norm / (norm + 1e-6)), in place.

    Args:
        norm: `gradient_norm` of the same parameters.
    """
    coefficient = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    # The factor is the same for every element: the local shards need no DTensor arithmetic.
    grads = [p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad for p in parameters if p.grad is not None]
    if grads:
        torch._foreach_mul_(grads, coefficient)
