"""Who does what when in a pipeline: the order of a schedule's actions, run against a clock without any weights.

The order is torch's own, from the plan that its schedule classes make, or that of a schedule's file. The clock knows
only compute: sends and receives take no time, and all stages cost the same. So the bubble is the part of it that the
schedule itself causes, as the literature counts it (arXiv 2104.04473): 1F1B idles (p − 1) / (m + p − 1) of a step.

Times are in the unit of `Costs`, and exact fractions, so that they can be compared with closed forms.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

from titan.config.errors import UserError
from titan.config.nearest import did_you_mean
from titan.parallelisms.schedule_csv import Action, Schedule, find_fault, read_schedule
from titan.parallelisms.schedules import SCHEDULES, stages_of_rank

if TYPE_CHECKING:
    from torch.distributed.pipelining.schedules import _Action


KINDS = {"F": "forward", "B": "backward", "I": "gradients of inputs", "W": "gradients of weights"}


@dataclass(frozen=True)
class Costs:
    """What a rank needs for one microbatch in all of its stages, in any unit of time.

    A stage costs the rank's share: with v stages per rank, 1/v of these. The model is the same however it is cut, so
    that schedules with one and with several stages per rank can be compared.

    Attributes:
        forward: of the forward pass.
        backward_input: of the gradients of inputs.
        backward_weight: of the gradients of weights; a full backward costs both.
    """

    forward: float = 1
    backward_input: float = 1
    backward_weight: float = 1

    def __post_init__(self) -> None:
        if not all(0 < cost < float("inf") for cost in (self.forward, self.backward_input, self.backward_weight)):
            raise UserError(f"{self}: every cost must be above 0 and finite")

    def of_stage(self, stages_per_rank: Fraction) -> dict[str, Fraction]:
        """Time of an action in one stage, by its kind."""
        forward, inputs, weights = (
            Fraction(cost) / stages_per_rank for cost in (self.forward, self.backward_input, self.backward_weight)
        )
        return {"F": forward, "B": inputs + weights, "I": inputs, "W": weights}


UNIT_COSTS = Costs()


class Slot(NamedTuple):
    """What a rank does from `start` to `end`; `kind` is F, B (full backward), or I and W, the halves of B."""

    rank: int
    kind: str
    stage: int
    microbatch: int
    start: Fraction
    end: Fraction


@dataclass(frozen=True)
class Timeline:
    """One step of a pipeline.

    Attributes:
        slots: what the ranks do, rank by rank, in order of time. The step starts at 0.
        ranks, stages, microbatches: how many there are; stages are counted over all ranks.
    """

    slots: list[Slot]
    ranks: int
    stages: int
    microbatches: int

    @property
    def stages_per_rank(self) -> Fraction:
        """A whole number, but for a file that gives ranks different numbers of stages: then their mean."""
        return Fraction(self.stages, self.ranks)

    @property
    def total(self) -> Fraction:
        """Time until the last rank is done."""
        return max(slot.end for slot in self.slots)

    @property
    def bubble(self) -> Fraction:
        """The idle share, 0 to 1, of all ranks' time within the step."""
        busy = sum((slot.end - slot.start for slot in self.slots), Fraction(0))
        return 1 - busy / (self.ranks * self.total)

    @property
    def peak_in_flight(self) -> list[Fraction]:
        """Of each rank, the most activations that it keeps at a time, as `peak_of_rank` counts them."""
        return [self.peak_of_rank(rank) for rank in range(self.ranks)]

    def of_rank(self, rank: int) -> list[Slot]:
        """What one rank does, in order of time."""
        return [slot for slot in self.slots if slot.rank == rank]

    def stages_of_rank(self, rank: int) -> list[int]:
        """The numbers of the stages that a rank holds."""
        return sorted({slot.stage for slot in self.slots if slot.rank == rank})

    def peak_of_rank(self, rank: int) -> Fraction:
        """The most activations that a rank keeps at a time, in microbatches of all of its stages.

        Activations of a microbatch in a stage count from the start of the forward to the end of the backward, or of its
        last half. That is an upper bound where backwards are split, since the first half frees some of them.
        """
        changes = {"F": 1, "I": 0, "B": -1, "W": -1}
        return max(accumulate(changes[slot.kind] for slot in self.of_rank(rank))) / self.stages_per_rank


