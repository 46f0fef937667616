"""One step of titan on fake tensors, with a tracer watching: the same functions as in train.py, in the same order."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from itertools import chain
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
    model_stages,
    pipeline_microbatches,
)
from titan.config.job_config import JobConfig
from titan.data.microbatch import Microbatch
from titan.estimation.compat import torchtitan
from titan.estimation.compiled import fusing_backend
from titan.estimation.dry_pipeline import (
    count_all_sent,
    holding_what_is_sent,
    run_each_stage,
    shortened,
    traced_microbatches,
)
from titan.estimation.events import HOST, Trace
from titan.estimation.fake_world import accelerator_operators, fake_world
from titan.estimation.replay import REPEATED, TRACED
from titan.estimation.tracer import Tracer
from titan.models.batch import Batch
from titan.models.layers.head import Head
from titan.parallelisms.float8 import unwrapped
from titan.parallelisms.parallel_dims import ParallelDims
from titan.training.gradients import local_part
from titan.training.initialize import materialize
from titan.training.optimizer import ModelOptimizer, build_optimizer
from titan.training.optimizer_groups import plan_updates
from titan.training.step import Share, Stages, TrainStep, WholeModel, build_model, build_stages

_CPU = torch.device("cpu")  # what fake tensors pretend to be on; any other needs a build of torch that has it
_MICROBATCHES = 3  # traced at most: the first, which finds no gradients, one like all others, and the last


@dataclasses.dataclass(frozen=True)
class TracedStep:
    """What was traced.

    Attributes:
        parameters: that the traced model has on a rank, before data parallel sharding.
        per_unit: the same of the unit that is repeated of each stage.
    """

    trace: Trace
    parameters: int
    per_unit: Sequence[int]


def trace_step(job: JobConfig, world_size: int, layers: int, period: int, *, rank: int = 0) -> TracedStep:
    """One step of a rank.

    Args:
        layers: how many of the model's are traced, or of each of the rank's pipeline stages, if those have as many.
        period: layers of a unit.
        rank: whose step it is.
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
        tracer = Tracer(
            _dimension_names(dims),
            documents=microbatch_rows(job),  # one in each row
            weights_on_host=job.training.enable_cpu_offload,
        )
        compiled = compiles(job, "model")
        if compiled:
            backend = cast(Any, fusing_backend(tracer))  # torch takes functions, too
            job = dataclasses.replace(job, compile=dataclasses.replace(job.compile, backend=backend))
        traced = traced_microbatches(job, dims.world.get_local_rank("pp")) if dims.pp > 1 else 1
        with shortened(job, layers, traced, tracer) if dims.pp > 1 else nullcontext():
            inner = build_stages(model, job, dims, _CPU)
        del model
        parts = inner.parts
        numbering = _number_layers(parts, job, layers, period)
        for part in parts:
            _mark(part, numbering, tracer)
        rows = traced * job.parallelism.pipeline_parallel_microbatch_size if dims.pp > 1 else None
        stages, microbatches = _Marked(inner, tracer, rows), _microbatches(job, dims)
        with (
            FakeTensorMode(allow_non_fake_inputs=True),
            accelerator_operators(fused_norm=compat is None),
            holding_what_is_sent(job, traced) if dims.pp > 1 else nullcontext(),
        ):
            for part in parts:
                materialize(part, _CPU)
            optimizer = build_optimizer(job, updates, parts)
            step = TrainStep(stages, optimizer, job, dims, _CPU)
            for part in parts:
                if isinstance(part, FSDPModule):
                    part._get_fsdp_state()._lazy_init()  # else in the first forward pass, where it would be counted
            with tracer.watching(), tracer.pause():
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
            units = _units_of_parameters(parts, numbering)
            with tracer.watching():
                tracer.enter("build", None)
                with tracer.pause():  # taking a tensor's local part is no part of the step
                    _add_states(tracer, parts, optimizer, units, HOST if job.training.enable_cpu_offload else None)
                stages.start(len(microbatches))
                step.run(1, microbatches[:_MICROBATCHES], valid_tokens=1)
    if dims.pp > 1:
        count_all_sent(tracer.trace, traced, pipeline_microbatches(job))
    sizes_of = [(_rank_size(parameter, dims), unit) for parameter, unit in units.items()]
    return TracedStep(
        tracer.trace,
        sum(size for size, _ in sizes_of),
        [sum(size for size, unit in sizes_of if unit == TRACED * stage + REPEATED) for stage in range(len(parts))],
    )


