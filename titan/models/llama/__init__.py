"""The Llama family: llama2 and llama3 (3.1 and 3.2 are flavors of llama3).

Torch is imported when a model is built, not when its sizes are looked up.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from titan.models.llama.huggingface import HUGGING_FACE
from titan.models.llama.sizes import LLAMA2_FLAVORS, LLAMA3_FLAVORS, LlamaSizes
from titan.models.spec import FlopsPerToken, ModelSpec, Stages, register_model

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

    from titan.config.job_config import JobConfig
    from titan.parallelisms.parallel_dims import ParallelDims
    from titan.parallelisms.pipeline import Pipeline


def _build(sizes: LlamaSizes) -> nn.Module:
    from titan.models.llama.model import Llama

    return Llama(sizes)


def _parallelize(model: nn.Module, world_mesh: DeviceMesh, parallel_dims: ParallelDims, job_config: JobConfig) -> None:
    from titan.models.llama.parallelize import parallelize_llama

    parallelize_llama(model, world_mesh, parallel_dims, job_config)


def _pipeline(
    model: nn.Module,
    world_mesh: DeviceMesh,
    parallel_dims: ParallelDims,
    job_config: JobConfig,
    device: torch.device,
) -> Pipeline:
    from titan.models.llama.parallelize import pipeline_llama

    return pipeline_llama(model, world_mesh, parallel_dims, job_config, device)


def llama_stages(sizes: LlamaSizes) -> Stages:
    """How a Llama may be cut into pipeline stages."""
    layers = tuple(f"layers.{layer}" for layer in range(sizes.n_layers))
    return Stages(first=("tok_embeddings",), layers=layers, last=("norm", "output"))


def _divisible_by_tp(sizes: LlamaSizes) -> dict[str, int]:
    return {"n_heads": sizes.n_heads, "n_kv_heads": sizes.n_kv_heads, "ffn_dim": sizes.ffn_dim}


def _flops_per_token(sizes: LlamaSizes, seq_len: int) -> FlopsPerToken:
    attention = sizes.dim * sizes.head_dim * (2 * sizes.n_heads + 2 * sizes.n_kv_heads)
    feed_forward = 3 * sizes.dim * sizes.ffn_dim
    gains = 0 if sizes.norm_type == "np_layernorm" else (2 * sizes.n_layers + 1) * sizes.dim
    multiplied = sizes.n_layers * (attention + feed_forward) + sizes.dim * sizes.vocab_size + gains
    scores = 12 * sizes.n_layers * sizes.n_heads * sizes.head_dim * seq_len
    return FlopsPerToken(full=6 * multiplied + scores, causal=6 * multiplied + scores / 2)


for _name, _flavors in (("llama2", LLAMA2_FLAVORS), ("llama3", LLAMA3_FLAVORS)):
    register_model(
        ModelSpec(
            _name,
            _flavors,
            _build,
            _parallelize,
            _flops_per_token,
            llama_stages,
            _pipeline,
            _divisible_by_tp,
            HUGGING_FACE,
        )
    )
