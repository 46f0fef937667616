"""Has a tracer follow what operators don't show: memory that changes its size, copies to the host, what FSDP does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.pipelining import stage
from torch.distributed.tensor._sharding_prop import ShardingPropagator

from titan.estimation.tracer import Tracer
from titan.parallelisms import activation_offload
from titan.parallelisms.float8 import unwrapped
from titan.training.gradients import local_part

_Original = Callable[..., Any]


@contextmanager
def watching(tracer: Tracer, *, weights_on_host: bool = False) -> Iterator[None]:
    """Trace what runs within; all is as before afterwards.

    Args:
        weights_on_host: what `Tensor.to` gets a device for goes to the host, or comes back from there.
    """
    watch = _Watch(tracer)
    replaced: list[tuple[Any, str, Callable[..., Any]]] = [
        (torch.UntypedStorage, "resize_", watch.resize),
        (torch.cpu.Stream, "record_event", _record_event),
        # DTensor makes tensors of global shapes when it only wants to know the shapes.
        (ShardingPropagator, "_propagate_tensor_meta_non_cached", watch.propagate),
        (stage, "_make_tensor_from_meta", watch.make_buffer),
        (activation_offload._Saved, "__init__", watch.save),
        (FSDPParamGroup, "unshard", watch.gather),
        (FSDPParamGroup, "wait_for_unshard", watch.gather),
        (FSDPParamGroup, "post_backward", watch.reduce),
    ]
    if weights_on_host:
        replaced.append((torch.Tensor, "to", watch.move))
    with ExitStack() as undo:
        undo.callback(tracer.forget)
        for owner, name, replacement in replaced:
            original = getattr(owner, name)
            undo.callback(setattr, owner, name, original)
            setattr(owner, name, _instead_of(original, replacement))
        with tracer:
            yield


def _instead_of(original: _Original, replacement: Callable[..., Any]) -> Callable[..., Any]:
    def method(*args: Any, **kwargs: Any) -> Any:
        return replacement(original, *args, **kwargs)

    return method


def _record_event(_: _Original, stream: Any) -> Any:
    return torch.cpu.Event()


class _Watch:
    """Replacements of torch's methods. Each gets the original first."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer

    def resize(self, original: _Original, storage: torch.UntypedStorage, size: int) -> Any:
        before, result = storage.nbytes(), original(storage, size)
        if storage.nbytes() != before:
            self._tracer.resized(storage)
        return result

    def propagate(self, original: _Original, *args: Any, **kwargs: Any) -> Any:
        with self._tracer.pause():
            return original(*args, **kwargs)

    def make_buffer(self, original: _Original, *args: Any, **kwargs: Any) -> torch.Tensor:
        """What a pipeline receives into is made once, in whatever step is its first, and kept."""
        with self._tracer.pause():
            buffer: torch.Tensor = original(*args, **kwargs)
        self._tracer.add(buffer, "communication", None)
        return buffer

    def save(self, original: _Original, *args: Any, **kwargs: Any) -> None:
        with self._tracer.copying(to_host=True):
            original(*args, **kwargs)

    def move(self, original: _Original, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        device = bool(args) and isinstance(args[0], torch.device)
        if not device or not isinstance(local_part(unwrapped(tensor)), FakeTensor):
            return original(tensor, *args, **kwargs)
        with self._tracer.copying(to_host=not self._tracer.is_on_host(tensor)):
            return tensor.clone()

    def gather(self, original: _Original, *args: Any, **kwargs: Any) -> Any:
        with self._tracer.making("unsharded_parameters"):
            return original(*args, **kwargs)

    def reduce(self, original: _Original, group: FSDPParamGroup, *args: Any, **kwargs: Any) -> Any:
        # Pipelines reduce all gradients at their end, layer by layer.
        unit = self._tracer.unit_of(group.fsdp_params[0]._sharded_param_data) if group.fsdp_params else None
        # Until a pipeline's last microbatch they are kept whole, in the type that they are summed in.
        purpose = "communication" if group.reduce_grads else "gradients"
        with self._tracer.making(purpose), self._tracer.working_for(unit):
            result = original(group, *args, **kwargs)
        if (partial_sum := group._partial_reduce_output) is not None:  # not yet summed over copies
            self._tracer.know(partial_sum, "gradients")
        return result
