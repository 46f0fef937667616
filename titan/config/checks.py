"""Rules that span fields. Each message has the keys, their values, the arithmetic, and the nearest legal values.

A rule is a function of (config, world size) that yields mistakes, with a row in `RULES`. What only deserves a word, and
stops no run, is at the end, under `warn`.
"""

from __future__ import annotations

import glob
import importlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from titan.config.derived import global_batch_size, model_sizes, resolved_steps
from titan.config.errors import UserError
from titan.config.job_config import JobConfig
from titan.config.nearest import did_you_mean
from titan.config.toml_text import DEFAULT
from titan.models.spec import model_families

Mistakes = Iterator[str]


class Rule(NamedTuple):
    """One rule that spans fields.

    Attributes:
        find: yields a text per mistake.
        reads: keys whose values it needs; it is left out when one of them is reported already.
        spoils: keys that later rules can't rely on once this one found a mistake.
    """

    find: Callable[[JobConfig, int], Mistakes]
    reads: tuple[str, ...]
    spoils: tuple[str, ...] = ()


def check(config: JobConfig, world_size: int, reported: set[str]) -> list[str]:
    """All mistakes across fields, for a run of this many ranks. Imports experimental.custom_import first.

    Args:
        reported: keys that a mistake was reported of already; rules that read one are left out.
    """
    doubtful = set(reported)
    mistakes: list[str] = []
    for rule in RULES:
        if doubtful.isdisjoint(rule.reads):
            found = list(rule.find(config, world_size))
            mistakes += found
            doubtful.update(rule.spoils if found else ())
    return mistakes


