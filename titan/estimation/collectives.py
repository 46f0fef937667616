"""Calls of torch's collectives, of either of its two interfaces, as messages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import _resolve_process_group  # type: ignore[attr-defined]
from torch.utils._pytree import tree_iter

from titan.estimation.events import Message

# What each call is, and where among its arguments the tensor is that a rank hands in.
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


def message_of(name: str, args: Any, kwargs: Mapping[str, Any], dims: Mapping[str, str]) -> Message | None:
    """What an operator sends; None if it is no collective, or its group one rank.

    Args:
        name: of the operator, with its namespace.
        dims: the mesh dimension of each process group, by the group's name.
    """
    namespace, _, operator = name.partition("::")
    operator = operator.split(".")[0]
    if namespace not in ("c10d", "_c10d_functional") or operator not in _COLLECTIVES:
        return None
    collective, place = _COLLECTIVES[operator]
    group = _group(args, kwargs)
    if group.size() == 1:
        return None
    handed = [tensor for tensor in tree_iter(args[place]) if isinstance(tensor, torch.Tensor)]
    size = sum(tensor.numel() * tensor.element_size() for tensor in handed)
    return Message(collective, dims.get(group.group_name, "other"), size, group.size())


def _group(args: Any, kwargs: Mapping[str, Any]) -> ProcessGroup:
    for value in (*args, *kwargs.values()):
        if isinstance(value, str) and value.lower() not in ("sum", "max", "min", "avg", "product"):
            return _resolve_process_group(cast(Any, value))
        if hasattr(value, "_type") and "ProcessGroup" in str(value._type()):
            return ProcessGroup.unbox(value)
    raise AssertionError(f"no process group among {args}")
