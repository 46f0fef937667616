"""What a run is going to be, in a few lines: for the log's start and for `--job.check_only`."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

from titan.config.derived import global_batch_size, model_sizes, resolved_steps
from titan.config.job_config import JobConfig
from titan.data.tokenizer import Tokenizer
from titan.models.spec import model_families
from titan.observability.device import Device
from titan.observability.flops import describe_flops
from titan.parallelisms.parallel_dims import ParallelDims

_SHOWN_TOKENS = 32


def describe_run(config: JobConfig, dims: ParallelDims, device: Device) -> list[str]:
    """The layout, the model and the size of a step. Needs no process group and no memory for weights."""
    training = config.training
    batch = global_batch_size(config, dims.batch_degree)
    steps = resolved_steps(config, batch)
    microbatches = batch // (training.local_batch_size * dims.batch_degree)
    degrees = " × ".join(f"{name} {degree}" for name, degree in dims.degrees().items())
    nodes = int(os.environ.get("GROUP_WORLD_SIZE", "1"))
    family, sizes = model_families()[config.model.name], model_sizes(config)
    with torch.device("meta"):
        parameters = sum(parameter.numel() for parameter in family.build(sizes).parameters())
    flops = family.flops_per_token(sizes, training.seq_len)
    return [
        f"{config.job.description}: torch {torch.__version__}, {dims.world_size} process(es) on {nodes} node(s), "
        f"{device.type} ({device.name})",
        f"mesh: {degrees}; batch ranks {dims.batch_degree}, weights sharded over {dims.dp_shard * dims.cp}",
        f"model: {config.model.name} {config.model.flavor}, {parameters:,} parameters in float32; computes in "
        f"{training.mixed_precision_param}, sums gradients in {training.mixed_precision_reduce}",
        f"step: {batch} windows × {training.seq_len} tokens = {batch * training.seq_len:,} tokens, as "
        f"{dims.batch_degree} rank(s) × {microbatches} microbatch(es) × {training.local_batch_size} windows; "
        f"{steps:,} steps = {steps * batch * training.seq_len:,} tokens",
        f"FLOPs: {describe_flops(flops, device.peak_flops(training.mixed_precision_param))}",
    ]


def describe_text(tokenizer: Tokenizer, tokens: Sequence[int]) -> str:
    """The first tokens that the model sees, and their text: the quickest proof that data and tokenizer fit."""
    shown = list(tokens[:_SHOWN_TOKENS])
    return f"first tokens: {shown} = {tokenizer.decode(shown)!r}"
