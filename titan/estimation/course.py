"""What a compiled graph does with memory, recorded once and followed as often as the graph is run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_iter, tree_map

from titan.estimation.events import Allocation, Event, Message
from titan.estimation.tracer import Tracer


@dataclass(frozen=True)
class _View:
    """A tensor of a graph's output.

    Attributes:
        storage: an object of the record, or the number of an input, counted down from -1.
    """

    storage: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype


class _Drop(NamedTuple):
    """The graph needs an input no longer, nor others that share its storage."""

    inputs: tuple[int, ...]


@dataclass(frozen=True)
class Course:
    """A graph's way from inputs to outputs.

    Attributes:
        steps: allocations, frees and drops in order.
        output: as the graph gives it, with a view for each tensor.
        flops, messages: what is computed and sent.
    """

    steps: Sequence[Event | _Drop]
    output: Any
    flops: int
    messages: Counter[Message]

    @torch.no_grad()
    def follow(self, inputs: list[Any], tracer: Tracer) -> Any:
        """Do the same to other inputs of the same sizes; empties their list, as the graph would."""
        given: dict[int, Any] = {-1 - number: value for number, value in enumerate(inputs)}
        inputs.clear()
        views = [view for view in tree_iter(self.output) if isinstance(view, _View)]
        kept = {view.storage for view in views}
        bases: dict[int, torch.Tensor] = {}
        objects: dict[int, int] = {}
        for step in self.steps:
            if isinstance(step, _Drop):
                if kept.isdisjoint(keys := [-1 - number for number in step.inputs]):
                    for key in keys:
                        del given[key]
            elif not isinstance(step, Allocation):
                tracer.free(objects.pop(step.object))
            elif step.object in kept:
                dtype = next(view.dtype for view in views if view.storage == step.object)
                with tracer.pause():
                    bases[step.object] = torch.empty(step.bytes // dtype.itemsize, dtype=dtype, device="cpu")
                tracer.follow(bases[step.object], step.operator)
            else:
                objects[step.object] = tracer.allocate(step.bytes, step.operator)
        tracer.count(self.flops, self.messages)

        def tensor(view: Any) -> Any:
            if not isinstance(view, _View):
                return view
            with tracer.pause():
                if 0 in view.size:  # which takes no memory
                    return torch.empty_strided(view.size, view.stride, dtype=view.dtype, device="cpu")
                base = given[view.storage] if view.storage < 0 else bases[view.storage]
                base = base if base.dtype == view.dtype else base.view(view.dtype)
                return base.as_strided(view.size, view.stride, view.offset)

        return tree_map(tensor, self.output)


class Recorder:
    """Records the course of a graph while it is run, with its inputs alive all the time."""

    def __init__(self, tracer: Tracer, inputs: Sequence[Any]) -> None:
        self._tracer = tracer
        self._given = [value for value in inputs if isinstance(value, torch.Tensor)]
        self._inputs: dict[int, list[int]] = {}  # by their storages' addresses
        for number, value in enumerate(inputs):
            if isinstance(value, torch.Tensor):
                self._inputs.setdefault(value.untyped_storage()._cdata, []).append(number)
        self._last_use: dict[int, int] = {}  # by storage, the number of events before it

    def __enter__(self) -> Recorder:
        self._undo = ExitStack()
        self._trace = self._undo.enter_context(self._tracer.apart(self._given))
        return self

    def __exit__(self, *error: object) -> None:
        self._undo.close()

    def dropped(self, value: Any) -> None:
        """The graph needs a value no longer; an input's memory is free once all views of it are dropped."""
        for part in tree_iter(value):
            if isinstance(part, torch.Tensor):
                self._last_use[part.untyped_storage()._cdata] = len(self._trace.events)

    def course(self, output: Any) -> Course:
        """What was recorded, up to this output of the graph."""
        drops: dict[int, list[_Drop]] = {}
        for address, numbers in self._inputs.items():
            if (place := self._last_use.get(address)) is not None:
                drops.setdefault(place, []).append(_Drop(tuple(numbers)))
        steps: list[Event | _Drop] = []
        for place, event in enumerate(self._trace.events):
            steps += [*drops.pop(place, ()), event]
        steps += [drop for late in drops.values() for drop in late]
        return Course(
            steps,
            tree_map(self._view, output),
            sum(self._trace.flops.values()),
            sum(self._trace.messages.values(), Counter()),
        )

    def _view(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        storage = value.untyped_storage()
        numbers = self._inputs.get(storage._cdata)
        place = self._tracer.object_of(value) if numbers is None else -1 - numbers[0]
        assert place is not None
        return _View(place, tuple(value.shape), value.stride(), int(value.storage_offset()), value.dtype)
