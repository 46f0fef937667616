"""Token files as one row of tokens."""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
from bisect import bisect_right
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt

from titan.config.errors import UserError
from titan.config.job_config import Training
from titan.data.documents import locate
from titan.data.text_files import OpenFile
from titan.data.token_shards import HEADER_BYTES, DamagedShard, read_headers, read_index, shard_name
from titan.data.tokenizer import Tokenizer

_OPEN_FILES = 64
_REPAIR = "Run scripts/prepare_data.py again with the same arguments: it keeps what is whole and writes the rest"


def open_token_files(training: Training, tokenizer: Tokenizer) -> TokenFiles:
    """The token files at `training.dataset_path`, all found to be there and to fit each other.

    Their sizes are checked, not their checksums, for that takes as long as reading them.

    Raises:
        UserError: there are none, a shard is missing, damaged or of another run, or the tokens are another tokenizer's.
    """
    if training.dataset_path is None:
        raise UserError('training.dataset = "tokens" needs training.dataset_path: a folder of scripts/prepare_data.py')
    setting = f'training.dataset_path = "{training.dataset_path}"'
    folder = Path(training.dataset_path).expanduser()
    try:
        files = TokenFiles(folder)
    except DamagedShard as damage:
        raise UserError(f"{setting}: {damage}. {_REPAIR}") from damage
    if files.tokenizer != tokenizer.fingerprint:
        raise UserError(
            f"{setting} holds the tokens of another tokenizer ({files.tokenizer}) than model.tokenizer_path's "
            f"({tokenizer.fingerprint}; {tokenizer.description}). Set model.tokenizer_path to the one that they were "
            "prepared with, or prepare the text anew"
        )
    if len(files) <= training.seq_len:
        raise UserError(
            f"{setting} has {len(files):,} tokens in all, fewer than a window of training.seq_len + 1 = "
            f"{training.seq_len + 1:,}"
        )
    return files


class TokenFiles:
    """The shards of a folder as one row of tokens.

    Args:
        folder: as `scripts/prepare_data.py` wrote it.

    Attributes:
        name, fingerprint: see `Documents`.
        tokenizer: the fingerprint of the tokenizer that made the tokens.

    Raises:
        DamagedShard: a file is missing, damaged, or of another run than the others.
    """

    def __init__(self, folder: Path) -> None:
        index = read_index(folder)
        self._folder = folder
        self._headers = read_headers(folder, index)
        self._ends = list(itertools.accumulate(header.tokens for header in self._headers))
        self._open_file = functools.lru_cache(maxsize=_OPEN_FILES)(OpenFile)
        self.name = "tokens"
        self.tokenizer: str = index["run"]["tokenizer"]
        identity = [index["run"], *(header.sha256 for header in self._headers)]
        self.fingerprint = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()

    def __len__(self) -> int:
        return self._ends[-1]

    @property
    def documents(self) -> int:
        return sum(header.documents for header in self._headers)

    @property
    def shards(self) -> int:
        return len(self._headers)

    def read(self, start: int, count: int) -> npt.NDArray[np.int32]:
        """Tokens start … start + count − 1, int32 `[count]`.

        Read by position rather than mapped, so that what was read once doesn't stay in the process's memory.

        Raises:
            IndexError: there are fewer.
            OSError: a shard became shorter since the start.
        """
        pieces = []
        while count:
            number, place = locate(start, self._ends)
            header = self._headers[number]
            size, dtype = min(count, header.tokens - place), header.dtype
            file = self._folder / shard_name(number)
            offset = HEADER_BYTES + place * dtype.itemsize
            raw = self._open_file(file).read(offset, size * dtype.itemsize)
            if len(raw) < size * dtype.itemsize:
                raise OSError(f"{file}: {len(raw)} bytes at {offset}, expected {size * dtype.itemsize}")
            pieces.append(np.frombuffer(raw, dtype=dtype).astype(np.int32))
            start, count = start + size, count - size
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

    def document_ends(self, start: int, count: int) -> npt.NDArray[np.int64]:
        """Where documents end within `read(start, count)`: places 1 … count, each the first that isn't the document's.

        Found by halving in the file, so that nothing of the ends need be kept.
        """
        found, stop = [], start + count
        while start < stop:
            number, place = locate(start, self._ends)
            header, first = self._headers[number], start - place
            file = self._open_file(self._folder / shard_name(number))
            end = partial(_read_end, file, header.ends_offset)
            low, high = (bisect_right(range(header.documents), edge, key=end) for edge in (place, stop - first))
            raw = file.read(header.ends_offset + 8 * low, 8 * (high - low))
            found.append(np.frombuffer(raw, dtype="<i8") + first)
            start = first + header.tokens
        return np.concatenate(found) - (stop - count)


def _read_end(file: OpenFile, offset: int, document: int) -> int:
    """The end of a document of a shard, whose ends begin at this offset."""
    return int.from_bytes(file.read(offset + 8 * document, 8), "little")
