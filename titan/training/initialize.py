"""Initial weights that don't depend on the layout: same seed, same bits, on any number of ranks.

A weight's value is a function of the seed, its parameter's full name and its place in the whole parameter. Each
parameter is drawn in fixed blocks of rows, each from a generator of its own, so that a rank draws only the blocks that
meet its shard, and never holds more than one block beside it.
"""

from __future__ import annotations

import math
from typing import cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from titan.data.shuffle import derive_key
from titan.models.spec import Constant, Normal, TrainableModel

_BLOCK_ELEMENTS = 2**20  # 4 MiB of fp32; part of the definition of the initial weights


def set_weight_dtype(model: nn.Module, dtype: torch.dtype) -> None:
    """Make a model's parameters ones of this type, while it is on meta. Buffers stay as they are."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)


def materialize(model: nn.Module, device: torch.device, *, weights_on_cpu: bool = False) -> None:
    """Give a model built on meta its memory: buffers filled, ties restored, weights still undefined.

    Args:
        weights_on_cpu: FSDP keeps them there and takes copies to the device; buffers it leaves alone.

    Raises:
        RuntimeError: something is left on meta.
    """
    model.to_empty(device="cpu" if weights_on_cpu else device)
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(device))
    trainable = cast(TrainableModel, model)
    trainable.tie_weights()  # to_empty gave each module a tensor of its own
    trainable.init_buffers(device)
    left = [name for name, tensor in [*model.named_parameters(), *model.named_buffers()] if tensor.is_meta]
    if left:
        raise RuntimeError(f"no memory was given to {', '.join(left)}")


@torch.no_grad()
def initialize_weights(model: nn.Module, seed: int) -> None:
    """Fill every parameter as `model.parameter_init` says."""
    trainable = cast(TrainableModel, model)
    for name, parameter in model.named_parameters():
        match trainable.parameter_init(name):
            case Constant(value):
                parameter.fill_(value)
            case Normal(std):
                _fill_normal(parameter, std, seed, name)


def _fill_normal(parameter: torch.Tensor, std: float, seed: int, name: str) -> None:
    shard, offset = local_shard(parameter)
    if shard.numel() == 0:
        return
    columns = tuple(slice(start, start + size) for start, size in zip(offset[1:], shard.shape[1:], strict=True))
    rows_per_block = max(1, _BLOCK_ELEMENTS // max(1, math.prod(parameter.shape[1:])))
    first_row, end_row = offset[0], offset[0] + shard.shape[0]
    for block in range(first_row // rows_per_block, math.ceil(end_row / rows_per_block)):
        start = block * rows_per_block
        rows = min(rows_per_block, parameter.shape[0] - start)
        values = _draw(derive_key(seed, "weights", name) + block, (rows, *parameter.shape[1:]), std)
        begin, end = max(start, first_row), min(start + rows, end_row)
        mine = (slice(begin - start, end - start), *columns)
        shard[begin - first_row : end - first_row] = values[mine]


def _draw(key: int, shape: tuple[int, ...], std: float) -> torch.Tensor:
    # Drawn on the CPU, whatever the device: the generators of different devices give different numbers.
    # torch's CPU generator takes 32 bits of a seed; successive ones keep the blocks of a parameter apart.
    generator = torch.Generator("cpu").manual_seed(key % 2**32)
    return torch.empty(shape, device="cpu").normal_(0.0, std, generator=generator).clamp_(-3 * std, 3 * std)


def local_shard(parameter: torch.Tensor) -> tuple[torch.Tensor, tuple[int, ...]]:
    """This rank's part of a parameter and the global index of its first element."""
    if not isinstance(parameter, DTensor):
        return parameter, (0,) * parameter.ndim
    _, offset = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    return parameter.to_local(), tuple(offset)
