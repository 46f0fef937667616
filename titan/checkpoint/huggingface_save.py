"""Weights to a Hugging Face folder: config.json, .safetensors files and their index, the tokenizer's files.

A tensor is gathered, written and dropped before the next one, so that no rank ever holds the whole model.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from titan.checkpoint.collective import Alone, Ranks
from titan.checkpoint.huggingface_config import CONFIG_FILE
from titan.checkpoint.safetensors_files import INDEX_FILE, SINGLE_FILE, SafetensorsFile, size_in_bytes
from titan.checkpoint.state import TensorInfo
from titan.checkpoint.storage import sync_folder, write_whole
from titan.checkpoint.weights import Weights, exported
from titan.config.errors import UserError
from titan.data.tokenizer import build_tokenizer
from titan.models.spec import HuggingFaceFormat
from titan.observability.logging import logger

FILE_BYTES = 5_000_000_000  # of tensors in a file, at most, unless one alone is larger


class _File(NamedTuple):
    """A file to be written.

    Attributes:
        rank: which one writes it.
        infos: what it will hold, by the model's names.
    """

    rank: int
    infos: dict[str, TensorInfo]


def save_weights(
    folder: str | Path,
    weights: Weights,
    ranks: Ranks | Alone,
    *,
    sizes: Any,
    hf: HuggingFaceFormat[Any],
    dtype: torch.dtype | None = None,
    tokenizer_path: str | None = None,
    vocab_size: int | None = None,
    file_bytes: int = FILE_BYTES,
) -> None:
    """Write a model as a folder that `transformers.AutoModelForCausalLM.from_pretrained` reads. Collective.

    A tensor is gathered, written and dropped before the next one. A file's tensors are all of one pipeline stage, whose
    first rank writes it: stages write at the same time, each at the speed of one writer. The folder appears whole, by a
    rename; until then it is called `.<name>.partial`.

    Args:
        folder: must not be there yet, or be empty; on a file system that all ranks see.
        weights: the model's; `LiveWeights` for one that is being trained, which stays as it is.
        sizes: the model's.
        hf: the family's `ModelSpec.huggingface`.
        dtype: of all floating-point tensors; None keeps each as it is.
        tokenizer_path: as `model.tokenizer_path`; its files are copied.
        vocab_size: write only so many rows of the vocabulary, without the padding behind them.
        file_bytes: tensors in a file, at most, unless one alone is larger.

    Raises:
        UserError: on all ranks, when the folder isn't empty, the format doesn't have such sizes, or rank 0 doesn't see
            the others' files.
        RuntimeError: on all ranks, when writing failed; it names ranks and causes.
    """
    folder = Path(folder).expanduser()
    partial = folder.with_name(f".{folder.name}.partial")
    task = f"write the weights to {folder}"
    rows = sizes.vocab_size if vocab_size is None else vocab_size
    config = ranks.on_first(task, lambda: _prepare(folder, partial, sizes, hf, rows))

    def announce() -> dict[str, TensorInfo]:
        return {name: _written(name, info, dtype, rows, hf) for name, info in weights.infos.items()}

    names = hf.names(sizes)
    files = ranks.on_each(task, announce, lambda by_rank: _plan(by_rank, names, file_bytes))
    ranks.on_each(
        task,
        lambda: _write(partial, files, weights, names, ranks.rank),
        lambda by_rank: _complete(folder, partial, files, names, by_rank, config, tokenizer_path),
    )
    logger.info(f"Wrote {folder}: {len(files)} file(s), {sum(map(_bytes, files.values())) / 2**20:.2f} MiB of weights")


def _prepare(folder: Path, partial: Path, sizes: Any, hf: HuggingFaceFormat[Any], rows: int) -> dict[str, Any]:
    """Make an empty folder to write into. Returns what config.json will say of the sizes."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} is there already: choose another place, or remove it")
    if not 1 <= rows <= sizes.vocab_size:
        raise UserError(f"vocab_size {rows}: the model has {sizes.vocab_size} rows; expected 1 to {sizes.vocab_size}")
    config = hf.config(sizes) | {"vocab_size": rows}
    if partial.exists():
        shutil.rmtree(partial)
    partial.mkdir(parents=True)
    return config


def _written(
    name: str, info: TensorInfo, dtype: torch.dtype | None, rows: int, hf: HuggingFaceFormat[Any]
) -> TensorInfo:
    shape = (rows, *info.shape[1:]) if name in hf.vocabulary else info.shape
    return exported(TensorInfo(shape, info.dtype), dtype)


