"""Every data-parallel layout follows one process: same initial weights, losses, gradient norms, weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.distributed.runs import TINY, SmallRun, train_here
from tests.distributed.world import WorldError, Worlds

REPLICATE, SHARD = "--parallelism.data_parallel_replicate_degree", "--parallelism.data_parallel_shard_degree"

# (ranks, replicate, shard, windows per microbatch, further arguments); 8 windows a step in each. The matrix of layouts
# (test_matrix.py) has more; these go through train.py itself, or vary what the matrix doesn't.
LAYOUTS: list[tuple[int, int, int, int, list[str]]] = [
    (1, 1, 1, 2, []),
    (2, 1, 2, 1, ["--parallelism.fsdp_reshard_after_forward=never"]),
    (4, 1, 4, 2, ["--parallelism.fsdp_reshard_after_forward=always"]),
    (4, 2, 2, 1, []),
    (4, 4, 1, 1, []),
]


def layout_arguments(replicate: int, shard: int, local: int, extra: list[str]) -> list[str]:
    batch = [f"--training.local_batch_size={local}", "--training.global_batch_size=8"]
    return [f"{REPLICATE}={replicate}", f"{SHARD}={shard}", *batch, *extra]


@pytest.fixture(scope="module")
def one_process(worlds: Worlds, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """Metrics of five steps on one process without accumulation, by flavor."""
    return {
        flavor: _train(worlds, tmp_path_factory.mktemp("one"), flavor, 1, 1, 1, 8, []) for flavor in ("untied", "tied")
    }


def _train(
    worlds: Worlds, folder: Path, flavor: str, ranks: int, replicate: int, shard: int, local: int, extra: list[str]
) -> list[dict[str, Any]]:
    arguments = [*TINY, f"--model.flavor={flavor}", f"--job.dump_folder={folder}", "--training.steps=5"]
    rows: list[dict[str, Any]] = worlds(ranks).run(
        train_here, arguments + layout_arguments(replicate, shard, local, extra)
    )[0]
    return rows


@pytest.mark.parametrize("flavor", ["untied", "tied"])
@pytest.mark.parametrize(("ranks", "replicate", "shard", "local", "extra"), LAYOUTS)
def test_num_layout_loss(
    worlds: Worlds,
    tmp_path: Path,
    one_process: dict[str, list[dict[str, Any]]],
    flavor: str,
    ranks: int,
    replicate: int,
    shard: int,
    local: int,
    extra: list[str],
) -> None:
    rows = _train(worlds, tmp_path, flavor, ranks, replicate, shard, local, extra)
    expected = one_process[flavor]
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]
    for key in ("loss", "grad_norm"):
        assert [row[key] for row in rows] == pytest.approx([row[key] for row in expected], rel=1e-5)
    assert [row["tokens_seen"] for row in rows] == [row["tokens_seen"] for row in expected]
    assert expected[0]["loss"] > expected[-1]["loss"] + 0.1


def random_batch(step: int, rows: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, 101, (rows, 33), generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def sgd_weights(arguments: list[str], steps: int, ignore: bool = False) -> tuple[Any, Any, list[float], list[float]]:
    """Initial weights, weights after some steps of SGD, losses and norms."""
    run = SmallRun(*arguments)
    initial = run.weights()
    outcomes = []
    for step in range(1, steps + 1):
        tokens, labels = random_batch(step)
        if ignore:  # 3 valid labels in row 0, 13 in row 1, all in rows 2-3, none at all in rows 4-7
            labels[0, 3:] = labels[1, 13:] = labels[4:] = -100
        outcomes.append(run.step(step, tokens, labels))
    return initial, run.weights(), [o.loss for o in outcomes], [o.grad_norm for o in outcomes]


@pytest.mark.parametrize(("flavor", "ignore"), [("untied", True), pytest.param("tied", False, marks=pytest.mark.slow)])
def test_dp_hsdp_scale_and_loss_accum(worlds: Worlds, flavor: str, ignore: bool) -> None:
    """SGD doesn't forgive a wrong scale of the gradient, as Adam does; also with unequal and with no valid labels."""
    own = [f"--model.flavor={flavor}", "--training.max_norm=0"]
    initial, after, losses, norms = worlds(1).run(sgd_weights, own + layout_arguments(1, 1, 8, []), 3, ignore)[0]
    assert any(not torch.equal(initial[name], after[name]) for name in initial)
    for ranks, replicate, shard, local, extra in LAYOUTS:
        arguments = own + layout_arguments(replicate, shard, local, extra)
        theirs = worlds(ranks).run(sgd_weights, arguments, 3, ignore)[0]
        for name in initial:
            assert torch.equal(theirs[0][name], initial[name]), f"initial {name} differs with {arguments}"
            assert (theirs[1][name] - after[name]).abs().max() < 1e-6, f"{name} after 3 steps differs with {arguments}"
        assert theirs[2] == pytest.approx(losses, rel=1e-5)
        assert theirs[3] == pytest.approx(norms, rel=1e-5)


