"""The format of token files: text that was tokenized once, in shards that are read by position.

A folder, as `scripts/prepare_data.py` writes it, has shards, and `tokens.json`, which lists them and is written last. A
shard is

    8192 bytes      its header, JSON padded with spaces
    tokens          little-endian uint16, or uint32 for more than 65,536 ids: one document behind another
    padding         zeros up to a multiple of 8 bytes
    ends            int64: where each document ends, in tokens from the shard's first

All shards together are one long row of tokens. Where documents end is known by their lengths, whatever the ids are.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final

import numpy as np
import numpy.typing as npt

INDEX_FILE: Final = "tokens.json"
HEADER_BYTES: Final = 8192
DTYPES: Final[dict[str, np.dtype[Any]]] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}

_CHUNK = 1 << 24


class DamagedShard(Exception):
    """A shard that isn't what it should be; the message says why."""


@dataclass(frozen=True)
class ShardHeader:
    """What a shard says of itself.

    Attributes:
        run: what it was made from and how; equal in all shards of a folder. `dtype` and `tokenizer` are among its keys.
        number: its place among the shards, from 0.
        tokens, documents: how many it has.
        left_out: rows of the dataset that couldn't be read.
        position: of the dataset, where the next shard goes on.
        sha256: of all bytes behind the header.
    """

    run: dict[str, Any]
    number: int
    tokens: int
    documents: int
    left_out: int
    position: dict[str, Any]
    sha256: str

    @property
    def dtype(self) -> np.dtype[Any]:
        return DTYPES[self.run["dtype"]]

    @property
    def ends_offset(self) -> int:
        """Where the documents' ends begin in the file."""
        return HEADER_BYTES + -(-self.tokens * self.dtype.itemsize // 8) * 8

    @property
    def file_size(self) -> int:
        return self.ends_offset + 8 * self.documents

    def to_bytes(self) -> bytes:
        text = json.dumps(dataclasses.asdict(self)).encode().ljust(HEADER_BYTES - 1) + b"\n"
        if len(text) > HEADER_BYTES:
            raise ValueError(f"the header has {len(text)} bytes, more than {HEADER_BYTES}: {text!r}")
        return text


def shard_name(number: int) -> str:
    """The file name of a shard."""
    return f"shard-{number:05}.tokens"


def read_shard_header(file: Path, *, verify_checksum: bool = False) -> ShardHeader:
    """The header of a shard whose size is what the header says.

    Args:
        verify_checksum: also read all of the shard.

    Raises:
        DamagedShard: it's missing, cut off, or not a shard; or its checksum is another.
    """
    try:
        with file.open("rb") as opened:
            header = ShardHeader(**json.loads(opened.read(HEADER_BYTES)))
            size, expected = os.fstat(opened.fileno()).st_size, header.file_size
            if size != expected:
                raise DamagedShard(f"{file.name} has {size:,} bytes, its header says {expected:,}")
            if verify_checksum and (found := _hash_behind_header(opened)) != header.sha256:
                raise DamagedShard(f"{file.name} has the SHA-256 {found}, its header says {header.sha256}")
    except FileNotFoundError:
        raise DamagedShard(f"{file.name} is missing") from None
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise DamagedShard(f"{file.name} has no header that can be read ({type(error).__name__}: {error})") from error
    return header


def _hash_behind_header(opened: BinaryIO) -> str:
    digest = hashlib.sha256()
    opened.seek(HEADER_BYTES)
    while chunk := opened.read(_CHUNK):
        digest.update(chunk)
    return digest.hexdigest()


def run_differences(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> str:
    """What differs between two runs of `prepare_data.py`, in a line; empty when nothing does."""
    keys = [key for key in (*ours, *(theirs.keys() - ours.keys())) if theirs.get(key) != ours.get(key)]
    return "; ".join(f"{key}: {theirs.get(key)!r}, not {ours.get(key)!r}" for key in keys)


class ShardWriter:
    """One shard, under another name until it is whole."""

    def __init__(self, folder: Path, run: dict[str, Any], number: int) -> None:
        self._run = run
        self._number = number
        self._target = folder / shard_name(number)
        self._draft = folder / f".{shard_name(number)}.draft"
        self._file = self._draft.open("wb")
        self._file.write(bytes(HEADER_BYTES))
        self._digest = hashlib.sha256()
        self._lengths: list[npt.NDArray[np.int64]] = []
        self._left_out = 0
        self.tokens = 0

    def add(self, tokens: npt.NDArray[Any], lengths: npt.NDArray[np.int64], left_out: int) -> None:
        """Documents one behind another, `[T]` in the run's type, their lengths `[D]`, and the rows left out."""
        self._write(tokens)
        self._lengths.append(lengths)
        self._left_out += left_out
        self.tokens += len(tokens)

    def finish(self, position: dict[str, Any]) -> ShardHeader:
        """Write what is behind the tokens and the header, and give the shard its name."""
        ends = np.cumsum(np.concatenate(self._lengths))
        self._write(np.zeros(-self._file.tell() % 8, dtype=np.uint8))
        self._write(ends.astype("<i8"))
        header = ShardHeader(
            self._run, self._number, self.tokens, len(ends), self._left_out, position, self._digest.hexdigest()
        )
        self._file.seek(0)
        self._file.write(header.to_bytes())
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self._draft.rename(self._target)
        return header

    def discard(self) -> None:
        """Leave nothing of an unfinished shard; may follow `finish`."""
        self._file.close()
        self._draft.unlink(missing_ok=True)

    def _write(self, values: npt.NDArray[Any]) -> None:
        self._file.write(values.data)
        self._digest.update(values.data)


def read_index(folder: Path) -> dict[str, Any]:
    """What `tokens.json` says: `run` as headers have it, and the checksums of the `shards`. Raises DamagedShard."""
    if not folder.is_dir():
        raise DamagedShard("there is no such folder")
    try:
        index = json.loads((folder / INDEX_FILE).read_bytes())
        if not index["shards"] or index["run"]["dtype"] not in DTYPES:
            raise ValueError("it has no shard, or tokens of an unknown type")
    except FileNotFoundError:
        reason = "its preparation wasn't finished" if list(folder.glob("shard-*.tokens")) else "it has no token files"
        raise DamagedShard(f"{INDEX_FILE} is missing, so {reason}") from None
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise DamagedShard(f"{INDEX_FILE} can't be read ({type(error).__name__}: {error})") from error
    return index


def read_headers(folder: Path, index: dict[str, Any]) -> Sequence[ShardHeader]:
    """The headers of the shards that an index lists, each found to be the very one that it means.

    Raises:
        DamagedShard: one is missing, damaged or of another run, or there are more than the index lists.
    """
    headers = []
    for number, checksum in enumerate(index["shards"]):
        header = read_shard_header(folder / shard_name(number))
        if difference := run_differences(header.run, index["run"]):
            raise DamagedShard(f"{shard_name(number)} is of another run than {INDEX_FILE}: {difference}")
        if (header.number, header.sha256) != (number, checksum):
            raise DamagedShard(
                f"{shard_name(number)} isn't the shard that {INDEX_FILE} lists: it is number {header.number} with the "
                f"SHA-256 {header.sha256}, not number {number} with {checksum}"
            )
        headers.append(header)
    extra = {file.name for file in folder.glob("shard-*.tokens")} - {shard_name(n) for n in range(len(headers))}
    if extra:
        raise DamagedShard(f"{INDEX_FILE} doesn't list {min(extra)}; is it of another run? Remove it")
    return headers


def write_index(folder: Path, run: dict[str, Any], shards: Sequence[ShardHeader]) -> None:
    """Finish a folder, in one moment."""
    counts = {key: sum(getattr(shard, key) for shard in shards) for key in ("documents", "tokens", "left_out")}
    text = json.dumps({"run": run, **counts, "shards": [shard.sha256 for shard in shards]}, indent=1)
    draft = folder / f".{INDEX_FILE}.draft"
    with draft.open("w", encoding="utf-8") as file:
        file.write(text + "\n")
        file.flush()
        os.fsync(file.fileno())
    draft.rename(folder / INDEX_FILE)
