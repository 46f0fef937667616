"""Llama's weights in Meta's files: a consolidated.NN.pth per tensor-parallel rank, and params.json."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from titan.checkpoint.huggingface_save import copy_tokenizer
from titan.checkpoint.state import TensorInfo
from titan.checkpoint.weights import StoredWeights
from titan.config.errors import UserError
from titan.models.llama import meta
from titan.models.llama.sizes import LLAMA2_FLAVORS, LLAMA3_FLAVORS, LlamaSizes

PARAMS_FILE = "params.json"


def open_meta(folder: Path, sizes: LlamaSizes | None) -> tuple[LlamaSizes, StoredWeights]:
    """Sizes and weights, under titan's names and with titan's order of rows.

    Args:
        sizes: of the model that somebody named; None takes them from params.json.

    Raises:
        UserError: files are missing or broken, or the parts of a tensor don't make up a whole.
    """
    params = _read_params(folder)
    paths = sorted(folder.glob("consolidated.*.pth"))
    if not paths:
        raise UserError(f"{folder} has {PARAMS_FILE}, but no consolidated.00.pth")
    shards = [_read_shard(path) for path in paths]
    shapes: dict[str, list[tuple[int, ...]]] = {
        name: [_shape(path, shard, name) for path, shard in zip(paths, shards, strict=True)]
        for name in shards[0]
        if name not in meta.IGNORED
    }
    try:
        ffn_dim, vocab_size = (
            sum(shape[0] for shape in shapes[name]) for name in ("layers.0.feed_forward.w1.weight", "output.weight")
        )
    except KeyError as error:
        raise UserError(f"{paths[0]} has no {error.args[0]}: it isn't a Llama of Meta's") from None
    if sizes is None:
        known = [*LLAMA2_FLAVORS.values(), *LLAMA3_FLAVORS.values()]
        sizes = meta.sizes_from_params(params, ffn_dim, vocab_size, known)
    head_dim = sizes.head_dim
    dims = {name: meta.join_dim(name, parts, sizes.dim) for name, parts in shapes.items()}

    def get(name: str) -> torch.Tensor:
        parts, dim = [shard[name] for shard in shards], dims[name]
        whole = parts[0] if dim is None or len(parts) == 1 else torch.cat(parts, dim)
        return meta.to_half_split(whole, head_dim) if meta.is_rotated(name) else whole

    infos = {
        name: TensorInfo(meta.whole_shape(parts, dims[name]), shards[0][name].dtype) for name, parts in shapes.items()
    }
    return sizes, StoredWeights(infos, get)


def _read_params(folder: Path) -> dict[str, Any]:
    path = folder / PARAMS_FILE
    try:
        params = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path} can't be read: {error}") from error
    if not isinstance(params, dict):
        raise UserError(f"{path}: expected a JSON object, found {type(params).__name__}")
    return params


def _read_shard(path: Path) -> dict[str, torch.Tensor]:
    try:
        shard: dict[str, torch.Tensor] = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except Exception as error:  # pickle's, zip's and torch's own
        raise UserError(f"{path} can't be read as a torch file: {error}") from error
    return shard


def _shape(path: Path, shard: Mapping[str, torch.Tensor], name: str) -> tuple[int, ...]:
    if name not in shard:
        raise UserError(f"{path} has no {name}, which the other files have")
    return tuple(shard[name].shape)


def write_meta(folder: Path, state: Mapping[str, torch.Tensor], sizes: LlamaSizes, tokenizer_path: str | None) -> None:
    """Write all tensors into one consolidated.00.pth, with params.json and the tokenizer's files.

    Args:
        state: every tensor by titan's name, the head too when it is tied.

    Raises:
        UserError: Meta's Llama has no such sizes.
    """
    params = meta.params_from_sizes(sizes)
    partial = folder.with_name(f".{folder.name}.partial")
    partial.mkdir(parents=True, exist_ok=True)
    rotated = {
        name: meta.to_interleaved(tensor, sizes.head_dim) if meta.is_rotated(name) else tensor
        for name, tensor in state.items()
    }
    torch.save(rotated, partial / "consolidated.00.pth")
    (partial / PARAMS_FILE).write_text(json.dumps(params, indent=2) + "\n", encoding="utf-8")
    copy_tokenizer(tokenizer_path, partial)
    partial.rename(folder)
