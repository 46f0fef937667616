"""Tensors in .safetensors files: what a folder holds, a slice of a stored tensor, and files written tensor by tensor.

The safetensors library, of the extra `hf`, is imported within the functions.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import torch

from titan.checkpoint.state import TensorInfo
from titan.config.errors import UserError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "BOOL": torch.bool,
}
_CODES = {dtype: code for code, dtype in _DTYPES.items()}


class StoredTensor(NamedTuple):
    """Where a tensor is stored, and what it is."""

    path: Path
    name: str
    info: TensorInfo


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """What the .safetensors files of a folder hold, by stored name: those of its index, or all where it has none.

    Raises:
        UserError: no such files; one that the index names is missing, broken, or without a tensor that it should have;
            a tensor is of a type that isn't one of weights.
    """
    placed = _index(folder)
    paths = sorted({folder / file for file in placed.values()} if placed else folder.glob("*.safetensors"))
    if not paths:
        raise UserError(f"{folder} has no .safetensors files")
    stored: dict[str, StoredTensor] = {}
    for path in paths:
        if not path.is_file():
            raise UserError(f"{folder / INDEX_FILE} names {path.name}, which isn't there")
        with _opened(path) as file:
            for name in file.keys():  # noqa: SIM118  (it isn't a dict)
                part = file.get_slice(name)
                stored[name] = StoredTensor(path, name, TensorInfo(tuple(part.get_shape()), _dtype(path, name, part)))
    for name, file_name in placed.items():
        if name not in stored or stored[name].path.name != file_name:
            raise UserError(f"{folder / INDEX_FILE} says that {name} is in {file_name}, which doesn't have it")
    return stored


def _index(folder: Path) -> dict[str, str]:
    """The file of each tensor, by an index if there is one."""
    path = folder / INDEX_FILE
    try:
        placed = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        return {str(name): str(file) for name, file in placed.items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path} isn't an index of .safetensors files: {error!r}") from error


def _dtype(path: Path, name: str, part: Any) -> torch.dtype:
    code = part.get_dtype()
    if code not in _DTYPES:
        raise UserError(f"{path}: {name} is of type {code}; expected one of {', '.join(_DTYPES)}")
    return _DTYPES[code]


def read_slice(stored: StoredTensor, start: Sequence[int], shape: Sequence[int]) -> torch.Tensor:
    """A part of a stored tensor. Nothing else of the file is read, and the file is let go with the result.

    Args:
        start: the index of its first element.
        shape: its size along each dimension.

    Raises:
        UserError: the file can't be read.
    """
    with _opened(stored.path) as file:
        part: torch.Tensor = file.get_slice(stored.name)[
            tuple(slice(first, first + size) for first, size in zip(start, shape, strict=True))
        ]
        return part


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """The file, opened anew each time: pages that were read count as this process's memory as long as it is mapped."""
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        raise UserError(f"{path} needs a library that isn't installed ({error}): pip install 'titan[hf]'") from error
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path} can't be read: {error}") from error


class SafetensorsFile:
    """A new file, written tensor by tensor, so that no two need be in memory at once.

    The format: the header's length in 8 bytes, little-endian; the header, JSON with each tensor's type, shape and
    place; then the tensors' bytes, one after the other (github.com/huggingface/safetensors, "Format").

    Args:
        infos: what will be written, by stored name and in this order.
    """

    def __init__(self, path: Path, infos: Mapping[str, TensorInfo]) -> None:
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        end = 0
        for name, info in infos.items():
            begin, end = end, end + size_in_bytes(info)
            header[name] = {"dtype": _CODES[info.dtype], "shape": list(info.shape), "data_offsets": [begin, end]}
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)  # the tensors begin at a multiple of 8
        self.size = 8 + len(text) + end
        self._left = list(infos.items())
        self._file = path.open("wb")
        self._file.write(len(text).to_bytes(8, "little") + text)

    def write(self, tensor: torch.Tensor) -> None:
        """The next tensor."""
        name, info = self._left.pop(0)
        if (tuple(tensor.shape), tensor.dtype) != info:
            raise ValueError(f"{name} was announced as {info}, and is {tuple(tensor.shape)}, {tensor.dtype}")
        # As bytes, since numpy has no bfloat16.
        self._file.write(tensor.cpu().contiguous().flatten().view(torch.uint8).numpy().data)

    def __enter__(self) -> SafetensorsFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the file; when nothing failed it is on the disk then."""
        with self._file:
            if error is None:
                assert not self._left, f"{len(self._left)} tensors weren't written"
                self._file.flush()
                os.fsync(self._file.fileno())


def size_in_bytes(info: TensorInfo) -> int:
    return math.prod(info.shape) * info.dtype.itemsize
