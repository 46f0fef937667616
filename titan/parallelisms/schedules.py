"""Pipeline schedules by name: what each one needs of the layout. Imports no torch, so that a config can be checked."""

from __future__ import annotations

from dataclasses import dataclass

from titan.config.job_config import Parallelism
from titan.models.spec import Stages
from titan.parallelisms.schedule_csv import read_schedule


@dataclass(frozen=True)
class ScheduleKind:
    """What a schedule asks for, as torch.distributed.pipelining.schedules checks it.

    Attributes:
        stages_per_rank: how many stages a rank holds when the config doesn't say.
        looped: another number of stages per rank is possible.
        v_shaped: rank r holds stages r and 2·pp − 1 − r, rather than r, r + pp, …
        splits_backward: gradients of inputs and of weights are separate passes, which torch.compile can't do.
        fills: it needs at least as many microbatches as there are stages.
        rounds: microbatches go in rounds of pp or more, all of one size: n must be a multiple of max(1, n // pp).
    """

    stages_per_rank: int
    looped: bool = False
    v_shaped: bool = False
    splits_backward: bool = False
    fills: bool = False
    rounds: bool = False

    def possible_stages(self, stages: int, ranks: int) -> bool:
        """This many stages can be spread over the ranks."""
        return stages % ranks == 0 and stages > 0 if self.looped else stages == ranks * self.stages_per_rank

    def possible_microbatches(self, microbatches: int, ranks: int) -> bool:
        """This many microbatches make a schedule. Only schedules with a fixed number of stages have to be filled."""
        if self.fills and microbatches < ranks * self.stages_per_rank:
            return False
        return not self.rounds or microbatches % max(1, microbatches // ranks) == 0


SCHEDULES = {
    "GPipe": ScheduleKind(1),
    "1F1B": ScheduleKind(1, fills=True),
    "Interleaved1F1B": ScheduleKind(2, looped=True, rounds=True),
    "LoopedBFS": ScheduleKind(2, looped=True),
    "InterleavedZeroBubble": ScheduleKind(2, looped=True, splits_backward=True, rounds=True),
    "ZBVZeroBubble": ScheduleKind(2, v_shaped=True, splits_backward=True),
    "DualPipeV": ScheduleKind(2, v_shaped=True, splits_backward=True, fills=True),
}


def stages_of_rank(rank: int, ranks: int, stages: int, v_shaped: bool) -> list[int]:
    """The numbers of the stages that a pipeline rank holds."""
    if v_shaped:
        return [rank, 2 * ranks - 1 - rank]
    return list(range(rank, stages, ranks))


def split_by_cost(modules: Stages, stages: int, first_less: int, last_less: int) -> list[list[str]]:
    """Modules of every stage: layers as even as they can be, the ends short of what embedding and head cost.

    The first stage counts as holding `first_less` layers more than it has, the last one `last_less`. Where that doesn't
    come out even, the middle stages take the layers that are over, since the ends are the ones that others wait for.

    Every stage gets a layer at least.

    Raises:
        ValueError: there are fewer layers than stages.
    """
    layers = list(modules.layers)
    if len(layers) < stages:
        raise ValueError(f"{len(layers)} layers can't make {stages} stages")
    counts = [1] * stages
    costs = [1] * stages
    costs[0] += first_less
    costs[-1] += last_less
    for _ in range(len(layers) - stages):
        least = min(range(stages), key=lambda stage: (costs[stage], abs(2 * stage - (stages - 1))))
        counts[least] += 1
        costs[least] += 1
    parts = []
    for count in counts:
        parts.append(layers[:count])
        layers = layers[count:]
    parts[0] = [*modules.first, *parts[0]]
    parts[-1] = [*parts[-1], *modules.last]
    return parts


def number_of_stages(settings: Parallelism, modules: Stages) -> int:
    """Stages over all ranks: as the names or the layers per stage say, or as many as the schedule has.

    Reads the schedule's file, if there is one.

    Raises:
        ValueError: the file is no schedule.
        OSError: it can't be read.
    """
    if settings.module_fqns_per_model_part is not None:
        return len(settings.module_fqns_per_model_part)
    if settings.pipeline_parallel_layers_per_stage is not None:
        return -(-layers_worth(settings, modules) // settings.pipeline_parallel_layers_per_stage)
    if settings.pipeline_parallel_schedule_csv is not None:
        return read_schedule(settings.pipeline_parallel_schedule_csv).stages
    return settings.pipeline_parallel_degree * SCHEDULES[settings.pipeline_parallel_schedule].stages_per_rank


def layers_worth(settings: Parallelism, modules: Stages) -> int:
    """The whole model's cost in layers: its layers and what embedding and head count for."""
    ends = settings.pipeline_parallel_first_stage_less_layers + settings.pipeline_parallel_last_stage_less_layers
    return len(modules.layers) + ends


def split(settings: Parallelism, modules: Stages) -> list[list[str]]:
    """Names of the modules of every stage, for a config that passed the checks."""
    if settings.module_fqns_per_model_part is not None:
        return settings.module_fqns_per_model_part
    return split_by_cost(
        modules,
        number_of_stages(settings, modules),
        settings.pipeline_parallel_first_stage_less_layers,
        settings.pipeline_parallel_last_stage_less_layers,
    )
