"""Muon on shards gives what torch's gives on whole matrices."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor

from tests.distributed.runs import TINY
from tests.distributed.test_matrix import Layout
from tests.distributed.tiny_models import UNTIED
from tests.distributed.world import Worlds
from tests.training.optimizer_runs import cut, resumed, straight, straight_and_resumed
from titan.checkpoint.state import make_optimizer_state
from titan.config.loader import load_and_check
from titan.models.llama.model import Llama
from titan.training.optimizer_groups import plan_updates
from titan.training.optimizer_muon import Muon

SHAPES = [(6, 10), (10, 6), (7, 5), (1, 9), (8, 8)]
MUON = ["--optimizer.name=Muon", "--loss.name=cross_entropy"]  # chunks would add up in another order on two ranks


def matrices(seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def three_steps(
    mesh_shape: tuple[int, ...], placements: list[Placement], state_dtype: torch.dtype = torch.float32
) -> list[torch.Tensor]:
    """Weights after three steps of titan's Muon on matrices that are spread like this; plain ones without a mesh."""
    mesh = init_device_mesh("cpu", mesh_shape) if mesh_shape else None

    def spread(tensor: torch.Tensor) -> torch.Tensor:
        return tensor if mesh is None else distribute_tensor(tensor, mesh, placements)

    weights = [nn.Parameter(spread(matrix)) for matrix in matrices(0)]
    groups = [{"params": weights[:3], "weight_decay": 0.1}, {"params": weights[3:], "weight_decay": 0.0}]
    optimizer = Muon(groups, 0.02, state_dtype=state_dtype)
    for step in (1, 2, 3):
        for weight, gradient in zip(weights, matrices(step), strict=True):
            weight.grad = spread(gradient)
        optimizer.step()
    return [(weight.detach() if mesh is None else weight.detach().full_tensor()) for weight in weights]


@pytest.fixture(scope="module")
def torch_s() -> list[torch.Tensor]:
    """The same three steps of torch's Muon."""
    weights = [nn.Parameter(matrix) for matrix in matrices(0)]
    groups = [{"params": weights[:3], "weight_decay": 0.1}, {"params": weights[3:], "weight_decay": 0.0}]
    optimizer = torch.optim.Muon(groups, lr=0.02, adjust_lr_fn="match_rms_adamw")
    for step in (1, 2, 3):
        for weight, gradient in zip(weights, matrices(step), strict=True):
            weight.grad = gradient.clone()
        optimizer.step()
    return [weight.detach() for weight in weights]


def assert_equal(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_whole_matrices(torch_s: list[torch.Tensor]) -> None:
    assert_equal(three_steps((), []), torch_s)


@pytest.mark.parametrize(
    ("mesh_shape", "placements"),
    [
        ((2,), [Shard(0)]),
        ((2,), [Shard(1)]),
        ((2,), [Replicate()]),
        ((2, 2), [Replicate(), Shard(0)]),
        ((2, 2), [Shard(0), Shard(1)]),
    ],
)
def test_shards_bit_for_bit(
    worlds: Worlds, torch_s: list[torch.Tensor], mesh_shape: tuple[int, ...], placements: list[Placement]
) -> None:
    """Among the shapes are ones that don't divide, and one of which a rank has nothing."""
    for found in worlds(2 ** len(mesh_shape)).run(three_steps, mesh_shape, placements):
        assert_equal(found, torch_s)


def test_making_the_state_changes_no_weight() -> None:
    weights = [nn.Parameter(matrix) for matrix in matrices(0)]
    optimizer = Muon([{"params": weights, "weight_decay": 0.1}], 0.02, state_dtype=torch.float32)
    make_optimizer_state(optimizer)
    assert_equal([weight.detach() for weight in weights], matrices(0))
    assert not any(optimizer.state[weight]["momentum_buffer"].any() for weight in weights)


def test_momentum_in_bf16_is_close(torch_s: list[torch.Tensor]) -> None:
    for found, expected in zip(three_steps((), [], torch.bfloat16), torch_s, strict=True):
        assert 0 < (found - expected).abs().max() < 0.01


def test_it_is_for_the_matrices_of_the_layers() -> None:
    config = load_and_check([*TINY, *MUON], 1).config
    with torch.device("meta"):
        plan = plan_updates(config, Llama(UNTIED))
    others = {name for name, update in plan.items() if update.algorithm == "AdamW"}
    assert {update.algorithm for update in plan.values()} == {"AdamW", "Muon"}
    assert others == {
        "tok_embeddings.weight",
        "output.weight",
        "norm.weight",
        *(f"layers.{layer}.{part}_norm.weight" for layer in (0, 1) for part in ("attention", "ffn")),
    }
    assert {update.weight_decay for update in plan.values() if update.algorithm == "Muon"} == {0.1}


def test_data_parallel_is_one_process_bit_for_bit_and_resumes_exactly(worlds: Worlds, tmp_path: object) -> None:
    expected = worlds(1).run(straight, Layout().arguments + MUON, f"{tmp_path}/one")[0]
    found, again = worlds(2).run(straight_and_resumed, Layout(dp=2).arguments + MUON, str(tmp_path))[0]
    assert again["losses"] == found["losses"][2:]
    for name, tensor in expected["tensors"].items():
        # Adam's first steps are ±lr wherever there is a gradient, be it of rounding alone: ours has the same sign.
        torch.testing.assert_close(found["tensors"][name], tensor, rtol=0, atol=0)
        torch.testing.assert_close(again["tensors"][name], tensor, rtol=0, atol=0)


@pytest.mark.parametrize("layout", [Layout(tp=2), Layout(pp=2), Layout(dp=2, tp=2)], ids=str)
def test_a_layout_follows_one_process_and_goes_on_in_another(worlds: Worlds, layout: Layout, tmp_path: object) -> None:
    expected = worlds(1).run(straight, Layout().arguments + MUON, f"{tmp_path}/one")[0]
    worlds(layout.ranks).run(cut, layout.arguments + MUON, f"{tmp_path}/cut")
    rest = worlds(2).run(resumed, Layout(replicate=2).arguments + MUON, f"{tmp_path}/cut")[0]
    # bf16, in which matrices are made orthogonal, turns differences of 1e-7 into some of 1e-3 here and there.
    assert rest["losses"] == pytest.approx(expected["losses"][2:], rel=2e-5)
    assert rest["tensors"].keys() == expected["tensors"].keys()
