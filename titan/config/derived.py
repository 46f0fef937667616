"""Numbers of a run that follow from its config, for a config that passed the checks."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, Literal

from titan.config.job_config import Float8, JobConfig, TextSource, Training
from titan.models.spec import Stages, model_families
from titan.parallelisms.parallel_dims import ParallelDims

# Operands of a float8 product (torch._scaled_mm) have sizes that are multiples of it.
FLOAT8_UNIT = 16


def batch_degree(config: JobConfig, world_size: int) -> int:
    """Ranks that read different rows: dp_replicate * dp_shard, where -1 takes all ranks that are left."""
    return ParallelDims.from_config(config.parallelism, world_size).batch_degree


def global_batch_size(config: JobConfig, batch_degree: int) -> int:
    """Windows per optimizer step over all ranks.

    Args:
        batch_degree: ranks that read different rows, dp_replicate * dp_shard.
    """
    given = config.training.global_batch_size
    return config.training.local_batch_size * batch_degree if given == -1 else given


def pipeline_microbatches(config: JobConfig) -> int:
    """Microbatches into which a pipeline cuts local_batch_size windows; 1 without a pipeline."""
    settings = config.parallelism
    if settings.pipeline_parallel_degree == 1:
        return 1
    return config.training.local_batch_size // settings.pipeline_parallel_microbatch_size


def microbatch_rows(config: JobConfig) -> int:
    """Windows that go through the model at once."""
    settings = config.parallelism
    pipelined = settings.pipeline_parallel_degree > 1
    return settings.pipeline_parallel_microbatch_size if pipelined else config.training.local_batch_size


def float8_recipe(settings: Float8) -> str:
    """What shares a scale in float8 products: "tensorwise" unless another recipe is set."""
    return settings.recipe_name or "tensorwise"


def resolved_steps(config: JobConfig, global_batch: int) -> int:
    """Optimizer steps of the run: training.steps, or those that training.total_tokens needs, rounded up.

    Args:
        global_batch: windows per step, as `global_batch_size` gives it.
    """
    total_tokens = config.training.total_tokens
    return (
        config.training.steps if total_tokens is None else -(-total_tokens // (global_batch * config.training.seq_len))
    )


def huggingface_folder(config: JobConfig) -> str:
    """Where checkpoint.initial_load_in_hf takes weights from."""
    folder = config.checkpoint.initial_load_path or config.model.hf_assets_path
    assert folder is not None  # checks_checkpoint.py
    return folder


def tokenizer_path(config: JobConfig) -> str | None:
    """Where the tokenizer is: model.tokenizer_path, else in model.hf_assets_path; None for the embedded one."""
    from titan.data.tokenizer import has_tokenizer  # slow to import: not before it is needed

    path, assets = config.model.tokenizer_path, config.model.hf_assets_path
    return assets if path is None and assets is not None and has_tokenizer(assets) else path


def compiles(config: JobConfig, component: Literal["model", "loss", "optimizer"]) -> bool:
    """Whether a part of the run goes through torch.compile."""
    return config.compile.enable and component in config.compile.components


def state_dtype(config: JobConfig) -> str:
    """The type of the optimizer's moments."""
    return config.optimizer.state_dtype or config.training.dtype


def model_sizes(config: JobConfig) -> Any:
    """The family's sizes of the flavor, with the normalisation and the vocabulary that the config sets.

    Where another trainer's step is estimated, rotary tables are as long as its windows: it makes them so.

    Raises:
        KeyError: no family or flavor of that name; the checks refuse such a config.
    """
    chosen = {"norm_type": config.model.norm_type, "vocab_size": config.model.vocab_size}
    if config.estimation.compat is not None:
        chosen["max_seq_len"] = config.training.seq_len
    sizes = model_families()[config.model.name].flavors[config.model.flavor]
    return dataclasses.replace(sizes, **{name: value for name, value in chosen.items() if value is not None})


def model_stages(config: JobConfig) -> Stages | None:
    """The model's modules for cutting it into pipeline stages; None when the family can't be cut.

    Raises:
        KeyError: as `model_sizes`.
    """
    stages = model_families()[config.model.name].stages
    return None if stages is None else stages(model_sizes(config))


def source_names(training: Training) -> list[str]:
    """What the sources of a mixture are called, in their order."""
    return [
        source.name or (Path(source.dataset_path).name if source.dataset_path else "") or source.dataset
        for source in training.sources
    ]


def source_text(training: Training, source: TextSource) -> Training:
    """The [training] section as if this source of a mixture were the run's only dataset."""
    unset_is_ours = {
        "dataset_split": source.dataset_split,
        "text_field": source.text_field,
        "text_unit": source.text_unit,
    }
    return dataclasses.replace(
        training,
        dataset=source.dataset,
        dataset_path=source.dataset_path,
        dataset_subset=source.dataset_subset,
        infinite=source.when_exhausted == "loop",
        sources=[],
        source_stages=[],
        **{key: value for key, value in unset_is_ours.items() if value is not None},  # type: ignore[arg-type]
    )


def validation_text(config: JobConfig) -> Training:
    """The [training] section as validation reads text: once, in order, from its own dataset where one is named."""
    own = config.validation
    changes: dict[str, object] = {
        "dataset_path": own.dataset_path,
        "dataset_split": own.dataset_split,
        "seq_len": own.seq_len,
        "local_batch_size": own.local_batch_size,
    }
    changes = {key: value for key, value in changes.items() if value is not None}
    if own.dataset is not None:  # the training set's place means nothing to another dataset
        changes = {"dataset_path": None, "dataset_subset": None, **changes, "dataset": own.dataset}
    changes |= {"sources": [], "source_stages": []}
    return dataclasses.replace(config.training, **changes, infinite=False, shuffle=False)  # type: ignore[arg-type]


def rank_log(config: JobConfig, rank: int) -> Path | None:
    """The file that a rank keeps its log in; None when it keeps none."""
    folder = config.metrics.rank_log_folder
    return None if folder is None else Path(config.job.dump_folder) / folder / f"rank_{rank}.log"


def keeps_reduced_gradients(job: JobConfig, batch_degree: int) -> bool:
    """Whether what FSDP's reduce-scatter gives is the gradient itself, until the optimizer's step has passed.

    Not where it is added to an earlier microbatch's, cast, copied to the CPU, or used up by an optimizer in backward.
    """
    training = job.training
    return (
        global_batch_size(job, batch_degree) == training.local_batch_size * batch_degree
        and training.mixed_precision_reduce == training.dtype
        and not training.enable_cpu_offload
        and not job.optimizer.early_step_in_backward
    )
