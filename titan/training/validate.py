"""The loss on a validation set: the function that training minimises, as one mean over all tokens of the set."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from titan.config.job_config import JobConfig
from titan.data.microbatch import Microbatch
from titan.models.layers.head import IGNORED
from titan.parallelisms.parallel_dims import ParallelDims
from titan.training.step import Share, Stages


@torch.no_grad()
def evaluate(
    stages: Stages, config: JobConfig, dims: ParallelDims, device: torch.device, microbatches: Sequence[Microbatch]
) -> float:
    """The mean loss over all valid labels of all ranks' microbatches, in nats; changes nothing. Collective.

    Args:
        stages: whose head was given its loss (`set_loss`).
        microbatches: this rank's, as many of the same shape as every other rank has.
    """
    share = Share(config, dims, device)
    for part in stages.parts:
        part.eval()
    # In float64: the sum of many tokens is far larger than what one adds.
    total = torch.zeros((), dtype=torch.float64, device=device)
    for batch in microbatches:
        total += stages.evaluate(share(batch))
    for part in stages.parts:
        part.train()
    valid = sum(int((batch.labels != IGNORED).sum()) for batch in microbatches)
    sums = torch.tensor([total.item(), valid], dtype=torch.float64)
    dist.all_reduce(sums)
    loss, count = sums.tolist()
    # Summed over all ranks: those of tp hold the same loss, and those of tp, cp and pp the same labels.
    return float(loss * dims.cp * dims.pp / count)
