"""Counting what collectives move."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch.distributed as dist
from torch._C import DispatchKey, DispatchKeySet
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

# The names of one thing in torch's two ways to call it.
_NAMES = {
    "allreduce_": "all_reduce",
    "all_reduce_": "all_reduce",
    "_allgather_base_": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "all_gather_into_tensor_out": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
    "recv_": "recv",
}


class Traffic(TorchDispatchMode):
    """Number of collectives of each kind, bytes of the tensors handed to them, and what a ring of ranks sends for that.

    Groups of one rank and up to three numbers (a step's loss and norm, what ranks agree on before it) are left out.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()
        self.sent: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor first turns its operator into those of plain tensors
        namespace, name = func.name().split("::")
        if namespace == "titan":  # its own operators hide from modes what they call
            with self:
                return func.redispatch(DispatchKeySet(DispatchKey.CPU), *args, **(kwargs or {}))
        name = name.split(".")[0]
        if namespace in ("c10d", "_c10d_functional") and name not in ("wait_tensor", "_wrap_tensor_autograd"):
            # In-place collectives name the output first.
            source = args[1] if name in ("_allgather_base_", "_reduce_scatter_base_") else args[0]
            (tensor,) = source if isinstance(source, (list, tuple)) else (source,)
            size = tensor.numel() * tensor.element_size()
            if size > 24 and (ranks := _group_size(args, kwargs or {})) > 1:
                kind = _NAMES.get(name, name)
                self.sent[kind] += _sent(kind, size, ranks)
                self.calls[kind] += 1
                self.bytes[kind] += size
        return func(*args, **(kwargs or {}))


def _sent(kind: str, size: int, ranks: int) -> int:
    shares = {"all_gather": ranks * (ranks - 1), "reduce_scatter": ranks - 1, "all_reduce": 2 * (ranks - 1)}
    return size * shares.get(kind, ranks) // ranks


def _group_size(args: Any, kwargs: dict[str, Any]) -> int:
    for value in (*args, *kwargs.values()):
        if isinstance(value, str) and value.lower() not in ("sum", "max", "avg"):
            return _resolve_process_group(value).size()
        if hasattr(value, "_type") and "ProcessGroup" in str(value._type()):
            return dist.ProcessGroup.unbox(value).size()
    raise AssertionError(f"no process group among {args}")
