"""The loss: a sum over tokens, divided by the number of tokens of the whole global batch."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from titan.config.job_config import Parallelism
from titan.parallelisms.parallel_dims import ParallelDims
from titan.parallelisms.vocabulary import VocabularyParallelCrossEntropy, rows_of_rank

IGNORED = -100  # a label that counts for nothing

# (logits as the model gives them, labels [B, S]) → Σ −log p(label), fp32
LossSum = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def cross_entropy_sum(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Σ −log p(label) over the labels that aren't IGNORED, in fp32; 0 when all are.

    Args:
        logits: `[B, S, V]`, any float dtype.
        labels: `[B, S]`, int64.
    """
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), ignore_index=IGNORED, reduction="sum")


def build_loss(settings: Parallelism, dims: ParallelDims, vocab_size: int) -> LossSum:
    """The loss for the logits of a layout: whole, or `[B, S, V/tp]` where tensor parallelism leaves them split."""
    if dims.tp == 1 or settings.disable_loss_parallel:
        return cross_entropy_sum
    tp = dims.world["tp"]
    rows = rows_of_rank(vocab_size, dims.tp, tp.get_local_rank())

    def loss_sum(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = VocabularyParallelCrossEntropy.apply(
            logits.flatten(0, 1), labels.flatten(), rows, IGNORED, tp.get_group()
        )
        return loss

    return loss_sum
