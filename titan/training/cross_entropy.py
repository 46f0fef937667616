"""Cross entropy with its gradient computed in the forward pass: of logits, or of a head's product chunk by chunk.

In chunks, neither logits nor their gradient ever exist whole: a chunk's gradient is computed right after its loss,
while its logits are there. Recomputing them in the backward pass would cost a third product. What stays for the
backward pass has the size of the stream and of the weight. (Cut Cross-Entropy, arXiv 2411.09009; Liger, 2410.10989.)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from titan.models.layers.head import IGNORED

# (logits [N, V], labels [N]) → Σ loss and its gradient for the logits [N, V], both fp32
TokenLoss = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def cross_entropy(logits: torch.Tensor, labels: torch.Tensor, z_loss: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Σ −log p(label) + z_loss · log²Z over the labels that aren't IGNORED, Z being the sum of exponentials.

    Args:
        logits: `[N, V]`, any float dtype.
        labels: `[N]`, int64.
        z_loss: weight of the squared log normaliser (PaLM, arXiv 2204.02311).

    Returns:
        The sum and its gradient for the logits `[N, V]`, both fp32 whatever the logits are.
    """
    valid = (labels != IGNORED).unsqueeze(-1)
    index = labels.unsqueeze(-1).where(valid, 0)
    log_p = torch.log_softmax(logits, dim=-1, dtype=torch.float32)
    picked = log_p.gather(-1, index)
    log_normaliser = logits.gather(-1, index).float() - picked
    loss = ((z_loss * log_normaliser.square() - picked) * valid).sum()
    gradient = log_p.exp_()
    gradient *= valid * (1 + 2 * z_loss * log_normaliser)
    return loss, gradient.scatter_add_(-1, index, -valid.to(gradient.dtype))


class CrossEntropy(torch.autograd.Function):
    """Σ loss(logits, label), fp32."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, labels: torch.Tensor, token_loss: TokenLoss) -> torch.Tensor:
        """`logits` `[N, V]`, `labels` `[N]` on the same device."""
        loss, gradient = token_loss(logits, labels)
        ctx.gradients = (gradient.to(logits.dtype),)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return *_take_gradients(ctx, grads[0]), None, None


class LinearCrossEntropy(torch.autograd.Function):
    """Σ loss(stream · weightᵀ, label) over the labels that aren't IGNORED, fp32; 0 when all are."""

    @staticmethod
    def forward(
        ctx: Any,
        stream: torch.Tensor,
        weight: torch.Tensor,
        labels: torch.Tensor,
        num_chunks: int,
        token_loss: TokenLoss,
        with_gradient: bool,
    ) -> torch.Tensor:
        """
        Args:
            stream: `[N, D]`.
            weight: `[V, D]`, of the same dtype.
            labels: `[N]`, int64, on the host. Ignored rows are left out of every product.
            num_chunks: of the N rows. A chunk has ⌈N / num_chunks⌉ valid ones.
            with_gradient: False where no backward pass will come.
        """
        rows_per_chunk = -(-len(labels) // num_chunks)
        valid = (labels != IGNORED).nonzero().squeeze(-1)
        device = stream.device
        kept, rows = stream, None
        if len(valid) < len(labels):
            labels, rows = labels[valid], valid.to(device, non_blocking=True)
            kept = stream.index_select(0, rows)
        targets = labels.to(device, non_blocking=True)

        loss = torch.zeros((), device=device)
        stream_grad = torch.empty_like(kept) if with_gradient else None
        # Every chunk adds to it, so it is summed wide.
        weight_grad = torch.zeros_like(weight, dtype=torch.float32) if with_gradient else None
        for start in range(0, len(kept), rows_per_chunk):
            chunk = slice(start, start + rows_per_chunk)
            part, logits_grad = token_loss(kept[chunk] @ weight.T, targets[chunk])
            loss += part
            if stream_grad is not None and weight_grad is not None:
                narrow = logits_grad.to(weight.dtype)
                torch.mm(narrow, weight, out=stream_grad[chunk])
                if weight.dtype == torch.float32:
                    weight_grad.addmm_(narrow.T, kept[chunk])
                else:
                    weight_grad += narrow.T @ kept[chunk]
                del narrow
            del logits_grad  # its memory is the next chunk's
        if stream_grad is not None and weight_grad is not None:
            if rows is not None:
                stream_grad = torch.zeros_like(stream).index_copy_(0, rows, stream_grad)
            ctx.gradients = stream_grad, weight_grad.to(weight.dtype)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return *_take_gradients(ctx, grads[0]), None, None, None, None


def _take_gradients(ctx: Any, factor: torch.Tensor) -> list[torch.Tensor]:
    """The gradients kept by the forward pass times that of the loss; in place, unless they are asked for again.

    Some pipeline schedules come twice: for the stream's gradient, and later for the weight's.
    """
    if torch._C._autograd._get_current_graph_task_keep_graph():
        return [gradient * factor for gradient in ctx.gradients]
    gradients = [gradient.mul_(factor) for gradient in ctx.gradients]
    del ctx.gradients  # autograd then takes them over without a copy
    return gradients
