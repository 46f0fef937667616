"""One step of titan on fake tensors, with a tracer watching: the same functions as in train.py, in the same order."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, cast

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from titan.config.derived import (
    compiles,
    global_batch_size,
    microbatch_rows,
    model_sizes,
)
from titan.config.job_config import JobConfig
from titan.data.microbatch import Microbatch
from titan.estimation.compat import torchtitan
from titan.estimation.compiled import fusing_backend
from titan.estimation.dry_pipeline import holding_what_is_sent, run_each_stage, shortened
from titan.estimation.events import HOST, Trace
from titan.estimation.fake_world import accelerator_operators, fake_world
from titan.estimation.marks import MICROBATCHES, MarkedStages, mark, number_layers, units_of_parameters
from titan.estimation.replay import REPEATED
from titan.estimation.tracer import Tracer
from titan.estimation.watching import watching
from titan.parallelisms.float8 import unwrapped
from titan.parallelisms.parallel_dims import ParallelDims
from titan.training.gradients import local_part
from titan.training.initialize import materialize
from titan.training.optimizer import ModelOptimizer, build_optimizer
from titan.training.optimizer_groups import plan_updates
from titan.training.step import Share, TrainStep, WholeModel, build_model, build_stages

_CPU = torch.device("cpu")  # what fake tensors pretend to be on; any other needs a build of torch that has it


@dataclasses.dataclass(frozen=True)
class TracedStep:
    """What was traced.

    Attributes:
        parameters: that the traced model has on a rank, before data parallel sharding.
        per_unit: the same of the unit of layers that is repeated.
    """

    trace: Trace
    parameters: int
    per_unit: int


def trace_step(
    job: JobConfig, world_size: int, layers: int, period: int, *, rank: int = 0, whole: bool = False
) -> TracedStep:
    """One step of a rank.

    Args:
        layers: how many are traced of the model's, or of a pipeline's rank.
        period: layers of a unit.
        rank: whose step it is.
        whole: run each action of a pipeline's schedule; else a few stand for all (excerpt.py).

    Raises:
        ValueError: of those actions some aren't like those that they should stand for.
    """
    compat = job.estimation.compat
    with fake_world(world_size, rank), nullcontext() if compat is None else torchtitan(compat):
        dims = ParallelDims.from_config(job.parallelism, world_size)
        dims.build()
        sizes = model_sizes(job)
        if dims.pp == 1:
            sizes = dataclasses.replace(cast(Any, sizes), n_layers=layers)
        model = build_model(job, sizes)
        updates = plan_updates(job, model)
        on_host = job.training.enable_cpu_offload
        tracer = Tracer(_dimension_names(dims), documents=microbatch_rows(job))  # one in each row
        compiled = compiles(job, "model")
        if compiled:
            backend = cast(Any, fusing_backend(tracer))  # torch takes functions, too
            job = dataclasses.replace(job, compile=dataclasses.replace(job.compile, backend=backend))
        short = None
        if dims.pp > 1:
            with shortened(job, layers, dims.world.get_local_rank("pp"), tracer, whole=whole) as short:
                inner = build_stages(model, job, dims, _CPU)
        else:
            inner = build_stages(model, job, dims, _CPU)
        del model
        parts = inner.parts
        numbering = number_layers(parts, job, layers, period)
        for part in parts:
            mark(part, numbering, tracer)
        rows = None if short is None else short.run * job.parallelism.pipeline_parallel_microbatch_size
        stages, microbatches = MarkedStages(inner, tracer, rows), _microbatches(job, dims)
        with (
            FakeTensorMode(allow_non_fake_inputs=True),
            accelerator_operators(fused_norm=compat is None),
            nullcontext() if short is None else holding_what_is_sent(job, short),
        ):
            for part in parts:
                materialize(part, _CPU)
            optimizer = build_optimizer(job, updates, parts)
            step = TrainStep(stages, optimizer, job, dims, _CPU)
            for part in parts:
                if isinstance(part, FSDPModule):
                    part._get_fsdp_state()._lazy_init()  # else in the first forward pass, where it would be counted
            with watching(tracer, weights_on_host=on_host), tracer.pause():
                if compiled and isinstance(inner, WholeModel):
                    step.run(1, microbatches[:1], valid_tokens=1)  # compiles, and makes the optimizer's state
                elif compiled:
                    share = Share(job, dims, _CPU)(microbatches[0])
                    run_each_stage(
                        cast(Any, inner), share.rows(slice(job.parallelism.pipeline_parallel_microbatch_size))
                    )
                    optimizer.step()
                    optimizer.zero_grad()
                else:
                    _fill_state(optimizer)
            units = units_of_parameters(parts, numbering)
            with watching(tracer, weights_on_host=on_host):
                tracer.enter("build", None)
                with tracer.pause():  # taking a tensor's local part is no part of the step
                    _add_states(tracer, parts, optimizer, units, HOST if on_host else None)
                stages.start(len(microbatches))
                step.run(1, microbatches[:MICROBATCHES], valid_tokens=1)
    if short is not None:
        short.finish(tracer.trace)
    sizes_of = [(_rank_size(parameter, dims), unit) for parameter, unit in units.items()]
    return TracedStep(
        tracer.trace,
        sum(size for size, _ in sizes_of),
        sum(size for size, unit in sizes_of if unit == REPEATED),
    )


def _dimension_names(dims: ParallelDims) -> dict[str, str]:
    meshes = {"batch": dims.batch, "loss": dims.loss}
    meshes |= {name: dims.world[name] for name in ("dp_replicate", "cp", "tp", "pp")} | {"fsdp": dims.fsdp}
    return {mesh.get_group().group_name: name for name, mesh in meshes.items()}


def _fill_state(optimizer: ModelOptimizer) -> None:
    """Have the optimizer make its state, as the first step does at its end."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()


def _add_states(
    tracer: Tracer,
    parts: Sequence[nn.Module],
    optimizer: ModelOptimizer,
    units: dict[nn.Parameter, int | None],
    stream: int | None,
) -> None:
    for part in parts:
        for buffer in part.buffers():
            tracer.add(buffer, "parameters", None)
    for parameter, unit in units.items():
        tracer.add(local_part(unwrapped(parameter)), "parameters", unit, stream)
    for owner, state in optimizer.state.items():
        for tensor in state.values():
            if isinstance(tensor, torch.Tensor):
                tracer.add(local_part(tensor), "optimizer", units[cast(nn.Parameter, owner)], stream)


def _microbatches(job: JobConfig, dims: ParallelDims) -> list[Microbatch]:
    rows, length = job.training.local_batch_size, job.training.seq_len
    number = global_batch_size(job, dims.batch_degree) // (rows * dims.batch_degree)
    tokens = torch.zeros(rows, length, dtype=torch.int64)  # on the host, with values: losses look for ignored labels
    documents = tokens if job.model.attn_mask == "document" else None  # how many there are makes no difference
    return [Microbatch(tokens, tokens, documents, documents)] * number


def _rank_size(parameter: nn.Parameter, dims: ParallelDims) -> int:
    """Parameters of this tp rank, before sharding over data parallel ranks."""
    if not isinstance(parameter, DTensor) or "tp" not in (parameter.device_mesh.mesh_dim_names or ()):
        return parameter.numel()
    placement = parameter.placements[(parameter.device_mesh.mesh_dim_names or ()).index("tp")]
    if placement.is_replicate():
        return parameter.numel()
    length = parameter.shape[cast(Any, placement).dim]
    return parameter.numel() // length * math.ceil(length / dims.tp)
