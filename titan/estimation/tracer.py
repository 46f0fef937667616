"""Records what a step does with memory, how much it computes, and what it sends, while it runs on fake tensors."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, cast

import torch
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import _resolve_process_group  # type: ignore[attr-defined]
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_leaves
from torch.utils.flop_counter import flop_registry

from titan.estimation.events import Allocation, Free, Message, Place, Trace
from titan.estimation.replay import REPEATED

# How torch names one thing in its two ways to call it, and where the tensor is that a rank hands in.
_COLLECTIVES = {
    "allreduce_": ("all_reduce", 0),
    "all_reduce": ("all_reduce", 0),
    "all_reduce_": ("all_reduce", 0),
    "allreduce_coalesced_": ("all_reduce", 0),
    "_allgather_base_": ("all_gather", 1),
    "all_gather_into_tensor": ("all_gather", 0),
    "all_gather_into_tensor_out": ("all_gather", 0),
    "_reduce_scatter_base_": ("reduce_scatter", 1),
    "reduce_scatter_tensor": ("reduce_scatter", 0),
    "all_to_all_single": ("all_to_all", 0),
    "alltoall_base_": ("all_to_all", 1),
    "broadcast_": ("broadcast", 0),
    "send": ("send", 0),
    "recv_": ("recv", 0),
}


class Tracer(TorchDispatchMode):
    """Follows every storage from the operator that makes it to the moment when nobody holds it.

    The streams are those of `torch.cpu`, which FSDP uses on fake CPU tensors as it uses an accelerator's.

    Attributes:
        trace: what was recorded so far.
        place: where in the step it is.
        times: how often what is counted now happens in the real step.
    """

    def __init__(self, dims: Mapping[str, str]) -> None:
        """
        Args:
            dims: the mesh dimension of each process group, by the group's name.
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
        return self._objects.get(tensor.untyped_storage()._cdata)

    def add(self, tensor: torch.Tensor, category: str, unit: int | None) -> None:
        """Record a tensor that exists already, as if it were made now."""
        before = self._made
        self._follow(tensor.untyped_storage(), category, unit)
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
        out = func(*args, **kwargs)
        if not self._paused:
            self._count(func, name, args, kwargs, out)
            self._record(name, args, out)
        return out

    def _count(self, func: Any, name: str, args: Any, kwargs: Any, out: Any) -> None:
        unit = self._current_unit()
        if func._overloadpacket in flop_registry:
            self.trace.flops[unit] += self.times * flop_registry[func._overloadpacket](*args, **kwargs, out_val=out)
        namespace, _, operator = name.partition("::")
        operator = operator.split(".")[0]
        if namespace in ("c10d", "_c10d_functional") and operator in _COLLECTIVES:
            collective, place = _COLLECTIVES[operator]
            group = _group(args, kwargs)
            if group.size() > 1:
                handed = [t for t in tree_iter(args[place]) if isinstance(t, torch.Tensor)]
                size = sum(tensor.numel() * tensor.element_size() for tensor in handed)
                message = Message(collective, self._dims.get(group.group_name, "other"), size, group.size())
                self.trace.messages.setdefault(unit, Counter())[message] += self.times

    def _record(self, name: str, args: Any, out: Any) -> None:
        if isinstance(out, torch.Tensor):
            growth, unit = 0, self._current_unit()
            if unit is None and name in ("aten::stack", "aten::cat"):
                growth = self._growth(args[0])
            self._follow(out.untyped_storage(), name, unit, growth)
            return
        sources = args[0] if args and isinstance(args[0], (list, tuple)) and name.startswith("aten::_f") else ()
        results = list(tree_iter(out))
        for number, result in enumerate(results):
            if isinstance(result, torch.Tensor):
                unit = self._current_unit()
                if unit is None and len(sources) == len(results):  # an operator over all parameters
                    unit = self._unit_of(sources[number])
                self._follow(result.untyped_storage(), name, unit)

    def _growth(self, parts: Any) -> int:
        """Bytes of the parts that are of the unit of layers that is repeated."""
        return sum(part.numel() * part.element_size() for part in parts if self._unit_of(part) == REPEATED)

    def _unit_of(self, tensor: torch.Tensor) -> int | None:
        known = self.object_of(tensor)
        return None if known is None else self._units.get(known)

    def _follow(self, storage: torch.UntypedStorage, operator: str, unit: int | None, growth: int = 0) -> None:
        address = storage._cdata
        if address in self._objects:
            return
        self._watched[address] = weakref.ref(storage, self._gone(address))
        self._allocate(address, storage.nbytes(), operator, unit, growth)

    def _allocate(self, address: int, size: int, operator: str, unit: int | None, growth: int = 0) -> None:
        self._made += 1
        self._objects[address] = self._made
        if self._purpose is not None:
            self.trace.categories[self._made] = self._purpose
        if size > 0:
            self._units[self._made] = unit
            event = Allocation(self._made, size, self._stream(), self.place, unit, operator, growth)
            self.trace.events.append(event)

    def _gone(self, address: int) -> Callable[[object], None]:
        def gone(_: object) -> None:
            self._watched.pop(address, None)
            number = self._objects.pop(address, None)
            if number is not None:
                self._free(number)

        return gone

    def _free(self, number: int) -> None:
        if number in self._units:  # else it is empty
            own, current = self._units.pop(number), self._current_unit()
            unit = own if current is None else current
            self.trace.events.append(Free(number, self.place, unit))

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
        address = storage._cdata
        number = self._objects.get(address)
        if number is not None:
            self._free(number)
            self._allocate(address, storage.nbytes(), "resize_", self._current_unit())
        else:
            self._follow(storage, "resize_", self._current_unit())

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Record nothing of what is made meanwhile."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Trace what runs within, storages that change their size included; all is as before afterwards."""
        resize = torch.UntypedStorage.resize_

        def resize_(storage: torch.UntypedStorage, size: int) -> Any:
            before, result = storage.nbytes(), resize(storage, size)
            if storage.nbytes() != before and not self._paused:
                self.resized(storage)
            return result

        with ExitStack() as undo:
            undo.callback(self._watched.clear)  # what lives on isn't followed any more
            replaced = (
                (torch.UntypedStorage, "resize_", resize_),
                (torch.cpu.Stream, "record_event", lambda stream: torch.cpu.Event()),
                # DTensor makes tensors of global shapes when it only wants to know the shapes.
                (ShardingPropagator, "_propagate_tensor_meta_non_cached", self._unseen),
                (FSDPParamGroup, "unshard", partial(self._purposeful, "unsharded_parameters")),
                (FSDPParamGroup, "wait_for_unshard", partial(self._purposeful, "unsharded_parameters")),
                (FSDPParamGroup, "post_backward", self._reducing),
            )
            for owner, name, replacement in replaced:
                original = getattr(owner, name)
                if owner in (ShardingPropagator, FSDPParamGroup):
                    replacement = _method(replacement, original)
                undo.callback(setattr, owner, name, original)
                setattr(owner, name, replacement)
            with self:
                yield

    def _unseen(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with self.pause():
            return original(*args, **kwargs)

    def _purposeful(self, purpose: str, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        before, self._purpose = self._purpose, purpose
        try:
            return original(*args, **kwargs)
        finally:
            self._purpose = before

    def _reducing(self, original: Callable[..., Any], group: FSDPParamGroup, *args: Any, **kwargs: Any) -> Any:
        # Pipelines reduce all gradients at their end, layer by layer.
        self._unit = self._unit_of(group.fsdp_params[0]._sharded_param_data) if group.fsdp_params else None
        try:
            result = self._purposeful("communication", original, group, *args, **kwargs)
        finally:
            self._unit = None
        if (partial_sum := group._partial_reduce_output) is not None:  # not yet summed over copies
            self.know(partial_sum, "gradients")
        return result

    def know(self, tensor: torch.Tensor, category: str) -> None:
        """Say what a tensor that was seen is for."""
        if (number := self.object_of(tensor)) is not None:
            self.trace.categories[number] = category


def _method(replacement: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    def method(*args: Any, **kwargs: Any) -> Any:
        return replacement(original, *args, **kwargs)

    return method


def _is_wrapper(kind: type) -> bool:
    return kind not in (torch.Tensor, torch.nn.Parameter, FakeTensor)


def _group(args: Any, kwargs: Mapping[str, Any]) -> ProcessGroup:
    for value in (*args, *kwargs.values()):
        if isinstance(value, str) and value.lower() not in ("sum", "max", "min", "avg", "product"):
            return _resolve_process_group(cast(Any, value))
        if hasattr(value, "_type") and "ProcessGroup" in str(value._type()):
            return ProcessGroup.unbox(value)
    raise AssertionError(f"no process group among {args}")