def test_loss_is_the_mean_over_all_valid_labels(worlds: Worlds) -> None:
    """Against a plain autograd computation in one piece, not against titan."""
    _, _, losses, norms = worlds(2).run(sgd_weights, layout_arguments(1, 2, 1, ["--training.max_norm=0"]), 1, True)[0]
    expected = worlds(1).run(plain_loss_and_norm)[0]
    assert (losses[0], norms[0]) == pytest.approx(expected, rel=1e-5)


def plain_loss_and_norm() -> tuple[float, float]:
    model = SmallRun(*layout_arguments(1, 1, 8, [])).model
    tokens, labels = random_batch(1)
    labels[0, 3:] = labels[1, 13:] = labels[4:] = -100
    loss = torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), labels.flatten())
    loss.backward()
    squares = sum(parameter.grad.pow(2).sum() for parameter in model.parameters())
    return loss.item(), float(squares**0.5)


def step_without_valid_labels() -> tuple[float, float, bool]:
    run = SmallRun(*layout_arguments(1, 2, 4, []))
    tokens, labels = random_batch(1)
    outcome = run.step(1, tokens, torch.full_like(labels, -100))
    return outcome.loss, outcome.grad_norm, outcome.updated


def test_no_valid_label_at_all_is_a_loss_of_zero(worlds: Worlds) -> None:
    assert worlds(2).run(step_without_valid_labels) == [(0.0, 0.0, True)] * 2