def timeline(
    schedule: str,
    ranks: int,
    microbatches: int,
    stages_per_rank: int | None = None,
    csv: Path | None = None,
    costs: Costs = UNIT_COSTS,
) -> Timeline:
    """One step of a schedule.

    Args:
        schedule: a name that `parallelism.pipeline_parallel_schedule` may have; not read beside `csv`.
        ranks: pipeline ranks.
        stages_per_rank: as many as the schedule, or its file, has when None.
        csv: a schedule's file (parallelisms/schedule_csv.py), which must be of this size.

    Raises:
        UserError: there is no such schedule, or not of this size, or the file can't be read or can't run.
    """
    order = named_schedule(schedule, ranks, microbatches, stages_per_rank) if csv is None else schedule_of_file(csv)
    if csv is not None:
        _check_size(csv, order, ranks, microbatches, stages_per_rank)
    return simulate(order, costs)


def named_schedule(name: str, ranks: int, microbatches: int, stages_per_rank: int | None = None) -> Schedule:
    """The order in which torch's schedule of that name runs its actions, with two overlapped ones one after another.

    Raises:
        UserError: there is no such schedule, or not of this size.
    """
    if name not in SCHEDULES:
        raise UserError(
            f'schedule "{name}": no such schedule; there are {", ".join(SCHEDULES)}{did_you_mean(name, SCHEDULES)}'
        )
    per_rank = SCHEDULES[name].stages_per_rank if stages_per_rank is None else stages_per_rank
    _check_possible(name, ranks, microbatches, per_rank)
    return Schedule([[*_flat(actions)] for actions in _plan(name, ranks, microbatches, per_rank)])


def schedule_of_file(path: Path) -> Schedule:
    """The order in a schedule's file.

    Raises:
        UserError: it can't be read, is no schedule, or would wait forever.
    """
    try:
        schedule = read_schedule(str(path))
    except OSError as error:
        raise UserError(f"schedule file {path}: {error.strerror}") from error
    except ValueError as error:  # UnicodeDecodeError is one too
        raise UserError(f"schedule file {path}: {error}") from error
    fault = "it is empty" if schedule.stages == 0 else find_fault(schedule) or _misplaced(schedule)
    if fault:
        raise UserError(f"schedule file {path}: {fault}")
    return schedule


def simulate(schedule: Schedule, costs: Costs = UNIT_COSTS) -> Timeline:
    """Run a schedule against the clock: each action starts when its rank is free and its inputs are there.

    Raises:
        ValueError: something is missing in it, or it would wait forever.
    """
    if fault := find_fault(schedule):
        raise ValueError(f"the schedule can't run: {fault}")
    stages = schedule.stages
    durations = costs.of_stage(Fraction(stages, len(schedule.ranks)))
    ends: dict[
        tuple[str, int, int], Fraction
    ] = {}  # (F, I or W, stage, microbatch), where I is a full backward as well
    done: list[list[Slot]] = [[] for _ in schedule.ranks]
    ahead = [deque(actions) for actions in schedule.ranks]
    while any(ahead):
        for rank, actions in enumerate(ahead):
            while actions and all(needed in ends for needed in _inputs(actions[0], stages)):
                action = actions.popleft()
                free = done[rank][-1].end if done[rank] else Fraction(0)
                start = max([free, *(ends[needed] for needed in _inputs(action, stages))])
                end = start + durations[action.kind]
                ends[_result(action)] = end
                done[rank].append(Slot(rank, action.kind, action.stage, action.microbatch, start, end))
    slots = [slot for slots in done for slot in slots]
    return Timeline(slots, len(schedule.ranks), stages, schedule.microbatches)


def _inputs(action: Action, stages: int) -> Iterator[tuple[str, int, int]]:
    """What has to be done before an action, as `_result` names it."""
    stage, kind, microbatch = action
    if kind == "F":
        if stage > 0:
            yield "F", stage - 1, microbatch
    elif kind == "W":
        yield "I", stage, microbatch
    else:
        yield "F", stage, microbatch
        if stage + 1 < stages:
            yield "I", stage + 1, microbatch


