"""Memory in closed form against published peaks, and against itself."""

from __future__ import annotations

import dataclasses
import json
import statistics
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.estimation.published import ROWS, layout_of_row
from titan.config.loader import load_and_check
from titan.estimation.closed_form import analytic_layout, estimate, peak
from titan.estimation.estimate import CATEGORIES
from titan.estimation.from_config import layout_of
from titan.estimation.hardware import GIB
from titan.estimation.layout import BYTES, Checkpointing, Layout, Stage, even_stages
from titan.models.spec import model_families


def reserved_gib(layout: Layout) -> float:
    return max(rank.peak_reserved_bytes for rank in estimate(layout)) / GIB


def error_of(row: dict[str, Any]) -> float:
    return reserved_gib(layout_of_row(row)) / row["mem_gib"] - 1


def test_published_peaks() -> None:
    errors = {}
    for row in ROWS:
        if row["memory_test"]:
            errors[row["id"]] = error_of(row)
            misfit = row.get("known_misfit", "")
            print(f"{row['id']:20} {row['mem_gib']:6.1f} {errors[row['id']]:+7.1%}  {misfit}")
    fitting = [abs(errors[row["id"]]) for row in ROWS if row["id"] in errors and not row.get("known_misfit")]
    print(f"median {statistics.median(fitting):.1%}, max {max(fitting):.1%} of {len(fitting)}")
    assert len(fitting) >= 20
    assert statistics.median(fitting) < 0.03
    assert max(fitting) < 0.15


@pytest.mark.parametrize(("name", "flavor"), [("llama3", "8B"), ("llama2", "13B"), ("llama3", "3.2-1B")])
def test_parameters_are_those_of_the_model(name: str, flavor: str) -> None:
    config = load_and_check([f"--model.name={name}", f"--model.flavor={flavor}"], 1).config
    family = model_families()[name]
    with torch.device("meta"):
        model = family.build(family.flavors[flavor])
    (rank,) = analytic_layout(config, 1)
    assert rank.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert layout_of(config, 1).model.parameters == rank.parameters


def layout(*arguments: str, ranks: int = 8) -> Layout:
    return layout_of(load_and_check(["--model.flavor=8B", "--training.seq_len=8192", *arguments], ranks).config, ranks)


def test_every_byte_has_a_category() -> None:
    for rank in estimate(layout("--parallelism.pipeline_parallel_degree=4")):
        assert tuple(rank.breakdown) == CATEGORIES
        assert rank.peak_active_bytes == sum(rank.breakdown.values()) < rank.peak_reserved_bytes


def test_states_are_sharded() -> None:
    (eight,), (one,) = estimate(layout(ranks=8)), estimate(layout(ranks=1))
    parameters = one.parameters
    assert eight.breakdown["parameters"] == round(4 * parameters / 8)
    assert eight.breakdown["optimizer"] == round(8 * parameters / 8)
    assert one.breakdown["optimizer"] == 8 * parameters
    (replicated,) = estimate(
        layout("--parallelism.data_parallel_replicate_degree=2", "--parallelism.data_parallel_shard_degree=4")
    )
    assert replicated.breakdown["parameters"] == round(4 * parameters / 4)


@pytest.mark.parametrize(
    "arguments",
    [
        ("--activation_checkpoint.mode=full",),
        ("--training.local_batch_size=1",),
        ("--training.enable_cpu_offload",),
        ("--optimizer.state_dtype=bfloat16",),
        ("--parallelism.tensor_parallel_degree=2",),
        ("--parallelism.context_parallel_degree=2",),
        ("--activation_checkpoint.offload",),
        ("--compile.enable", "--activation_checkpoint.mode=memory_budget", "--activation_checkpoint.memory_budget=0"),
    ],
)
def test_what_saves_memory_does(arguments: tuple[str, ...]) -> None:
    assert reserved_gib(layout(*arguments)) < reserved_gib(layout())


def test_whole_logits_need_more_than_chunks() -> None:
    assert reserved_gib(layout("--loss.name=cross_entropy")) > reserved_gib(layout())


def test_early_ranks_of_a_pipeline_keep_more_microbatches() -> None:
    ranks = estimate(layout("--parallelism.pipeline_parallel_degree=4"))
    assert [rank.name for rank in ranks] == [f"pp {rank} (stages {rank})" for rank in range(4)]
    kept = [rank.breakdown["activations"] for rank in ranks]
    assert kept[1] > kept[2] > 0
    assert sum(rank.ranks for rank in ranks) == 8
    assert sum(rank.parameters for rank in ranks) == 8_030_261_248


def test_muon_keeps_one_moment_of_matrices() -> None:
    (adam,), (muon,) = estimate(layout()), estimate(layout("--optimizer.name=Muon"))
    matrices = 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336)
    assert muon.breakdown["optimizer"] == adam.breakdown["optimizer"] - 4 * matrices // 8


def test_every_nth_block() -> None:
    base = layout()
    every = dataclasses.replace(base, checkpointing=Checkpointing("full", every=2))
    assert every.kept_by_block == (base.kept("full") + base.kept("none")) / 2


def test_stages_are_those_of_the_trainer() -> None:
    config = load_and_check(["--model.flavor=8B", "--parallelism.pipeline_parallel_degree=4"], 4).config
    assert layout_of(config, 4).stages == even_stages(32, 4, 1)
    assert even_stages(32, 1, 1) == ((Stage(32),),)


def test_peak_names_a_moment() -> None:
    whole = dataclasses.replace(layout(), reference="torchtitan-2024", chunks=1)
    assert peak(whole, 0)[0] == "loss"
    assert BYTES["bfloat16"] == 2


def test_rows_are_those_of_the_file() -> None:
    assert json.loads((Path(__file__).parent / "published_measurements.json").read_text()) == ROWS