def clipped_change(replicate: int, shard: int, max_norm: float) -> tuple[float, float]:
    """Length of the step that SGD with lr 1 makes: the norm of the clipped gradient."""
    extra = [f"--training.max_norm={max_norm}"]
    run = SmallRun(*layout_arguments(replicate, shard, 8 // (replicate * shard), extra), lr=1.0)
    before = run.weights()
    outcome = run.step(1, *random_batch(1))
    after = run.weights()
    change = sum((after[name].double() - before[name].double()).pow(2).sum() for name in before) ** 0.5
    return outcome.grad_norm, float(change)


@pytest.mark.parametrize(("replicate", "shard"), [(1, 1), (1, 4), (2, 2), (4, 1)])
def test_dp_clip_generator_and_gradnorm_local(worlds: Worlds, replicate: int, shard: int) -> None:
    ranks = replicate * shard
    norm, change = worlds(ranks).run(clipped_change, replicate, shard, 1e-3)[0]
    assert norm > 0.1
    assert change == pytest.approx(1e-3 * norm / (norm + 1e-6), rel=1e-3)
    norm, change = worlds(ranks).run(clipped_change, replicate, shard, 0.0)[0]
    assert change == pytest.approx(norm, rel=1e-4)


def clipped_gradients(norm: float, max_norm: float) -> float:
    """Norm after clipping gradients of a given norm, sharded over the world."""
    from titan.training.gradients import clip_gradients, gradient_norm

    run = SmallRun(*layout_arguments(1, dist.get_world_size(), 1, []))
    parameters = list(run.model.parameters())
    count = sum(parameter.numel() for parameter in parameters)
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, norm / count**0.5)
    clip_gradients(parameters, gradient_norm(parameters), max_norm)
    return gradient_norm(parameters).item()


def test_dp_clip_eps(worlds: Worlds) -> None:
    """The 1e-6 is added once, to the norm of the whole model, not once per rank."""
    expected = 1e-6 * (1e-7 / (1e-6 + 1e-6))
    for ranks in (1, 2, 4):
        assert worlds(ranks).run(clipped_gradients, 1e-6, 1e-7)[0] == pytest.approx(expected, rel=1e-4)


def summed_gradient() -> float:
    """Gradient of the sum over ranks of w · (rank + 1), on every mesh shape of this world."""
    from torch import nn

    from titan.config.loader import load_and_check
    from titan.parallelisms.fsdp import apply_fsdp
    from titan.parallelisms.parallel_dims import ParallelDims

    results = set()
    for replicate, shard in ((1, 4), (2, 2), (4, 1)):
        config = load_and_check([*TINY, f"{REPLICATE}={replicate}", f"{SHARD}={shard}"], 4).config
        dims = ParallelDims.from_config(config.parallelism, 4)
        dims.build()
        model = nn.Sequential(nn.Linear(8, 1, bias=False))
        apply_fsdp(model, [[model[0]]], dims, config)
        model(torch.full((2, 8), dist.get_rank() + 1.0)).sum().backward()
        results |= set(model[0].weight.grad.full_tensor().flatten().tolist())
    (result,) = results
    return result


def test_dp_gloo_sum(worlds: Worlds) -> None:
    assert worlds(4).run(summed_gradient) == [20.0] * 4  # 2 rows × (1 + 2 + 3 + 4): a sum, not a mean


def tie_after_steps() -> list[bool]:
    run = SmallRun("--model.flavor=tied", *layout_arguments(1, 2, 4, []))
    checks = []
    for step in (1, 2, 3):
        checks.append(run.model.output.weight is run.model.tok_embeddings.weight)
        run.step(step, *random_batch(step))
    checks.append(run.model.output.weight is run.model.tok_embeddings.weight)
    return checks


def test_dp_tie_split(worlds: Worlds) -> None:
    assert worlds(2).run(tie_after_steps) == [[True] * 4] * 2


def poisoned_step(policy: str, limit: int) -> tuple[list[Any], str, bool]:
    """Rank 1's own shard of a weight is made infinite before step 3; steps are tried until the run ends."""
    extra = [f"--training.nonfinite={policy}", f"--training.nonfinite_skip_limit={limit}"]
    run = SmallRun(*layout_arguments(1, 2, 4, extra))
    outcomes = []
    for step in range(1, 9):
        healthy = run.model.output.weight.to_local().detach().clone()
        if step >= 3 and dist.get_rank() == 1:
            run.model.output.weight.to_local().data[0, 0] = torch.inf
        try:
            outcomes.append(run.step(step, *random_batch(step)).updated)
        except Exception as error:
            run.model.output.weight.to_local().data.copy_(healthy)  # take the poison itself out again
            finite = all(bool(w.isfinite().all()) for w in run.weights().values())
            return outcomes, f"{type(error).__name__}: {error}", finite
        run.model.output.weight.to_local().data.copy_(healthy)
    return outcomes, "", True


def test_num_nan_stops_all_ranks_at_the_step(worlds: Worlds) -> None:
    for updated, error, finite in worlds(2).run(poisoned_step, "stop", 0):
        assert updated == [True, True]
        assert error.startswith("TrainingDiverged: step 3: loss")
        assert finite


def test_num_nan_skips_up_to_a_limit(worlds: Worlds) -> None:
    for updated, error, finite in worlds(2).run(poisoned_step, "skip", 2):
        assert updated == [True, True, False, False]
        assert "step 5" in error and "nonfinite_skip_limit = 2" in error
        assert finite


def output_dtypes(replicate: int, shard: int) -> set[torch.dtype]:
    run = SmallRun(*layout_arguments(replicate, shard, 2, ["--training.mixed_precision_param=bfloat16"]))
    seen = set()
    run.model.layers["0"].register_forward_hook(lambda module, inputs, output: seen.add(output.dtype))
    run.model.layers["0"].attention.wq.register_forward_hook(lambda module, inputs, output: seen.add(output.dtype))
    run.step(1, *random_batch(1))
    seen |= {torch.float32 if p.dtype == torch.float32 else torch.int8 for p in run.model.parameters()}
    return seen


@pytest.mark.parametrize(("ranks", "replicate", "shard"), [(1, 1, 1), (2, 1, 2), (2, 2, 1), (4, 2, 2)])
def test_num_mp_skipped(worlds: Worlds, ranks: int, replicate: int, shard: int) -> None:
    """Mixed precision means the same in every layout: bf16 activations, fp32 weights."""
    assert worlds(ranks).run(output_dtypes, replicate, shard)[0] == {torch.bfloat16, torch.float32}


def test_a_failing_rank_is_named(worlds: Worlds) -> None:
    with pytest.raises(WorldError, match=r"rank \d of 2"):
        worlds(2).run(train_here, [*TINY, "--training.seq_len=100000"])
