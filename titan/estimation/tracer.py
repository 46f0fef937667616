"""Records what a step does with memory, how much it computes, and what it sends, while it runs on fake tensors."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch._C import DispatchKey, DispatchKeySet
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_leaves
from torch.utils.flop_counter import flop_registry

from titan.estimation.collectives import message_of
from titan.estimation.events import HOST, Allocation, Free, Message, Place, Trace
from titan.estimation.replay import REPEATED
from titan.parallelisms.float8 import unwrapped


class Tracer(TorchDispatchMode):
    """Follows every storage from the operator that makes it to the moment when nobody holds it.

    The streams are those of `torch.cpu`, which FSDP uses on fake CPU tensors as it uses an accelerator's.

    Attributes:
        trace: what was recorded so far.
        place: where in the step it is.
        times: how often what is counted now happens in the real step (`counted`).
    """

    def __init__(self, dims: Mapping[str, str], *, documents: int = 1) -> None:
        """
        Args:
            dims: the mesh dimension of each process group, by the group's name.
            documents: that a microbatch has.
        """
        super().__init__()
        self.trace = Trace()
        self.place, self.times = Place("build", None), 1
        self._dims = dims
        self._objects: dict[int, int] = {}  # by the storage's address
        self._units: dict[int, int | None] = {}  # by object, of those alive
        self._watched: dict[int, weakref.ref[Any]] = {}
        self._streams: dict[int, int] = {id(torch.cpu.current_stream()): 0}
        self._kept_streams: list[Any] = []  # or another could get the address of one that is gone
        self._made = 0
        self._paused = False
        self._visits: Counter[int | None] = Counter()
        self._purpose: str | None = None  # of all that is made now
        self._documents = documents
        self._on_host: set[int] = set()  # objects
        self._on_host_now: bool | None = None  # where what is made now is, other than where it is made from
        self._unit: int | None = None  # what is done outside of layers is done for this one

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Lets torch.compile run below it."""
        return True

    supports_higher_order_operators = True

    def enter(self, phase: str, unit: int | None) -> None:
        """Say where in the step it is from here on."""
        if (phase, unit) != self.place[:2]:
            self.place = Place(phase, unit, self._visits[unit])
            self._visits[unit] += 1

    def object_of(self, tensor: torch.Tensor) -> int | None:
        """The number of a tensor's storage; None when it was never seen."""
        return self._objects.get(unwrapped(tensor).untyped_storage()._cdata)

    def add(self, tensor: torch.Tensor, category: str, unit: int | None, stream: int | None = None) -> None:
        """Record a tensor that exists already, as if it were made now."""
        before = self._made
        self._follow(tensor.untyped_storage(), category, unit, stream=stream)
        if self._made > before:
            self.trace.categories[self._made] = category

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(issubclass(kind, torch.Tensor) and _is_wrapper(kind) for kind in types):
            return NotImplemented  # DTensor and the like first turn their operator into those of plain tensors
        name = func.name()
        if name == "_c10d_functional::wait_tensor":
            return args[0]
        if name == "aten::_local_scalar_dense":
            return 1.0 if args[0].is_floating_point() else 1
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if given and not any(isinstance(tensor, FakeTensor) for tensor in given):
            with unset_fake_temporarily():  # on the host, such as labels; they must have values
                return func(*args, **kwargs)
        if name == "aten::nonzero":  # where documents begin
            return args[0].new_empty(self._documents, args[0].dim(), dtype=torch.int64)
        if name.startswith("titan::") and not self._paused:
            with self:  # titan's own operators hide what they are made of
                return func.redispatch(DispatchKeySet(DispatchKey.CPU), *args, **kwargs)
        out = func(*args, **kwargs)
        if not self._paused:
            self._count(func, name, args, kwargs, out)
            self._record(name, args, out, self._stream_of_results(given))
        return out

    def _count(self, func: Any, name: str, args: Any, kwargs: Any, out: Any) -> None:
        unit = self._current_unit()
        if func._overloadpacket in flop_registry:
            self.trace.flops[unit] += self.times * flop_registry[func._overloadpacket](*args, **kwargs, out_val=out)
        if (message := message_of(name, args, kwargs, self._dims)) is not None:
            self.trace.messages.setdefault(unit, Counter())[message] += self.times

    def _record(self, name: str, args: Any, out: Any, stream: int) -> None:
        if isinstance(out, torch.Tensor):
            growth, unit = 0, self._current_unit()
            if unit is None and name in ("aten::stack", "aten::cat"):
                growth = self._growth(args[0])
            self._follow(out.untyped_storage(), name, unit, growth, stream)
            return
        sources = args[0] if args and isinstance(args[0], (list, tuple)) and name.startswith("aten::_f") else ()
        results = list(tree_iter(out))
        for number, result in enumerate(results):
            if isinstance(result, torch.Tensor):
                unit = self._current_unit()
                if unit is None and len(sources) == len(results):  # an operator over all parameters
                    unit = self.unit_of(sources[number])
                self._follow(result.untyped_storage(), name, unit, stream=stream)

    def _growth(self, parts: Any) -> int:
        """Bytes of the parts that are of the unit of layers that is repeated."""
        return sum(part.numel() * part.element_size() for part in parts if self.unit_of(part) == REPEATED)

    def unit_of(self, tensor: torch.Tensor) -> int | None:
        """The unit of layers that a tensor is counted with."""
        known = self.object_of(tensor)
        return None if known is None else self._units.get(known)

    def follow(self, tensor: torch.Tensor, operator: str) -> None:
        """Record a tensor that was made unseen as an operator's result."""
        if not self._paused:
            self._follow(tensor.untyped_storage(), operator, self._current_unit())

    def allocate(self, size: int, operator: str) -> int:
        """Record memory that no tensor stands for; its number."""
        self._made += 1
        if not self._paused:
            self._record_new(size, operator, self._current_unit())
        return self._made

    def free(self, number: int) -> None:
        """Record that an object is gone."""
        self._on_host.discard(number)
        if number in self._units:  # else it is empty, or made while nothing was recorded
            own, current = self._units.pop(number), self._current_unit()
            unit = own if current is None else current
            self.trace.events.append(Free(number, self.place, unit))

    def count(self, flops: int, messages: Mapping[Message, int]) -> None:
        """Record what was computed and sent unseen."""
        if not self._paused:
            unit = self._current_unit()
            self.trace.flops[unit] += self.times * flops
            for message, number in messages.items():
                self.trace.messages.setdefault(unit, Counter())[message] += self.times * number

    def _stream_of_results(self, given: Sequence[torch.Tensor]) -> int:
        if self._on_host_now is not None:
            return HOST if self._on_host_now else self._stream()
        if self._on_host and any(tensor.dim() > 0 and self.is_on_host(tensor) for tensor in given):
            return HOST  # and so is what is computed from it, but for single numbers, which go where they are needed
        return self._stream()

    def is_on_host(self, tensor: torch.Tensor) -> bool:
        """Its memory is the host's."""
        return self.object_of(tensor) in self._on_host

    @contextmanager
    def copying(self, *, to_host: bool) -> Iterator[None]:
        """What is made meanwhile is made on the host, or on the device, wherever it is made from."""
        before, self._on_host_now = self._on_host_now, to_host
        try:
            yield
        finally:
            self._on_host_now = before

    @contextmanager
    def making(self, category: str) -> Iterator[None]:
        """What is made meanwhile is for this."""
        before, self._purpose = self._purpose, category
        try:
            yield
        finally:
            self._purpose = before

    @contextmanager
    def working_for(self, unit: int | None) -> Iterator[None]:
        """What happens meanwhile outside of layers is counted with this unit of them."""
        before, self._unit = self._unit, unit
        try:
            yield
        finally:
            self._unit = before

    def _follow(
        self,
        storage: torch.UntypedStorage,
        operator: str,
        unit: int | None,
        growth: int = 0,
        stream: int | None = None,
    ) -> None:
        address = storage._cdata
        if address in self._objects:
            return
        self._watched[address] = weakref.ref(storage, self._gone(address))
        self._allocate(address, storage.nbytes(), operator, unit, growth, stream)

    def _allocate(
        self,
        address: int,
        size: int,
        operator: str,
        unit: int | None,
        growth: int = 0,
        stream: int | None = None,
    ) -> None:
        self._made += 1
        self._objects[address] = self._made
        self._record_new(size, operator, unit, growth, stream)

    def _record_new(
        self, size: int, operator: str, unit: int | None, growth: int = 0, stream: int | None = None
    ) -> None:
        if self._purpose is not None:
            self.trace.categories[self._made] = self._purpose
        if size > 0:
            self._units[self._made] = unit
            stream = self._stream() if stream is None else stream
            if stream == HOST:
                self._on_host.add(self._made)
            event = Allocation(self._made, size, stream, self.place, unit, operator, growth)
            self.trace.events.append(event)

    def _gone(self, address: int) -> Callable[[object], None]:
        def gone(_: object) -> None:
            self._watched.pop(address, None)
            number = self._objects.pop(address, None)
            if number is not None:
                self.free(number)

        return gone

    def _current_unit(self) -> int | None:
        return self._unit if self.place.unit is None else self.place.unit

    def _stream(self) -> int:
        stream = torch.cpu.current_stream()
        if id(stream) not in self._streams:
            self._streams[id(stream)] = len(self._streams)
            self._kept_streams.append(stream)
        return self._streams[id(stream)]

    def resized(self, storage: torch.UntypedStorage) -> None:
        """A storage was given another size, as FSDP does with gathered weights: the old memory goes, new comes."""
        if self._paused:
            return
        address = storage._cdata
        number = self._objects.get(address)
        if number is not None:
            self.free(number)
            self._allocate(address, storage.nbytes(), "resize_", self._current_unit())
        else:
            self._follow(storage, "resize_", self._current_unit())

    @contextmanager
    def counted(self, times: int) -> Iterator[None]:
        """What happens meanwhile stands for so many of its kind, where products and messages are counted."""
        before, self.times = self.times, self.times * times
        try:
            yield
        finally:
            self.times = before

    @contextmanager
    def apart(self, given: Iterable[torch.Tensor]) -> Iterator[Trace]:
        """Record what happens meanwhile in a trace of its own, whether paused or not.

        Args:
            given: tensors that it starts from, which may have been made unseen.
        """
        before = self.trace, self._paused, self.times
        unseen = {tensor.untyped_storage()._cdata for tensor in given}.difference(self._objects)
        self._objects |= dict.fromkeys(unseen, 0)
        self.trace, self._paused, self.times = Trace(), False, 1
        try:
            yield self.trace
        finally:
            self.trace, self._paused, self.times = before
            for address in unseen:
                del self._objects[address]

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Record nothing of what is made meanwhile."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def forget(self) -> None:
        """Follow nothing any more of what lives on."""
        self._watched.clear()

    def know(self, tensor: torch.Tensor, category: str) -> None:
        """Say what a tensor that was seen is for."""
        if (number := self.object_of(tensor)) is not None:
            self.trace.categories[number] = category


def _is_wrapper(kind: type) -> bool:
    return kind not in (torch.Tensor, torch.nn.Parameter, FakeTensor)
