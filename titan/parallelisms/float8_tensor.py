"""Float8 in tensor parallelism: what is gathered for products with one scale per tensor travels in 8 bits.

In the forward pass that is the stream before a block's column products, in the backward pass the gradient before a row
product. What is summed over ranks stays in high precision. torchao's own styles do the same, but gather tensors of
float8 types, which gloo doesn't know; here their bytes travel.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate
from torch.distributed.tensor.parallel import ParallelStyle, RowwiseParallel
from torchao.float8.float8_linear import Float8Linear
from torchao.float8.float8_scaling_utils import hp_tensor_to_float8_dynamic
from torchao.float8.float8_training_tensor import Float8TrainingTensor, GemmInputRole, LinearMMConfig


def is_float8(module: nn.Module) -> bool:
    """All linears of this module multiply in float8; it may be a linear itself."""
    return all(isinstance(part, Float8Linear) for part in module.modules() if isinstance(part, nn.Linear))


class Float8WholeSequences(ParallelStyle):
    """Casts and gathers the stream once for all column products of a block that `is_float8`."""

    def __init__(self, stream: Placement) -> None:
        self._stream = stream

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        linear = next(part for part in module.modules() if isinstance(part, Float8Linear))
        dtype, products = linear.config.cast_config_input.target_dtype, linear.linear_mm_config

        def gather(_: nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
            x = DTensor.from_local(args[0], device_mesh, [self._stream], run_check=False)
            return _GatherInput.apply(x, dtype, products), *args[1:]

        module.register_forward_pre_hook(gather)
        return module


class Float8Row(ParallelStyle):
    """A float8 linear whose inputs are split; it gives back the stream."""

    def __init__(self, stream: Placement) -> None:
        self._stream = stream

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, Float8Linear)
        dtype, products = module.config.cast_config_grad_output.target_dtype, module.linear_mm_config

        def reduce(_: nn.Module, args: tuple[torch.Tensor, ...], summands: DTensor) -> torch.Tensor:
            stream = summands.redistribute(placements=[self._stream])
            return _GatherGradient.apply(stream, dtype, products).to_local()

        RowwiseParallel(output_layouts=Partial(), use_local_output=False)._apply(module, device_mesh)
        module.register_forward_hook(reduce)
        return module


def _gather(x: DTensor, dtype: torch.dtype, products: LinearMMConfig, role: GemmInputRole) -> DTensor:
    """`x` whole on every rank, in float8 by one scale: DTensor finds the largest magnitude over all ranks."""
    part = hp_tensor_to_float8_dynamic(x, dtype, products, gemm_input_role=role).to_local()
    data = DTensor.from_local(part._data.view(torch.uint8), x.device_mesh, x.placements, run_check=False).full_tensor()
    whole = Float8TrainingTensor(data.view(dtype), part._scale, x.dtype, products, role)
    return DTensor.from_local(whole, x.device_mesh, [Replicate()], run_check=False)


# torch.compile takes both as they are and traces what they do; it couldn't follow the subclasses through Python.
@torch._dynamo.allow_in_graph
class _GatherInput(torch.autograd.Function):
    """x `[B, S/tp, D]` → float8 `[B, S, D]`; backward sums the gradient over ranks and scatters it."""

    @staticmethod
    def forward(ctx: Any, x: DTensor, dtype: torch.dtype, products: LinearMMConfig) -> DTensor:
        ctx.stream = x.placements
        return _gather(x, dtype, products, GemmInputRole.INPUT)

    @staticmethod
    def backward(ctx: Any, *grads: DTensor) -> tuple[DTensor, None, None]:
        return grads[0].redistribute(placements=ctx.stream), None, None


@torch._dynamo.allow_in_graph
class _GatherGradient(torch.autograd.Function):
    """The stream as it is; backward gives its gradient whole and in float8 to the product that it came from."""

    @staticmethod
    def forward(ctx: Any, stream: DTensor, dtype: torch.dtype, products: LinearMMConfig) -> DTensor:
        ctx.dtype, ctx.products = dtype, products
        return stream

    @staticmethod
    def backward(ctx: Any, *grads: DTensor) -> tuple[DTensor, None, None]:
        return _gather(grads[0], ctx.dtype, ctx.products, GemmInputRole.GRAD_OUTPUT), None, None
