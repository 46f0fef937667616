"""Timelines of pipeline schedules against the closed forms of the papers, and against what torch's schedules run."""

from __future__ import annotations

import csv
from collections import Counter
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.pipelining.schedules import get_schedule_class

from titan.config.errors import UserError
from titan.estimation.pipeline_timeline import Costs, Timeline, named_schedule, simulate, timeline
from titan.parallelisms.schedule_csv import Schedule
from titan.parallelisms.schedules import SCHEDULES, stages_of_rank

SIZES = [(2, 4), (4, 4), (4, 8), (3, 9), (8, 16), (5, 20)]
ZERO_BUBBLE = [name for name, kind in SCHEDULES.items() if kind.splits_backward]


def all_timelines() -> list[tuple[str, int, int, int]]:
    """Every schedule in several sizes that it can run, few microbatches and one rank included."""
    return [
        (name, ranks, microbatches, stages)
        for name, kind in SCHEDULES.items()
        for ranks in (1, 2, 3, 4)
        for microbatches in (1, 3, 4, 8, 10)
        for stages in ((1, 2, 3) if kind.looped else (kind.stages_per_rank,))
        if kind.possible_microbatches(microbatches, ranks)
    ]


def write(path: Path, schedule: Schedule) -> Path:
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([str(action) for action in actions] for actions in schedule.ranks)
    return path


@pytest.mark.parametrize("name", ["GPipe", "1F1B"])
@pytest.mark.parametrize("ratio", [1, 2, 2.5])
@pytest.mark.parametrize(("p", "m"), SIZES)
def test_bubble_with_one_stage_per_rank(name: str, p: int, m: int, ratio: float) -> None:
    """(p − 1) / (m + p − 1), however long a backward takes: arXiv 2104.04473, section 2.2.1, as a share of the step."""
    found = timeline(name, p, m, costs=Costs(1, ratio, ratio))
    assert found.bubble == Fraction(p - 1, m + p - 1)
    assert found.total == (m + p - 1) * (1 + 2 * Fraction(ratio))


@pytest.mark.parametrize("name", ["Interleaved1F1B", "LoopedBFS"])
@pytest.mark.parametrize("v", [1, 2, 3, 4])
@pytest.mark.parametrize(("p", "m"), SIZES)
def test_bubble_with_several_stages_per_rank(name: str, p: int, m: int, v: int) -> None:
    """Idle time is v times less: section 2.2.2 of the same paper, and arXiv 2211.05953. m is a multiple of p."""
    assert timeline(name, p, m, v).bubble == Fraction(p - 1, v * m + p - 1)


@pytest.mark.parametrize("name", ZERO_BUBBLE)
@pytest.mark.parametrize("p", [2, 4, 8])
def test_zero_bubble_schedules_idle_less(name: str, p: int) -> None:
    found = timeline(name, p, 4 * p)
    assert found.bubble < timeline("Interleaved1F1B", p, 4 * p).bubble < timeline("1F1B", p, 4 * p).bubble


@pytest.mark.parametrize("p", [2, 3, 4, 8])
def test_zbv_idles_only_until_its_first_input(p: int) -> None:
    """With all costs equal and 2p microbatches or more: rank r waits for r stages, then never (arXiv 2401.10241)."""
    found = timeline("ZBVZeroBubble", p, 2 * p)
    for rank in range(p):
        slots = found.of_rank(rank)
        assert slots[0].start == Fraction(rank, 2)
        assert sum(slot.end - slot.start for slot in slots) == slots[-1].end - slots[0].start


@pytest.mark.parametrize(("p", "m"), [*SIZES, (4, 5)])
def test_peak_in_flight(p: int, m: int) -> None:
    assert timeline("GPipe", p, m).peak_in_flight == [m] * p
    assert timeline("1F1B", p, m).peak_in_flight == [min(m, p - rank) for rank in range(p)]


@pytest.mark.parametrize("p", [2, 4, 8])
def test_peak_in_flight_with_several_stages(p: int) -> None:
    """LoopedBFS keeps everything; interleaved 1F1B (v − 1) p + 2 (p − 1 − r) + 1 stages, as its warm-up has it."""
    m, v = 4 * p, 2
    assert timeline("LoopedBFS", p, m, v).peak_in_flight == [m] * p
    expected = [Fraction((v - 1) * p + 2 * (p - 1 - rank) + 1, v) for rank in range(p)]
    assert timeline("Interleaved1F1B", p, m, v).peak_in_flight == expected


