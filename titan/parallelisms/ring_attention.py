"""Ring attention (arXiv 2310.01889): keys and values travel from rank to rank while each rank attends to those it has.

No rank ever holds more than two blocks of keys and values, its own apart. Partial results over blocks of keys are
merged exactly by their log-sum-exp, and the flash backward needs nothing but the merged output and log-sum-exp.

What a rank sends, and receives, for E = B * H_kv * S/cp * D elements of a key block in a dtype of w bytes:

    forward     cp - 1 hops of 2Ew (keys and values)
    backward    cp - 1 hops of 2Ew, and cp - 1 hops of 8E (their gradients, summed on the way in fp32)

In the backward the sum of a block's gradients starts at the rank after the block's owner and ends at the owner, who
adds its own part there: one hop fewer than if it started with the owner.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _resolve_process_group
from torch.distributed.distributed_c10d import GroupName

from titan.config.errors import UserError

_aten = torch.ops.aten


def ring_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, group: dist.ProcessGroup, balanced: bool
) -> torch.Tensor:
    """Causal attention of this rank's queries to the keys of all ranks; collective, differentiable.

    torch.compile can't trace point-to-point transfers. It sees one operator forward and one backward, of fixed names:
    titan::ring_attention_forward and titan::ring_attention_backward.

    Args:
        query: `[B, H, S/cp, D]`, the tokens that `SequenceShards` of the same `balanced` gives this rank.
        key, value: `[B, H_kv, S/cp, D]` of the same tokens.

    Returns:
        `[B, H, S/cp, D]` in query's dtype.

    Raises:
        UserError: the accelerator's flash kernels don't take this dtype or this size of heads.
    """
    if not on_cpu(query) and (refusal := flash_refusal(query)):
        raise UserError(
            f'parallelism.context_parallel_rotate_method = "alltoall" computes with flash attention, {refusal}, or set '
            'parallelism.context_parallel_rotate_method = "allgather"'
        )
    out, _, _ = ring_attention_forward(query, torch.stack((key, value)), group.group_name, balanced)
    return out


def on_cpu(x: torch.Tensor) -> bool:
    """Whether a CPU's kernels are called; in an estimate they are an accelerator's, whatever a tensor says."""
    return x.device.type == "cpu"


def flash_refusal(query: torch.Tensor) -> str | None:
    """Why an accelerator's flash kernel doesn't take heads like `query`'s and what to do; None when it takes them."""
    if query.dtype not in (torch.bfloat16, torch.float16):
        dtype = str(query.dtype).removeprefix("torch.")
        return f'which takes bfloat16 and float16, not {dtype}: set training.mixed_precision_param = "bfloat16"'
    if query.shape[-1] % 8:
        return f"which takes heads of a multiple of 8, not {query.shape[-1]}: choose another model.flavor"
    return None


class _Hop:
    """A tensor on its way to the next rank of the ring, while the previous rank's comes in."""

    def __init__(self, sent: torch.Tensor, group: dist.ProcessGroup) -> None:
        rank, degree = dist.get_rank(group), dist.get_world_size(group)
        self.sent = sent  # keeps the memory until the transfer is done
        self.received = torch.empty_like(sent)
        # One batch, because where sends block (NCCL) every rank would wait for a receiver that is itself sending.
        self.works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, sent, group=group, group_peer=(rank + 1) % degree),
                dist.P2POp(dist.irecv, self.received, group=group, group_peer=(rank - 1) % degree),
            ]
        )

    def wait(self) -> torch.Tensor:
        for work in self.works:
            work.wait()
        return self.received


class _Seen(NamedTuple):
    """The part of a block that counts: these of the local queries look at these of the block's keys."""

    queries: slice
    keys: slice
    causal: bool


