"""titan's own AdamW: equal to torch's where both exist, moments in bf16, one compiled graph for all."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from tests.distributed.test_matrix import Layout
from tests.distributed.world import Worlds
from tests.training.optimizer_runs import OptimizerRun, straight, straight_and_resumed
from titan.checkpoint.state import make_optimizer_state
from titan.training.optimizer_adamw import AdamW, _compiled

SHAPES = [(5, 7), (7,), (64, 3), (1,), (2, 2)]


def parameters(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES]


def give_gradients(tensors: list[nn.Parameter], step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for tensor in tensors:
        tensor.grad = torch.randn(tensor.shape, generator=generator).to(tensor.dtype) * 10.0 ** -(step % 4)


def own(tensors: list[nn.Parameter], decoupled: bool = True, **settings: Any) -> AdamW:
    groups = [{"params": tensors[:2], "weight_decay": 0.1}, {"params": tensors[2:], "weight_decay": 0.0}]
    groups = [group for group in groups if group["params"]]
    settings = {"state_dtype": torch.float32, **settings}
    return AdamW(groups, 0.1, (0.9, 0.95), 1e-8, decoupled=decoupled, **settings)


def train(optimizer: torch.optim.Optimizer, tensors: list[nn.Parameter], steps: int = 6) -> None:
    for step in range(1, steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = 0.1 / step
        give_gradients(tensors, step)
        optimizer.step()


@pytest.mark.parametrize("decoupled", [True, False])
def test_float32_is_torch_s(decoupled: bool) -> None:
    ours, theirs = parameters(), parameters()
    train(own(ours, decoupled), ours)
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    groups = [{"params": theirs[:2], "weight_decay": 0.1}, {"params": theirs[2:], "weight_decay": 0.0}]
    train(kind(groups, lr=0.1, betas=(0.9, 0.95), eps=1e-8, foreach=False), theirs)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("decoupled", [True, False])
def test_making_the_state_changes_no_bit(decoupled: bool) -> None:
    weight = nn.Parameter(torch.tensor([-0.0, 0.0, 1e-45, torch.inf]))
    before = weight.detach().numpy().tobytes()
    optimizer = own([weight], decoupled, state_dtype=torch.bfloat16)
    make_optimizer_state(optimizer)
    assert weight.detach().numpy().tobytes() == before
    assert not any(value.any() for value in optimizer.state[weight].values())


def test_a_parameter_that_joins_later_counts_its_own_steps() -> None:
    ours, theirs = parameters(), parameters()
    for optimizer, tensors in ((own(ours), ours), (torch.optim.AdamW(theirs, lr=0.1, betas=(0.9, 0.95)), theirs)):
        for group in optimizer.param_groups:
            group["weight_decay"] = 0.0
        for step in (1, 2, 3):
            give_gradients(tensors, step)
            if step < 3:
                tensors[0].grad = None
            optimizer.step()
    torch.testing.assert_close(ours[0], theirs[0], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("moments", [torch.float32, torch.bfloat16])
def test_each_step_rounds_once(weights: torch.dtype, moments: torch.dtype) -> None:
    """Against float64 arithmetic on what is stored: all that is added is the rounding to the stored type."""
    tensors = parameters(weights)
    optimizer = own(tensors, state_dtype=moments)
    for step in range(1, 6):
        give_gradients(tensors, step)
        before = [tensor.detach().double() for tensor in tensors]
        states = [optimizer.state[tensor] for tensor in tensors]
        means = [state["exp_avg"].double() if state else 0 * old for state, old in zip(states, before, strict=True)]
        squares = [state["exp_avg_sq"].double() if state else 0 * b for state, b in zip(states, before, strict=True)]
        optimizer.step()
        for number, tensor in enumerate(tensors):
            grad = tensor.grad.double()
            mean, square = 0.9 * means[number] + 0.1 * grad, 0.95 * squares[number] + 0.05 * grad * grad
            decay = 0.1 if number < 2 else 0.0
            ratio = mean / (1 - 0.9**step) / ((square / (1 - 0.95**step)).sqrt() + 1e-8)
            state = optimizer.state[tensor]
            for found, expected in (
                (tensor, before[number] * (1 - 0.1 * decay) - 0.1 * ratio),
                (state["exp_avg"], mean),
                (state["exp_avg_sq"], square),
            ):
                rounding = 2.0**-8 if found.dtype == torch.bfloat16 else 2.0**-20
                assert ((found.double() - expected).abs() <= rounding * expected.abs() + 1e-6).all()


@pytest.fixture
def graphs() -> Iterator[list[Any]]:
    """The graphs that the backend "counting" was given."""
    found: list[Any] = []

    def counting(graph: Any, inputs: Any) -> Any:
        found.append(graph)
        return graph.forward

    torch._dynamo.reset()
    torch._dynamo.register_backend(counting, name="counting")
    yield found
    torch._dynamo.reset()
    _compiled.cache_clear()
    del torch._dynamo.backends.registry._COMPILER_FNS["counting"]


def test_one_graph_serves_all_shapes_steps_and_learning_rates(graphs: list[Any]) -> None:
    ours, eager = parameters(), parameters()
    optimizer = own(ours, compile_backend="counting")
    train(optimizer, ours, steps=2)
    assert len(graphs) == 2  # one, and one for tensors of a single element, which torch.compile treats by themselves
    train(optimizer, ours, steps=8)
    assert len(graphs) == 2
    reference = own(eager)
    train(reference, eager, steps=2)
    train(reference, eager, steps=8)
    for one, other in zip(ours, eager, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


COMPILED = ["--compile.enable", "--compile.components=optimizer"]


@pytest.mark.parametrize(
    "backend", ["aot_eager", pytest.param("inductor", marks=[pytest.mark.slow, pytest.mark.timeout(600)])]
)
@pytest.mark.parametrize("layout", [Layout(dp=2), Layout(tp=2)], ids=str)
def test_compiled_is_eager(worlds: Worlds, layout: Layout, backend: str, tmp_path: object) -> None:
    arguments = [*layout.arguments, "--optimizer.state_dtype=bfloat16"]
    expected = worlds(layout.ranks).run(straight, arguments, f"{tmp_path}/eager")[0]
    compiled = [*arguments, *COMPILED, f"--compile.backend={backend}"]
    found = worlds(layout.ranks).run(straight, compiled, f"{tmp_path}/compiled", timeout=500)[0]
    assert found["losses"] == pytest.approx(expected["losses"], rel=1e-6)
    assert found["tensors"].keys() == expected["tensors"].keys()


def moments_bytes(arguments: list[str], folder: str) -> int:
    """Bytes of this rank's moments."""
    run = OptimizerRun(arguments, folder)
    run.train(0, 1)
    moments = [state[key] for state in run.optimizer.state.values() for key in ("exp_avg", "exp_avg_sq")]
    shards = [moment.to_local() if isinstance(moment, DTensor) else moment for moment in moments]
    return sum(shard.numel() * shard.element_size() for shard in shards)


@pytest.mark.parametrize("layout", [Layout(dp=2), pytest.param(Layout(tp=2), marks=pytest.mark.slow)], ids=str)
def test_moments_in_bf16_take_half_the_memory_and_resume_exactly(
    worlds: Worlds, layout: Layout, tmp_path: object
) -> None:
    half = [*layout.arguments, "--optimizer.state_dtype=bfloat16"]
    sizes = worlds(2).run(moments_bytes, half, f"{tmp_path}/half")
    assert [2 * size for size in sizes] == worlds(2).run(moments_bytes, layout.arguments, f"{tmp_path}/full")
    whole, resumed = worlds(2).run(straight_and_resumed, half, str(tmp_path))[0]
    assert resumed["losses"] == whole["losses"][2:]
    for name, tensor in whole["tensors"].items():
        assert torch.equal(resumed["tensors"][name], tensor), name
    one = worlds(1).run(straight, [*Layout().arguments, "--optimizer.state_dtype=bfloat16"], f"{tmp_path}/one")[0]
    assert whole["losses"] == pytest.approx(one["losses"], rel=1e-6)