@pytest.mark.parametrize(("name", "p", "m", "v"), all_timelines())
def test_work_is_complete_and_in_order(name: str, p: int, m: int, v: int) -> None:
    found = timeline(name, p, m, v)
    assert (found.ranks, found.stages, found.microbatches) == (p, p * v, m)
    check_work(found)
    check_order(found)
    check_peaks(found)
    for rank in range(p):
        assert found.stages_of_rank(rank) == sorted(stages_of_rank(rank, p, p * v, SCHEDULES[name].v_shaped))
    assert sum(slot.end - slot.start for slot in found.slots) == 3 * m * p  # the same, however the model is cut


def check_work(found: Timeline) -> None:
    """One forward and one backward, whole or in two halves, of each microbatch in each stage."""
    count = Counter((slot.stage, slot.microbatch, slot.kind) for slot in found.slots)
    assert set(count.values()) == {1}
    for stage in range(found.stages):
        for microbatch in range(found.microbatches):
            assert "".join(kind for kind in "FBIW" if count[stage, microbatch, kind]) in ("FB", "FIW")


def check_order(found: Timeline) -> None:
    """One action at a time on a rank, none before its inputs, and none later than it could be."""
    ends = {(slot.stage, slot.microbatch, slot.kind): slot.end for slot in found.slots}
    free = dict.fromkeys(range(found.ranks), Fraction(0))
    for slot in found.slots:
        stage, microbatch = slot.stage, slot.microbatch
        if slot.kind == "F":
            inputs = [(stage - 1, microbatch, "F")]
        elif slot.kind == "W":
            inputs = [(stage, microbatch, "I")]
        else:
            inputs = [(stage, microbatch, "F"), (stage + 1, microbatch, "I"), (stage + 1, microbatch, "B")]
        ready = [ends[key] for key in inputs if key in ends]
        assert slot.start == max([free[slot.rank], *ready])
        free[slot.rank] = slot.end


def check_peaks(found: Timeline) -> None:
    """In flight is what began its forward and hasn't ended its last backward; the most is reached at some beginning."""
    begins = {(slot.stage, slot.microbatch): slot.start for slot in found.slots if slot.kind == "F"}
    ends = {(slot.stage, slot.microbatch): slot.end for slot in found.slots if slot.kind in "BW"}
    for rank, peak in enumerate(found.peak_in_flight):
        stages = found.stages_of_rank(rank)
        kept = [(begins[key], ends[key]) for key in begins if key[0] in stages]
        most = max(sum(begin <= time < end for begin, end in kept) for time, _ in kept)
        assert peak == Fraction(most, len(stages))


class RecordingStage:
    """Stands in for a pipeline stage and writes down what a schedule calls."""

    def __init__(self, stage: int, stages: int) -> None:
        self.stage_index, self.num_stages = stage, stages
        self.is_first, self.is_last = stage == 0, stage == stages - 1
        self.calls: list[str] = []

    def forward_one_chunk(self, microbatch: int, *args: Any, **kwargs: Any) -> None:
        self.calls.append(f"{self.stage_index}F{microbatch}")

    def backward_one_chunk(self, microbatch: int, *args: Any, **kwargs: Any) -> None:
        self.calls.append(f"{self.stage_index}B{microbatch}")

    def __getattr__(self, name: str) -> Any:
        """No sends, no receives, nothing to reduce or to clear."""
        if name.startswith(("get_", "perform_", "clear_")):
            return lambda *args, **kwargs: []
        raise AttributeError(name)


