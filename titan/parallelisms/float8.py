"""Float8 training (arXiv 2209.05433), by torchao: matrix products of linears with operands of 8 bits.

An operand is scaled so that its largest magnitude is float8's, over the whole tensor (tensorwise) or over each row or
column (rowwise), and then rounded; the scale is computed anew each time. Weights, their gradients and the optimizer's
state keep their type and their names: a checkpoint doesn't know how its run multiplied.

torchao, an optional extra, is imported within the functions, and so is what `--job.check_only` needn't wait for.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import nn

from titan.config.derived import FLOAT8_UNIT, float8_recipe
from titan.config.errors import UserError
from titan.config.job_config import Float8
from titan.parallelisms.parallel_dims import ParallelDims


class Linears(NamedTuple):
    """Names of a model's linears, by what becomes of them.

    Attributes:
        converted: they multiply in float8.
        gathered: those of them whose weights FSDP also gathers in float8.
        filtered: left as they are, because float8.filter_fqns says so.
        unfit: left as they are, because float8 products can't take their sizes, or because they are of a class with a
            forward of its own.
    """

    converted: tuple[str, ...]
    gathered: tuple[str, ...]
    filtered: tuple[str, ...]
    unfit: tuple[str, ...]


def sort_linears(model: nn.Module, settings: Float8, dims: ParallelDims) -> Linears:
    """Which linears of a model, or of a pipeline stage, float8 is for.

    Tensor parallelism splits one size of a weight or the other, and what a rank holds must be multiples of FLOAT8_UNIT.
    FSDP gathers in float8 only weights that it cuts into equal parts.
    """
    linears = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    filtered = [name for name in linears if any(part in name for part in settings.filter_fqns)]
    size_unit, shard_unit = FLOAT8_UNIT * dims.tp, dims.tp * dims.dp_shard * dims.cp
    converted = [
        name
        for name, linear in linears.items()
        if name not in filtered
        and type(linear) is nn.Linear
        and linear.in_features % size_unit == linear.out_features % size_unit == 0
    ]
    gathered = [
        name
        for name in converted
        if settings.enable_fsdp_float8_all_gather and linears[name].out_features % shard_unit == 0
    ]
    unfit = [name for name in linears if name not in filtered and name not in converted]
    return Linears(*map(tuple, (converted, gathered, filtered, unfit)))


def convert_to_float8(model: nn.Module, settings: Float8, dims: ParallelDims) -> None:
    """Make linears of a model, or of a pipeline stage, multiply in float8, in place; before tensor parallelism."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    linears = sort_linears(model, settings, dims)
    recipe = Float8LinearConfig.from_recipe_name(float8_recipe(settings))
    for gathered in (True, False):
        names = {name for name in linears.converted if (name in linears.gathered) == gathered}
        if names:
            config = dataclasses.replace(recipe, enable_fsdp_float8_all_gather=gathered, emulate=settings.emulate)
            convert_to_float8_training(model, config=config, module_filter_fn=partial(_is_one_of, names))


def refuse_unconverted(parts: Sequence[nn.Module], settings: Float8, dims: ParallelDims) -> None:
    """See to it that a family's parallelize function has converted the linears that float8 is for.

    Raises:
        UserError: it left them as they are, so that float8 would silently do nothing.
    """
    left = [name for part in parts for name in sort_linears(part, settings, dims).converted]
    if left:
        raise UserError(
            f"float8.enable_float8_linear = true: the model family's parallelize function leaves {len(left)} linears "
            f"as they are ({left[0]}, …); it must call titan.parallelisms.float8.convert_to_float8 before tensor "
            "parallelism (docs/models.md)"
        )


def _is_one_of(names: set[str], module: nn.Module, name: str) -> bool:
    return name in names


def precomputes_scales(settings: Float8, dims: ParallelDims) -> bool:
    """Whether `precompute_scales` is to be called for a run.

    With tensor parallelism also unasked: only so do the parts of a weight that tp ranks hold share one scale. The scale
    is the same number in either way.
    """
    gathers = settings.enable_float8_linear and settings.enable_fsdp_float8_all_gather
    return gathers and (settings.precompute_float8_dynamic_scale_for_fsdp or dims.tp > 1)


def precompute_scales(parts: Sequence[nn.Module]) -> None:
    """Find the scales of all weights that FSDP gathers in float8 by one all-reduce per part, rather than one a weight.

    They hold until the weights change: to be called before the first step, and after each of the optimizer. Collective.
    """
    from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

    for part in parts:
        precompute_float8_dynamic_scale_for_fsdp(part)


def unwrapped(weight: torch.Tensor) -> torch.Tensor:
    """A weight, in the same memory, without what torchao puts around its shard for FSDP's gathers."""
    from torch.distributed.tensor import DTensor

    shard = weight.to_local() if isinstance(weight, DTensor) else weight
    if not hasattr(shard, "fsdp_pre_all_gather"):
        return weight
    plain: torch.Tensor = shard._tensor  # type: ignore[attr-defined]  # of torchao's class
    if not isinstance(weight, DTensor):
        return plain
    return DTensor.from_local(
        plain, weight.device_mesh, weight.placements, run_check=False, shape=weight.shape, stride=weight.stride()
    )
