"""Differences between titan and torchtitan of late 2024, for comparing predictions with its published measurements.

- embedding, norm and head are gathered with FSDP's root, and stay so through the step
- the norm is made of several operators, the first of which casts to fp32 (`accelerator_operators(fused_norm=False)`)
- the loss is F.cross_entropy of whole logits in fp32
- checkpointing within a block also keeps the last product
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F

from titan.models.layers.head import Labels
from titan.models.llama import parallelize
from titan.parallelisms import activation_checkpoint
from titan.training import loss


@contextmanager
def torchtitan_2024() -> Iterator[None]:
    """Build and run models as torchtitan did; undone at the end."""
    choice = activation_checkpoint._Choice.__init__

    def keep_all(self: Any, products: int) -> None:
        choice(self, products + 1)

    replaced: tuple[tuple[Any, str, Any], ...] = (
        (parallelize, "fsdp_groups", lambda model: [[block] for block in model.layers.values()]),
        (loss, "build_loss", lambda config, dims, vocab_size: _whole_logits),
        (activation_checkpoint._Choice, "__init__", keep_all),
    )
    originals = [getattr(owner, name) for owner, name, _ in replaced]
    try:
        for owner, name, replacement in replaced:
            setattr(owner, name, replacement)
        yield
    finally:
        for (owner, name, _), original in zip(replaced, originals, strict=True):
            setattr(owner, name, original)


def _whole_logits(stream: Any, weight: Any, labels: Labels) -> torch.Tensor:
    logits = F.linear(stream, weight)
    targets = labels.tensor.flatten().to(logits.device, non_blocking=True)
    return F.cross_entropy(logits.flatten(0, 1).float(), targets, reduction="sum")
