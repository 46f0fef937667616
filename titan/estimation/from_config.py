"""From a config to the layout that it asks for."""

from __future__ import annotations

from titan.config.derived import (
    compiles,
    global_batch_size,
    microbatch_rows,
    model_sizes,
    model_stages,
    pipeline_microbatches,
)
from titan.config.derived import state_dtype as moments_dtype
from titan.config.errors import UserError
from titan.config.job_config import ActivationCheckpoint, JobConfig
from titan.estimation.layout import BYTES, Checkpointing, Layout, ModelShape, Stage
from titan.parallelisms.parallel_dims import ParallelDims
from titan.parallelisms.schedules import SCHEDULES, split, stages_of_rank

_NEEDED = ("dim", "n_layers", "n_heads", "n_kv_heads", "head_dim", "ffn_dim", "vocab_size", "tied", "norm_type")


def unknown_blocks(config: JobConfig) -> str | None:
    """Why there is no closed form of a config's model; None if there is one."""
    if lacking := [name for name in _NEEDED if not hasattr(model_sizes(config), name)]:
        return (
            f'model.name = "{config.model.name}": the closed form knows blocks like those of Llama, whose sizes have '
            f"{', '.join(lacking)} as well"
        )
    return None


def layout_of(config: JobConfig, world_size: int) -> Layout:
    """The layout of a config that passed its checks for so many ranks.

    Raises:
        UserError: the model is of a family whose sizes aren't those of a Llama.
    """
    sizes, settings, training = model_sizes(config), config.parallelism, config.training
    if refusal := unknown_blocks(config):
        raise UserError(f"{refusal}; estimation.method = trace needs none")
    dims = ParallelDims.from_config(settings, world_size)
    batch = global_batch_size(config, dims.batch_degree)
    reference = config.estimation.compat
    types = {training.dtype, training.mixed_precision_param, training.mixed_precision_reduce}
    float8 = config.float8
    model = ModelShape(**{name: getattr(sizes, name) for name in _NEEDED})
    return Layout(
        model=model,
        stages=_stages(config),
        seq_len=training.seq_len,
        rows=microbatch_rows(config),
        microbatches=pipeline_microbatches(config),
        accumulation=batch // (training.local_batch_size * dims.batch_degree),
        dp_replicate=dims.dp_replicate,
        dp_shard=dims.dp_shard,
        cp=dims.cp,
        tp=dims.tp,
        schedule=settings.pipeline_parallel_schedule,
        csv=settings.pipeline_parallel_schedule_csv,
        checkpointing=_checkpointing(config.activation_checkpoint),
        reshard=settings.fsdp_reshard_after_forward,
        chunks=config.loss.num_chunks if config.loss.name == "linear_cross_entropy" else 1,
        compiled=compiles(config, "model"),
        compiled_loss=compiles(config, "loss"),
        float8=float8.enable_float8_linear,
        float8_gather=float8.enable_float8_linear and float8.enable_fsdp_float8_all_gather,
        async_tp=settings.enable_async_tensor_parallel,
        sequence_parallel=settings.enable_sequence_parallel,
        loss_parallel=not settings.disable_loss_parallel or config.loss.name == "linear_cross_entropy",
        ring=settings.context_parallel_rotate_method == "alltoall",
        balanced=settings.context_parallel_load_balancer == "headtail",
        element=BYTES[training.mixed_precision_param],
        reduce=BYTES[training.mixed_precision_reduce],
        weight=BYTES[training.dtype],
        moment=BYTES[moments_dtype(config)],
        moments=_moments(config, model),
        wrapped=world_size > 1 or len(types) > 1 or training.enable_cpu_offload,
        cpu_offload=training.enable_cpu_offload,
        early_step=config.optimizer.early_step_in_backward,
        reference=reference,
    )


def _stages(config: JobConfig) -> tuple[tuple[Stage, ...], ...]:
    settings, modules = config.parallelism, model_stages(config)
    if settings.pipeline_parallel_degree == 1:
        return ((Stage(model_sizes(config).n_layers),),)
    assert modules is not None  # the checks refuse a pipeline of a family without stages
    parts = split(settings, modules)
    ends = set(modules.first), {modules.last[-1]}
    stages = [
        Stage(sum(name in modules.layers for name in part), bool(ends[0] & {*part}), bool(ends[1] & {*part}))
        for part in parts
    ]
    kind = SCHEDULES[settings.pipeline_parallel_schedule]
    ranks = settings.pipeline_parallel_degree
    return tuple(
        tuple(stages[number] for number in stages_of_rank(rank, ranks, len(stages), kind.v_shaped))
        for rank in range(ranks)
    )


def _moments(config: JobConfig, model: ModelShape) -> float:
    """Muon keeps one of a block's matrices and, as AdamW, two of everything else."""
    if config.optimizer.name != "Muon":
        return 2
    return 2 - model.n_layers * sum(model.products.values()) / model.parameters


def _checkpointing(own: ActivationCheckpoint) -> Checkpointing:
    if own.mode == "memory_budget":
        return Checkpointing("none", budget=own.memory_budget)
    if own.mode == "selective":
        if own.selective_ac_option == "op":
            return Checkpointing("op", offload=own.offload)
        every = int(own.selective_ac_option)
        return Checkpointing("full", every=every, offload=own.offload, early_stop=own.early_stop)
    return Checkpointing(own.mode, offload=own.offload, early_stop=own.early_stop)
