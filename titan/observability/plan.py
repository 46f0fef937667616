"""What a run is going to be: a few lines for the log's start, and the whole layout for `--job.check_only`."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Sequence

import torch

from titan.config.derived import (
    compiles,
    float8_recipe,
    global_batch_size,
    model_sizes,
    model_stages,
    pipeline_microbatches,
    resolved_steps,
    state_dtype,
)
from titan.config.job_config import JobConfig, Parallelism
from titan.data.tokenizer import Tokenizer
from titan.models.spec import model_families
from titan.observability.device import Device
from titan.observability.flops import describe_flops
from titan.parallelisms.float8 import Linears, sort_linears
from titan.parallelisms.parallel_dims import ParallelDims
from titan.parallelisms.schedules import SCHEDULES, split, stages_of_rank
from titan.training.optimizer_groups import describe_updates, plan_updates

_SHOWN_TOKENS = 32
_MOST_ROWS = 16  # of a table; of a longer one the first and the last are shown


def describe_run(config: JobConfig, dims: ParallelDims, device: Device) -> list[str]:
    """The layout in short, the model and the size of a step. Needs no process group and no memory for weights."""
    training = config.training
    batch = global_batch_size(config, dims.batch_degree)
    steps = resolved_steps(config, batch)
    microbatches = batch // (training.local_batch_size * dims.batch_degree)
    degrees = " × ".join(f"{name} {degree}" for name, degree in dims.degrees().items())
    nodes = int(os.environ.get("GROUP_WORLD_SIZE", "1"))
    family, sizes = model_families()[config.model.name], model_sizes(config)
    with torch.device("meta"):
        model = family.build(sizes)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    flops = family.flops_per_token(sizes, training.seq_len)
    return [
        f"{config.job.description}: torch {torch.__version__}, {dims.world_size} process(es) on {nodes} node(s), "
        f"{device.type} ({device.name})",
        f"mesh: {degrees}; batch ranks {dims.batch_degree}, weights sharded over {dims.dp_shard * dims.cp}",
        *([f"pipeline: {_schedule(config)}"] if dims.pp > 1 else []),
        f"model: {config.model.name} {config.model.flavor}, {parameters:,} parameters in {training.dtype}; computes in "
        f"{training.mixed_precision_param}, sums gradients in {training.mixed_precision_reduce}",
        *([_float8(sort_linears(model, config.float8, dims), config)] if config.float8.enable_float8_linear else []),
        f"step: {batch} windows × {training.seq_len} tokens = {batch * training.seq_len:,} tokens, as "
        f"{dims.batch_degree} rank(s) × {microbatches} microbatch(es) × {training.local_batch_size} windows; "
        f"{steps:,} steps = {steps * batch * training.seq_len:,} tokens",
        *([f"documents: {documents}"] if (documents := _documents(config)) else []),
        f"FLOPs: {describe_flops(flops, device.peak_flops(training.mixed_precision_param))}",
        f"optimizer: {_optimizer(config)}",
        *(f"  {line}" for line in describe_updates(plan_updates(config, model), model)),
    ]


def _documents(config: JobConfig) -> str:
    """Such as `best-fit packed, kept apart by flex`; empty when they follow each other and are seen."""
    packed = ["best-fit packed"] if config.training.packing == "best_fit" else []
    apart = [f"kept apart by {config.model.attn_backend}"] if config.model.attn_mask == "document" else []
    return ", ".join(packed + apart)


def _optimizer(config: JobConfig) -> str:
    """Such as `AdamW, fused, moments in float32`."""
    settings, moments = config.optimizer, state_dtype(config)
    parts: list[str] = [settings.name]
    if compiles(config, "optimizer"):
        parts.append("compiled")
    elif moments == config.training.dtype:
        parts.append(settings.implementation)
    parts.append(f"moments in {moments}")
    if settings.early_step_in_backward:
        parts.append("each update during the backward pass")
    if config.training.enable_cpu_offload:
        parts.append("weights, gradients and moments in the CPU's memory")
    return ", ".join(parts)


def _float8(linears: Linears, config: JobConfig) -> str:
    """Such as `float8: 224 linears, tensorwise, weights gathered in bfloat16; left in bfloat16: 1 …`."""
    settings, precision = config.float8, config.training.mixed_precision_param
    recipe = float8_recipe(settings) + (", emulated" if settings.emulate else "")
    gathered: str = "float8" if linears.gathered else precision
    if linears.gathered and (uneven := len(linears.converted) - len(linears.gathered)):
        gathered += f" but for {uneven} that FSDP can't cut evenly"
    return (
        f"float8: {len(linears.converted)} linears, {recipe}, weights gathered in {gathered}; left in {precision}: "
        f"{len(linears.filtered)} by float8.filter_fqns, {len(linears.unfit)} of sizes that float8 products don't take"
    )


def describe_layout(config: JobConfig, dims: ParallelDims) -> list[str]:
    """Where everything is: ranks and their coordinates, what is split over what, the modules of every stage.

    For a config that passed the checks. Needs no process group and doesn't build the model.
    """
    return [
        "ranks:",
        *_rank_table(dims),
        "what is split:",
        *_split_over(config, dims),
        *(["pipeline:", *_stage_table(config, dims)] if dims.pp > 1 else []),
    ]


def _rank_table(dims: ParallelDims) -> Iterator[str]:
    degrees = dims.degrees()
    columns = {name: max(len(name), len(str(degree - 1))) for name, degree in degrees.items()}
    width = max(len("rank"), len(str(dims.world_size - 1)))
    yield "  ".join(["", "rank".rjust(width), *(name.rjust(column) for name, column in columns.items())])
    for rank in _first_and_last(range(dims.world_size)):
        if rank is None:
            yield f"  … {dims.world_size - _MOST_ROWS} more"
            continue
        coordinates = _coordinates(rank, list(degrees.values()))
        cells = [str(place).rjust(column) for place, column in zip(coordinates, columns.values(), strict=True)]
        yield "  ".join(["", str(rank).rjust(width), *cells])


def _coordinates(rank: int, degrees: Sequence[int]) -> list[int]:
    """A rank's place in every dimension; the last one counts fastest."""
    return [rank // math.prod(degrees[dim + 1 :]) % degree for dim, degree in enumerate(degrees)]


def _split_over(config: JobConfig, dims: ParallelDims) -> Iterator[str]:
    training, settings = config.training, config.parallelism
    shards = f"fsdp = dp_shard {dims.dp_shard} × cp {dims.cp} = {dims.dp_shard * dims.cp}"
    yield f"  weights: each over {shards} rank(s){f', its matrices also over tp {dims.tp}' if dims.tp > 1 else ''}" + (
        f"; {dims.dp_replicate} copies (dp_replicate)" if dims.dp_replicate > 1 else ""
    )
    batch = global_batch_size(config, dims.batch_degree)
    accumulated = batch // (training.local_batch_size * dims.batch_degree)
    yield (
        f"  batch: {batch} windows over dp_replicate {dims.dp_replicate} × dp_shard {dims.dp_shard} = "
        f"{dims.batch_degree} rank(s): {batch // dims.batch_degree} each, as {accumulated} microbatch(es) of "
        f"{training.local_batch_size}"
    )
    yield f"  sequence: {_sequence(training.seq_len, settings, dims)}"
    if dims.tp > 1:
        rows = model_sizes(config).vocab_size
        loss = "gathered for the loss" if settings.disable_loss_parallel else "the loss is computed on the parts"
        yield f"  vocabulary: {rows} rows over tp {dims.tp}: {-(-rows // dims.tp)} on a rank at most; {loss}"
    yield f"  tokens per step: {batch} windows × {training.seq_len} = {batch * training.seq_len:,}"


def _sequence(seq_len: int, settings: Parallelism, dims: ParallelDims) -> str:
    text = f"{seq_len} tokens"
    if dims.cp > 1 and settings.context_parallel_load_balancer == "headtail":
        chunk = seq_len // dims.cp // 2
        text += f" over cp {dims.cp}: {seq_len // dims.cp} on a rank, in an early and a late chunk of {chunk}"
    elif dims.cp > 1:
        text += f" over cp {dims.cp}: {seq_len // dims.cp} on a rank"
    if dims.tp > 1 and settings.enable_sequence_parallel:
        text += f"; between matrix products over tp {dims.tp}: {seq_len // dims.cp // dims.tp} on a rank"
    return text if dims.cp * dims.tp > 1 else f"{text}, whole on each rank"


def _stage_table(config: JobConfig, dims: ParallelDims) -> Iterator[str]:
    modules = model_stages(config)
    assert modules is not None  # the checks refuse a pipeline of a family without stages
    parts = split(config.parallelism, modules)
    v_shaped = SCHEDULES[config.parallelism.pipeline_parallel_schedule].v_shaped
    rank_of = {stage: rank for rank in range(dims.pp) for stage in stages_of_rank(rank, dims.pp, len(parts), v_shaped)}
    yield f"  {_schedule(config)}"
    for stage in _first_and_last(range(len(parts))):
        if stage is None:
            yield f"  … {len(parts) - _MOST_ROWS} more"
            continue
        yield f"  stage {stage} on pp {rank_of[stage]}: {', '.join(_shorter(parts[stage]))}"


def _schedule(config: JobConfig) -> str:
    """Such as `1F1B, 2 stages, 8 microbatches of 1 window(s)`."""
    settings, modules = config.parallelism, model_stages(config)
    assert modules is not None  # the checks refuse a pipeline of a family without stages
    name = settings.pipeline_parallel_schedule_csv or settings.pipeline_parallel_schedule
    return (
        f"{name}, {len(split(settings, modules))} stages on {settings.pipeline_parallel_degree} ranks, "
        f"{pipeline_microbatches(config)} microbatch(es) of {settings.pipeline_parallel_microbatch_size} window(s)"
    )


def _shorter(names: Iterable[str]) -> Iterator[str]:
    """Names in which a run of layers, such as layers.2, layers.3, layers.4, is one: layers.2 … 4."""
    first, last = "", ""
    for name in [*names, ""]:
        stem, _, number = name.rpartition(".")
        if last and stem and number.isdecimal() and last == f"{stem}.{int(number) - 1}":
            last = name
            continue
        if first:
            yield first if first == last else f"{first} … {last.rpartition('.')[2]}"
        first = last = name


def _first_and_last(numbers: range) -> Iterator[int | None]:
    """All numbers, or of many the first and the last, with None for those between."""
    half = _MOST_ROWS // 2
    if len(numbers) <= _MOST_ROWS:
        yield from numbers
    else:
        yield from [*numbers[:half], None, *numbers[-half:]]


def describe_text(tokenizer: Tokenizer, tokens: Sequence[int]) -> str:
    """The first tokens that the model sees, and their text: the quickest proof that data and tokenizer fit."""
    shown = list(tokens[:_SHOWN_TOKENS])
    return f"first tokens: {shown} = {tokenizer.decode(shown)!r}"
