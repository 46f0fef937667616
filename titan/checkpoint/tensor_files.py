"""Tensors to and from files, by torch.distributed.checkpoint (DCP).

DCP is imported within the functions: half a second of every start, which runs that neither save nor resume don't pay.
DCP reads tensors with `weights_only`; its index, `.metadata`, is a pickle by design, so load none from strangers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, cast

import torch
import torch.distributed as dist

from titan.checkpoint.manifest import FileRecord
from titan.checkpoint.state import TensorInfo
from titan.checkpoint.storage import Place

if TYPE_CHECKING:
    from concurrent.futures import Future

    from torch.distributed.checkpoint.metadata import Metadata

INDEX_FILE = ".metadata"


def write_tensors(
    folder: Place, tensors: Mapping[str, torch.Tensor], group: dist.ProcessGroup | None, *, in_process: bool = False
) -> dict[str, FileRecord]:
    """Write each tensor once, every rank its share, synced to the disk. Collective; `folder` has no tensors yet.

    Args:
        group: the ranks that write; None for a process alone.
        in_process: write in processes of their own, which live until the job ends. The tensors have to lie in shared
            memory.

    Returns:
        The files of all ranks, the index among them, on every rank.

    Raises:
        RuntimeError: on all ranks, when any fails; it names ranks and causes.
    """
    from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, async_save, save

    from titan.checkpoint.dcp_storage import AlreadyStaged, Writer, files_of

    writer = Writer(folder, on_host=all(tensor.device.type == "cpu" for tensor in tensors.values()))
    with _ordinary_errors("write the tensors"):
        if in_process:
            done = async_save(
                dict(tensors),
                storage_writer=writer,
                process_group=group,
                async_checkpointer_type=AsyncCheckpointerType.PROCESS,
                async_stager=AlreadyStaged(),
            )
            index = cast("Future[Metadata]", done).result()
        else:
            index = save(dict(tensors), storage_writer=writer, process_group=group, no_dist=group is None)
    return files_of(index)


def end_writing_process() -> None:
    """End this rank's process that `write_tensors` started, if there is one, whatever it is doing.

    A program that ends would wait for it otherwise, and it may wait for a peer that is dead.
    """
    from torch.distributed.checkpoint import _async_process_executor

    # torch 2.13 has no public call for this.
    if (process := _async_process_executor._CHECKPOINT_PROCESS) is not None:
        process._save_process.kill()


def read_tensors(folder: Place, tensors: Mapping[str, torch.Tensor], group: dist.ProcessGroup) -> None:
    """Fill the tensors in place, whatever layout wrote them. Collective.

    Raises:
        RuntimeError: on all ranks, when any fails; it names ranks and causes.
    """
    from torch.distributed.checkpoint.state_dict_loader import load

    from titan.checkpoint.dcp_storage import Reader

    with _ordinary_errors("read the tensors"):
        load(dict(tensors), storage_reader=Reader(folder), process_group=group)


def stored_tensors(folder: Place) -> dict[str, TensorInfo]:
    """What a checkpoint holds, from its index alone.

    Raises:
        OSError: no index.
        TypeError: it holds something that isn't a tensor.
    """
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    from titan.checkpoint.dcp_storage import Reader

    stored: dict[str, TensorInfo] = {}
    for name, entry in Reader(folder).read_metadata().state_dict_metadata.items():
        if not isinstance(entry, TensorStorageMetadata):
            raise TypeError(f"{folder / INDEX_FILE}: {name} is no tensor")
        stored[name] = TensorInfo(tuple(entry.size), entry.properties.dtype)
    return stored


@contextmanager
def _ordinary_errors(task: str) -> Iterator[None]:
    """DCP raises a BaseException, which passes every `except Exception`, and prints all ranks' tracebacks."""
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        yield
    except CheckpointException as error:
        causes = [f"rank {rank}: {type(cause).__name__}: {cause}" for rank, (cause, _) in error.failures.items()]
        raise RuntimeError(f"could not {task}: {'; '.join(causes)}") from error
