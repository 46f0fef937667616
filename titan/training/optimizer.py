"""The optimizer over all parameters of a model, in groups that say which of them decay."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from titan.config.job_config import Optimizer
from titan.observability.logging import logger


def build_optimizer(settings: Optimizer, named_parameters: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    """Adam (arXiv 1412.6980) or AdamW (arXiv 1711.05101).

    Matrices decay; norm gains and biases, which have one dimension, don't unless `decay_norms_and_biases`. The learning
    rate of a step is set by `set_lr` before it.
    """
    parameters = [parameter for _, parameter in named_parameters if parameter.requires_grad]
    decayed = [p for p in parameters if p.ndim > 1 or settings.decay_norms_and_biases]
    plain = [p for p in parameters if not (p.ndim > 1 or settings.decay_norms_and_biases)]
    groups = [
        {"params": decayed, "weight_decay": settings.weight_decay},
        {"params": plain, "weight_decay": 0.0},
    ]
    logger.info(
        f"{settings.name} ({settings.implementation}): {len(decayed)} tensors with weight decay "
        f"{settings.weight_decay:g}, {len(plain)} without"
    )
    kind = {"Adam": torch.optim.Adam, "AdamW": torch.optim.AdamW}[settings.name]
    return kind(
        [group for group in groups if group["params"]],
        lr=settings.lr,
        betas=(settings.beta1, settings.beta2),
        eps=settings.eps,
        fused=settings.implementation == "fused",
        foreach=settings.implementation == "foreach",
    )


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Make the next step of all groups use this learning rate."""
    for group in optimizer.param_groups:
        group["lr"] = lr