def seen_of_block(rank: int, source: int, length: int, balanced: bool) -> _Seen | None:
    """What the `length` queries of `rank` see of the keys of `source`; None for nothing.

    Balanced, every rank holds an early and a late chunk. Of a rank before this one the early chunk lies before all
    queries and the late one after all; a rank after this one lies, as a whole, between this one's early and late
    queries. Either way it is half of the square, on all ranks in all steps.
    """
    everything, early, late = slice(0, length), slice(0, length // 2), slice(length // 2, length)
    if source == rank:
        return _Seen(everything, everything, causal=True)
    if source < rank:
        return _Seen(everything, early if balanced else everything, causal=False)
    return _Seen(late, everything, causal=False) if balanced else None


@torch.library.custom_op("titan::ring_attention_forward", mutates_args=())
def ring_attention_forward(
    query: torch.Tensor, key_value: torch.Tensor, group_name: str, balanced: bool
) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """`query` `[B, H, S/cp, D]`, `key_value` `[2, B, H_kv, S/cp, D]`.

    Returns:
        The output `[B, H, S/cp, D]`; and for the backward, the fp32 log-sum-exp `[B, H, S/cp]` over all keys and
        flash_forward's state of no dropout.
    """
    group = _resolve_process_group(GroupName(group_name))
    rank, degree, length = dist.get_rank(group), dist.get_world_size(group), query.shape[2]
    out = torch.zeros(query.shape, dtype=torch.float32, device=query.device)
    lse = torch.full(query.shape[:-1], -torch.inf, dtype=torch.float32, device=query.device)
    block = key_value
    unused_rng: list[torch.Tensor] = []
    for step in range(degree):
        hop = _Hop(block, group) if step < degree - 1 else None  # travels while this step computes
        if seen := seen_of_block(rank, (rank - step) % degree, length, balanced):
            part, part_lse, unused_rng = flash_forward(query[:, :, seen.queries], block[..., seen.keys, :], seen.causal)
            _merge(out[:, :, seen.queries], lse[:, :, seen.queries], part, part_lse)
        if hop:
            block = hop.wait()
    return out.to(query.dtype), lse, unused_rng


@torch.library.custom_op("titan::ring_attention_backward", mutates_args=())
def ring_attention_backward(
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key_value: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    unused_rng: list[torch.Tensor],
    group_name: str,
    balanced: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of `query` and `key_value`, from the gradient of the output and what the forward got and returned."""
    group = _resolve_process_group(GroupName(group_name))
    rank, degree, length = dist.get_rank(group), dist.get_world_size(group), query.shape[2]
    grad_query = torch.zeros(query.shape, dtype=torch.float32, device=query.device)
    block = key_value
    own = torch.zeros(key_value.shape, dtype=torch.float32, device=key_value.device)
    travelling: _Hop | None = None  # the gradient of a block that isn't this rank's
    for step in range(degree):
        hop = _Hop(block, group) if step < degree - 1 else None
        grad_block = own if step == 0 else torch.zeros_like(own)
        if seen := seen_of_block(rank, (rank - step) % degree, length, balanced):
            query_part, grad_part, out_part, lse_part = (x[:, :, seen.queries] for x in (query, grad_out, out, lse))
            to_query, to_block = flash_backward(
                query_part, grad_part, out_part, lse_part, block[..., seen.keys, :], seen.causal, unused_rng
            )
            grad_query[:, :, seen.queries] += to_query
            grad_block[..., seen.keys, :] += to_block
        if travelling:
            grad_block += travelling.wait()
        if step > 0:
            travelling = _Hop(grad_block, group)
        if hop:
            block = hop.wait()
    if travelling:
        own += travelling.wait()
    return grad_query.to(query.dtype), own.to(key_value.dtype)


@ring_attention_forward.register_fake
def _fake_forward(
    query: torch.Tensor, key_value: torch.Tensor, group_name: str, balanced: bool
) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    _, _, unused_rng = flash_forward(query, key_value, causal=True)  # whose own fake knows the device's state
    return query.new_empty(query.shape), query.new_empty(query.shape[:-1], dtype=torch.float32), unused_rng


@ring_attention_backward.register_fake
def _fake_backward(
    grad_out: torch.Tensor, query: torch.Tensor, key_value: torch.Tensor, *_: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    return query.new_empty(query.shape), key_value.new_empty(key_value.shape)


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    query, key_value, ctx.group_name, ctx.balanced = inputs
    out, lse, unused_rng = output
    ctx.mark_non_differentiable(lse)
    ctx.save_for_backward(query, key_value, out, lse, *unused_rng)


def _backward(ctx: Any, grad_out: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor, None, None]:
    query, key_value, out, lse, *unused_rng = ctx.saved_tensors
    gradients = ring_attention_backward(grad_out, query, key_value, out, lse, unused_rng, ctx.group_name, ctx.balanced)
    return *gradients, None, None


ring_attention_forward.register_autograd(_backward, setup_context=_save_for_backward)


def _merge(out: torch.Tensor, lse: torch.Tensor, part: torch.Tensor, part_lse: torch.Tensor) -> None:
    """Add, in place and in fp32, what attention to further keys gave: a softmax over the union of the keys.

    Args:
        out, part: `[B, H, S, D]`, the softmax-weighted means of the values.
        lse, part_lse: `[B, H, S]`, the logarithms of the softmax's denominators; -inf where no key was seen yet.
    """
    total = torch.logaddexp(lse, part_lse)
    out.mul_((lse - total).exp_().unsqueeze(-1))
    out.addcmul_(part.float(), (part_lse - total).exp_().unsqueeze(-1))
    lse.copy_(total)


def flash_forward(
    query: torch.Tensor, key_value: torch.Tensor, causal: bool
) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """The device's flash kernel; all take grouped heads. `query` `[B, H, n, D]`, `key_value` `[2, B, H_kv, m, D]`.

    Returns:
        The output `[B, H, n, D]`, the fp32 log-sum-exp `[B, H, n]`, and the state of the dropout that there isn't,
        which the accelerators' backward asks for all the same.
    """
    key, value = key_value.unbind()
    if on_cpu(query):
        out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, causal)
        return out, lse, []
    out, lse, _, _, _, _, seed, offset, _ = _aten._scaled_dot_product_flash_attention(query, key, value, 0.0, causal)
    return out, lse, [seed, offset]


def flash_backward(
    query: torch.Tensor,
    grad_out: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    key_value: torch.Tensor,
    causal: bool,
    unused_rng: list[torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of `query` and `key_value` from the part of the softmax that lies on these keys.

    Args:
        out, lse: those of the softmax over all keys, not over these alone. The kernel computes each probability anew as
            exp(score - lse), so it gets the true ones, and the gradients of the parts add up to those of the whole.
    """
    key, value = key_value.unbind()
    lse = lse.contiguous()  # the kernels do their own indexing
    if on_cpu(query):
        grad_query, *grad_key_value = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad_out, query, key, value, out, lse, 0.0, causal
        )
    else:
        offsets = None, None  # of packed sequences; all of these have the same length
        lengths = query.shape[2], key.shape[2]
        grad_query, *grad_key_value = _aten._scaled_dot_product_flash_attention_backward(
            grad_out, query, key, value, out, lse, *offsets, *lengths, 0.0, causal, *unused_rng
        )
    return grad_query, torch.stack(grad_key_value)
