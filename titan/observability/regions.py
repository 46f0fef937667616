"""Named stretches of a profiler's trace: parts of a step, pipeline stages, layers.

A name costs a look at a flag when no profiler records. Layers are named by hooks that are there in traced steps alone:
around a block's call, so that compiled or checkpointed code within it stays as it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd import profiler
from torch.utils.hooks import RemovableHandle

_NOTHING = nullcontext()


def region(name: str) -> AbstractContextManager[Any]:
    """A context that bears this name in a trace, and does nothing when none is recorded."""
    return profiler.record_function(name) if profiler._is_profiler_enabled else _NOTHING


def named_layers(parts: Iterable[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """Blocks and other modules at the top of a model or of a pipeline's stages, by their names in the whole model."""
    for part in parts:
        for name, child in part.named_children():
            if isinstance(child, nn.ModuleDict | nn.ModuleList):
                yield from ((f"{name}.{key}", block) for key, block in child.named_children())
            else:
                yield name, child


class LayerRegions:
    """Names the layers of models for as long as it is attached: `layers.0 forward`, `layers.0 backward`.

    A layer's backward pass lies between the gradients of its output and of its input. No module's graph is changed for
    it: both are hooks on tensors. Where the input needs no gradient (the embedding's), only the forward pass is named.
    """

    def __init__(self, parts: Iterable[nn.Module]) -> None:
        self._layers = list(named_layers(parts))
        self._handles: list[RemovableHandle] = []
        self._forward: list[profiler.record_function] = []
        self._backward: tuple[str, profiler.record_function] | None = None

    def attach(self) -> None:
        """Name what runs from here on."""
        for name, layer in self._layers:
            before, after = partial(self._enter_forward, name), partial(self._leave_forward, name)
            self._handles.append(layer.register_forward_pre_hook(before, prepend=True))
            self._handles.append(layer.register_forward_hook(after, always_call=True))

    def detach(self) -> None:
        """Leave the modules as they were; may be called twice."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._close_backward()

    def backward_names(self) -> set[str]:
        """How backward passes are named."""
        return {f"{name} backward" for name, _ in self._layers}

    def _enter_forward(self, name: str, layer: nn.Module, args: tuple[Any, ...]) -> None:
        if args and _needs_gradient(args[0]):
            args[0].register_hook(partial(self._leave_backward, name))
        self._forward.append(profiler.record_function(f"{name} forward"))
        self._forward[-1].__enter__()

    def _leave_forward(self, name: str, layer: nn.Module, args: tuple[Any, ...], out: Any) -> None:
        self._forward.pop().__exit__(None, None, None)
        if args and _needs_gradient(args[0]) and _needs_gradient(out):
            out.register_hook(partial(self._enter_backward, name))

    def _enter_backward(self, name: str, gradient: torch.Tensor) -> None:
        self._close_backward()
        # Where weights have a pass of their own, the gradient of an output comes without that of the input.
        torch.autograd.Variable._execution_engine.queue_callback(self._close_backward)
        self._backward = name, profiler.record_function(f"{name} backward")
        self._backward[1].__enter__()

    def _leave_backward(self, name: str, gradient: torch.Tensor) -> None:
        if self._backward is not None and self._backward[0] == name:
            self._close_backward()

    def _close_backward(self) -> None:
        if self._backward is not None:
            self._backward[1].__exit__(None, None, None)
            self._backward = None


def _needs_gradient(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad
