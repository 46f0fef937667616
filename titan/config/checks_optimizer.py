"""Rules of the optimizer: parameter groups, Muon, the optimizer in backward, what may be compiled."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from titan.config.derived import (
    batch_degree,
    compiles,
    global_batch_size,
    model_sizes,
    model_stages,
    state_dtype,
)
from titan.config.job_config import JobConfig
from titan.config.nearest import did_you_mean
from titan.config.rules import MODEL_KEYS, Mistakes, Rule
from titan.config.toml_text import DEFAULT
from titan.models.spec import model_families


def _groups(config: JobConfig, world_size: int) -> Mistakes:
    if not config.optimizer.groups:
        return
    # Torch is imported for those who ask for groups: only a model knows its parameters' names.
    import torch

    from titan.training.optimizer_groups import assign_groups

    with torch.device("meta"):
        model = model_families()[config.model.name].build(model_sizes(config))
    names = [name for name, _ in model.named_parameters()]
    used = set(assign_groups(config.optimizer.groups, names).values())
    for number, group in enumerate(config.optimizer.groups):
        if number in used:
            continue
        place = f'optimizer.groups, table {number + 1}: pattern = "{group.pattern}"'
        fits = [name for name, found in assign_groups([group], names).items() if found is not None]
        if fits:
            yield f"{place}: earlier tables, which count, have all that it fits ({fits[0]}, …); put it before them"
        else:
            hint = did_you_mean(group.pattern, [re.sub(r"\.\d+\.", ".*.", name) for name in names])
            yield f"{place}: fits no parameter of {config.model.name} {config.model.flavor}{hint}"


def _muon(config: JobConfig, world_size: int) -> Mistakes:
    if config.optimizer.name == "Muon" and model_stages(config) is None:
        yield (
            f'optimizer.name = "Muon": it is for matrices of the layers, and model family {config.model.name} doesn\'t '
            'say which modules are layers (ModelSpec.stages); use "AdamW"'
        )


def _early_step(config: JobConfig, world_size: int) -> Mistakes:
    """Whatever needs all gradients together can't be had when each is used and freed by itself."""
    if not config.optimizer.early_step_in_backward:
        return
    training, pp = config.training, config.parallelism.pipeline_parallel_degree
    ranks = batch_degree(config, world_size)
    batch, unit = global_batch_size(config, ranks), training.local_batch_size * ranks
    lacking = []
    if training.max_norm > 0:
        lacking.append(
            f"training.max_norm = 0, since a norm of all gradients is known too late (it is {training.max_norm:g})"
        )
    if batch != unit:
        lacking.append(f"no accumulation: training.global_batch_size = {unit} or -1 (it is {batch})")
    if training.nonfinite != "stop":
        lacking.append('training.nonfinite = "stop", since weights have changed by the time a number isn\'t finite')
    if pp > 1:
        lacking.append(f"no pipeline, whose microbatches add up gradients (pipeline_parallel_degree is {pp})")
    if compiles(config, "optimizer"):
        lacking.append('compile.components without "optimizer"')
    if config.optimizer.name == "Muon":
        lacking.append('optimizer.name = "AdamW" or "Adam", since Muon has ranks work on several matrices together')
    if lacking:
        yield f"optimizer.early_step_in_backward = true needs {'; '.join(lacking)}"


def _components(config: JobConfig, world_size: int) -> Mistakes:
    if config.compile.enable and not config.compile.components:
        yield "compile.components = []: nothing is left to compile; name some, or set compile.enable = false"
    if compiles(config, "optimizer") and config.optimizer.name == "Muon":
        yield 'compile.components has "optimizer": Muon isn\'t compiled; leave it out, or use optimizer.name = "AdamW"'


_BF16_HALF_STEP = 1 / 512  # the least change, relative to a number, that rounding may let through


RULES = (
    Rule(_groups, (*MODEL_KEYS, "optimizer.groups")),
    Rule(_muon, (*MODEL_KEYS, "optimizer.name")),
    Rule(
        _early_step,
        (
            "optimizer.early_step_in_backward",
            "optimizer.name",
            "training.max_norm",
            "training.nonfinite",
            "training.global_batch_size",
            "training.local_batch_size",
            "parallelism.data_parallel_replicate_degree",
            "parallelism.data_parallel_shard_degree",
            "parallelism.pipeline_parallel_degree",
            "compile.enable",
            "compile.components",
        ),
    ),
    Rule(_components, ("compile.enable", "compile.components", "optimizer.name")),
)


def warnings(config: JobConfig, origins: Mapping[str, str]) -> Iterator[str]:
    """See `checks.warn`."""
    if config.training.dtype == "bfloat16":
        yield (
            'training.dtype = "bfloat16": an update that is smaller than 1/512 of a weight is lost in rounding; norm '
            "gains, which start at 1, may never move. Weights in float32 lose none"
        )
    beta2 = config.optimizer.beta2
    if state_dtype(config) == "bfloat16" and 1 - beta2 < _BF16_HALF_STEP:
        yield (
            f"optimizer.beta2 = {beta2:g} with moments in bfloat16: a second moment changes by about {1 - beta2:.2g} "
            "of itself in a step, and less than 1/512 is lost in rounding; use at most 0.998, or moments in float32"
        )
    reasons = {
        "the optimizer is compiled": compiles(config, "optimizer"),
        f"moments are kept in {state_dtype(config)}, unlike weights": state_dtype(config) != config.training.dtype,
    }
    if origins["optimizer.implementation"] != DEFAULT and any(reasons.values()):
        why = next(reason for reason, holds in reasons.items() if holds)
        name = config.optimizer.implementation
        yield f'optimizer.implementation = "{name}" isn\'t used: {why}, for which there is but one'
