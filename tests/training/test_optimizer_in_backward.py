"""The optimizer in the backward pass: the same numbers as after it, without the gradients' memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.runs import TINY, train_here
from tests.distributed.test_matrix import Layout, random_batch
from tests.distributed.world import WorldError, Worlds
from tests.training.optimizer_runs import OptimizerRun, cut, resumed, straight
from titan.checkpoint.manifest import read_manifest

EARLY = ["--optimizer.early_step_in_backward"]
LAYOUTS = [Layout(), Layout(dp=2), Layout(replicate=2), Layout(tp=2), Layout(cp=2)]


def assert_equal(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found["losses"] == expected["losses"][-len(found["losses"]) :]
    assert found["norms"] == pytest.approx(expected["norms"][-len(found["norms"]) :], rel=1e-6)
    assert found["tensors"].keys() == expected["tensors"].keys()
    for name, tensor in expected["tensors"].items():
        assert torch.equal(found["tensors"][name], tensor), name


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_it_is_the_optimizer_after_backward_bit_for_bit(worlds: Worlds, layout: Layout, tmp_path: object) -> None:
    """Losses, gradient norms, weights and state; the learning rate is another one in each step."""
    expected = worlds(layout.ranks).run(straight, layout.arguments, f"{tmp_path}/after")[0]
    found = worlds(layout.ranks).run(straight, layout.arguments + EARLY, f"{tmp_path}/in")[0]
    assert_equal(found, expected)


@pytest.mark.slow
def test_checkpoints_are_interchangeable(worlds: Worlds, tmp_path: object) -> None:
    layout = Layout(dp=2).arguments
    expected = worlds(2).run(straight, layout, f"{tmp_path}/straight")[0]
    for before, after in ((EARLY, []), ([], EARLY)):
        folder = f"{tmp_path}/{len(before)}"
        worlds(2).run(cut, layout + before, folder)
        assert_equal(worlds(2).run(resumed, layout + after, folder)[0], expected)
    worlds(2).run(cut, layout + EARLY, f"{tmp_path}/other")
    elsewhere = worlds(2).run(resumed, Layout(tp=2).arguments + EARLY, f"{tmp_path}/other")[0]
    assert elsewhere["losses"] == pytest.approx(expected["losses"][2:], rel=1e-6)


def most_gradients(arguments: list[str], folder: str) -> tuple[int, int]:
    """Gradients at once during a backward pass, as its hooks see them, and those that are left behind it."""
    run = OptimizerRun(arguments, folder)
    parameters = run.parameters()
    seen = []
    for parameter in parameters:
        parameter.register_post_accumulate_grad_hook(
            lambda _: seen.append(sum(other.grad is not None for other in parameters))
        )
    left = []
    after = run.stages.forward_backward

    def forward_backward(*given: Any, **named: Any) -> Any:
        result = after(*given, **named)
        left.append(sum(parameter.grad is not None for parameter in parameters))
        return result

    run.stages.forward_backward = forward_backward  # type: ignore[method-assign]
    run.step(1, *random_batch(1))
    assert len(seen) == len(parameters)
    return max(seen), left[0]


def test_no_gradient_outlives_its_update(worlds: Worlds, tmp_path: object) -> None:
    for most, left in worlds(2).run(most_gradients, Layout(dp=2).arguments + EARLY, str(tmp_path)):
        assert (most, left) == (0, 0)  # each was freed before the test's own hook
    most, left = worlds(2).run(most_gradients, Layout(dp=2).arguments, str(tmp_path))[0]
    assert most == left == 21


def test_num_nan_weights_that_are_not_finite_are_not_saved(worlds: Worlds, tmp_path: Path) -> None:
    arguments = [*TINY, f"--job.dump_folder={tmp_path}", "--training.steps=5", "--training.max_norm=0", *EARLY]
    arguments += ["--checkpoint.enable", "--checkpoint.interval=1", "--training.local_batch_size=4"]
    arguments += ["--optimizer.lr=1e30", "--lr_scheduler.warmup_steps=0"]
    with pytest.raises(WorldError, match=r"step 2: loss .* The weights have changed already, and aren't saved"):
        worlds(2).run(train_here, arguments)
    assert [path.name for path in (tmp_path / "checkpoint").glob("step-*")] == ["step-1"]
    assert read_manifest(tmp_path / "checkpoint" / "step-1", 1).step == 1
