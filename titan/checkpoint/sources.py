"""A model's weights at a path, whatever format they are in, for scripts: one process, no process group.

They are checked against the model that they are said to be, and read tensor by tensor, from memory-mapped files where
the format allows it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

import torch

from titan.checkpoint.folders import STEP_NAME, find_checkpoint, step_folder
from titan.checkpoint.huggingface_config import CONFIG_FILE, family_of, read_config
from titan.checkpoint.huggingface_load import check_copy, match_names
from titan.checkpoint.manifest import MANIFEST_FILE, ManifestError, find_damage
from titan.checkpoint.meta_files import PARAMS_FILE, open_meta
from titan.checkpoint.model_names import model_of_manifest, model_of_sizes
from titan.checkpoint.safetensors_files import StoredTensor, read_slice, stored_tensors
from titan.checkpoint.state import TensorInfo, compare, describe
from titan.checkpoint.tensor_files import stored_tensors as tensors_of_dcp
from titan.checkpoint.weights import StoredWeights, refuse_other_model
from titan.config.derived import model_sizes, tokenizer_path
from titan.config.errors import UserError
from titan.config.job_config import JobConfig
from titan.data.tokenizer import has_tokenizer
from titan.models.spec import ModelSpec, model_families

Format = Literal["dcp", "hf", "torch", "meta"]


class Source(NamedTuple):
    """A model's weights, opened.

    Attributes:
        format: what they are stored as.
        weights: every tensor of the model, a tied one once.
        family, sizes: the model.
        config: what names the model in [model]; None when no flavor of titan's has its sizes.
        tokenizer_path: as model.tokenizer_path; None when there is none with the weights.
    """

    format: Format
    weights: StoredWeights
    family: ModelSpec[Any]
    sizes: Any
    config: JobConfig | None
    tokenizer_path: str | None


def open_source(path: Path, named: JobConfig | None = None, tokenizer: str | None = None) -> Source:
    """Find out what is stored at a path, and check it against the model that it says it is.

    Args:
        path: a step-N folder, a folder of such ones (the newest counts), a Hugging Face folder, a folder of Meta's, or
            a torch file with titan's names.
        named: its [model] names the model where the path doesn't say; None when nobody named it.
        tokenizer: as model.tokenizer_path; None takes the one that is with the weights.

    Raises:
        UserError: there is nothing of these kinds, it is damaged, or it isn't the model that it is said to be.
    """
    path = path.expanduser()
    found: Format = _format(path)
    if found == "torch":
        source = _open_torch(path, named)
    elif found == "dcp":
        source = _open_dcp(path, named)
    elif found == "hf":
        source = _open_huggingface(path, named)
    else:
        source = _open_meta(path, named)
    return source._replace(weights=_checked(str(path), source), tokenizer_path=tokenizer or source.tokenizer_path)


def _format(path: Path) -> Format:
    if path.is_file():
        return "torch"
    if not path.is_dir():
        raise UserError(f"{path}: no such file or folder")
    if (path / MANIFEST_FILE).is_file() or any(STEP_NAME.fullmatch(entry.name) for entry in path.iterdir()):
        return "dcp"
    if (path / CONFIG_FILE).is_file():
        return "hf"
    if (path / PARAMS_FILE).is_file():
        return "meta"
    there = ", ".join(sorted(entry.name for entry in path.iterdir())[:8]) or "nothing"
    raise UserError(
        f"{path} is none of the formats: a checkpoint has {MANIFEST_FILE} (or step-N folders with one), a Hugging Face "
        f"folder {CONFIG_FILE}, one of Meta's {PARAMS_FILE}; it has {there}"
    )


class ModelLayout(NamedTuple):
    """The tensors of a model.

    Attributes:
        infos: by name, a tied one once.
        ties: other names of tied ones → their name in `infos`.
    """

    infos: dict[str, TensorInfo]
    ties: dict[str, str]


def model_layout(family: ModelSpec[Any], sizes: Any) -> ModelLayout:
    """What a model's state dict holds."""
    with torch.device("meta"):
        model = family.build(sizes)
    names: dict[int, str] = {}
    tensors: dict[str, torch.Tensor] = {}
    ties: dict[str, str] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        first = names.setdefault(id(tensor), name)
        if first == name:
            tensors[name] = tensor
        else:
            ties[name] = first
    return ModelLayout(describe(tensors), ties)


