"""The loss: a sum over tokens, divided by the number of tokens of the whole global batch."""

from __future__ import annotations

import torch
import torch.nn.functional as F

IGNORED = -100  # a label that counts for nothing


def cross_entropy_sum(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Σ −log p(label) over the labels that aren't IGNORED, in fp32; 0 when all are.

    Args:
        logits: `[B, S, V]`, any float dtype.
        labels: `[B, S]`, int64.
    """
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), ignore_index=IGNORED, reduction="sum")
