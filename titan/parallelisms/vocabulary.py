"""Cross entropy where the vocabulary is split over ranks, so that none ever holds a whole row of logits."""

from __future__ import annotations

import torch
import torch.distributed._functional_collectives as funcol

from titan.models.layers.head import IGNORED


def rows_of_rank(vocab_size: int, ranks: int, rank: int) -> range:
    """The rows of the vocabulary that a rank holds, as DTensor's Shard cuts them: equal parts, the last ones short."""
    share = -(-vocab_size // ranks)
    return range(min(vocab_size, rank * share), min(vocab_size, (rank + 1) * share))


def split_cross_entropy(
    logits: torch.Tensor, labels: torch.Tensor, z_loss: float, rows: range, group: funcol.RANK_TYPES
) -> tuple[torch.Tensor, torch.Tensor]:
    """`cross_entropy` of titan/training/cross_entropy.py for a part of the logits; the loss is the same on all ranks.

    Two all-reduces of a number or two per token: the maximum, then the sum of exponentials and the label's logit.

    Args:
        logits: this rank's part, `[N, V/tp]`.
        rows: this rank's part of the vocabulary.
        group: the ranks that the vocabulary is split over.

    Returns:
        The sum, and its gradient for this rank's logits `[N, V/tp]`.
    """
    logits, labels = logits.float(), labels.unsqueeze(-1)
    largest = funcol.all_reduce(logits.amax(dim=-1, keepdim=True), "max", group)
    mine = (labels >= rows.start) & (labels < rows.stop)
    columns = (labels - rows.start).where(mine, 0)
    picked = logits.gather(-1, columns).where(mine, 0.0)
    gradient = (logits - largest).exp_()
    sums = torch.cat([gradient.sum(dim=-1, keepdim=True), picked], dim=-1)
    normaliser, picked = funcol.all_reduce(sums, "sum", group).split(1, dim=-1)
    log_normaliser, valid = normaliser.log() + largest, labels != IGNORED
    loss = ((log_normaliser - picked + z_loss * log_normaliser.square()) * valid).sum()
    gradient *= valid * (1 + 2 * z_loss * log_normaliser) / normaliser
    return loss, gradient.scatter_add_(-1, columns, -mine.to(gradient.dtype))
