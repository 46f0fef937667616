"""Weights from any format to any other, in one process without a process group: for scripts.

A Hugging Face folder is written tensor by tensor; the other formats are written from memory, which may then hold the
whole model.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch
from torch import nn

from titan.checkpoint.collective import Alone
from titan.checkpoint.folders import step_folder
from titan.checkpoint.huggingface_save import save_weights
from titan.checkpoint.meta_files import write_meta
from titan.checkpoint.saving import Snapshot, write_snapshot
from titan.checkpoint.sources import Format, Source, model_layout, without_a_group
from titan.checkpoint.state import MODEL_PREFIX
from titan.checkpoint.weights import exported
from titan.config.errors import UserError
from titan.config.toml_text import to_toml
from titan.training.initialize import materialize, set_weight_dtype


def write_weights(
    source: Source, target: Path, to: Format, dtype: torch.dtype | None, vocab_size: int | None = None
) -> Path:
    """Store a model in another format. What is written appears whole, by a rename.

    Args:
        target: must not be there yet, or be an empty folder.
        dtype: of all floating-point tensors; None keeps each as it is.
        vocab_size: for "hf": write only so many rows of the vocabulary.

    Returns:
        What was written: the target, or for "dcp" the step-0 within it.

    Raises:
        UserError: the target is there, or the format can't hold this model.
        OSError: the file system refuses.
    """
    target = target.expanduser()
    if target.exists() and (target.is_file() or any(target.iterdir())):
        raise UserError(f"{target} is there already: choose another place, or remove it")
    if vocab_size is not None and to != "hf":
        raise UserError(f"--vocab_size {vocab_size}: only a Hugging Face folder is written with fewer rows")
    if to == "hf":
        if source.family.huggingface is None:
            raise UserError(f"model.name = {source.family.name}: this family has no Hugging Face format")
        save_weights(
            target,
            source.weights,
            Alone(),
            sizes=source.sizes,
            hf=source.family.huggingface,
            dtype=dtype,
            tokenizer_path=source.tokenizer_path,
            vocab_size=vocab_size,
        )
        return target
    if to == "dcp":
        return _write_dcp(source, target, dtype)
    state = {name: _read(source, name, dtype) for name in source.weights.infos}
    state |= {name: state[first] for name, first in model_layout(source.family, source.sizes).ties.items()}
    if to == "meta":
        write_meta(target, state, source.sizes, source.tokenizer_path)
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}.partial")
    torch.save(state, partial)
    partial.rename(target)
    return target


def _read(source: Source, name: str, dtype: torch.dtype | None) -> torch.Tensor:
    """A tensor in memory of its own: a view would be stored with all of the file that it is a view of."""
    tensor = source.weights.read(name, exported(source.weights.infos[name], dtype).dtype)
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


def _write_dcp(source: Source, root: Path, dtype: torch.dtype | None) -> Path:
    """A checkpoint of the weights alone, for checkpoint.initial_load_path."""

    if source.config is None:
        raise UserError(
            "a checkpoint names its model, and no flavor of titan's has these sizes: register one (docs/models.md) and "
            "name it by --experimental.custom_import, --model.name and --model.flavor"
        )
    config = dataclasses.replace(
        source.config, model=dataclasses.replace(source.config.model, tokenizer_path=source.tokenizer_path)
    )
    tensors = {
        MODEL_PREFIX + name: source.weights.read(name, exported(info, dtype).dtype)
        for name, info in source.weights.infos.items()
    }
    with without_a_group():
        write_snapshot(root, Snapshot(0, None, "{}", tensors, to_toml(config, {}), {}, model_only=True), Alone())
    return root / step_folder(root, 0).name


def load_model(source: Source, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """The model with its weights, for inference."""
    with torch.device("meta"):
        model = source.family.build(source.sizes)
    set_weight_dtype(model, dtype)
    materialize(model, device)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if name in source.weights.infos:
                tensor.copy_(source.weights.read(name, tensor.dtype))
    return model.eval()
