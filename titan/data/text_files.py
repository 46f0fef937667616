"""Text files, a document per file or per line, and the rows of files in general. Random access, little memory."""

import codecs
import functools
import itertools
import os
import sysconfig
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from titan.config.job_config import Training
from titan.data.documents import BadRow, Documents, locate, require_index
from titan.data.files import Files, files_fingerprint, find_files, walk

_NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
_SCAN_BYTES = 1 << 24
_OPEN_FILES = 64


def open_text(training: Training) -> Documents:
    """The text files at `training.dataset_path`. Raises UserError as `find_files`."""
    files = find_files(training)
    if training.text_unit == "file":
        return _WholeFiles(files, "text")
    parts = [LineRows(where, file, decode) for where, file in files]
    return RowDocuments(parts, "text", files_fingerprint(files, "lines"))


def open_python_stdlib(training: Training) -> Documents:
    """The running Python's own library without its tests: text that every machine has."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    files = walk(folder, skip=lambda name: name in _NOT_LIBRARY or name.startswith("config-"))
    return _WholeFiles([(name, file) for name, file in files if file.suffix == ".py"], "python_stdlib")


def decode(raw: bytes, where: str) -> str:
    """The text of some bytes. Raises BadRow when they aren't UTF-8."""
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise BadRow(where, f"not UTF-8: {error}") from None


class _WholeFiles:
    """A document per file; an empty file is none."""

    def __init__(self, files: Files, name: str) -> None:
        self._files = [(where, file) for where, file in files if file.stat().st_size]
        self.name = name
        self.fingerprint = files_fingerprint(self._files, "files")

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, i: int) -> str:
        require_index(i, len(self))
        where, file = self._files[i]
        return decode(file.read_bytes().removeprefix(codecs.BOM_UTF8), where)


class OpenFile:
    """An open file, read by position only, so that threads and forked processes share it without a lock.

    It closes when the last reader lets go of it, which may be after it has left the cache.
    """

    def __init__(self, file: Path) -> None:
        self._descriptor = os.open(file, os.O_RDONLY)

    def __del__(self) -> None:
        if hasattr(self, "_descriptor"):
            os.close(self._descriptor)

    def read(self, start: int, size: int) -> bytes:
        """`size` bytes from `start`, fewer at the end of the file."""
        pieces = []
        while size and (piece := os.pread(self._descriptor, size, start)):  # a read may stop at 2 GiB
            pieces.append(piece)
            start, size = start + len(piece), size - len(piece)
        return b"".join(pieces)


class Rows(Protocol):
    """The documents of one file."""

    def __len__(self) -> int: ...

    def read(self, i: int, open_file: Callable[[Path], OpenFile]) -> str:
        """Document i of the file; `open_file` opens it, or has it open. Raises BadRow when it can't be read."""


class RowDocuments:
    """The rows of several files, one file after another."""

    def __init__(self, parts: Sequence[Rows], name: str, fingerprint: str) -> None:
        self._parts = parts
        self._ends = list(itertools.accumulate(len(part) for part in parts))
        self._open_file = functools.lru_cache(maxsize=_OPEN_FILES)(OpenFile)
        self.name = name
        self.fingerprint = fingerprint

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, i: int) -> str:
        part, row = locate(i, self._ends)
        return self._parts[part].read(row, self._open_file)


class LineRows:
    """The lines of a file that aren't blank. Only where they end is kept: 8 bytes a line.

    Args:
        where: the file's name in messages.
        file: its path.
        parse: turns a line's bytes and its place into a document, or raises BadRow.
    """

    def __init__(self, where: str, file: Path, parse: Callable[[bytes, str], str]) -> None:
        self._where = where
        self._file = file
        self._parse = parse
        self._ends, self._lines = _index_lines(file)

    def __len__(self) -> int:
        return len(self._ends if self._lines is None else self._lines)

    def read(self, i: int, open_file: Callable[[Path], OpenFile]) -> str:
        """See `Rows`."""
        line = i if self._lines is None else int(self._lines[i])
        start = int(self._ends[line - 1]) + 1 if line else 0
        raw = open_file(self._file).read(start, int(self._ends[line]) - start)
        if line == 0:
            raw = raw.removeprefix(codecs.BOM_UTF8)
        return self._parse(raw.removesuffix(b"\r"), f"{self._where}:{line + 1}")


def _index_lines(file: Path) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64] | None]:
    """Where each line of a file ends, and the numbers (from 0) of the lines that aren't blank; None for all."""
    size = file.stat().st_size
    if not size:
        return np.empty(0, dtype=np.int64), None
    content = np.asarray(np.memmap(file, dtype=np.uint8, mode="r"))
    newlines = [
        np.flatnonzero(content[start : start + _SCAN_BYTES] == ord("\n")) + start
        for start in range(0, size, _SCAN_BYTES)
    ]
    unfinished = np.array([] if content[-1] == ord("\n") else [size], dtype=np.int64)
    ends = np.concatenate([*newlines, unfinished])
    starts = np.concatenate([np.zeros(1, dtype=np.int64), ends[:-1] + 1])
    # Few lines start with a space or are empty: only those need a look at the rest.
    blank = np.isin(content[starts], np.frombuffer(b" \t\r\n\v\f", dtype=np.uint8))
    for line in np.flatnonzero(blank):
        blank[line] = not content[starts[line] : ends[line]].tobytes().strip()
    return ends, (np.flatnonzero(~blank) if blank.any() else None)