def _dimension_names(dims: ParallelDims) -> dict[str, str]:
    meshes = {"batch": dims.batch, "loss": dims.loss}
    meshes |= {name: dims.world[name] for name in ("dp_replicate", "cp", "tp", "pp")} | {"fsdp": dims.fsdp}
    return {mesh.get_group().group_name: name for name, mesh in meshes.items()}


def _number_layers(parts: Sequence[nn.Module], job: JobConfig, layers: int, period: int) -> dict[nn.Module, int]:
    """The unit of each layer. What doesn't fill a unit belongs to the last one of the stage.

    Where a rank has several pipeline stages with too many layers to stand for others, each layer is a unit of its own.
    """
    stages = model_stages(job)
    if stages is None:
        return {}
    names = set(stages.layers)
    held = [[module for name, module in part.named_modules() if name in names] for part in parts]
    last = max(0, layers // period - 1)
    if len(parts) > 1 and any(len(modules) != TRACED for modules in held):
        return {module: number for number, module in enumerate(chain(*held))}
    return {
        module: TRACED * stage + min(last, number // period)
        for stage, modules in enumerate(held)
        for number, module in enumerate(modules)
    }


def _mark(part: nn.Module, numbering: dict[nn.Module, int], tracer: Tracer) -> None:
    """Let the tracer know when a layer's forward and backward passes begin, and when the layers' end."""
    blocks = [(module, numbering[module]) for module in part.modules() if module in numbering]
    has_head = any(isinstance(module, Head) for module in part.modules())
    for number, (block, unit) in enumerate(blocks):
        after = None if number + 1 < len(blocks) else "loss" if has_head else "forward"
        _mark_block(block, unit, tracer, first=number == 0, after=after)


def _mark_block(block: nn.Module, unit: int, tracer: Tracer, *, first: bool, after: str | None) -> None:
    inner: Callable[..., torch.Tensor] = block.forward

    def forward(stream: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        tracer.enter("forward", unit)
        if first and stream.requires_grad:
            stream.register_hook(lambda _: tracer.enter("backward", None))
        out = inner(stream, *args, **kwargs)
        out.register_hook(lambda _: tracer.enter("backward", unit))
        if after is not None:
            tracer.enter(after, None)
        return out

    block.forward = forward


class _Marked:
    """Stages that tell the tracer of their phases."""

    def __init__(self, stages: Stages, tracer: Tracer, rows: int | None) -> None:
        """
        Args:
            rows: of each batch that are run; None for all.
        """
        self.parts, self._stages, self._tracer, self._rows = stages.parts, stages, tracer, slice(rows)
        self.start(1)

    def start(self, microbatches: int) -> None:
        """A step of this many microbatches begins, of which fewer may be run."""
        self._done, self.total = 0, microbatches

    def forward_backward(self, batch: Batch, valid_tokens: int, last: bool) -> torch.Tensor:
        """See `titan.training.step.Stages`."""
        self._done += 1
        times = self.total - _MICROBATCHES + 1 if self._done == 2 and self.total > _MICROBATCHES else 1
        self._tracer.enter("forward", None)
        with self._tracer.counted(times):
            loss = self._stages.forward_backward(batch.rows(self._rows), valid_tokens, last)
        self._tracer.enter("optimizer", None)
        for part in self.parts if last else []:
            for parameter in part.parameters():
                if parameter.grad is not None:
                    self._tracer.know(local_part(parameter.grad), "gradients")
        return loss

    def evaluate(self, batch: Batch) -> torch.Tensor:
        """See `titan.training.step.Stages`."""
        return self._stages.evaluate(batch)


def _fill_state(optimizer: ModelOptimizer) -> None:
    """Have the optimizer make its state, as the first step does at its end."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()


def _units_of_parameters(parts: Sequence[nn.Module], numbering: dict[nn.Module, int]) -> dict[nn.Parameter, int | None]:
    units: dict[nn.Parameter, int | None] = {parameter: None for part in parts for parameter in part.parameters()}
    for block, unit in numbering.items():
        units |= dict.fromkeys(block.parameters(), unit)
    return units


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
