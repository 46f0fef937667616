"""How a Llama is spread over ranks: the list of techniques, in the order in which they must be applied."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from titan.config.derived import compiles, float8_recipe
from titan.config.job_config import JobConfig
from titan.models.llama import llama_stages
from titan.models.llama.model import Llama
from titan.parallelisms.activation_checkpoint import (
    checkpoint_whole_blocks,
    checkpoint_within_blocks,
    checkpointed_blocks,
)
from titan.parallelisms.activation_offload import offload_activations
from titan.parallelisms.compile import apply_compile
from titan.parallelisms.context import apply_context_parallel
from titan.parallelisms.float8 import convert_to_float8
from titan.parallelisms.fsdp import apply_fsdp
from titan.parallelisms.parallel_dims import ParallelDims
from titan.parallelisms.tensor import Role, apply_tensor_parallel, enable_async_tensor_parallel

if TYPE_CHECKING:
    from titan.parallelisms.pipeline import Pipeline

TENSOR_PLAN = {
    "tok_embeddings": Role.EMBEDDING,
    "layers.*.attention_norm": Role.NORM,
    "layers.*.attention": Role.BLOCK,
    "layers.*.attention.wq": Role.COLUMN,
    "layers.*.attention.wk": Role.COLUMN,
    "layers.*.attention.wv": Role.COLUMN,
    "layers.*.attention.wo": Role.ROW,
    "layers.*.ffn_norm": Role.NORM,
    "layers.*.feed_forward": Role.BLOCK,
    "layers.*.feed_forward.w1": Role.COLUMN,
    "layers.*.feed_forward.w3": Role.COLUMN,
    "layers.*.feed_forward.w2": Role.ROW,
    "norm": Role.NORM,
    "output": Role.HEAD,
}


def parallelize_llama(
    model: nn.Module, world_mesh: DeviceMesh, parallel_dims: ParallelDims, job_config: JobConfig
) -> None:
    """Spread a Llama, or a pipeline stage of one, over the ranks, in place, while it is on the meta device."""
    model = cast(Llama, model)
    settings, float8 = job_config.parallelism, job_config.float8
    if float8.enable_float8_linear:
        convert_to_float8(model, float8, parallel_dims)
    if parallel_dims.tp > 1:
        apply_tensor_parallel(
            model,
            world_mesh["tp"],
            TENSOR_PLAN,
            sequence_parallel=settings.enable_sequence_parallel,
            float8=float8.enable_float8_linear and float8_recipe(float8) == "tensorwise",
        )
        model.tie_weights()  # embedding and head were split one by one
        if settings.enable_async_tensor_parallel:
            enable_async_tensor_parallel(world_mesh["tp"])
    if (backend := job_config.model.attn_backend) != "sdpa":
        from titan.models.layers.attention_kernels import apply_attention_kernel  # few wait for torch's to be imported

        model.prepare_documents = apply_attention_kernel(model, backend)
    if parallel_dims.cp > 1:
        apply_context_parallel(
            model,
            world_mesh["cp"],
            settings.context_parallel_rotate_method,
            balanced=settings.context_parallel_load_balancer == "headtail",
        )
    checkpointing = job_config.activation_checkpoint
    checkpoint_within_blocks(model.layers, checkpointing)
    if compiles(job_config, "model"):
        apply_compile(model.layers.values(), job_config.compile)
    checkpoint_whole_blocks(model.layers, checkpointing)
    if checkpointing.offload:
        offload_activations(checkpointed_blocks(model.layers, checkpointing), checkpointing)
    apply_fsdp(model, fsdp_groups(model), parallel_dims, job_config)


def pipeline_llama(
    model: nn.Module,
    world_mesh: DeviceMesh,
    parallel_dims: ParallelDims,
    job_config: JobConfig,
    device: torch.device,
) -> Pipeline:
    """This rank's pipeline stages of a Llama, each of them parallelized."""
    from titan.parallelisms.pipeline import Pipeline  # only a pipeline waits for torch's to be imported

    sizes = cast(Llama, model).sizes
    return Pipeline(
        model,
        llama_stages(sizes),
        sizes,
        parallel_dims,
        job_config,
        device=device,
        parallelize=lambda stage: parallelize_llama(stage, world_mesh, parallel_dims, job_config),
    )


def fsdp_groups(model: Llama) -> list[list[nn.Module]]:
    """Modules whose weights are gathered together, in the order of the forward pass.

    Embedding and head are groups of their own: part of the root they would stay gathered all through the step. Tied
    ones must share a group, or each would get a weight of its own; they are left to the root.
    """
    blocks: list[list[nn.Module]] = [[block] for block in model.layers.values()]
    if model.sizes.tied:
        return blocks
    ends: tuple[list[nn.Module | None], list[nn.Module | None]] = [model.tok_embeddings], [model.norm, model.output]
    first, last = ([module for module in end if module is not None] for end in ends)
    return [group for group in (first, *blocks, last) if group]