def _result(action: Action) -> tuple[str, int, int]:
    """What others wait for: a full backward sends its gradients of inputs when it is done."""
    return "I" if action.kind == "B" else action.kind, action.stage, action.microbatch


def _plan(name: str, ranks: int, microbatches: int, stages_per_rank: int) -> list[list[_Action | None]]:
    """Torch's plan for every rank. Any rank's schedule object has it; this makes that of rank 0."""
    from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class

    kind = get_schedule_class(name)
    numbers = stages_of_rank(0, ranks, ranks * stages_per_rank, SCHEDULES[name].v_shaped)
    stages: list[Any] = [_stand_in(number, ranks, stages_per_rank) for number in numbers]
    if not issubclass(kind, PipelineScheduleSingle):
        return list(kind(stages, microbatches).pipeline_order.values())
    order = kind(stages[0], microbatches).pipeline_order
    assert order is not None
    return [_renumbered(actions) for actions in order.values()]


def _stand_in(number: int, ranks: int, stages_per_rank: int) -> SimpleNamespace:
    """What a schedule asks of a rank-0 stage when it makes its plan."""
    return SimpleNamespace(
        stage_index=number, num_stages=ranks * stages_per_rank, group_size=ranks, group_rank=0, submod=None
    )


def _renumbered(actions: list[_Action | None]) -> list[_Action | None]:
    """A plan with the n-th forward, and the n-th backward, being of microbatch n, as single-stage schedules run them.

    In torch 2.13 the plan of 1F1B numbers the last rank's forwards from 1, which the schedule itself doesn't do.
    """
    count: dict[str, int] = {}
    numbered: list[_Action | None] = []
    for action in actions:
        if action is not None and action.microbatch_index is not None:
            number = count.get(action.computation_type.value, 0)
            count[action.computation_type.value] = number + 1
            action = action._replace(microbatch_index=number)
        numbered.append(action)
    return numbered


def _flat(actions: list[_Action | None]) -> Iterator[Action]:
    """Only computing, overlapped actions one by one."""
    for action in actions:
        if action is not None and action.is_compute_op:
            for part in action.sub_actions or (action,):
                assert part.microbatch_index is not None
                yield Action(part.stage_index, part.computation_type.value, part.microbatch_index)


def _check_possible(name: str, ranks: int, microbatches: int, stages_per_rank: int) -> None:
    for what, number in (("ranks", ranks), ("microbatches", microbatches), ("stages_per_rank", stages_per_rank)):
        if number < 1:
            raise UserError(f"{what} = {number}: expected a whole number of at least 1")
    kind = SCHEDULES[name]
    if not kind.possible_stages(ranks * stages_per_rank, ranks):
        raise UserError(f"stages_per_rank = {stages_per_rank}: {name} has exactly {kind.stages_per_rank} per rank")
    if not kind.possible_microbatches(microbatches, ranks):
        counts = [n for n in range(1, microbatches + 2 * ranks + 1) if kind.possible_microbatches(n, ranks)]
        near = [*[n for n in counts if n < microbatches][-1:], *[n for n in counts if n > microbatches][:1]]
        legal = " or ".join(str(number) for number in near)
        raise UserError(f"microbatches = {microbatches}: {name} on {ranks} ranks can't run that many; nearest: {legal}")


def _check_size(path: Path, schedule: Schedule, ranks: int, microbatches: int, stages_per_rank: int | None) -> None:
    stages = schedule.stages if stages_per_rank is None else ranks * stages_per_rank
    wanted = {"ranks": ranks, "stages": stages, "microbatches": microbatches}
    found = {"ranks": len(schedule.ranks), "stages": schedule.stages, "microbatches": schedule.microbatches}
    for what, number in wanted.items():
        if found[what] != number:
            raise UserError(f"schedule file {path}: it has {found[what]} {what}, not {number}")


def _misplaced(schedule: Schedule) -> str | None:
    """A stage that two ranks have, or a rank that has none."""
    rows: dict[int, int] = {}
    for row in range(1, len(schedule.ranks) + 1):
        stages = schedule.stages_of_rank(row - 1)
        if not stages:
            return f"row {row} has no action; each rank needs a stage"
        for stage in stages:
            if rows.setdefault(stage, row) != row:
                return f"rows {rows[stage]} and {row} both have stage {stage}, which is one rank's"
    return None