@pytest.mark.parametrize("name", ["GPipe", "1F1B"])
@pytest.mark.parametrize(("p", "m"), [(1, 1), (1, 3), (2, 4), (4, 4), (4, 9)])
def test_order_is_what_torch_runs(name: str, p: int, m: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not only what it plans: in torch 2.13 the plan of 1F1B has wrong numbers on the last rank."""
    planned = named_schedule(name, p, m)
    for rank in range(p):
        stage = RecordingStage(rank, p)
        schedule = get_schedule_class(name)(stage, m, scale_grads=False)  # type: ignore[call-arg, arg-type]
        monkeypatch.setattr(schedule, "_initialize_stage", lambda *args: None)
        monkeypatch.setattr(schedule, "_has_backward", True)
        schedule._step_microbatches([()] * m, [{}] * m, return_outputs=False)
        assert stage.calls == [str(action) for action in planned.ranks[rank]]


@pytest.mark.parametrize("name", ["1F1B", "Interleaved1F1B", "ZBVZeroBubble", "DualPipeV"])
def test_file_is_the_same_as_the_name(name: str, tmp_path: Path) -> None:
    path = write(tmp_path / "own.csv", named_schedule(name, 3, 6))
    assert timeline("", 3, 6, csv=path) == timeline(name, 3, 6)


def test_file_with_overlapped_actions_runs_them_one_after_another(tmp_path: Path) -> None:
    path = tmp_path / "own.csv"
    path.write_text("0F0,(0F1;0B0)OVERLAP_F_B,0B1\n,1F0,1B0,1F1,1B1\n")
    found = timeline("", 2, 2, csv=path)
    assert [(slot.kind, slot.microbatch, slot.start) for slot in found.of_rank(0)] == [
        ("F", 0, 0),
        ("F", 1, 1),
        ("B", 0, 4),
        ("B", 1, 7),
    ]


def test_costs_are_those_of_a_rank() -> None:
    found = timeline("ZBVZeroBubble", 2, 4, costs=Costs(1, 1.5, 0.25))
    lengths = {slot.kind: slot.end - slot.start for slot in found.slots}
    assert lengths == {"F": Fraction(1, 2), "I": Fraction(3, 4), "W": Fraction(1, 8)}


def test_plans_need_no_weights_and_no_process_group() -> None:
    """Nor much time, at the size of a cluster: an estimate may try many layouts."""
    assert timeline("DualPipeV", 16, 64).bubble < Fraction(1, 10)
    assert not dist.is_initialized()


def test_file_with_uneven_ranks(tmp_path: Path) -> None:
    """A stage costs 1/v of a rank with the ranks' mean number of stages: all ranks together do the same work."""
    path = tmp_path / "own.csv"
    path.write_text("0F0,1F0,1B0,0B0\n2F0,2B0\n")
    found = timeline("", 2, 1, csv=path)
    assert found.stages_per_rank == Fraction(3, 2)
    assert found.total == sum(slot.end - slot.start for slot in found.slots) == 6


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("1f1b", 4, 8), 'schedule "1f1b": no such schedule; there are GPipe'),
        (("1F1B", 4, 3), "microbatches = 3: 1F1B on 4 ranks can't run that many; nearest: 4"),
        (("Interleaved1F1B", 4, 9), "nearest: 8 or 10"),
        (("GPipe", 0, 3), "ranks = 0"),
        (("GPipe", 2, 0), "microbatches = 0"),
        (("LoopedBFS", 2, 4, 0), "stages_per_rank = 0"),
        (("DualPipeV", 2, 4, 3), "stages_per_rank = 3: DualPipeV has exactly 2 per rank"),
    ],
)
def test_impossible_sizes(arguments: tuple[Any, ...], expected: str) -> None:
    with pytest.raises(UserError) as caught:
        timeline(*arguments)
    assert expected in str(caught.value)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (None, "No such file"),
        ("", "it is empty"),
        ("0F0,0B0\n1X0\n", 'row 2, cell 1: "1X0" is no action'),
        ("0F0,0B0\n1B0,1F0\n", "row 1 waits forever at 0B0"),
        ("0F0,1F0\n1B0,0B0\n", "rows 1 and 2 both have stage 0"),
        ("0F0,0B0\n,\n", "row 2 has no action"),
        ("0F0,1F0,1B0,0B0\n", "it has 1 ranks, not 2"),
        ("0F0,0F1,0B0,0B1\n1F0,1F1,1B0,1B1\n", "it has 2 microbatches, not 1"),
    ],
)
def test_wrong_files(text: str | None, expected: str, tmp_path: Path) -> None:
    path = tmp_path / "own.csv"
    if text is not None:
        path.write_text(text)
    with pytest.raises(UserError) as caught:
        timeline("", 2, 1, csv=path)
    assert str(caught.value).startswith(f"schedule file {path}: ")
    assert expected in str(caught.value)


def test_schedule_that_waits_forever_is_refused() -> None:
    forward, backward = named_schedule("GPipe", 1, 1).ranks[0]
    with pytest.raises(ValueError, match="waits forever"):
        simulate(Schedule([[backward, forward]]))


@pytest.mark.parametrize("wrong", [0, -1, float("nan"), float("inf")])
def test_wrong_costs(wrong: float) -> None:
    with pytest.raises(UserError, match="above 0"):
        Costs(backward_input=wrong)
