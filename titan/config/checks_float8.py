"""Rules of float8. Those of the machine and of the model need torch, which is imported once float8 is asked for."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterator

from titan.config.derived import FLOAT8_UNIT, float8_recipe, model_sizes
from titan.config.job_config import JobConfig
from titan.config.machine import is_elsewhere, machine
from titan.config.nearest import did_you_mean
from titan.config.rules import MODEL_KEYS, Mistakes, Rule, listed, nearest_multiples
from titan.config.toml_text import shown
from titan.models.spec import model_families
from titan.parallelisms.parallel_dims import ParallelDims

_ENABLE = "float8.enable_float8_linear"
_FILTER = "float8.filter_fqns"
_GATHER = "float8.enable_fsdp_float8_all_gather"
_PRECOMPUTE = "float8.precompute_float8_dynamic_scale_for_fsdp"
_HEAD = "output"


def _machine(config: JobConfig, world_size: int) -> Mistakes:
    if not config.float8.enable_float8_linear:
        return
    if not is_elsewhere() and importlib.util.find_spec("torchao") is None:
        yield f"{_ENABLE} = true: torchao isn't installed: pip install 'titan[float8]'"
    if config.float8.emulate:
        return
    if not (device := machine()).multiplies_float8:
        who = "it is planned for" if is_elsewhere() else "this machine computes on"
        yield (
            f"{_ENABLE} = true: needs a GPU that multiplies in float8, of compute capability 8.9 or more ({who} "
            f"{device.name}); float8.emulate = true computes the same anywhere, slowly, for tests"
        )


def _gathers(config: JobConfig, world_size: int) -> Mistakes:
    settings = config.float8
    if not settings.enable_float8_linear:
        return
    if settings.enable_fsdp_float8_all_gather and (recipe := float8_recipe(settings)) != "tensorwise":
        yield (
            f'{_GATHER} = true: recipe "{recipe}" has a scale for each row and for each column of a weight, and what '
            f'is gathered has one; set float8.recipe_name = "tensorwise", or {_GATHER} = false'
        )
    if settings.precompute_float8_dynamic_scale_for_fsdp and not settings.enable_fsdp_float8_all_gather:
        yield (
            f"{_PRECOMPUTE} = true: the scales are those of gathers in float8, and {_GATHER} = false; "
            "set both to true or both to false"
        )


def _linears(config: JobConfig, world_size: int) -> Mistakes:
    settings = config.float8
    if not settings.enable_float8_linear:
        return
    import torch

    from titan.parallelisms.float8 import sort_linears

    dims = ParallelDims.from_config(config.parallelism, world_size)
    with torch.device("meta"):
        model = model_families()[config.model.name].build(model_sizes(config))
    linears = sort_linears(model, settings, dims)
    names = sorted({*linears.converted, *linears.filtered, *linears.unfit})
    given = f"{_FILTER} = {shown(settings.filter_fqns)}"
    for part in settings.filter_fqns:
        if not any(part in name for name in names):
            last_parts = sorted({name.rpartition(".")[2] for name in names})
            hint = did_you_mean(part, last_parts)
            yield f'{given}: no linear has "{part}" in its name; names end in {listed(last_parts)}{hint}'
    if _HEAD in names and _HEAD not in linears.filtered:
        yield (
            f'{given}: it must keep the head, "{_HEAD}", in high precision: its product belongs to the loss, which '
            f'rounded logits would distort; add "{_HEAD}"'
        )
    if not linears.converted:
        unit = f"{FLOAT8_UNIT} * tensor_parallel_degree {dims.tp}" if dims.tp > 1 else str(FLOAT8_UNIT)
        yield (
            f"{_ENABLE} = true: nothing is left to convert: {_FILTER} keeps {len(linears.filtered)} of {len(names)} "
            f"linears, {len(linears.unfit)} have sizes that aren't multiples of {unit}; set it to false"
        )


def _tokens(config: JobConfig, world_size: int) -> Mistakes:
    """The gradient of a weight is a product over tokens."""
    if not config.float8.enable_float8_linear or float8_recipe(config.float8) == "rowwise_with_gw_hp":
        return
    seq_len, cp = config.training.seq_len, config.parallelism.context_parallel_degree
    rows = config.training.local_batch_size
    if config.parallelism.pipeline_parallel_degree > 1:
        rows = config.parallelism.pipeline_parallel_microbatch_size
    if rows * seq_len % (FLOAT8_UNIT * cp):
        unit = FLOAT8_UNIT * cp // math.gcd(FLOAT8_UNIT * cp, rows)
        over = f" / context_parallel_degree {cp}" if cp > 1 else ""
        yield (
            f"training.seq_len = {seq_len}: {rows} window(s) * {seq_len}{over} tokens go into a product, and float8 "
            f"products take multiples of {FLOAT8_UNIT}; nearest legal: {listed(nearest_multiples(seq_len, unit))}"
        )


_DEGREES = tuple(
    f"parallelism.{name}_degree"
    for name in (
        "data_parallel_replicate",
        "data_parallel_shard",
        "context_parallel",
        "tensor_parallel",
        "pipeline_parallel",
    )
)
_BATCH = ("training.local_batch_size", "parallelism.pipeline_parallel_microbatch_size")

RULES = (
    Rule(_machine, (_ENABLE, "float8.emulate")),
    Rule(_gathers, (_ENABLE, "float8.recipe_name", _GATHER, _PRECOMPUTE)),
    Rule(_linears, (_ENABLE, _FILTER, "model.vocab_size", *MODEL_KEYS, *_DEGREES)),
    Rule(_tokens, (_ENABLE, "float8.recipe_name", "training.seq_len", *_BATCH, *_DEGREES)),
)


def warnings(config: JobConfig) -> Iterator[str]:
    """Float8 that is slower than none."""
    if not config.float8.enable_float8_linear:
        return
    if config.float8.emulate:
        yield "float8.emulate = true: float8 products are computed in float32, slower than without float8"
    elif not config.compile.enable:
        yield (
            f"{_ENABLE} = true without torch.compile: each cast to float8 is several kernels, which cost more than "
            "the products save; set compile.enable = true"
        )
