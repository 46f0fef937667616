import pytest
import torch
from torch import nn

from tests.distributed.runs import TINY, train_here
from tests.distributed.world import Worlds
from titan.config.job_config import Optimizer
from titan.training.optimizer import build_optimizer, set_lr


class Toy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.norm = nn.LayerNorm(3)


def test_opt_decay_groups_matrices_decay_and_vectors_do_not(caplog: pytest.LogCaptureFixture) -> None:
    model = Toy()
    with caplog.at_level("INFO", logger="titan"):
        optimizer = build_optimizer(Optimizer(weight_decay=0.3), model.named_parameters())
    assert "1 tensors with weight decay 0.3, 3 without" in caplog.text
    decay = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert {name: decay[id(p)] for name, p in model.named_parameters()} == {
        "linear.weight": 0.3,
        "linear.bias": 0.0,
        "norm.weight": 0.0,
        "norm.bias": 0.0,
    }


def test_older_trainers_decayed_everything() -> None:
    settings = Optimizer(weight_decay=0.3, decay_norms_and_biases=True)
    optimizer = build_optimizer(settings, Toy().named_parameters())
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.3]


def test_adamw_first_step_by_hand() -> None:
    """After one step of AdamW a weight w with gradient g is w·(1 − lr·decay) − lr·g/(|g| + eps)."""
    weight = nn.Parameter(torch.tensor([[1.0, -2.0]]))
    settings = Optimizer(lr=1.0, weight_decay=0.1, eps=1e-8, implementation="for-loop")
    optimizer = build_optimizer(settings, [("weight", weight)])
    weight.grad = torch.tensor([[0.5, -0.25]])
    set_lr(optimizer, 0.01)
    optimizer.step()
    assert weight.flatten().tolist() == pytest.approx([1 * 0.999 - 0.01, -2 * 0.999 + 0.01], abs=1e-6)


@pytest.mark.parametrize("name", ["Adam", "AdamW"])
def test_opt_impl_all_three_give_the_same_losses(
    worlds: Worlds, name: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    results = []
    for ranks, implementation in (
        (1, "for-loop"),
        (1, "foreach"),
        (1, "fused"),
        (2, "for-loop"),
        (2, "foreach"),
        (2, "fused"),
    ):
        folder = tmp_path_factory.mktemp("run")
        arguments = [*TINY, f"--job.dump_folder={folder}", "--training.steps=4", f"--optimizer.name={name}"]
        arguments += [f"--optimizer.implementation={implementation}", "--training.global_batch_size=8"]
        arguments += [f"--training.local_batch_size={8 // ranks}"]
        results.append([row["loss"] for row in worlds(ranks).run(train_here, arguments)[0]])
    assert all(result == pytest.approx(results[0], rel=1e-5) for result in results)
    assert results[0][-1] < results[0][0]
