"""Tensors to and from files, by torch.distributed.checkpoint (DCP).

DCP is imported within the functions: half a second of every start, which runs that neither save nor resume don't pay.
DCP reads tensors with `weights_only`; its index, `.metadata`, is a pickle by design, so load none from strangers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist

from titan.checkpoint.state import TensorInfo

INDEX_FILE = ".metadata"


def write_tensors(folder: Path, tensors: Mapping[str, torch.Tensor], group: dist.ProcessGroup) -> None:
    """Write each tensor once, every rank its share, synced to the disk. Collective; `folder` has to be new.

    Raises:
        RuntimeError: on all ranks, when any fails; it names ranks and causes.
    """
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    writer = FileSystemWriter(folder, overwrite=False)
    with _ordinary_errors("write the tensors"):
        save(dict(tensors), storage_writer=writer, process_group=group)


def read_tensors(folder: Path, tensors: Mapping[str, torch.Tensor], group: dist.ProcessGroup) -> None:
    """Fill the tensors in place, whatever layout wrote them. Collective.

    Raises:
        RuntimeError: on all ranks, when any fails; it names ranks and causes.
    """
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.state_dict_loader import load

    with _ordinary_errors("read the tensors"):
        load(dict(tensors), storage_reader=FileSystemReader(folder), process_group=group)


def stored_tensors(folder: Path) -> dict[str, TensorInfo]:
    """What a checkpoint holds, from its index alone.

    Raises:
        OSError: no index.
        TypeError: it holds something that isn't a tensor.
    """
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    stored: dict[str, TensorInfo] = {}
    for name, entry in FileSystemReader(folder).read_metadata().state_dict_metadata.items():
        if not isinstance(entry, TensorStorageMetadata):
            raise TypeError(f"{folder / INDEX_FILE}: {name} is no tensor")
        stored[name] = TensorInfo(tuple(entry.size), entry.properties.dtype)
    return stored


def files_written_by(rank: int, folder: Path) -> list[Path]:
    """The files that `write_tensors` wrote on this rank; rank 0's include the index."""
    index = [folder / INDEX_FILE] if rank == 0 else []
    return index + sorted(folder.glob(f"__{rank}_*.distcp"))


@contextmanager
def _ordinary_errors(task: str) -> Iterator[None]:
    """DCP raises a BaseException, which passes every `except Exception`, and prints all ranks' tracebacks."""
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        yield
    except CheckpointException as error:
        causes = [f"rank {rank}: {type(cause).__name__}: {cause}" for rank, (cause, _) in error.failures.items()]
        raise RuntimeError(f"could not {task}: {'; '.join(causes)}") from error
