"""How a Llama is spread over ranks: the list of techniques, in the order in which they must be applied."""

from __future__ import annotations

from typing import cast

from torch import nn

from titan.config.job_config import JobConfig
from titan.models.llama.model import Llama
from titan.parallelisms.fsdp import apply_fsdp
from titan.parallelisms.parallel_dims import ParallelDims


def parallelize_llama(model: nn.Module, parallel_dims: ParallelDims, config: JobConfig) -> None:
    """Spread `model` (on meta, whole) over the ranks, in place."""
    model = cast(Llama, model)
    apply_fsdp(model, fsdp_groups(model), parallel_dims, config)


def fsdp_groups(model: Llama) -> list[list[nn.Module]]:
    """Modules whose weights are gathered together, in the order of the forward pass.

    Embedding and head are groups of their own: part of the root they would stay gathered all through the step. Tied
    ones must share a group, or each would get a weight of its own; they are left to the root.
    """
    blocks: list[list[nn.Module]] = [[block] for block in model.layers.values()]
    if model.sizes.tied:
        return blocks
    return [[model.tok_embeddings], *blocks, [model.norm, model.output]]
