"""The loss: a sum over tokens, which the step divides by the number of tokens of the whole global batch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from titan.config.derived import compiles
from titan.config.job_config import JobConfig
from titan.models.layers.head import Head, HeadLoss, Labels
from titan.parallelisms.parallel_dims import ParallelDims
from titan.training.cross_entropy import CrossEntropy, LinearCrossEntropy, TokenLoss, cross_entropy


def set_loss(parts: Iterable[nn.Module], config: JobConfig, dims: ParallelDims) -> None:
    """Give the head the loss of the config and the layout, where one of these parts of a model has it."""
    for part in parts:
        for module in part.modules():
            if isinstance(module, Head):
                module.loss = build_loss(config, dims, module.out_features)


def build_loss(config: JobConfig, dims: ParallelDims, vocab_size: int) -> HeadLoss:
    """Σ over the valid labels, in fp32, as a function of the head's input, its weight, and the labels."""
    token_loss = _token_loss(config, dims, vocab_size)
    num_chunks = config.loss.num_chunks

    def whole_logits(stream: Any, weight: Any, labels: Labels) -> torch.Tensor:
        logits: Any = F.linear(stream, weight)
        if dims.tp > 1:
            logits = logits.full_tensor() if config.parallelism.disable_loss_parallel else logits.to_local()
        targets = labels.tensor.flatten().to(logits.device, non_blocking=True)
        return CrossEntropy.apply(logits.flatten(0, 1), targets, token_loss)

    def chunked(stream: Any, weight: Any, labels: Labels) -> torch.Tensor:
        if dims.tp > 1:
            from torch.distributed.tensor import Partial

            # A rank's rows of the vocabulary give a part of the stream's gradient.
            stream, weight = stream.to_local(grad_placements=[Partial()]), weight.to_local()
        return LinearCrossEntropy.apply(
            stream.flatten(0, 1), weight, labels.tensor.flatten(), num_chunks, token_loss, torch.is_grad_enabled()
        )

    return whole_logits if config.loss.name == "cross_entropy" else chunked


def _token_loss(config: JobConfig, dims: ParallelDims, vocab_size: int) -> TokenLoss:
    """The loss of logits as a rank has them: whole rows, or its part of the vocabulary."""
    z_loss = config.loss.z_loss

    def whole(logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return cross_entropy(logits, labels, z_loss)

    token_loss: TokenLoss = whole
    if dims.tp > 1 and not (config.loss.name == "cross_entropy" and config.parallelism.disable_loss_parallel):
        from titan.parallelisms.vocabulary import rows_of_rank, split_cross_entropy

        tp = dims.world["tp"]
        rows, group = rows_of_rank(vocab_size, dims.tp, tp.get_local_rank()), tp.get_group()

        def split(logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return split_cross_entropy(logits, labels, z_loss, rows, group)

        token_loss = split
    if compiles(config, "loss"):
        token_loss = torch.compile(token_loss, backend=config.compile.backend, fullgraph=True)
    return token_loss
