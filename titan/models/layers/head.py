"""The output projection with the loss behind it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils import _pytree as pytree

IGNORED = -100  # a label that counts for nothing


@dataclass(frozen=True)
class Labels:
    """Labels `[B, S]`, int64, on the host, where the valid ones are counted without waiting for the device.

    A type of its own, because FSDP moves the tensors that a model is given to the device.
    """

    tensor: torch.Tensor


pytree.register_pytree_node(  # pipelines split their arguments over microbatches by it
    Labels, lambda labels: ([labels.tensor], None), lambda leaves, _: Labels(*leaves)
)

# (stream [B, S, dim], the head's weight [V, dim], labels) → the loss, a scalar in fp32
HeadLoss = Callable[[torch.Tensor, torch.Tensor, Labels], torch.Tensor]


class Head(nn.Linear):
    """Stream → logits, or → the loss of given labels.

    The loss is computed within the head's call, so that one that never holds whole logits may use the weight chunk by
    chunk while FSDP has it gathered.

    Attributes:
        loss: how, set once the layout is known (training/loss.py).
    """

    loss: HeadLoss | None = None

    def __init__(self, dim: int, vocab_size: int) -> None:
        super().__init__(dim, vocab_size, bias=False)

    def forward(self, stream: torch.Tensor, labels: Labels | None = None) -> torch.Tensor:
        """`[B, S, dim]` → `[B, S, V]`; with labels a scalar, the sum of their losses."""
        if labels is None:
            return super().forward(stream)
        assert self.loss is not None, "titan.training.loss.set_loss comes first"
        return self.loss(stream, self.weight, labels)
