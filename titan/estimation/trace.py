"""The dry run by tracing: titan's own step on fake tensors → what it takes of an accelerator (docs/estimation.md)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from titan.config.derived import model_sizes, model_stages, pipeline_microbatches
from titan.config.errors import UserError
from titan.config.job_config import JobConfig
from titan.estimation.dry_step import trace_step
from titan.estimation.estimate import CATEGORIES, RankEstimate, Traffic
from titan.estimation.events import Place, Trace
from titan.estimation.history import History
from titan.estimation.peak import classify, find_peak
from titan.estimation.pipeline_timeline import timeline
from titan.estimation.replay import TRACED, replay
from titan.parallelisms.parallel_dims import ParallelDims
from titan.parallelisms.schedules import SCHEDULES, split, stages_of_rank


def trace_layout(
    job: JobConfig,
    world_size: int,
    *,
    compat: bool = False,
    replayed: bool = True,
    expandable_segments: bool = True,
) -> list[RankEstimate]:
    """What a step takes on the ranks of a job, from a trace of one of its steps.

    Args:
        job: that passed the checks for this number of ranks.
        compat: trace it as torchtitan of 2024 would have run it (compat.py).
        replayed: trace a few layers and play them as often as there are layers; else trace all.
        expandable_segments: how the accelerator's allocator is set up; titan's own jobs have it so.

    Returns:
        One estimate for each kind of rank.

    Raises:
        UserError: the job has something that can't be traced yet, or this process is part of a running job.
    """
    refuse_untraceable(job, world_size, compat=compat)
    return [
        _estimate(job, world_size, kind, compat=compat, replayed=replayed, expandable=expandable_segments)
        for kind in _kinds(job, world_size)
    ]


@dataclass(frozen=True)
class _Kind:
    """Ranks that do the same.

    Attributes:
        rank: that is traced.
        ranks: how many are like it.
        layers: that it holds.
        repeats: whether its layers come one after another, forward and backward, so that a few stand for all.
    """

    name: str
    rank: int
    ranks: int
    layers: int
    repeats: bool


def _kinds(job: JobConfig, world_size: int) -> Iterator[_Kind]:
    # Muon computes with whole matrices, each on one rank: the first rank's share isn't that of its layers.
    repeats = model_stages(job) is not None and job.optimizer.name != "Muon"
    dims = ParallelDims.from_config(job.parallelism, world_size)
    if dims.pp == 1:
        yield _Kind("every rank", 0, world_size, model_sizes(job).n_layers, repeats)
        return
    modules, settings = model_stages(job), job.parallelism
    assert modules is not None  # config/checks_pipeline.py
    stages, each = split(settings, modules), world_size // dims.pp
    schedule = SCHEDULES[settings.pipeline_parallel_schedule]
    in_flight = timeline(
        settings.pipeline_parallel_schedule, dims.pp, pipeline_microbatches(job), len(stages) // dims.pp
    ).peak_in_flight
    alike: dict[object, list[int]] = {}  # pipeline ranks whose stages have as many layers, and keep as much
    numbers = [stages_of_rank(rank, dims.pp, len(stages), schedule.v_shaped) for rank in range(dims.pp)]
    held = [[[name in modules.layers for name in stages[number]] for number in own] for own in numbers]
    for rank in range(dims.pp):
        alike.setdefault((str(held[rank]), in_flight[rank]), []).append(rank)
    for ranks in alike.values():
        first = ranks[0]
        yield _Kind(
            name=f"pp {', '.join(map(str, ranks))} (of stages {', '.join(map(str, numbers[first]))})",
            rank=first * each,
            ranks=each * len(ranks),
            layers=sum(map(sum, held[first])),
            # Where gradients of weights are a pass of their own, that one doesn't go layer by layer.
            repeats=repeats and len(numbers[first]) == 1 and not schedule.splits_backward,
        )


def _estimate(
    job: JobConfig, world_size: int, kind: _Kind, *, compat: bool, replayed: bool, expandable: bool
) -> RankEstimate:
    period, layers = _period(job), kind.layers
    units = layers // period
    if not replayed or units <= TRACED or not kind.repeats:
        units = TRACED
    else:
        layers = TRACED * period + layers % period
    run = trace_step(job, world_size, layers, period, rank=kind.rank, compat=compat)
    trace = run.trace
    trace.events = classify(trace.events, trace.categories)
    trace = replay(trace, units)
    history = History(len(trace.events))
    peak = find_peak(trace.events, expandable=expandable, history=history)
    return RankEstimate(
        name=kind.name,
        ranks=kind.ranks,
        parameters=run.parameters + run.parameters_per_unit * (units - TRACED),
        breakdown={category: peak.breakdown.get(category, 0) for category in CATEGORIES},
        peak_active_bytes=peak.active_bytes,
        peak_reserved_bytes=peak.reserved_bytes,
        peak_at=f"{_describe(peak.place, period)}, {peak.operator.removeprefix('aten::')}",
        hardware_flops=float(sum(trace.flops.values())),
        traffic=_traffic(trace),
        moments=history.moments(lambda place: _describe(place, period)),
    )


def refuse_untraceable(job: JobConfig, world_size: int, *, compat: bool) -> None:
    """Raise UserError, naming the key, for what a trace would get wrong."""
    dims = ParallelDims.from_config(job.parallelism, world_size)
    refusals = {
        "parallelism.tensor_parallel_degree": compat and dims.tp > 1 and "the loss of torchtitan of 2024 isn't",
        "parallelism.pipeline_parallel_schedule_csv": dims.pp > 1
        and job.parallelism.pipeline_parallel_schedule_csv is not None
        and "a schedule's file isn't",
        "parallelism.pipeline_parallel_schedule": dims.pp > 1
        and SCHEDULES[job.parallelism.pipeline_parallel_schedule].splits_backward
        and "a backward pass in two parts isn't",
        "model.attn_mask": job.model.attn_mask == "document" and "documents that are kept apart aren't",
        "model.attn_backend": job.model.attn_backend != "sdpa" and "another kernel than sdpa's isn't",
        "float8.enable_float8_linear": job.float8.enable_float8_linear and "float8 isn't",
        "training.enable_cpu_offload": job.training.enable_cpu_offload and "weights in the CPU's memory aren't",
        "activation_checkpoint.offload": job.activation_checkpoint.offload and "offloaded activations aren't",
        "parallelism.context_parallel_rotate_method": dims.cp > 1
        and job.parallelism.context_parallel_rotate_method == "alltoall"
        and "the ring isn't",
        "training.mixed_precision_param": dims.cp > 1
        and job.training.mixed_precision_param == "float32"
        and "context parallelism in float32 isn't",
    }
    for key, reason in refusals.items():
        if reason:
            raise UserError(f"{key}: {reason} traced yet; the closed form (--estimation.method analytic) may know it")


def _period(job: JobConfig) -> int:
    """After how many layers they repeat."""
    checkpointing = job.activation_checkpoint
    counted = checkpointing.mode == "selective" and checkpointing.selective_ac_option != "op"
    return int(checkpointing.selective_ac_option) if counted else 1


def _traffic(trace: Trace) -> list[Traffic]:
    calls: Counter[tuple[str, str]] = Counter()
    sent: Counter[tuple[str, str]] = Counter()
    for messages in trace.messages.values():
        for message, count in messages.items():
            if message.collective == "recv":
                continue  # another rank's send
            calls[message.collective, message.dim] += count
            sent[message.collective, message.dim] += count * message.sent
    return [Traffic(*kind, calls[kind], sent[kind]) for kind in sorted(calls)]


def _describe(place: Place, period: int) -> str:
    unit = place.unit
    layer = "" if unit is None else f", layer {unit}"
    if unit is not None and period > 1:
        layer = f", layers {unit * period} to {unit * period + period - 1}"
    return f"{place.phase}{layer}"
