"""A world of which only one rank exists, computing on nothing: no process, no network, no memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Partial

from titan.config.errors import UserError
from titan.parallelisms import activation_offload, context, ring_attention
from titan.parallelisms.ring_attention import flash_refusal

_attend_on_any_device = context.attend


@contextmanager
def fake_world(world_size: int, rank: int) -> Iterator[None]:
    """Make this process the rank of a job whose collectives do nothing; undone at the end.

    Raises:
        UserError: this process is part of a job already.
    """
    from torch.distributed.pipelining.schedules import _PipelineSchedule
    from torch.distributed.tensor._redistribute import clear_redistribute_planner_cache
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise UserError("a layout can't be traced in a process of a running job; run estimation.py beside it")
    warm_up = _PipelineSchedule._warmup_p2p
    _PipelineSchedule._warmup_p2p = _no_warm_up  # type: ignore[method-assign,assignment]
    dist.init_process_group(dist.Backend.FAKE, store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()
        _PipelineSchedule._warmup_p2p = warm_up  # type: ignore[method-assign]
        clear_redistribute_planner_cache()  # or an equal mesh of a real job would be sent over these groups
        _clear_sharding_prop_cache()
        torch._dynamo.reset()  # compiled code refers to this trace


def _no_warm_up(schedule: Any, stages: list[Any], *_: Any) -> None:
    """What stages agree on by a vote: that the shapes they were given are enough."""
    from torch.distributed.pipelining._utils import InferenceMode

    for stage in stages:
        stage._inference_mode = InferenceMode.STATIC


@contextmanager
def accelerator_operators(*, fused_norm: bool) -> Iterator[None]:
    """Run the operators that an accelerator would run, where a CPU has others, and copy from the host to fake tensors.

    Args:
        fused_norm: the RMS norm is one operator, as it has been on accelerators since torch 2.9.
    """
    norm, attention, attend, to = F.rms_norm, F.scaled_dot_product_attention, context.attend, torch.Tensor.to
    on_cpu, copies = ring_attention.on_cpu, activation_offload.Copies
    start, wait = copies.start, copies.wait

    def moved(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        from torch._subclasses.fake_tensor import FakeTensor

        if type(tensor) is torch.Tensor and args and isinstance(args[0], torch.device) and not tensor.is_meta:
            assert not isinstance(tensor, FakeTensor)
            return torch.empty(tensor.shape, dtype=tensor.dtype, device=args[0])  # where the mode makes it fake
        return to(tensor, *args, **kwargs)

    def fused(x: Any, normalized_shape: Any, weight: Any = None, eps: float | None = None) -> Any:
        if torch.compiler.is_compiling():  # which takes it to pieces, and fuses them anew
            return norm(x, normalized_shape, weight, eps)
        return _rms_norm(x, weight)

    if fused_norm:
        F.rms_norm = fused  # type: ignore[assignment]
    F.scaled_dot_product_attention = _attention
    context.attend, ring_attention.on_cpu = _attend, _on_accelerator
    copies.start, copies.wait = _start_copy, _wait_for_copy  # type: ignore[method-assign,assignment]
    torch.Tensor.to = moved  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        F.rms_norm, F.scaled_dot_product_attention, context.attend = norm, attention, attend
        ring_attention.on_cpu = on_cpu
        copies.start, copies.wait = start, wait  # type: ignore[method-assign]
        torch.Tensor.to = to  # type: ignore[method-assign]


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """What scaled_dot_product_attention chooses on an accelerator.

    The flash kernel alone takes grouped heads, and no mask; of the kernels for other types, or with a mask, one takes
    equal heads, and what remains holds whole matrices of scores.
    """
    if attn_mask is None and flash_refusal(query) is None:
        return torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal)[0]
    if query.shape[1] == key.shape[1]:
        bias = None
        if attn_mask is not None:  # yes or no becomes 0 or -inf, for all heads
            bias = query.new_zeros(attn_mask.shape).masked_fill(attn_mask.logical_not(), -torch.inf)
            bias = bias.expand(*query.shape[:-1], key.shape[2])
        efficient = torch.ops.aten._scaled_dot_product_efficient_attention
        return efficient(query, key, value, bias, torch.is_grad_enabled(), dropout_p, is_causal)[0]
    return torch.ops.aten._scaled_dot_product_attention_math(
        query, key, value, attn_mask, dropout_p, is_causal, enable_gqa=enable_gqa
    )[0]


def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, documents: torch.Tensor | None
) -> torch.Tensor:
    """`parallelisms.context.attend` on an accelerator."""
    if documents is not None or flash_refusal(query) is not None:
        return _attend_on_any_device(query, key, value, documents)
    return torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, 0.0, True)[0]


def _on_accelerator(x: torch.Tensor) -> bool:
    return False


def _start_copy(
    copies: activation_offload.Copies, target: torch.Tensor, source: torch.Tensor, device: torch.device
) -> Any:
    """Copies beside the computation end later than they begin, also on what looks like a CPU."""
    return torch.cpu.Event() if copies.beside else None


def _wait_for_copy(copies: activation_offload.Copies, end: Any, device: torch.device) -> None:
    pass


class _RMSNorm(torch.autograd.Function):
    """The fused operator's memory: it keeps its input and a number per row."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        rstd = x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)
        ctx.save_for_backward(x, weight, rstd)
        return torch.empty_like(x, memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight)


def _rms_norm(x: Any, weight: Any) -> Any:
    if not isinstance(x, DTensor):
        return _RMSNorm.apply(x, weight.to_local() if isinstance(weight, DTensor) else weight)
    local = _RMSNorm.apply(x.to_local(), weight.to_local(grad_placements=_gain_gradient(x)))
    return DTensor.from_local(local, x.device_mesh, x.placements, run_check=False, shape=x.shape, stride=x.stride())


def _gain_gradient(x: DTensor) -> list[Any]:
    """Each rank has its part of the sequence, and of the gain's gradient a summand."""
    return [Partial() if placement.is_shard() else placement for placement in x.placements]
