"""Rules of documents in windows: their packing, the mask that keeps them apart, and the kernels that know of it."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

from titan.config.derived import compiles, model_sizes
from titan.config.job_config import JobConfig
from titan.config.machine import machine
from titan.config.rules import MODEL_KEYS, Mistakes, Rule
from titan.models.spec import model_families

_MASK, _BACKEND, _PACKING = "model.attn_mask", "model.attn_backend", "training.packing"
_CP, _ROTATE = "parallelism.context_parallel_degree", "parallelism.context_parallel_rotate_method"


def _family(config: JobConfig, world_size: int) -> Mistakes:
    if config.model.attn_mask == "causal":
        return
    import torch

    with torch.device("meta"):
        model = model_families()[config.model.name].build(model_sizes(config))
    if "documents" not in inspect.signature(model.forward).parameters:
        yield (
            f'{_MASK} = "document": the models of family {config.model.name} take no documents, a parameter '
            f'"documents" of forward (docs/models.md); leave it at "causal"'
        )


def _ring(config: JobConfig, world_size: int) -> Mistakes:
    settings = config.parallelism
    if config.model.attn_mask == "causal" or settings.context_parallel_degree == 1:
        return
    if settings.context_parallel_rotate_method == "alltoall":
        yield f'{_ROTATE} = "alltoall" can\'t keep documents apart ({_MASK} = "document"); set it to "allgather"'


def _kernel(config: JobConfig, world_size: int) -> Mistakes:
    backend = config.model.attn_backend
    if backend == "sdpa":
        return
    given = f'{_BACKEND} = "{backend}"'
    if not (device := machine()).accelerates:
        lacking = (
            "FlexAttention has no backward pass" if backend == "flex" else "variable-length attention has no kernel"
        )
        yield f'{given}: {lacking} on a CPU, and this machine computes on {device.name}; leave it at "sdpa"'
    if (cp := config.parallelism.context_parallel_degree) > 1:
        yield f'{given}: {_CP} = {cp} has an attention of its own, over all ranks\' keys; leave it at "sdpa"'
    if backend == "flex" and not compiles(config, "model"):
        yield (
            f"{given}: its kernel is made by torch.compile, without which all scores are stored; set "
            'compile.enable = true with "model" in compile.components'
        )
    if backend == "varlen" and (precision := config.training.mixed_precision_param) == "float32":
        yield f"{given}: its kernel computes in 16 bits; set training.mixed_precision_param ({precision}) to bfloat16"


def _best_fit(config: JobConfig, world_size: int) -> Mistakes:
    sources = [source.dataset for source in config.training.sources] or [config.training.dataset]
    if config.training.packing == "best_fit" and "tokens" in sources:
        yield (
            f'{_PACKING} = "best_fit": token files are read by the numbers of their windows, which are cut in advance '
            'every training.seq_len; train on the text itself, or leave it at "concatenate"'
        )


RULES = (
    Rule(_family, (_MASK, "model.vocab_size", "model.norm_type", *MODEL_KEYS)),
    Rule(_ring, (_MASK, _CP, _ROTATE)),
    Rule(_kernel, (_BACKEND, _CP, "compile.enable", "compile.components", "training.mixed_precision_param")),
    Rule(_best_fit, (_PACKING, "training.dataset", "training.sources")),
)


def warnings(config: JobConfig) -> Iterator[str]:
    """A kernel without use."""
    if config.model.attn_backend != "sdpa" and config.model.attn_mask == "causal":
        yield (
            f'{_BACKEND} = "{config.model.attn_backend}" changes nothing with {_MASK} = "causal", which "sdpa" has '
            'fused kernels for too; it is for "document"'
        )
