"""Differences between titan and torchtitan of 2024 and 2025, for comparing predictions with its published measurements.

- in 2024 embedding, norm and head are gathered with FSDP's root, and stay so through the step
- sums of gradients lie in a pool of FSDP's
- the norm is made of several operators, the first of which casts to fp32 (`accelerator_operators(fused_norm=False)`)
- the loss is F.cross_entropy of whole logits in fp32; with tp DTensor's, of logits that are split over the vocabulary
- checkpointing within a block also keeps the last product
- with tp the embedding is DTensor's, whose backward pass makes a gradient of the whole vocabulary
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Placement, Replicate, distribute_tensor
from torch.distributed.tensor.parallel import RowwiseParallel, loss_parallel

from titan.models.layers.head import Labels
from titan.models.llama import parallelize
from titan.parallelisms import activation_checkpoint, fsdp, tensor
from titan.training import loss


@contextmanager
def torchtitan(year: str) -> Iterator[None]:
    """Build and run models as torchtitan did; undone at the end.

    Args:
        year: "torchtitan-2024" or "torchtitan-2025".
    """
    choice = activation_checkpoint._Choice.__init__

    def keep_all(self: Any, products: int) -> None:
        choice(self, products + 1)

    replaced: list[tuple[Any, str, Any]] = [
        (fsdp, "keeps_reduced_gradients", lambda config, batch_degree: False),
        (loss, "build_loss", lambda config, dims, vocab_size: _whole_logits),
        (activation_checkpoint._Choice, "__init__", keep_all),
        (tensor, "_VocabularyEmbedding", _embedding),
    ]
    if year == "torchtitan-2024":
        replaced.append((parallelize, "fsdp_groups", lambda model: [[block] for block in model.layers.values()]))
    originals = [getattr(owner, name) for owner, name, _ in replaced]
    try:
        for owner, name, replacement in replaced:
            setattr(owner, name, replacement)
        with loss_parallel():
            yield
    finally:
        for (owner, name, _), original in zip(replaced, originals, strict=True):
            setattr(owner, name, original)


def _embedding(stream: Placement) -> RowwiseParallel:
    return RowwiseParallel(input_layouts=Replicate(), output_layouts=stream)


def _whole_logits(stream: Any, weight: Any, labels: Labels) -> torch.Tensor:
    logits = F.linear(stream, weight)
    targets: Any = labels.tensor.flatten().to(logits.device, non_blocking=True)
    if isinstance(logits, DTensor):
        targets = distribute_tensor(targets, logits.device_mesh, [Replicate()], src_data_rank=None)
    total = F.cross_entropy(logits.flatten(0, 1).float(), targets, reduction="sum")
    return total.to_local() if isinstance(total, DTensor) else total
