"""Activation checkpointing of blocks in this process. Layouts are in tests/distributed/test_activation_checkpoint.py.

Nothing is rounded differently when it is computed again, so gradients must be equal bit for bit.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.utils import counters
from torch._functorch import config as functorch_config
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import GraphExecGroup

from tests.distributed.tiny_models import SPEC
from tests.estimation.test_memory import Alive, storage
from titan.config.job_config import ActivationCheckpoint, Compile
from titan.models.llama.model import Llama
from titan.parallelisms.activation_checkpoint import (
    checkpoint_whole_blocks,
    checkpoint_within_blocks,
    checkpointed_blocks,
)
from titan.parallelisms.activation_offload import offload_activations
from titan.parallelisms.compile import apply_compile
from titan.training.initialize import initialize_weights, materialize

TOKENS = torch.randint(0, 101, (2, 32), generator=torch.Generator().manual_seed(0))


def llama(flavor: str = "deep") -> Llama:
    with torch.device("meta"):
        model = Llama(SPEC.flavors[flavor])
    materialize(model, torch.device("cpu"))
    initialize_weights(model, seed=0)
    return model


def apply(model: Llama, *, compiled: bool = False, **settings: Any) -> Llama:
    """What parallelize_llama does with these settings of [activation_checkpoint]."""
    checkpointing = ActivationCheckpoint(**settings)
    checkpoint_within_blocks(model.layers, checkpointing)
    if compiled:
        apply_compile(model.layers.values(), Compile(enable=True, backend="aot_eager"))
    checkpoint_whole_blocks(model.layers, checkpointing)
    if checkpointing.offload:
        offload_activations(checkpointed_blocks(model.layers, checkpointing), checkpointing)
    return model


def gradients(model: Llama) -> dict[str, torch.Tensor]:
    model.zero_grad()
    model(TOKENS).logsumexp(-1).sum().backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def assert_equal(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


@pytest.fixture(scope="module")
def expected() -> dict[str, torch.Tensor]:
    return gradients(llama())


@pytest.fixture(autouse=True)
def nothing_compiled_before() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield


MODES: list[dict[str, Any]] = [
    {"mode": "full"},
    {"mode": "full", "early_stop": True},
    {"mode": "selective", "selective_ac_option": "2"},
    {"mode": "selective"},
    {"mode": "selective", "preserve_rng_state": False, "determinism_check": "none"},
]


@pytest.mark.parametrize("settings", MODES, ids=str)
@pytest.mark.parametrize("offload", [False, True])
def test_gradients_are_those_without_checkpointing(
    settings: dict[str, Any], offload: bool, expected: dict[str, torch.Tensor]
) -> None:
    model = apply(llama(), **settings, offload=offload)
    for _ in range(2):  # steps
        assert_equal(gradients(model), expected)
    assert {name for name, _ in model.named_modules()} == {name for name, _ in llama().named_modules()}


@pytest.mark.parametrize(
    "settings",
    [
        *MODES[1:4],
        {"mode": "memory_budget", "memory_budget": 0.3},
        {"mode": "selective", "offload": True},
        {"mode": "memory_budget", "memory_budget": 0.3, "offload": True},
    ],
    ids=str,
)
def test_ac_compile_blocks_share_one_graph_without_breaks(
    settings: dict[str, Any], expected: dict[str, torch.Tensor]
) -> None:
    model = apply(llama(), compiled=True, **settings)
    for _ in range(2):
        assert_equal(gradients(model), expected)
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]


class Products(TorchDispatchMode):
    """Shapes of the results of matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: Counter[tuple[int, ...]] = Counter()

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = operator(*args, **(kwargs or {}))
        if operator.name() in ("aten::mm", "aten::addmm"):
            self.shapes[tuple(out.shape)] += 1
        return out


def backward_products(model: Llama) -> Counter[tuple[int, ...]]:
    loss = model(TOKENS).logsumexp(-1).sum()
    with Products() as products:
        loss.backward()
    return products.shapes


T, SIZES = TOKENS.numel(), SPEC.flavors["untied"]
Q, K, D, FFN = SIZES.n_heads * SIZES.head_dim, SIZES.n_kv_heads * SIZES.head_dim, SIZES.dim, SIZES.ffn_dim


@pytest.mark.parametrize(
    ("settings", "again"),
    [
        ({"mode": "full"}, [Q, K, K, D, FFN, FFN, D]),
        ({"mode": "full", "early_stop": True}, [Q, K, K, D, FFN, FFN]),
        ({"mode": "selective"}, [K, D, FFN]),  # wk, wo, w3
    ],
    ids=str,
)
def test_products_that_are_computed_again(settings: dict[str, Any], again: list[int]) -> None:
    plain, checkpointed = (backward_products(apply(llama("untied"), **each)) for each in ({"mode": "none"}, settings))
    assert checkpointed - plain == Counter(2 * [(T, width) for width in again])  # of two layers
    assert not plain - checkpointed


