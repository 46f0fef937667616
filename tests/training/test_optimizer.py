from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
from torch import nn

from tests.distributed.runs import TINY, train_here
from tests.distributed.test_matrix import Layout
from tests.distributed.world import Worlds
from tests.training.optimizer_runs import OptimizerRun, straight
from titan.config.job_config import JobConfig, Optimizer, ParameterGroup
from titan.training.optimizer import ModelOptimizer, build_optimizer, set_lr
from titan.training.optimizer_groups import describe_updates, plan_updates


class Toy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.norm = nn.LayerNorm(3)


def build(settings: Optimizer, model: nn.Module) -> ModelOptimizer:
    config = JobConfig(optimizer=settings)
    return build_optimizer(config, plan_updates(config, model), [model])


def by_name(optimizer: ModelOptimizer, model: nn.Module, key: str) -> dict[str, float]:
    values = {id(p): group[key] for group in optimizer.param_groups for p in group["params"]}
    return {name: values[id(p)] for name, p in model.named_parameters()}


def test_opt_decay_groups_matrices_decay_and_vectors_do_not() -> None:
    model = Toy()
    settings = Optimizer(weight_decay=0.3)
    assert by_name(build(settings, model), model, "weight_decay") == {
        "linear.weight": 0.3,
        "linear.bias": 0.0,
        "norm.weight": 0.0,
        "norm.bias": 0.0,
    }
    plan = plan_updates(JobConfig(optimizer=settings), model)
    assert describe_updates(plan, model) == [
        "AdamW: 1 tensors of 12 parameters, weight decay 0.3",
        "AdamW: 3 tensors of 9 parameters, weight decay 0",
    ]


def test_older_trainers_decayed_everything() -> None:
    optimizer = build(Optimizer(weight_decay=0.3, decay_norms_and_biases=True), Toy())
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.3]


def test_opt_decay_groups_the_first_pattern_that_fits_counts() -> None:
    groups = [
        ParameterGroup("norm.*", lr_factor=0.5),
        ParameterGroup("*.bias", weight_decay=0.7),
        ParameterGroup("*", lr_factor=3.0, weight_decay=0.0),
    ]
    model, settings = Toy(), Optimizer(weight_decay=0.3, groups=groups)
    optimizer = build(settings, model)
    assert by_name(optimizer, model, "weight_decay") == {
        "linear.weight": 0.0,
        "linear.bias": 0.7,
        "norm.weight": 0.0,
        "norm.bias": 0.0,
    }
    for lr in (0.1, 0.01):  # the schedule's
        set_lr(optimizer, lr)
        assert by_name(optimizer, model, "lr") == pytest.approx(
            {"linear.weight": 3 * lr, "linear.bias": lr, "norm.weight": lr / 2, "norm.bias": lr / 2}
        )
    plan = plan_updates(JobConfig(optimizer=settings), model)
    assert describe_updates(plan, model) == [
        "AdamW, group *: 1 tensors of 12 parameters, weight decay 0, learning rate times 3",
        "AdamW, group *.bias: 1 tensors of 3 parameters, weight decay 0.7",
        "AdamW, group norm.*: 2 tensors of 6 parameters, weight decay 0, learning rate times 0.5",
    ]


GROUPS = '[{"pattern": "*.wq.weight", "lr_factor": 0.25}, {"pattern": "output.*", "weight_decay": 0.5}]'


@pytest.mark.parametrize("layout", [Layout(pp=2), pytest.param(Layout(tp=2), marks=pytest.mark.slow)], ids=str)
def test_opt_decay_groups_are_those_of_the_whole_model(worlds: Worlds, layout: Layout, tmp_path: object) -> None:
    """A pattern that fits nothing in one stage of a pipeline fits something in the other."""
    arguments = [f"--optimizer.groups={GROUPS}"]
    expected = worlds(1).run(straight, Layout().arguments + arguments, f"{tmp_path}/one")[0]
    plain = worlds(1).run(straight, Layout().arguments, f"{tmp_path}/plain")[0]
    found = worlds(2).run(straight, layout.arguments + arguments, f"{tmp_path}/two")[0]
    assert found["losses"] == pytest.approx(expected["losses"], rel=1e-6)
    assert found["norms"] == pytest.approx(expected["norms"], rel=1e-5)
    assert abs(expected["losses"][-1] - plain["losses"][-1]) > 1e-4  # the groups do something


def test_adamw_first_step_by_hand() -> None:
    """After one step of AdamW a weight w with gradient g is w·(1 − lr·decay) − lr·g/(|g| + eps)."""
    model = nn.Linear(2, 1, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[1.0, -2.0]]))
    optimizer = build(Optimizer(lr=1.0, weight_decay=0.1, eps=1e-8, implementation="for-loop"), model)
    model.weight.grad = torch.tensor([[0.5, -0.25]])
    set_lr(optimizer, 0.01)
    optimizer.step()
    assert model.weight.flatten().tolist() == pytest.approx([1 * 0.999 - 0.01, -2 * 0.999 + 0.01], abs=1e-6)


@pytest.mark.parametrize("name", [pytest.param("Adam", marks=pytest.mark.slow), "AdamW"])
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


def kinds(arguments: list[str], folder: str) -> tuple[set[str], set[str]]:
    """The dtypes of the weights and of all of the optimizer's state."""
    tensors = OptimizerRun(arguments, folder).tensors()

    def dtypes(names: Iterable[str]) -> set[str]:
        return {str(tensors[name].dtype) for name in names if not name.endswith(".step")}

    weights = [name for name in tensors if name.startswith("model.")]
    return dtypes(weights), dtypes(tensors.keys() - set(weights))


@pytest.mark.parametrize("name", ["AdamW", "Muon"])
@pytest.mark.parametrize(
    ("weights", "state", "expected"),
    [
        ("float32", "", "float32"),
        ("bfloat16", "", "bfloat16"),
        ("float32", "bfloat16", "bfloat16"),
        ("bfloat16", "float32", "float32"),
    ],
)
def test_types_of_weights_and_state(
    worlds: Worlds, name: str, weights: str, state: str, expected: str, tmp_path: object
) -> None:
    arguments = [f"--optimizer.name={name}", f"--training.dtype={weights}", f"--optimizer.state_dtype={state}"]
    found = worlds(1).run(kinds, Layout().arguments + arguments, str(tmp_path))[0]
    assert found == ({f"torch.{weights}"}, {f"torch.{expected}"})
