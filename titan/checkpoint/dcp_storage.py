"""How torch.distributed.checkpoint (DCP) reaches a checkpoint's files, whatever storage they lie in.

Files are hashed while they are written: reading hundreds of gigabytes once more would take as long as the save itself.
DCP only appends, so the bytes pass by in order. Import this within functions, see tensor_files.py.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, cast

from torch.distributed.checkpoint.filesystem import FileSystemBase, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from titan.checkpoint.manifest import FileRecord, Recorder
from titan.checkpoint.storage import Place, rename

if TYPE_CHECKING:
    from typing_extensions import Buffer

# DCP's default: how many bytes are copied from an accelerator ahead of writing them.
_COPY_AHEAD = 10_000_000


class Writer(FileSystemWriter):
    """Writes a rank's tensors to one file, and on rank 0 the index. `files_of` tells what all ranks wrote.

    Args:
        folder: where to; it exists, and has no index yet.
        on_host: all tensors are in the CPU's memory, so that nothing has to touch an accelerator.
    """

    def __init__(self, folder: Place, *, on_host: bool) -> None:
        # Files are synced by `_Files`: DCP would sync the whole machine where a file has no descriptor.
        super().__init__(
            str(folder), sync_files=False, overwrite=False, per_thread_copy_ahead=0 if on_host else _COPY_AHEAD
        )
        self._files = _Files()
        self.fs, self.path = self._files, folder  # type: ignore[assignment]

    @property
    def checkpoint_id(self) -> str:
        return str(self.path)  # it goes into the index, a pickle, which shall need no titan to be read

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        results = super().write_data(plan, planner).wait()
        records = WriteResult(MetadataIndex("files"), 0, dict(self._files.records))
        done: Future[list[WriteResult]] = Future()
        done.set_result([*results, records])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        files = {name: record for by_rank in results for name, record in by_rank.pop().storage_data.items()}
        super().finish(metadata, results)
        # DCP gives the index to all ranks, once it is written: the only way back, also from another process.
        metadata.files = files | self._files.records  # type: ignore[attr-defined]


def files_of(index: Metadata) -> dict[str, FileRecord]:
    """The files of all ranks, from what DCP returns of a save by `Writer`."""
    return cast("dict[str, FileRecord]", index.files)  # type: ignore[attr-defined]


class Reader(FileSystemReader):
    """Reads from any storage."""

    def __init__(self, folder: Place) -> None:
        super().__init__(str(folder))
        self.fs, self.path = _Files(), folder  # type: ignore[assignment]


class AlreadyStaged(AsyncStager):
    """For tensors that nothing will change until they are written."""

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        return state_dict

    def synchronize_staging(self) -> None:
        return

    def close(self) -> None:
        return


class _Files(FileSystemBase):
    """DCP's operations on files.

    Attributes:
        records: of the files that were written here, by name.
    """

    def __init__(self) -> None:
        self.records: dict[str, FileRecord] = {}

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[io.IOBase]:
        with path.open(mode) as raw:
            if mode == "rb":
                yield raw
                return
            stream = _RecordedStream(raw)
            yield cast(io.IOBase, stream)
            if isinstance(path, Path):
                raw.flush()
                os.fsync(raw.fileno())
        self.records[path.name] = stream.recorder.record()

    def concat_path(self, path: Any, suffix: str) -> Any:
        return path / suffix

    def init_path(self, path: Any) -> Any:
        return path

    def rename(self, path: Any, new_path: Any) -> None:
        rename(path, new_path)
        self.records[new_path.name] = self.records.pop(path.name)

    def mkdir(self, path: Any) -> None:
        if isinstance(path, Path):  # rank 0 made it for all, but where ranks see different disks
            path.mkdir(parents=True, exist_ok=True)

    def exists(self, path: Any) -> bool:
        return bool(path.exists())

    def rm_file(self, path: Any) -> None:
        path.unlink()

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True


class _RecordedStream:
    """What DCP needs of a stream to write to."""

    def __init__(self, raw: IO[bytes]) -> None:
        self._raw = raw
        self.recorder = Recorder()

    def write(self, data: Buffer) -> int:
        self.recorder.add(data)
        return self._raw.write(data)

    def tell(self) -> int:
        return self.recorder.size

    def flush(self) -> None:
        self._raw.flush()

    def close(self) -> None:
        pass  # by create_stream, when it is on the disk
