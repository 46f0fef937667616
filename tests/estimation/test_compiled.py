"""What a compiled graph does with memory, and that it does it every time."""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from titan.estimation.compiled import _Fused
from titan.estimation.events import Allocation, Event
from titan.estimation.tracer import Tracer
from titan.estimation.watching import watching


def graph_of(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    product = x @ weight
    return (product.exp() * 2) @ weight, x.t()


def described(events: list[Event]) -> list[tuple[str, int]]:
    sizes = {event.object: (event.operator, event.bytes) for event in events if isinstance(event, Allocation)}
    return [
        sizes[event.object] if isinstance(event, Allocation) else ("free", sizes[event.object][1]) for event in events
    ]


def test_memory_of_a_graph() -> None:
    """Pointwise results stay in registers, inputs go after their last use, and a view keeps its tensor."""
    graph, tracer = make_fx(graph_of)(torch.empty(4, 8), torch.empty(8, 8)), Tracer({})
    fused = _Fused(graph, tracer)
    with FakeTensorMode(), watching(tracer):
        for _ in range(2):
            tracer.trace.events.clear()
            inputs = [torch.empty(4, 8), torch.empty(8, 8)]
            out, view = fused(inputs)
            events = list(tracer.trace.events)
            assert inputs == []
            assert (out.shape, view.shape, view.stride()) == ((4, 8), (8, 4), (1, 8))
            given, made = [("aten::empty.memory_format", 128), ("aten::empty.memory_format", 256)], "aten::mm"
            assert described(events) == [
                *given,
                (made, 128),
                ("free", 128),  # what is computed element by element takes its place
                ("aten::mul.Tensor", 128),
                (made, 128),
                ("free", 256),
                ("free", 128),
            ]
            kept = {event.object for event in events if isinstance(event, Allocation)}
            kept -= {event.object for event in events if not isinstance(event, Allocation)}
            assert kept == {tracer.object_of(out), tracer.object_of(view)}
            del out, view
