"""How models are cut into stages, where stages lie, and what schedules ask for; torch itself is the judge."""

from __future__ import annotations

import inspect
import random
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest

from titan.config.job_config import Parallelism
from titan.models.spec import Stages
from titan.parallelisms.schedule_csv import Action, Schedule, find_fault, read_schedule
from titan.parallelisms.schedules import SCHEDULES, number_of_stages, split, split_by_cost, stages_of_rank


def model(layers: int) -> Stages:
    return Stages(("tok_embeddings",), tuple(f"layers.{layer}" for layer in range(layers)), ("norm", "output"))


def counts(parts: list[list[str]]) -> list[int]:
    return [sum(name.startswith("layers.") for name in part) for part in parts]


def test_schedules_are_the_configs_and_torchs() -> None:
    from torch.distributed.pipelining.schedules import get_schedule_class

    assert list(SCHEDULES) == list(get_args(get_type_hints(Parallelism)["pipeline_parallel_schedule"]))
    assert all(get_schedule_class(name) for name in SCHEDULES)


@pytest.mark.parametrize("seed", range(200))
def test_split_is_even_in_order_and_whole(seed: int) -> None:
    draw = random.Random(seed)
    stages = draw.randint(1, 16)
    modules = model(draw.randint(stages, 130))
    first_less, last_less = draw.randint(0, 4), draw.randint(0, 4)
    parts = split_by_cost(modules, stages, first_less, last_less)
    assert len(parts) == stages
    assert [name for part in parts for name in part] == [*modules.first, *modules.layers, *modules.last]
    layers = counts(parts)
    assert min(layers) >= 1
    costs = list(layers)
    costs[0] += first_less
    costs[-1] += last_less
    # A stage of one layer can't have less, however much its end counts for.
    assert all(cost <= min(costs) + 1 for cost, count in zip(costs, layers, strict=True) if count > 1)


@pytest.mark.parametrize(
    ("layers", "stages", "less", "expected"),
    [
        (6, 2, (1, 1), [3, 3]),
        (6, 4, (1, 1), [1, 2, 2, 1]),
        (126, 16, (1, 1), [7, *[8] * 14, 7]),  # Llama 3 405B, as it was trained
        (32, 4, (1, 1), [7, 9, 9, 7]),  # what doesn't come out even goes to the middle
        (8, 4, (0, 0), [2, 2, 2, 2]),
        (10, 3, (8, 1), [1, 5, 4]),
        (3, 3, (4, 4), [1, 1, 1]),
        (5, 1, (1, 1), [5]),
    ],
)
def test_split(layers: int, stages: int, less: tuple[int, int], expected: list[int]) -> None:
    assert counts(split_by_cost(model(layers), stages, *less)) == expected


def test_too_few_layers() -> None:
    with pytest.raises(ValueError, match="2 layers can't make 3 stages"):
        split_by_cost(model(2), 3, 1, 1)


def test_names_of_the_ends() -> None:
    assert split_by_cost(model(2), 2, 1, 1) == [["tok_embeddings", "layers.0"], ["layers.1", "norm", "output"]]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (Parallelism(pipeline_parallel_degree=4), 4),
        (Parallelism(pipeline_parallel_degree=4, pipeline_parallel_schedule="Interleaved1F1B"), 8),
        (Parallelism(pipeline_parallel_degree=4, pipeline_parallel_schedule="DualPipeV"), 8),
        (Parallelism(pipeline_parallel_degree=4, pipeline_parallel_layers_per_stage=2), 7),
        (Parallelism(pipeline_parallel_degree=4, module_fqns_per_model_part=[["a"], ["b"]]), 2),
    ],
)
def test_number_of_stages(settings: Parallelism, expected: int) -> None:
    assert number_of_stages(settings, model(12)) == expected


def test_parts_by_name_are_taken_as_they_are() -> None:
    parts = [["tok_embeddings"], ["layers.0", "norm", "output"]]
    assert split(Parallelism(module_fqns_per_model_part=parts), model(1)) == parts


@pytest.mark.parametrize("ranks", range(1, 9))
def test_stages_of_ranks_are_torchs(ranks: int) -> None:
    from torch.distributed.pipelining._utils import generate_rank_to_stage_mapping

    for per_rank in (1, 2, 3):
        stages = ranks * per_rank
        loop = generate_rank_to_stage_mapping(ranks, stages, style="loop")
        assert {rank: stages_of_rank(rank, ranks, stages, v_shaped=False) for rank in range(ranks)} == loop
    v = generate_rank_to_stage_mapping(ranks, 2 * ranks, style="v")
    assert {rank: stages_of_rank(rank, ranks, 2 * ranks, v_shaped=True) for rank in range(ranks)} == v


def test_both_ends_of_a_v_are_on_the_first_rank() -> None:
    assert [stages_of_rank(rank, 3, 6, v_shaped=True) for rank in range(3)] == [[0, 5], [1, 4], [2, 3]]


