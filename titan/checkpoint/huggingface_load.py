"""Weights from a Hugging Face folder straight into each rank's part of a model.

A rank reads the slices that it holds, one after the other: it needs no more than one tensor beside its own part.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from titan.checkpoint.collective import Alone, Ranks
from titan.checkpoint.huggingface_config import CONFIG_FILE, differing_sizes, read_config
from titan.checkpoint.safetensors_files import StoredTensor, read_slice, stored_tensors
from titan.checkpoint.state import TensorInfo, describe
from titan.checkpoint.weights import refuse_other_model
from titan.config.errors import UserError
from titan.models.spec import HuggingFaceFormat
from titan.observability.logging import logger
from titan.parallelisms.float8 import unwrapped
from titan.training.initialize import local_shard


class _Found(NamedTuple):
    """Where the tensors of a model are stored.

    Attributes:
        tensors: by the model's names.
        copies: a second copy of some of them.
    """

    tensors: dict[str, StoredTensor]
    copies: dict[str, StoredTensor]


def load_weights(
    folder: str | Path,
    tensors: Mapping[str, torch.Tensor],
    ranks: Ranks | Alone,
    *,
    sizes: Any,
    hf: HuggingFaceFormat[Any],
) -> None:
    """Fill a model's tensors, in place, from a Hugging Face folder. Collective.

    Each rank reads the slices that it holds, one tensor at a time, and casts them to its own type. Where the model's
    vocabulary has more rows than the folder's, the rest are padding: they become zero.

    Args:
        folder: config.json and .safetensors files, on a file system that all ranks see.
        tensors: this rank's, by parameter name, plain or DTensors of any placements.
        sizes: the model's.
        hf: the family's `ModelSpec.huggingface`.

    Raises:
        UserError: on all ranks, when config.json has other sizes, a name is missing, unexpected or of another shape, or
            a file is missing or broken. Weights may be half loaded in the last case.
        RuntimeError: on all ranks, when reading failed in another way; it names ranks and causes.
    """
    folder = Path(folder).expanduser()
    live = {name: unwrapped(tensor.detach()) for name, tensor in tensors.items()}
    found = ranks.on_each(
        f"look for weights in {folder}",
        lambda: describe(live),
        lambda by_rank: _find(folder, {name: info for infos in by_rank for name, info in infos.items()}, sizes, hf),
    )
    ranks.on_each(f"read the weights in {folder}", lambda: _fill(live, found), lambda _: None)


def _find(folder: Path, ours: Mapping[str, TensorInfo], sizes: Any, hf: HuggingFaceFormat[Any]) -> _Found:
    """The stored tensors of a model, after all that can be checked without reading them. Rank 0's work."""
    if differing := differing_sizes(sizes, hf.sizes(read_config(folder))):
        raise UserError(f"{folder / CONFIG_FILE} is of another model: {', '.join(differing)}")
    stored = stored_tensors(folder)
    found = match_names(folder, stored, sizes, hf)
    reshaped = []
    for name, info in ours.items():
        theirs = found.tensors[name].info.shape
        if name in hf.vocabulary and theirs[0] < info.shape[0]:
            rows = f"{info.shape[0] - theirs[0]} rows of {name} are padding, set to zero: {folder} has {theirs[0]}"
            logger.warning(rows)
            theirs = (info.shape[0], *theirs[1:])
        if theirs != info.shape:
            reshaped.append(f"{found.tensors[name].name} (stored {list(theirs)}, here {list(info.shape)})")
    refuse_other_model(str(folder), [], [], reshaped)
    return found


def match_names(folder: Path, stored: Mapping[str, StoredTensor], sizes: Any, hf: HuggingFaceFormat[Any]) -> _Found:
    """The stored tensors by the model's names.

    Raises:
        UserError: names are missing, or are none of the model's.
    """
    names, copies = hf.names(sizes), hf.copies(sizes)
    of = {theirs: ours for ours, theirs in names.items()}
    missing = [f"{theirs} (titan's {ours})" for ours, theirs in names.items() if theirs not in stored]
    unexpected = [name for name in stored if name not in of and name not in copies and not name.endswith(hf.ignored)]
    refuse_other_model(str(folder), missing, unexpected, [])
    return _Found(
        {ours: stored[theirs] for ours, theirs in names.items()},
        {of[original]: stored[copy] for copy, original in copies.items() if copy in stored},
    )


@torch.no_grad()
def _fill(live: Mapping[str, torch.Tensor], found: _Found) -> None:
    for name, tensor in live.items():
        shard, start = local_shard(tensor)
        stored = found.tensors[name]
        rows = max(0, min(shard.shape[0], stored.info.shape[0] - start[0]))
        shard[rows:].zero_()
        if shard[:rows].numel() == 0:
            continue
        if name in found.copies:
            check_copy(found.copies[name], stored, start, shard[:rows].shape)
        shard[:rows].copy_(read_slice(stored, start, shard[:rows].shape))


def check_copy(copy: StoredTensor, original: StoredTensor, start: Sequence[int], shape: Sequence[int]) -> None:
    """Refuse a second copy of a tied weight that isn't one, in the slice that begins at `start`.

    Raises:
        UserError: it has another shape or other values.
    """
    same_shape = copy.info.shape == original.info.shape
    if not same_shape or not torch.equal(read_slice(copy, start, shape), read_slice(original, start, shape)):
        raise UserError(
            f"{copy.path}: {copy.name} has other values than {original.name}, so the model isn't tied: choose a flavor "
            "that isn't either"
        )
