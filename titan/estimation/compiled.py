"""A backend of torch.compile that makes no code: it runs a graph node by node, with the memory that fused code takes.

The graphs are those that the default backend would get: the same decompositions, and the same choice of what the
backward pass computes again. A value that such code keeps in registers gets no memory here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import fx

from titan.estimation.course import Course, Recorder
from titan.estimation.tracer import Tracer

_FUSIBLE_REDUCTIONS = frozenset({"sum", "mean", "amax", "amin", "var_mean", "rsqrt"})
_FUSIBLE_MOVES = frozenset({"cat", "_to_copy", "convert_element_type", "clone", "copy", "full", "full_like"})


def fusing_backend(tracer: Tracer) -> Callable[..., Any]:
    """The backend; what it hides, it hides from this tracer."""
    from functorch.compile import min_cut_rematerialization_partition
    from torch._dynamo.backends.common import aot_autograd
    from torch._inductor.decomposition import select_decomp_table

    def run_by_node(graph: fx.GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
        return _boxed(_Fused(graph, tracer))

    return aot_autograd(
        fw_compiler=run_by_node,
        bw_compiler=run_by_node,
        inference_compiler=run_by_node,
        partition_fn=min_cut_rematerialization_partition,
        decompositions=select_decomp_table(),
    )


def _boxed(run: Callable[[list[Any]], Any]) -> Callable[..., Any]:
    run._boxed_call = True  # type: ignore[attr-defined]
    return run


class _Fused:
    """Runs a graph. Takes its inputs as a list, which it empties, so that they can be freed after their last use.

    All layers, microbatches and passes have the same graphs; so what one does with memory is found once, node by node,
    and then done again.
    """

    def __init__(self, graph: fx.GraphModule, tracer: Tracer) -> None:
        self._graph, self._tracer = graph, tracer
        nodes = list(graph.graph.nodes)
        last = {used: node for node in nodes for used in node.all_input_nodes}
        self._dropped: dict[fx.Node, list[fx.Node]] = {}
        for used, node in last.items():
            self._dropped.setdefault(node, []).append(used)
        self._hidden: set[fx.Node] = set()
        for node in reversed(nodes):
            if node.op == "call_function" and (_is_view(node) or _fuses(node)) and _in_registers(node, self._hidden):
                self._hidden.add(node)
        self._courses: dict[tuple[int, ...], Course] = {}  # by the sizes that it is given

    def __call__(self, inputs: list[Any]) -> Any:
        sizes = tuple(value for value in inputs if isinstance(value, int))
        if sizes not in self._courses:
            self._courses[sizes] = self._recorded(inputs)
        return self._courses[sizes].follow(inputs, self._tracer)

    def _recorded(self, inputs: Sequence[Any]) -> Course:
        with Recorder(self._tracer, inputs) as recorder:
            return recorder.course(self._by_node(inputs, recorder.dropped))

    def _by_node(self, inputs: Sequence[Any], dropped: Callable[[Any], None]) -> Any:
        values: dict[fx.Node, Any] = {}
        given = iter(inputs)
        for node in self._graph.graph.nodes:
            if node.op == "placeholder":
                values[node] = next(given)
            elif node.op == "get_attr":
                values[node] = getattr(self._graph, str(node.target))
            elif node.op == "output":
                return fx.node.map_arg(node.args[0], values.__getitem__)
            else:
                args = fx.node.map_arg(node.args, values.__getitem__)
                kwargs = fx.node.map_arg(node.kwargs, values.__getitem__)
                with self._tracer.pause() if node in self._hidden else nullcontext():
                    values[node] = node.target(*args, **kwargs)
                del args, kwargs
            for used in self._dropped.get(node, ()):
                dropped(values[used])
                del values[used]
        raise AssertionError("a graph ends with its output")


def _in_registers(node: fx.Node, hidden: set[fx.Node]) -> bool:
    """Whether nobody needs a value in memory: every user is fused with it, views of it included."""
    return bool(node.users) and all(
        user in hidden if _is_view(user) else user.op == "call_function" and _fuses(user) for user in node.users
    )


def _is_view(node: fx.Node) -> bool:
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return False
    return target.is_view or target._schema.name in ("aten::view", "aten::reshape", "aten::_unsafe_view")


def _fuses(node: fx.Node) -> bool:
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return False
    name = target._schema.name.partition("::")[2]
    return torch.Tag.pointwise in target.tags or name in _FUSIBLE_REDUCTIONS or name in _FUSIBLE_MOVES
