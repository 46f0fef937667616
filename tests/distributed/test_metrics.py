"""What is logged in layouts: everywhere the same numbers, of the whole model, and who is slow."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.distributed.runs import TINY, SmallRun, train_here
from tests.distributed.test_layouts import random_batch
from tests.distributed.world import Worlds
from tests.observability.test_metrics import read_scalars
from titan.observability.logging import logger
from titan.training.optimizer import ModelOptimizer

DEGREE = {
    "replicate": "data_parallel_replicate_degree",
    "shard": "data_parallel_shard_degree",
    "cp": "context_parallel_degree",
    "tp": "tensor_parallel_degree",
    "pp": "pipeline_parallel_degree",
}


def layout(**degrees: int) -> list[str]:
    rows = degrees.get("replicate", 1) * degrees.get("shard", 1)
    return [f"--parallelism.{DEGREE[name]}={degree}" for name, degree in degrees.items()] + [
        f"--training.local_batch_size={4 // rows}",
        "--training.global_batch_size=4",
    ]


LOGGED = ["--metrics.enable_tensorboard", "--metrics.layer_norms", "--metrics.log_freq=2"]


@pytest.mark.parametrize(
    ("ranks", "degrees"), [(1, {}), (2, {"pp": 2}), pytest.param(4, {"tp": 2, "shard": 2}, marks=pytest.mark.slow)]
)
def test_pp_loss_rank_tensorboard_has_every_step_once_also_after_a_resume(
    worlds: Worlds, tmp_path: Path, ranks: int, degrees: dict[str, int]
) -> None:
    """Step 6 is logged, and done again after a resume from step 5, in each layout."""
    arguments = [*TINY, *layout(**degrees), *LOGGED, "--checkpoint.enable", "--checkpoint.interval=5"]
    arguments += [f"--job.dump_folder={tmp_path}", "--lr_scheduler.total_steps=9"]
    worlds(ranks).run(train_here, [*arguments, "--training.steps=6"])
    rows = worlds(ranks).run(train_here, [*arguments, "--training.steps=9", "--checkpoint.load_step=5"])[0]
    assert [row["step"] for row in rows] == [1, 2, 4, 6, 8, 9]
    assert all(row["loss"] > 1 for row in rows)
    scalars = read_scalars(tmp_path / "tb")
    assert set(scalars) == set(rows[0]) - {"step", "mfu", "time"}
    for name, points in scalars.items():
        as_float32 = torch.tensor([row[name] for row in rows], dtype=torch.float32).tolist()
        assert points == list(zip([1, 2, 4, 6, 8, 9], as_float32, strict=True)), name
    starts = [json.loads(line) for line in (tmp_path / "starts.jsonl").read_text().splitlines()]
    assert [(start["start"], start["step"], start["world_size"]) for start in starts] == [(0, 0, ranks), (1, 5, ranks)]
    assert all(0 < row["goodput"] < 1 for row in rows)


def norms_after_a_step(*arguments: str) -> tuple[dict[str, float], float, dict[str, float]]:
    """Of the second step: norms by layer, of the whole gradient, and the weights' as they come from whole tensors."""
    run = SmallRun("--metrics.layer_norms", *arguments)
    run.step(1, *random_batch(1))
    weights = run.weights()
    tokens, labels = random_batch(2)
    step = run.steps.run
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run.steps, "run", lambda *given: step(*given, logged=True))
        outcome = run.step(2, tokens, labels)
    squares: dict[str, float] = {}
    for name, weight in weights.items():
        layer = ".".join(name.split(".")[: 2 if name.startswith("layers") else 1])
        squares[layer] = squares.get(layer, 0.0) + float(weight.double().square().sum())
    return dict(outcome.layer_norms), outcome.grad_norm, {layer: square**0.5 for layer, square in squares.items()}


@pytest.fixture(scope="module")
def of_one_process(worlds: Worlds) -> dict[str, float]:
    found, whole, weights = worlds(1).run(norms_after_a_step, *layout())[0]
    layers = ["tok_embeddings", "layers.0", "layers.1", "norm", "output"]
    assert list(found) == [f"{kind}/{layer}" for kind in ("grad_norm", "weight_norm") for layer in layers]
    by_layer = [found[f"grad_norm/{layer}"] for layer in layers]
    assert sum(norm**2 for norm in by_layer) ** 0.5 == pytest.approx(whole, rel=1e-6)
    assert {layer: found[f"weight_norm/{layer}"] for layer in layers} == pytest.approx(weights, rel=1e-6)
    return found


@pytest.mark.parametrize(
    ("ranks", "degrees"),
    [
        (2, {"pp": 2}),
        (2, {"replicate": 2}),
        (2, {"cp": 2}),
        (4, {"tp": 2, "shard": 2}),
        pytest.param(4, {"replicate": 2, "shard": 2}, marks=pytest.mark.slow),
        pytest.param(4, {"pp": 2, "tp": 2}, marks=pytest.mark.slow),
        pytest.param(4, {"pp": 2, "replicate": 2}, marks=pytest.mark.slow),
    ],
)
def test_layers_norms_are_those_of_one_process(
    worlds: Worlds, of_one_process: dict[str, float], ranks: int, degrees: dict[str, int]
) -> None:
    for found, _, _ in worlds(ranks).run(norms_after_a_step, *layout(**degrees)):
        assert found == pytest.approx(of_one_process, rel=2e-5)


def _train_with_a_slow_rank(arguments: Sequence[str]) -> list[str]:
    """Warnings of a run whose last rank takes 0.3 s longer to update its weights."""
    warnings: list[str] = []
    update = ModelOptimizer.step

    def slow_update(self: Any) -> None:
        time.sleep(0.3 if dist.get_rank() == dist.get_world_size() - 1 else 0.0)
        update(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ModelOptimizer, "step", slow_update)
        patch.setattr(logger, "warning", warnings.append)
        train_here(arguments)
    return [warning for warning in warnings if "holds the others up" in warning]


@pytest.mark.parametrize(
    ("ranks", "degrees"), [(2, {"shard": 2}), pytest.param(4, {"pp": 2, "tp": 2}, marks=pytest.mark.slow)]
)
def test_a_slow_rank_is_named(worlds: Worlds, tmp_path: Path, ranks: int, degrees: dict[str, int]) -> None:
    arguments = [*TINY, *layout(**degrees), f"--job.dump_folder={tmp_path}", "--training.steps=5"]
    warnings = worlds(ranks).run(_train_with_a_slow_rank, arguments)
    assert warnings[1:] == [[]] * (ranks - 1)
    (warning,) = warnings[0]
    assert warning.startswith(f"rank {ranks - 1} holds the others up in each step of ")
    assert "its own work takes 0.3" in warning
