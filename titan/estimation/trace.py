"""The dry run by tracing: titan's own step on fake tensors → what it takes of an accelerator (docs/estimation.md)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from titan.config.derived import model_sizes, model_stages
from titan.config.errors import UserError
from titan.config.job_config import JobConfig
from titan.estimation.dry_pipeline import planned_microbatches
from titan.estimation.dry_step import trace_step
from titan.estimation.estimate import CATEGORIES, RankEstimate, Traffic, rank_name
from titan.estimation.events import Place, Trace
from titan.estimation.history import History
from titan.estimation.peak import classify, find_peak
from titan.estimation.pipeline_timeline import timeline
from titan.estimation.replay import TRACED, replay
from titan.parallelisms.parallel_dims import ParallelDims
from titan.parallelisms.schedules import SCHEDULES, split, stages_of_rank

_FEW_NUMBERS = 24  # bytes


def trace_layout(
    job: JobConfig,
    world_size: int,
    *,
    replayed: bool = True,
    expandable_segments: bool = True,
) -> list[RankEstimate]:
    """What a step takes on the ranks of a job, from a trace of one of its steps.

    Args:
        job: that passed the checks for this number of ranks.
        replayed: trace a few layers and play them as often as there are layers; else trace all.
        expandable_segments: how the accelerator's allocator is set up; titan's own jobs have it so.

    Returns:
        One estimate for each kind of rank.

    Raises:
        UserError: the job has something that can't be traced yet, or this process is part of a running job.
    """
    refuse_untraceable(job)
    return [
        _estimate(job, world_size, kind, replayed=replayed, expandable=expandable_segments)
        for kind in _kinds(job, world_size)
    ]


@dataclass(frozen=True)
class _Kind:
    """Ranks that hold as many layers, and the same ends of the model.

    Attributes:
        name: of the rank that is traced.
        rank: the one of them that keeps most microbatches.
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
    csv = settings.pipeline_parallel_schedule_csv
    in_flight = timeline(
        settings.pipeline_parallel_schedule,
        dims.pp,
        planned_microbatches(job, 0),
        len(stages) // dims.pp,
        csv=None if csv is None else Path(csv),
    ).peak_in_flight
    numbers = [stages_of_rank(rank, dims.pp, len(stages), schedule.v_shaped) for rank in range(dims.pp)]
    alike: dict[object, list[int]] = {}  # pipeline ranks that hold the same
    for rank, own in enumerate(numbers):
        alike.setdefault(str([_shape(stages[number], modules.layers) for number in own]), []).append(rank)
    for ranks in alike.values():
        worst = max(ranks, key=in_flight.__getitem__)  # what else they do is the same
        yield _Kind(
            name=rank_name(worst, numbers[worst]),
            rank=worst * each,
            ranks=each * len(ranks),
            layers=sum(name in modules.layers for number in numbers[worst] for name in stages[number]),
            repeats=repeats and len(stages) == dims.pp,
        )


def _shape(names: Sequence[str], layers: Sequence[str]) -> list[str]:
    """A stage's modules, its layers but counted."""
    return [*(name for name in names if name not in layers), str(sum(name in layers for name in names))]


def _estimate(job: JobConfig, world_size: int, kind: _Kind, *, replayed: bool, expandable: bool) -> RankEstimate:
    period = _period(job)
    units = kind.layers // period
    if replayed and kind.repeats and units > TRACED:
        layers = TRACED * period + kind.layers % period
    else:
        units, layers = TRACED, kind.layers
    try:
        run = trace_step(job, world_size, layers, period, rank=kind.rank, whole=not replayed)
        run.trace.events = classify(run.trace.events, run.trace.categories)
        trace = replay(run.trace, units)
    except ValueError:  # layers or microbatches aren't alike: each is traced
        return _estimate(job, world_size, kind, replayed=False, expandable=expandable)
    history = History(len(trace.events))
    peak = find_peak(trace.events, expandable=expandable, history=history)
    return RankEstimate(
        name=kind.name,
        ranks=kind.ranks,
        parameters=run.parameters + (units - TRACED) * run.per_unit,
        breakdown={category: peak.breakdown.get(category, 0) for category in CATEGORIES},
        peak_active_bytes=peak.active_bytes,
        peak_reserved_bytes=peak.reserved_bytes,
        peak_at=f"{_describe(peak.place, period)}, {peak.operator.removeprefix('aten::')}",
        hardware_flops=float(sum(trace.flops.values())),
        traffic=_traffic(trace),
        moments=history.moments(lambda place: _describe(place, period)),
        host_bytes=peak.host_bytes,
    )


def refuse_untraceable(job: JobConfig) -> None:
    """Raise UserError, naming the key, for what a trace would get wrong."""
    if job.model.attn_mask == "document" and job.model.attn_backend == "flex":
        raise UserError(
            'model.attn_backend = "flex": a kernel that torch.compile writes can\'t be traced; the closed form '
            "(estimation.method = analytic) knows it, or take varlen, which needs as much memory"
        )


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
            if message.collective == "recv" or message.bytes <= _FEW_NUMBERS:
                continue  # another rank's send; a step's loss or norm, which takes no time
            calls[message.collective, message.dim] += count
            sent[message.collective, message.dim] += count * message.sent
    return [Traffic(*kind, calls[kind], sent[kind]) for kind in sorted(calls)]


def _describe(place: Place, period: int) -> str:
    unit = place.unit
    layer = "" if unit is None else f", layer {unit}"
    if unit is not None and period > 1:
        layer = f", layers {unit * period} to {unit * period + period - 1}"
    return f"{place.phase}{layer}"