def _plan(by_rank: Sequence[Mapping[str, TensorInfo]], names: Iterable[str], file_bytes: int) -> dict[str, _File]:
    """Which file holds what, by file name. Rank 0's work.

    Larger types come first in a file, so that each tensor begins at a multiple of its type's size.
    """
    infos: dict[str, tuple[int, TensorInfo]] = {}
    for rank, own in enumerate(by_rank):
        for name, info in own.items():
            infos.setdefault(name, (rank, info))
    names = list(names)
    if set(names) != infos.keys():
        raise ValueError(f"the model and its stored form differ in {sorted(set(names) ^ infos.keys())[:3]}")
    names.sort(key=lambda name: infos[name][0])  # of one stage after the other, each in the order of the forward pass
    files: list[_File] = []
    for name in names:
        rank, info = infos[name]
        if not files or files[-1].rank != rank or _bytes(files[-1]) + size_in_bytes(info) > file_bytes:
            files.append(_File(rank, {}))
        files[-1].infos[name] = info
    for number, file in enumerate(files):
        by_width = sorted(file.infos.items(), key=lambda item: -item[1].dtype.itemsize)
        files[number] = _File(file.rank, dict(by_width))
    if len(files) == 1:
        return {SINGLE_FILE: files[0]}
    return {f"model-{number:05}-of-{len(files):05}.safetensors": file for number, file in enumerate(files, start=1)}


def _bytes(file: _File) -> int:
    return sum(map(size_in_bytes, file.infos.values()))


@torch.no_grad()
def _write(
    folder: Path, files: Mapping[str, _File], weights: Weights, names: Mapping[str, str], rank: int
) -> dict[str, int]:
    """Gather this rank's tensors and write the files that are its own. Returns their sizes.

    A file that fails is given up, but its tensors are still gathered: the ranks that hold parts of them wait for this
    one.
    """
    written: dict[str, int] = {}
    failure: Exception | None = None
    for file_name, file in files.items():
        mine = [name for name in file.infos if name in weights.infos]
        if file.rank != rank:
            for name in mine:
                weights.read(name, file.infos[name].dtype)
            continue
        tensors = (weights.read(name, file.infos[name].dtype)[: file.infos[name].shape[0]] for name in mine)
        try:
            with SafetensorsFile(folder / file_name, {names[name]: info for name, info in file.infos.items()}) as out:
                for tensor in tensors:
                    out.write(tensor)
                written[file_name] = out.size
        except Exception as error:
            failure = error
            for _ in tensors:
                pass
    if failure is not None:
        raise failure
    return written


def _complete(
    folder: Path,
    partial: Path,
    files: Mapping[str, _File],
    names: Mapping[str, str],
    by_rank: Sequence[Mapping[str, int]],
    config: dict[str, Any],
    tokenizer_path: str | None,
) -> None:
    """Rank 0's part once all files are written: everything that isn't a tensor, and the folder's name."""
    for file_name, size in (item for sizes in by_rank for item in sizes.items()):
        path = partial / file_name
        if not path.is_file() or path.stat().st_size != size:
            raise UserError(f"rank 0 doesn't see {path}: {folder} has to be on a file system that all ranks share")
    if len(files) > 1:
        placed = {names[name]: file_name for file_name, file in files.items() for name in file.infos}
        index = {"metadata": {"total_size": sum(map(_bytes, files.values()))}, "weight_map": placed}
        _write_json(partial / INDEX_FILE, index)
    dtypes = {info.dtype for file in files.values() for info in file.infos.values()}
    widest = max(dtypes, key=lambda dtype: dtype.itemsize)
    tokenizer = build_tokenizer(tokenizer_path)
    ends = {"bos_token_id": tokenizer.bos_id, "eos_token_id": tokenizer.eos_id}
    _write_json(partial / CONFIG_FILE, config | ends | {"torch_dtype": str(widest).removeprefix("torch.")})
    _write_json(partial / "generation_config.json", ends)
    copy_tokenizer(tokenizer_path, partial)
    sync_folder(partial)
    partial.rename(folder)
    sync_folder(folder.parent)


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    write_whole(path, json.dumps(content, indent=2) + "\n")


def copy_tokenizer(path: str | None, folder: Path) -> None:
    """Copy the files of a tokenizer, as `model.tokenizer_path` names one, into a folder. The embedded one has none."""
    place = None if path is None else Path(path).expanduser()
    if place is None or not place.exists():  # bytes, or a name that experimental.custom_import registered
        return
    home = place if place.is_dir() else place.parent
    if place.is_file():
        files = {"tokenizer.json" if place.suffix == ".json" else "tokenizer.model": place}
    else:
        files = {"tokenizer.model": home / "original" / "tokenizer.model"}
        files |= {name: home / name for name in ("tokenizer.json", "tokenizer.model") if (home / name).is_file()}
    files |= {name: home / name for name in ("tokenizer_config.json", "special_tokens_map.json")}
    for name, file in files.items():
        if file.is_file():
            shutil.copyfile(file, folder / name)
