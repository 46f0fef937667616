"""Sharded data parallelism: FSDP2, HSDP and plain replication, all by `fully_shard` on one mesh.

Gradients are summed over ranks, never averaged: the loss was divided by the global number of tokens already.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from titan.config.derived import keeps_reduced_gradients
from titan.config.job_config import JobConfig
from titan.parallelisms.parallel_dims import ParallelDims


def apply_fsdp(
    model: nn.Module, groups: Sequence[Sequence[nn.Module]], parallel_dims: ParallelDims, config: JobConfig
) -> None:
    """Shard `model` in place, also on one process where it casts: compute dtypes are then the same in every layout.

    Args:
        groups: modules whose weights are gathered together, in the order of the forward pass. What no group holds
            is gathered with the root and stays so through the step.
    """
    if _only_copies(parallel_dims, config):
        return
    policy = MixedPrecisionPolicy(
        param_dtype=getattr(torch, config.training.mixed_precision_param),
        reduce_dtype=getattr(torch, config.training.mixed_precision_reduce),
        # The embedding's output has the compute dtype already; casting inputs would only spoil the fp32 rotary tables.
        cast_forward_inputs=False,
    )
    offload = _offload_policy(parallel_dims.device_type) if config.training.enable_cpu_offload else OffloadPolicy()
    spread = partial(fully_shard, mesh=parallel_dims.weights, mp_policy=policy, offload_policy=offload)
    reshard = config.parallelism.fsdp_reshard_after_forward
    if reshard == "default" and parallel_dims.pp > 1:
        reshard = "never"  # or every microbatch would gather the weights again
    for group in groups:
        # The backward pass starts with the last group: freeing it would gather it again at once.
        keep = reshard == "never" or (reshard == "default" and group is groups[-1])
        spread(cast(nn.Module, list(group)), reshard_after_forward=not keep)
    spread(model, reshard_after_forward=reshard == "always")
    pooled = keeps_reduced_gradients(config, parallel_dims.batch_degree) and hasattr(model, "set_custom_reduce_scatter")
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo has no PREMUL_SUM
            module.set_gradient_divide_factor(1.0)
            if pooled:
                module.set_custom_reduce_scatter(cast(Any, ReduceScatterIntoPool(parallel_dims.device_type)))


class ReduceScatterIntoPool:
    """FSDP2's reduce-scatter, but for where its result lies: with the tensors that the device computes with.

    FSDP2 asks for that memory while its reduce-scatter stream is the current one. The caching allocator has a pool for
    each stream, and gives none back: all sharded gradients would have memory of their own, through the whole step.
    In the pool of the stream that computes they take what the backward pass has freed.

    That is safe, for results that `keeps_reduced_gradients`. The stream that reduces has waited for the one that
    computes before it asks, so whoever had the memory is done with it. And the one that computes waits for all
    reductions at the end of the backward pass, before anybody frees a gradient.

    Implements `torch.distributed.fsdp`'s ReduceScatter, see `FSDPModule.set_custom_reduce_scatter`.
    """

    def __init__(self, device_type: str) -> None:
        """To be made while the stream that computes is the current one."""
        self._streams = torch.get_device_module(device_type)
        self._computing = self._streams.current_stream()

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Memory for an input or a result, flat."""
        with self._streams.stream(self._computing):
            return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Sum `input_tensor` `[N · n]` over the N ranks of the group; `output_tensor` `[n]` gets this rank's part."""
        return dist.reduce_scatter_single(output_tensor, input_tensor, op=op, group=group, async_op=async_op)


def _only_copies(parallel_dims: ParallelDims, config: JobConfig) -> bool:
    """Whether FSDP would but copy each weight and each gradient: on one process, with one type for everything."""
    training = config.training
    types = {training.dtype, training.mixed_precision_param, training.mixed_precision_reduce}
    elsewhere = training.enable_cpu_offload or config.float8.enable_fsdp_float8_all_gather
    return parallel_dims.world_size == 1 and len(types) == 1 and not elsewhere


def _offload_policy(device_type: str) -> OffloadPolicy:
    """Shards of weights and gradients live in the CPU's memory; what is gathered is on the device."""
    from titan.observability.device import pins_memory

    return CPUOffloadPolicy(pin_memory=pins_memory(device_type))


def reduce_over_replicas(model: nn.Module, enabled: bool) -> None:
    """Whether the next backward also sums gradients over dp_replicate.

    Within a step of several microbatches each one's gradients are reduce-scattered, so that no rank ever holds more
    than its shard; the sum over the copies is needed once, after the last.
    """
    if isinstance(model, FSDPModule):
        model.set_requires_all_reduce(enabled)
