"""Rules that span fields. Each message has the keys, their values, the arithmetic, and the nearest legal values.

A rule is a function of (config, world size) that yields mistakes, with a row in `RULES`. What only deserves a word, and
stops no run, is at the end, under `warn`.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping, Sequence

from titan.config import (
    checks_activation,
    checks_assets,
    checks_checkpoint,
    checks_data,
    checks_documents,
    checks_float8,
    checks_metrics,
    checks_mixture,
    checks_optimizer,
    checks_parallelism,
    checks_pipeline,
    checks_profiling,
)
from titan.config.derived import (
    batch_degree,
    global_batch_size,
    model_sizes,
    pipeline_microbatches,
    resolved_steps,
    tokenizer_path,
)
from titan.config.errors import UserError
from titan.config.job_config import JobConfig
from titan.config.machine import is_elsewhere
from titan.config.nearest import did_you_mean
from titan.config.rules import MODEL_KEYS, SEQUENCES, Mistakes, Rule, listed, nearest_multiples, window_lengths
from titan.config.toml_text import DEFAULT
from titan.models.spec import model_families


def check(config: JobConfig, world_size: int, reported: set[str], rules: Sequence[Rule] | None = None) -> list[str]:
    """All mistakes across fields, for a run of this many ranks. Imports experimental.custom_import first.

    Args:
        reported: keys that a mistake was reported of already; rules that read one are left out.
        rules: which to check; all when None.
    """
    doubtful = set(reported)
    mistakes: list[str] = []
    for rule in RULES if rules is None else rules:
        if doubtful.isdisjoint(rule.reads) and not (rule.local and is_elsewhere()):
            found = list(rule.find(config, world_size))
            mistakes += found
            doubtful.update(rule.spoils if found else ())
    return mistakes


def _custom_import(config: JobConfig, world_size: int) -> Mistakes:
    module = config.experimental.custom_import
    if not module:
        return
    try:
        importlib.import_module(module)
    except Exception as error:  # whatever the user's module raises
        reason = f"{type(error).__name__}: {error}"
        yield f"experimental.custom_import = {module}: the import failed with {reason}; set PYTHONPATH to where it lies"


def _global_batch(config: JobConfig, world_size: int) -> Mistakes:
    local, ranks = config.training.local_batch_size, batch_degree(config, world_size)
    batch, unit = global_batch_size(config, ranks), local * ranks
    if batch % unit:
        yield (
            f"training.global_batch_size = {batch}: not a multiple of training.local_batch_size {local} * "
            f"{ranks} batch ranks (dp_replicate * dp_shard) = {unit}; "
            f"nearest legal: {listed(nearest_multiples(batch, unit))}"
        )


def _model_name(config: JobConfig, world_size: int) -> Mistakes:
    name, families = config.model.name, model_families()
    if name not in families:
        hint = did_you_mean(name, families)
        yield f'model.name = "{name}": no such model family; there are {listed(families)}{hint}'


def _flavor(config: JobConfig, world_size: int) -> Mistakes:
    name, flavor = config.model.name, config.model.flavor
    flavors = model_families()[name].flavors
    if flavor not in flavors:
        hint = did_you_mean(flavor, flavors)
        yield f'model.flavor = "{flavor}": {name} has no such flavor; it has {listed(flavors)}{hint}'


def _seq_len(config: JobConfig, world_size: int) -> Mistakes:
    longest = model_sizes(config).max_seq_len
    for key, seq_len in window_lengths(config).items():
        if seq_len > longest:
            yield (
                f"{key} = {seq_len}: model {config.model.name} {config.model.flavor} has positions for "
                f"{longest} tokens; use at most {longest}"
            )


def _vocabulary(config: JobConfig, world_size: int) -> Mistakes:
    from titan.data.tokenizer import build_tokenizer  # its libraries are slow to import: not before they are needed

    path, rows = tokenizer_path(config), model_sizes(config).vocab_size
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


CUSTOM_IMPORT = Rule(_custom_import, ("experimental.custom_import",), ("experimental.custom_import", "model.name"))

_BATCH_RANKS = ("parallelism.data_parallel_replicate_degree", "parallelism.data_parallel_shard_degree")
_MODEL = ("model.name", "model.flavor")

RULES = (
    CUSTOM_IMPORT,
    *checks_parallelism.DEGREE_RULES,
    Rule(_global_batch, (*_BATCH_RANKS, "training.global_batch_size", "training.local_batch_size")),
    Rule(_model_name, ("experimental.custom_import", "model.name"), ("model.name",)),
    Rule(_flavor, _MODEL, ("model.flavor",)),
    Rule(_seq_len, (*_MODEL, *SEQUENCES)),
    *checks_assets.RULES,
    Rule(_vocabulary, (*MODEL_KEYS, "model.vocab_size", "model.tokenizer_path", "model.hf_assets_path"), local=True),
    *checks_parallelism.MODEL_RULES,
    *checks_pipeline.RULES,
    *checks_activation.RULES,
    *checks_optimizer.RULES,
    *checks_float8.RULES,
    *checks_mixture.RULES,
    *checks_data.RULES,
    *checks_documents.RULES,
    *checks_checkpoint.RULES,
    *checks_profiling.RULES,
    *checks_metrics.RULES,
)


def warn(config: JobConfig, world_size: int, origins: Mapping[str, str]) -> list[str]:
    """What deserves a word in a config without mistakes.

    Args:
        origins: where each value came from, as LoadedConfig has it.
    """
    global_batch = global_batch_size(config, batch_degree(config, world_size))
    steps = resolved_steps(config, global_batch)
    warnings = [
        *_schedule_warnings(config, steps),
        *_pipeline_warnings(config),
        *_loss_warnings(config),
        *checks_activation.warnings(config),
        *checks_checkpoint.warnings(config),
        *checks_data.warnings(config),
        *checks_mixture.warnings(config, steps, global_batch * config.training.seq_len),
        *checks_documents.warnings(config),
        *([] if is_elsewhere() else _vocabulary_warnings(config)),
        *checks_optimizer.warnings(config, origins),
        *checks_float8.warnings(config),
        *_validation_warnings(config),
        *checks_profiling.warnings(config, steps),
    ]
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


def _pipeline_warnings(config: JobConfig) -> Iterator[str]:
    ranks, microbatches = config.parallelism.pipeline_parallel_degree, pipeline_microbatches(config)
    if microbatches < ranks:
        yield (
            f"parallelism.pipeline_parallel_degree = {ranks}: only {microbatches} microbatch(es) for as many ranks, so "
            "that most of them wait; raise training.local_batch_size or lower "
            "parallelism.pipeline_parallel_microbatch_size"
        )


def _loss_warnings(config: JobConfig) -> Iterator[str]:
    settings, chunked = config.parallelism, config.loss.name == "linear_cross_entropy"
    if settings.disable_loss_parallel and chunked and settings.tensor_parallel_degree > 1:
        yield (
            "parallelism.disable_loss_parallel = true changes nothing beside loss.name = 'linear_cross_entropy', which "
            "never gathers logits; loss.name = 'cross_entropy' does"
        )
    forward_first = settings.pipeline_parallel_schedule in ("GPipe", "LoopedBFS")
    if forward_first and chunked and settings.pipeline_parallel_degree > 1:
        yield (
            f"parallelism.pipeline_parallel_schedule = {settings.pipeline_parallel_schedule!r}: all microbatches go "
            "forward first, and loss.name = 'linear_cross_entropy' keeps a gradient of the head's weight for each; "
            "another schedule, or loss.name = 'cross_entropy', needs less memory where the vocabulary is large"
        )


def _validation_warnings(config: JobConfig) -> Iterator[str]:
    own = config.validation
    if own.enable and own.dataset is None and own.dataset_path is None and own.dataset_split is None:
        yield (
            "validation.enable = true without validation.dataset, dataset_path or dataset_split: the loss is measured "
            "on the text that the model trains on"
        )


def _vocabulary_warnings(config: JobConfig) -> Iterator[str]:
    """Bytes are what the debug model is for; of any other they use a small part."""
    from titan.data.tokenizer import build_tokenizer

    model = config.model
    rows, ids = model_sizes(config).vocab_size, build_tokenizer(tokenizer_path(config)).vocab_size
    if ids < rows / 2 and model.flavor != "debugmodel":
        owner = "model.vocab_size" if model.vocab_size else f"{model.name} {model.flavor}"
        yield f"{owner} has {rows:,} rows, the tokenizer only {ids:,} ids: set model.tokenizer_path to the model's own"