def test_every_nth_layer_is_counted_in_the_whole_model() -> None:
    stage = nn.ModuleDict({str(number): nn.Identity() for number in (3, 4, 5, 6, 7)})
    for option, numbers in [("1", "34567"), ("2", "357"), ("3", "5"), ("4", "37"), ("9", "")]:
        found = checkpointed_blocks(stage, ActivationCheckpoint(mode="selective", selective_ac_option=option))
        assert found == [stage[number] for number in numbers]
    assert checkpointed_blocks(stage, ActivationCheckpoint(mode="none")) == []
    assert checkpointed_blocks(stage, ActivationCheckpoint()) == list(stage.values())


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 64, bias=False), nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(self.second(F.dropout(self.first(x)).sigmoid()))


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_random_numbers_are_drawn_again_if_they_are_to_be(mode: Any) -> None:
    def gradient(**settings: Any) -> torch.Tensor:
        torch.manual_seed(0)
        layers = nn.ModuleDict({"0": Dropping()})
        checkpoint_within_blocks(layers, ActivationCheckpoint(**settings))
        checkpoint_whole_blocks(layers, ActivationCheckpoint(**settings))
        layers["0"](torch.ones(4, 64)).sum().backward()
        return layers["0"].first.weight.grad

    plain = gradient(mode="none")
    assert torch.equal(gradient(mode=mode), plain)
    assert not torch.equal(gradient(mode=mode, preserve_rng_state=False), plain)


@pytest.mark.parametrize("settings", [*MODES[:4], {"mode": "full", "offload": True}, {"offload": True}], ids=str)
def test_nothing_waits_for_the_garbage_collector(settings: dict[str, Any]) -> None:
    """Which is off in a run, most of the time."""
    model = apply(llama("untied"), **settings)
    permanent = {storage(tensor)._cdata for tensor in (*model.parameters(), *model.buffers())}
    gc.disable()
    try:
        with Alive() as alive:
            model(TOKENS).sum().backward()
        model.zero_grad()
        assert alive.bytes(but=permanent) == 0
    finally:
        gc.enable()


def alive_in_backward(**settings: Any) -> dict[str, int]:
    """Bytes that a block has made and that are alive when the gradients of its norms are known, and at the end."""
    model = apply(llama("untied"), **settings)
    block, found = model.layers["0"], {}
    shared = {storage(tensor)._cdata for tensor in (*block.parameters(), *model.rotary(32))}
    with Alive() as alive:
        x = torch.ones(2, 32, D, requires_grad=True) + 0
        loss = block(x, *model.rotary(32)).sum()
        for name, tensor in {"ffn": block.ffn_norm.weight, "attention": block.attention_norm.weight, "end": x}.items():
            tensor.register_hook(lambda gradient, name=name: found.update({name: alive.bytes(but=shared)}))
        del x, tensor
        loss.backward()
    return found


def test_what_was_computed_again_is_freed_as_it_is_used() -> None:
    plain = alive_in_backward(mode="none")
    assert plain["ffn"] > plain["attention"] > plain["end"]
    assert alive_in_backward(mode="full") == alive_in_backward(mode="selective") == plain


class Fickle(nn.Module):
    """Computes something else every time."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.first, self.second = 0, nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls > 1:
            x = F.scaled_dot_product_attention(*3 * [x.view(1, 1, 4, 8)])[0, 0, :2]
        return self.second(self.first(x).sigmoid())


@pytest.mark.parametrize(("mode", "reason"), [("full", "more tensors"), ("selective", "attention.* where it ran aten")])
def test_a_block_that_computes_something_else_the_second_time_is_an_error(mode: Any, reason: str) -> None:
    layers = nn.ModuleDict({"0": Fickle()})
    checkpoint_within_blocks(layers, ActivationCheckpoint(mode=mode))
    checkpoint_whole_blocks(layers, ActivationCheckpoint(mode=mode))
    with pytest.raises(RuntimeError, match=reason):
        layers["0"](torch.ones(4, 8, requires_grad=True)).sum().backward()


def test_the_memory_budget_is_for_the_mode_alone() -> None:
    apply(llama(), mode="memory_budget", memory_budget=0.3)
    assert functorch_config.activation_memory_budget == 0.3
    apply(llama())
    assert functorch_config.activation_memory_budget == 1.0


def split_gradients(**settings: Any) -> tuple[list[torch.Tensor], int]:
    """Gradients of inputs first, of weights later, as zero-bubble schedules have it; how often a block ran again."""
    model, calls = llama("untied"), 0
    block = model.layers["0"]
    forward = block.forward

    def counted(*args: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return forward(*args)

    block.forward = counted  # type: ignore[method-assign]
    apply(model, **settings)
    x = torch.randn(2, 32, D, generator=torch.Generator().manual_seed(0)).requires_grad_()
    loss = block(x, *model.rotary(32)).square().sum()
    _, groups = stage_backward_input([loss], None, [x], iter(block.parameters()))
    with GraphExecGroup():  # as titan's pipeline stages do
        stage_backward_weight(iter(block.parameters()), groups)
    return [x.grad, *(parameter.grad for parameter in block.parameters())], calls - 1


@pytest.mark.parametrize("settings", [*MODES, {"mode": "selective", "offload": True}], ids=str)
def test_a_split_backward_computes_a_block_again_once_per_part(settings: dict[str, Any]) -> None:
    plain, _ = split_gradients(mode="none")
    found, again = split_gradients(**settings)
    assert all(torch.equal(a, b) for a, b in zip(found, plain, strict=True))
    assert again == (0 if settings.get("selective_ac_option") == "2" else 2)