def batch_degree(config: JobConfig, world_size: int) -> int:
    """Ranks that read different rows: dp_replicate * dp_shard, for degrees that fit the world size."""
    replicate = config.parallelism.data_parallel_replicate_degree
    shard = config.parallelism.data_parallel_shard_degree
    return replicate * (world_size // replicate if shard == -1 else shard)


def _custom_import(config: JobConfig, world_size: int) -> Mistakes:
    module = config.experimental.custom_import
    if not module:
        return
    try:
        importlib.import_module(module)
    except Exception as error:  # whatever the user's module raises
        reason = f"{type(error).__name__}: {error}"
        yield f"experimental.custom_import = {module}: the import failed with {reason}; set PYTHONPATH to where it lies"


def _degrees(config: JobConfig, world_size: int) -> Mistakes:
    replicate = config.parallelism.data_parallel_replicate_degree
    shard = config.parallelism.data_parallel_shard_degree
    divisors = [degree for degree in range(1, world_size + 1) if world_size % degree == 0]
    if shard == -1 and world_size % replicate:
        yield (
            f"parallelism.data_parallel_replicate_degree = {replicate}: dp_replicate {replicate} doesn't divide "
            f"WORLD_SIZE = {world_size}; legal beside data_parallel_shard_degree = -1: {_listed(divisors)}"
        )
    elif shard != -1 and replicate * shard != world_size:
        yield (
            f"parallelism.data_parallel_replicate_degree = {replicate}, "
            f"parallelism.data_parallel_shard_degree = {shard}: dp_replicate {replicate} * dp_shard {shard} = "
            f"{replicate * shard}, but WORLD_SIZE = {world_size}; legal: "
            f"{_listed([f'{degree} * {world_size // degree}' for degree in divisors])} "
            "(data_parallel_shard_degree = -1 takes all ranks that are left)"
        )


def _global_batch(config: JobConfig, world_size: int) -> Mistakes:
    local, ranks = config.training.local_batch_size, batch_degree(config, world_size)
    batch, unit = global_batch_size(config, ranks), local * ranks
    if batch % unit:
        below = batch // unit * unit
        legal = _listed([number for number in (below, below + unit) if number])
        yield (
            f"training.global_batch_size = {batch}: not a multiple of training.local_batch_size {local} * "
            f"{ranks} batch ranks (dp_replicate * dp_shard) = {unit}; nearest legal: {legal}"
        )


def _model_name(config: JobConfig, world_size: int) -> Mistakes:
    name, families = config.model.name, model_families()
    if name not in families:
        hint = did_you_mean(name, families)
        yield f'model.name = "{name}": no such model family; there are {_listed(families)}{hint}'


def _flavor(config: JobConfig, world_size: int) -> Mistakes:
    name, flavor = config.model.name, config.model.flavor
    flavors = model_families()[name].flavors
    if flavor not in flavors:
        hint = did_you_mean(flavor, flavors)
        yield f'model.flavor = "{flavor}": {name} has no such flavor; it has {_listed(flavors)}{hint}'


def _seq_len(config: JobConfig, world_size: int) -> Mistakes:
    seq_len, longest = config.training.seq_len, model_sizes(config).max_seq_len
    if seq_len > longest:
        yield (
            f"training.seq_len = {seq_len}: model {config.model.name} {config.model.flavor} has positions for "
            f"{longest} tokens; use at most {longest}"
        )


def _vocabulary(config: JobConfig, world_size: int) -> Mistakes:
    from titan.data.tokenizer import build_tokenizer  # its libraries are slow to import: not before they are needed

    path, rows = config.model.tokenizer_path, model_sizes(config).vocab_size
    try:
        ids = build_tokenizer(path).vocab_size
    except UserError as error:
        yield str(error)
        return
    if ids > rows:
        key = "model.vocab_size" if config.model.vocab_size else f"the vocabulary of model.flavor {config.model.flavor}"
        yield (
            f"{key} = {rows}: the tokenizer ({path or 'bytes, embedded'}) has {ids} ids; "
            f"set model.vocab_size to {ids} or more"
        )


def _dataset_path(config: JobConfig, world_size: int) -> Mistakes:
    dataset, path = config.training.dataset, config.training.dataset_path
    if dataset not in ("text", "json", "parquet"):
        return
    if path is None:
        yield f'training.dataset = "{dataset}" needs training.dataset_path: a file, a folder or a glob'
    elif not os.path.exists(path) and not glob.glob(path, recursive=True):
        beside = [str(file) for file in Path(path).parent.glob("*")]
        yield f'training.dataset_path = "{path}": matches no file{did_you_mean(path, beside)}'


def _load_step(config: JobConfig, world_size: int) -> Mistakes:
    if config.checkpoint.load_step != -1 and not config.checkpoint.enable:
        yield (
            f"checkpoint.load_step = {config.checkpoint.load_step}: nothing is loaded while checkpoint.enable = false; "
            "set checkpoint.enable = true, or leave load_step at -1"
        )


_DEGREES = ("parallelism.data_parallel_replicate_degree", "parallelism.data_parallel_shard_degree")
_MODEL = ("model.name", "model.flavor")

RULES = (
    Rule(_custom_import, ("experimental.custom_import",), ("experimental.custom_import", "model.name")),
    Rule(_degrees, _DEGREES, _DEGREES),
    Rule(_global_batch, (*_DEGREES, "training.global_batch_size", "training.local_batch_size")),
    Rule(_model_name, ("experimental.custom_import", "model.name"), ("model.name",)),
    Rule(_flavor, _MODEL, ("model.flavor",)),
    Rule(_seq_len, (*_MODEL, "training.seq_len")),
    Rule(_vocabulary, ("experimental.custom_import", *_MODEL, "model.vocab_size", "model.tokenizer_path")),
    Rule(_dataset_path, ("training.dataset", "training.dataset_path")),
    Rule(_load_step, ("checkpoint.load_step", "checkpoint.enable")),
)


def warn(config: JobConfig, world_size: int, origins: Mapping[str, str]) -> list[str]:
    """What deserves a word in a config without mistakes.

    Args:
        origins: where each value came from, as LoadedConfig has it.
    """
    steps = resolved_steps(config, global_batch_size(config, batch_degree(config, world_size)))
    warnings = list(_schedule_warnings(config, steps))
    if config.training.total_tokens is not None and origins["training.steps"] != DEFAULT:
        warnings.append(
            f"training.total_tokens = {config.training.total_tokens} decides the length of the run: {steps} steps; "
            f"training.steps = {config.training.steps} ({origins['training.steps']}) isn't used"
        )
    return warnings


def _schedule_warnings(config: JobConfig, steps: int) -> Iterator[str]:
    schedule = config.lr_scheduler
    total = steps if schedule.total_steps is None else schedule.total_steps
    warmup = schedule.warmup_steps
    decay = 0 if schedule.decay_ratio is None else round(total * schedule.decay_ratio)
    if warmup > total:
        yield (
            f"lr_scheduler.warmup_steps = {warmup}: more than the schedule's {total} steps; "
            f"the warm-up is cut to {total} and nothing decays"
        )
    elif warmup + decay > total:
        yield (
            f"lr_scheduler.warmup_steps {warmup} + decay_ratio {schedule.decay_ratio} * {total} steps = "
            f"{warmup + decay}: more than the schedule's {total} steps; the decay is cut to {total - warmup}"
        )
    if total < steps:
        factor = schedule.min_lr_factor
        yield (
            f"lr_scheduler.total_steps = {total}: the run has {steps} steps; "
            f"after step {total} the learning rate stays at {factor:g} of its peak"
        )


def _listed(names: Iterable[object]) -> str:
    """`1, 2 or 4`."""
    texts = [str(name) for name in names]
    return texts[0] if len(texts) == 1 else f"{', '.join(texts[:-1])} or {texts[-1]}"
