"""Tensor parallelism (Megatron-LM, arXiv 1909.08053) with sequence parallelism (arXiv 2205.05198), by DTensor.

A family gives a plan: which role each of its modules plays. Roles become placements here:

    x [B, S/tp, D] ──gather──▶ column products ──▶ row product ──reduce-scatter──▶ [B, S/tp, D]
                    [B, S, D]       heads, or the feed-forward's width, split

Without sequence parallelism the stream is whole on every rank: nothing to gather, an all-reduce after the row product.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, auto
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from titan.parallelisms.vocabulary import rows_of_rank


class Role(Enum):
    """What a module does with the residual stream."""

    EMBEDDING = auto()  # tokens → stream; its rows, the vocabulary, are split
    NORM = auto()  # stream → stream, token by token; its weights are whole on every rank
    BLOCK = auto()  # takes the stream as its first argument and needs whole sequences of it
    COLUMN = auto()  # a linear within a block whose outputs are split
    ROW = auto()  # a linear within a block whose inputs are split; gives back the stream
    HEAD = auto()  # stream → logits or loss; the vocabulary is split


def apply_tensor_parallel(
    model: nn.Module,
    mesh: DeviceMesh,
    plan: Mapping[str, Role],
    *,
    sequence_parallel: bool,
    float8: bool = False,
) -> None:
    """Split a model's weights over the ranks of `mesh`, in place. What a pipeline stage lacks is passed over.

    Args:
        mesh: the tp dimension.
        plan: role by module name; `*` stands for a layer's number.
        sequence_parallel: split the stream over the sequence between blocks, `[B, S/tp, D]`.
        float8: what is gathered for linears that were converted to float8, tensorwise, travels in it.
    """
    stream: Placement = Shard(1) if sequence_parallel else Replicate()
    styles: dict[Role, ParallelStyle] = {
        Role.EMBEDDING: _VocabularyEmbedding(stream),
        Role.NORM: SequenceParallel(use_local_output=True) if sequence_parallel else _ReplicatedNorm(),
        Role.BLOCK: _WholeSequences(stream),
        Role.COLUMN: ColwiseParallel(),
        Role.ROW: RowwiseParallel(output_layouts=stream),
        Role.HEAD: _VocabularyHead(stream),
    }
    for pattern, role in plan.items():
        for module in _matching(model, pattern):
            style = _float8_style(module, role, stream) if float8 else None
            parallelize_module(module, mesh, style or styles[role])


def _float8_style(module: nn.Module, role: Role, stream: Placement) -> ParallelStyle | None:
    """How a module of a float8 model is split, where that differs from high precision."""
    from titan.parallelisms.float8_tensor import Float8Row, Float8WholeSequences, is_float8  # needs torchao

    if role is Role.BLOCK and is_float8(module):
        return Float8WholeSequences(stream)
    return Float8Row(stream) if role is Role.ROW and is_float8(module) else None


def enable_async_tensor_parallel(mesh: DeviceMesh) -> None:
    """Let torch.compile overlap each gather with the product after it, and each product with its reduce-scatter.

    Both are cut into pieces that travel through symmetric memory while the next piece is computed (PyTorch's
    micro-pipelining pass, https://dev-discuss.pytorch.org/t/2487). Must come before compiled blocks first run; needs
    GPUs that reach each other's memory.

    Args:
        mesh: the tp dimension.
    """
    from torch._inductor import config
    from torch.distributed._symmetric_memory import enable_symm_mem_for_group

    config._micro_pipeline_tp = True
    # Deprecated, but in torch 2.13 the pass fuses nothing, silently, for a group without it.
    enable_symm_mem_for_group(mesh.get_group().group_name)


def _matching(model: nn.Module, pattern: str) -> list[nn.Module]:
    wanted = pattern.split(".")
    return [
        module
        for name, module in model.named_modules()
        if len(parts := name.split(".")) == len(wanted)
        and all(want in ("*", part) for want, part in zip(wanted, parts, strict=True))
    ]


class _WholeSequences(ParallelStyle):
    """Gathers the stream once for all column products of a block, and sums their gradients before scattering them."""

    def __init__(self, stream: Placement) -> None:
        self._stream = stream

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def gather(_: nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
            x = DTensor.from_local(args[0], device_mesh, [self._stream], run_check=False)
            return x.redistribute(placements=[Replicate()]), *args[1:]

        module.register_forward_pre_hook(gather)
        return module


class _ReplicatedNorm(ParallelStyle):
    """A norm over a whole stream: the same on every rank, gradients of its weights included.

    Its weights become DTensors all the same: then all of a model's weights lie on one mesh, which optimizers with
    foreach or fused kernels ask for.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def to_dtensor(_: nn.Module, args: tuple[torch.Tensor, ...], mesh: DeviceMesh) -> DTensor:
            return DTensor.from_local(args[0], mesh, [Replicate()], run_check=False)

        def to_local(_: nn.Module, output: DTensor, mesh: DeviceMesh) -> torch.Tensor:
            return output.to_local()

        # torch annotates these as returning nothing, but uses what they return.
        return distribute_module(module, device_mesh, None, to_dtensor, to_local)  # type: ignore[arg-type]


class _VocabularyEmbedding(ParallelStyle):
    """Each rank looks up the tokens whose rows it holds; the others' are zero, and the sum over ranks is the stream.

    Not DTensor's own embedding, whose backward makes a gradient of the whole vocabulary on every rank.
    """

    def __init__(self, stream: Placement) -> None:
        self._stream = stream

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, nn.Embedding)
        weight = distribute_tensor(module.weight, device_mesh, [Shard(0)], src_data_rank=None)
        module.register_parameter("weight", nn.Parameter(weight))
        module.forward = partial(self._look_up, module, device_mesh)  # type: ignore[method-assign]
        return module

    def _look_up(self, module: nn.Embedding, mesh: DeviceMesh, tokens: torch.Tensor) -> torch.Tensor:
        assert isinstance(module.weight, DTensor)
        rows = rows_of_rank(module.num_embeddings, mesh.size(), mesh.get_local_rank())
        mine = (tokens >= rows.start) & (tokens < rows.stop)
        found = F.embedding((tokens - rows.start).where(mine, 0), module.weight.to_local())
        summands = DTensor.from_local(found * mine.unsqueeze(-1), mesh, [Partial()], run_check=False)
        # A copy, because FSDP puts hooks on what a module returns and a view could lose them.
        return summands.redistribute(placements=[self._stream]).to_local().clone()


class _VocabularyHead(_WholeSequences):
    """Each rank computes the logits whose rows of the weight it holds, as a DTensor; the rest is the loss's."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, nn.Linear)
        weight = distribute_tensor(module.weight, device_mesh, [Shard(0)], src_data_rank=None)
        module.register_parameter("weight", nn.Parameter(weight))
        return super()._apply(module, device_mesh)
