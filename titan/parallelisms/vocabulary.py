"""Cross entropy over logits whose vocabulary is split over ranks, so that no rank ever holds a whole row of them."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


def rows_of_rank(vocab_size: int, ranks: int, rank: int) -> range:
    """The rows of the vocabulary that a rank holds, as DTensor's Shard cuts them: equal parts, the last ones short."""
    share = -(-vocab_size // ranks)
    return range(min(vocab_size, rank * share), min(vocab_size, (rank + 1) * share))


class VocabularyParallelCrossEntropy(torch.autograd.Function):
    """Σ −log p(label) over the labels that aren't ignored, fp32, the same on all ranks of the group.

    Two all-reduces of a number or two per token: the maximum, then the sum of exponentials and the label's logit.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, labels: torch.Tensor, rows: range, ignored: int, group: dist.ProcessGroup
    ) -> torch.Tensor:
        """
        Args:
            logits: this rank's part, `[N, V/tp]`, any float dtype.
            labels: `[N]`, int64, of the whole vocabulary.
            rows: this rank's part of the vocabulary.
            ignored: the label that counts for nothing.
            group: the ranks that the vocabulary is split over.
        """
        wide = logits.float()
        largest = wide.amax(dim=-1)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
        mine = (labels >= rows.start) & (labels < rows.stop)
        columns = (labels - rows.start).where(mine, 0).unsqueeze(-1)
        picked = wide.gather(-1, columns).squeeze(-1).where(mine, 0.0)
        sums = torch.stack([(wide - largest.unsqueeze(-1)).exp().sum(dim=-1), picked])
        dist.all_reduce(sums, group=group)
        log_normaliser = sums[0].log() + largest
        valid = labels != ignored
        ctx.save_for_backward(logits, log_normaliser, columns, mine, valid)
        return (log_normaliser - sums[1]).where(valid, 0.0).sum()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        logits, log_normaliser, columns, mine, valid = ctx.saved_tensors
        grad = (logits.float() - log_normaliser.unsqueeze(-1)).exp_()
        grad.scatter_add_(-1, columns, -mine.unsqueeze(-1).to(grad.dtype))
        grad *= (valid * grads[0]).unsqueeze(-1)
        return grad.to(logits.dtype), None, None, None, None