class StageStandIn:
    """What torch's schedules read of a stage when they are made."""

    def __init__(self, index: int, stages: int, ranks: int, rank: int) -> None:
        import torch

        self.stage_index, self.num_stages, self.group_size, self.group_rank = index, stages, ranks, rank
        self.is_first, self.is_last = index == 0, index == stages - 1
        self.submod, self.has_backward = torch.nn.Identity(), True


def torchs_schedule(name: str, ranks: int, stages: int, microbatches: int) -> Any:
    """Torch's schedule as rank 0 makes it: all ranks' actions are in it.

    Raises:
        ValueError: torch doesn't take this many microbatches.
    """
    from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class

    kind = get_schedule_class(name)
    own = [
        StageStandIn(stage, stages, ranks, 0) for stage in stages_of_rank(0, ranks, stages, SCHEDULES[name].v_shaped)
    ]
    given = own[0] if issubclass(kind, PipelineScheduleSingle) else own
    return kind(given, microbatches, loss_fn=lambda output, target: output, scale_grads=False)


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("name", SCHEDULES)
def test_microbatches_that_are_possible_are_those_that_torch_takes(name: str, ranks: int, tmp_path: Path) -> None:
    kind = SCHEDULES[name]
    for microbatches in range(1, 14):
        possible = kind.possible_microbatches(microbatches, ranks)
        for stages in {ranks * per_rank for per_rank in (1, 2, 3)}:
            if not kind.possible_stages(stages, ranks):
                continue
            try:
                schedule = torchs_schedule(name, ranks, stages, microbatches)
            except ValueError:
                assert not possible, (stages, microbatches)
                continue
            assert possible, (stages, microbatches)
            if kind.stages_per_rank > 1:
                check_actions(schedule, tmp_path / "schedule.csv", stages, microbatches)


def check_actions(schedule: Any, path: Path, stages: int, microbatches: int) -> None:
    """Torch's own schedule, written to a file by torch, is read back and has no fault."""
    schedule._dump_csv(str(path), format="compute_only")
    found = read_schedule(str(path))
    assert (found.stages, found.microbatches) == (stages, microbatches)
    assert find_fault(found) is None


def test_stages_that_are_possible() -> None:
    possible = {
        name: [stages for stages in range(1, 13) if kind.possible_stages(stages, 4)] for name, kind in SCHEDULES.items()
    }
    looped, v_shaped = [4, 8, 12], [8]
    assert possible == {
        "GPipe": [4],
        "1F1B": [4],
        "Interleaved1F1B": looped,
        "LoopedBFS": looped,
        "InterleavedZeroBubble": looped,
        "ZBVZeroBubble": v_shaped,
        "DualPipeV": v_shaped,
    }


def test_backward_halves_are_those_of_torch() -> None:
    from torch.distributed.pipelining.schedules import get_schedule_class

    for name, kind in SCHEDULES.items():
        refuses_compile = "_check_torch_compile_compatibility" in inspect.getsource(get_schedule_class(name))
        assert refuses_compile == kind.splits_backward


class TestFile:
    def test_actions(self, tmp_path: Path) -> None:
        (tmp_path / "s.csv").write_text("0F0, ,(1F0;1B0)OVERLAP_F_B\n\n")
        schedule = read_schedule(str(tmp_path / "s.csv"))
        assert schedule.ranks == [[Action(0, "F", 0), Action(1, "F", 0), Action(1, "B", 0)], []]
        assert (schedule.stages, schedule.microbatches) == (2, 1)
        assert schedule.stages_of_rank(0) == [0, 1] and schedule.stages_of_rank(1) == []

    def test_a_file_without_actions(self, tmp_path: Path) -> None:
        (tmp_path / "s.csv").write_text(",,\n")
        schedule = read_schedule(str(tmp_path / "s.csv"))
        assert (schedule.stages, schedule.microbatches) == (0, 0)

    @pytest.mark.parametrize(
        ("ranks", "fault"),
        [
            (["0F0 0B0"], None),
            (["0F0 0I0 0W0"], None),
            (["0F0 0W0 0I0"], "row 1 waits forever at 0W0 for 0I0"),
            (["0B0 0F0"], "row 1 waits forever at 0B0 for 0F0"),
            (["0F0 0B0 0W0"], "stage 0 has F and B and W of microbatch 0"),
            (["0F0 0B0", "1F0 1I0 1W0"], None),
            (["0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"], None),
            (["0F0 0B0 0F1 0B1", "1F1 1B1 1F0 1B0"], "row 1 waits forever at 0B0 for 1B0"),
            (["0F0 0B0", "1F0 1B0 1B0"], "1B0 is there 2 times"),
            (["0F0 0B0", "2F0 2B0"], "stage 1 has nothing of microbatch 0"),
        ],
    )
    def test_faults(self, ranks: list[str], fault: str | None) -> None:
        rows = [[Action(int(a[0]), a[1], int(a[2])) for a in actions.split()] for actions in ranks]
        found = find_fault(Schedule(rows))
        assert found is None if fault is None else found is not None and found.startswith(fault)
