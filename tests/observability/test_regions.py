"""titan/observability/regions.py: names that change nothing, and that only a profiler sees."""

from __future__ import annotations

import gc
import time

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

from titan.observability.regions import LayerRegions, named_layers, region


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 4)
        self.layers = nn.ModuleDict({"2": nn.Linear(4, 4), "3": nn.Linear(4, 4)})
        self.norm = None
        self.output = nn.Linear(4, 1)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        h = self.embedding(tokens)
        for layer in self.layers.values():
            h = h + layer(h)
        return self.output(h).sum()


def gradients(model: nn.Module) -> list[torch.Tensor]:
    model.zero_grad()
    model(torch.arange(10)).backward()
    return [parameter.grad.clone() for parameter in model.parameters()]  # type: ignore[union-attr]


def test_layers_have_their_names_in_the_whole_model() -> None:
    names = [name for name, _ in named_layers([Blocks(), nn.Sequential(nn.Linear(1, 1))])]
    assert names == ["embedding", "layers.2", "layers.3", "output", "0"]


def test_layers_are_named_forward_and_backward_and_compute_the_same() -> None:
    torch.manual_seed(0)
    model = Blocks()
    block = model.layers["3"]
    forward = block.forward
    block.forward = lambda x: checkpoint(forward, x, use_reentrant=False)  # runs again within its backward pass
    expected = gradients(model)
    regions = LayerRegions([model])
    with profile(activities=[ProfilerActivity.CPU]) as trace:
        with region("all"):
            regions.attach()
            named = gradients(model)
            with torch.no_grad():
                model(torch.arange(10))
        regions.detach()
        regions.detach()
        after = gradients(model)
    assert all(map(torch.equal, expected, named)) and all(map(torch.equal, expected, after))
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    spans = [(event.name, event.time_range) for event in trace.events() if event.is_user_annotation]
    assert [name for name, _ in spans if name.endswith("forward")] == 2 * [
        f"{layer} forward" for layer in ("embedding", "layers.2", "layers.3", "output")
    ]
    backward = {name: span for name, span in spans if name.endswith("backward")}
    assert list(backward) == [f"{layer} backward" for layer in ("output", "layers.3", "layers.2")]
    products = [event.time_range for event in trace.events() if event.name == "AddmmBackward0"]
    for name, span in backward.items():
        within = [p for p in products if span.start <= p.start and p.end <= span.end]
        assert len(within) == 1, name


def test_a_name_costs_nothing_without_a_profiler() -> None:
    assert region("a") is region("b")
    gc.collect()
    start = time.thread_time()
    for number in range(10_000):
        with region(f"microbatch {number}"):
            pass
    assert (time.thread_time() - start) / 10_000 < 5e-6


@pytest.mark.parametrize("backend", ["aot_eager"])
def test_compiled_blocks_are_not_compiled_again(backend: str) -> None:
    torch._dynamo.reset()
    model = Blocks()
    compiled = []
    for layer in model.layers.values():
        layer.forward = torch.compile(layer.forward, backend=backend, fullgraph=True)
    expected = gradients(model)
    count = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert count
    with profile(activities=[ProfilerActivity.CPU]), torch._dynamo.config.patch(error_on_recompile=True):
        regions = LayerRegions([model])
        regions.attach()
        named = gradients(model)
        regions.detach()
    assert all(map(torch.equal, expected, named)) and not compiled
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == count