def _checked(place: str, source: Source) -> StoredWeights:
    """The weights under the model's names, once each.

    Raises:
        UserError: names or shapes are another model's, or tied weights differ.
    """
    weights = source.weights
    infos, ties = model_layout(source.family, source.sizes)
    for name in [name for name in ties if name in weights.infos]:
        if not torch.equal(weights.get(name), weights.get(ties[name])):
            raise UserError(
                f"{place}: {name} has other values than {ties[name]}, so the model isn't tied: name a flavor that "
                "isn't either, by --model.flavor"
            )
    own = {name: info for name, info in weights.infos.items() if name not in ties}
    refuse_other_model(place, *compare(own, infos))
    return StoredWeights({name: own[name] for name in infos}, weights.get)


# --- formats


def _open_torch(path: Path, named: JobConfig | None) -> Source:
    if named is None:
        raise UserError(
            f"{path}: a torch file doesn't say which model it is: name it by --model.name and --model.flavor"
        )
    try:
        tensors = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except Exception as error:  # pickle's, zip's and torch's own
        raise UserError(f"{path} can't be read as a torch file: {error}") from error
    if not isinstance(tensors, dict) or not all(isinstance(value, torch.Tensor) for value in tensors.values()):
        raise UserError(f"{path}: expected a dict of tensors by titan's names")
    weights = StoredWeights(describe(tensors), tensors.__getitem__)
    return Source("torch", weights, _family(named), model_sizes(named), named, tokenizer_path(named))


def _family(config: JobConfig) -> ModelSpec[Any]:
    return model_families()[config.model.name]


def _open_dcp(path: Path, named: JobConfig | None) -> Source:
    try:
        root, manifest = find_checkpoint(path.resolve())  # a link's own name needn't be step-N
    except ManifestError as error:
        raise UserError(f"{path}: no complete checkpoint there ({error})") from None
    folder = cast(Path, step_folder(root, manifest.step))  # it is what `path` is
    if damage := find_damage(folder, manifest.files, "size"):
        raise UserError(f"the checkpoint {folder} is damaged: {damage[0]}")
    config = model_of_manifest(manifest.config)
    sizes = model_sizes(config)
    model_of_sizes(sizes, named)
    return Source("dcp", _weights_of_dcp(folder), _family(config), sizes, config, tokenizer_path(config))


def _weights_of_dcp(folder: Path) -> StoredWeights:
    from torch.distributed.checkpoint.state_dict_loader import load

    from titan.checkpoint.dcp_storage import Reader

    prefix = "model."
    infos = {
        name.removeprefix(prefix): info for name, info in tensors_of_dcp(folder).items() if name.startswith(prefix)
    }
    reader = Reader(folder)
    index = reader.read_metadata()
    reader.read_metadata = lambda *_, **__: index  # type: ignore[method-assign]  # else parsed anew for each tensor

    def get(name: str) -> torch.Tensor:
        tensors = {prefix + name: torch.empty(infos[name].shape, dtype=infos[name].dtype)}
        with without_a_group():
            load(tensors, storage_reader=reader, no_dist=True)
        return tensors[prefix + name]

    return StoredWeights(infos, get)


@contextmanager
def without_a_group() -> Iterator[None]:
    """DCP warns of what is meant here: that this process works alone."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
        yield


def _open_huggingface(folder: Path, named: JobConfig | None) -> Source:
    content = read_config(folder)
    family = family_of(content) if named is None else _family(named)
    hf = family.huggingface
    if hf is None:
        raise UserError(f"model.name = {family.name}: this family has no Hugging Face format")
    sizes = hf.sizes(content)
    found = match_names(folder, stored_tensors(folder), sizes, hf)
    for name, copy in found.copies.items():
        check_copy(copy, found.tensors[name], [0] * len(copy.info.shape), copy.info.shape)
    weights = StoredWeights({name: stored.info for name, stored in found.tensors.items()}, _whole(found.tensors))
    return Source("hf", weights, family, sizes, model_of_sizes(sizes, named), _tokenizer_in(folder))


def _whole(tensors: Mapping[str, StoredTensor]) -> Callable[[str], torch.Tensor]:
    def get(name: str) -> torch.Tensor:
        stored = tensors[name]
        return read_slice(stored, [0] * len(stored.info.shape), stored.info.shape)

    return get


def _open_meta(folder: Path, named: JobConfig | None) -> Source:
    sizes, weights = open_meta(folder, None if named is None else model_sizes(named))
    family = model_families()["llama3"] if named is None else _family(named)
    return Source("meta", weights, family, sizes, model_of_sizes(sizes, named), _tokenizer_in(folder))


def _tokenizer_in(folder: Path) -> str | None:
    return str(folder) if has_tokenizer(folder) else None
