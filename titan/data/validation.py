"""The windows of a validation set: the same ones in every round and every layout, the last one however short it is."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from titan.config.derived import validation_text
from titan.config.errors import UserError
from titan.config.job_config import JobConfig, Training
from titan.data.microbatch import Microbatch, lay_out
from titan.data.packing import PackedStream, Window
from titan.data.readers import BadRowPolicy, open_reader
from titan.data.sources import TOKENS, open_documents
from titan.data.token_files import open_token_files
from titan.data.token_windows import read_window
from titan.data.tokenizer import Tokenizer, document_tokens
from titan.parallelisms.parallel_dims import ParallelDims


class Rows(NamedTuple):
    """A rank's part of a validation set.

    Attributes:
        microbatches: as many of the same shape on every rank; what windows there aren't is IGNORED.
        bytes_per_token: of the text that was read for them, in UTF-8, over its tokens; None when only tokens are known.
    """

    microbatches: list[Microbatch]
    bytes_per_token: float | None


def validation_rows(config: JobConfig, tokenizer: Tokenizer, global_batch: int, dims: ParallelDims) -> Rows:
    """This rank's rows of the validation set that a config names.

    Args:
        global_batch: windows that validation.steps counts by.

    Raises:
        UserError: as `read_rows`.
    """
    steps = config.validation.steps
    return read_rows(
        validation_text(config),
        tokenizer,
        None if steps == -1 else steps * global_batch,
        dims.batch.get_local_rank(),
        dims.batch_degree,
        document_mask=config.model.attn_mask == "document",
    )


def read_rows(
    settings: Training,
    tokenizer: Tokenizer,
    windows: int | None,
    batch_rank: int,
    batch_degree: int,
    *,
    document_mask: bool = False,
) -> Rows:
    """Read a validation set and keep this rank's rows. Every rank reads all of it, and keeps an even share.

    Args:
        settings: as `derived.validation_text` gives them.
        windows: how many of the first windows make the set; None for all.
        batch_rank, batch_degree: this rank's place among those that read different rows.
        document_mask: keep documents apart (see `lay_out`).

    Raises:
        UserError: the dataset isn't there, or has not even two tokens.
    """
    text = _TokenFiles(settings, tokenizer, document_mask) if settings.dataset == TOKENS else _Text(settings, tokenizer)
    mine: list[Window] = []
    count = 0
    for window in itertools.islice(text.windows(), windows):
        if count % batch_degree == batch_rank:
            mine.append(window)
        count += 1
    if count == 0:
        raise UserError(f"the validation set ({settings.dataset}) has not even two tokens")
    size = settings.local_batch_size
    unit = size * batch_degree
    rows = -(-count // unit) * size
    mine += [Window(np.empty(0, np.int32), [])] * (rows - len(mine))
    whole = lay_out(mine, settings.seq_len, document_mask=document_mask)
    return Rows(whole.split(size), text.bytes_per_token)


class _Text:
    """Windows of a text that is read once, and how long it was."""

    def __init__(self, settings: Training, tokenizer: Tokenizer) -> None:
        self._bytes = self._tokens = 0
        self._settings = settings
        self._tokenizer = tokenizer

    @property
    def bytes_per_token(self) -> float:
        return self._bytes / self._tokens

    def windows(self) -> Iterator[Window]:
        """`seq_len + 1` tokens each, concatenated and cut; the last one has what is left."""
        try:
            source = open_documents(self._settings)
        except UserError as error:
            raise UserError(f"the validation set can't be read: {error}") from error
        reader = open_reader(source, self._settings, BadRowPolicy(self._settings.bad_rows), 0, 1, seed=0)
        stream = PackedStream(reader, self._encode, self._settings.seq_len)
        while (window := stream.next_window()) is not None:
            yield window
        if len((rest := stream.rest()).tokens) > 1:
            yield rest

    def _encode(self, text: str) -> np.ndarray:
        tokens = document_tokens(self._tokenizer, text)
        self._bytes += len(text.encode())
        self._tokens += len(tokens)
        return tokens


class _TokenFiles:
    """Windows of token files, which don't know how long their text was."""

    bytes_per_token = None

    def __init__(self, settings: Training, tokenizer: Tokenizer, document_mask: bool) -> None:
        self._files = open_token_files(settings, tokenizer)
        self._seq_len = settings.seq_len
        self._find_documents = document_mask

    def windows(self) -> Iterator[Window]:
        """As `_Text` makes them."""
        for start in range(0, len(self._files) - 1, self._seq_len):
            count = min(self._seq_len + 1, len(self._files) - start)
            yield read_window(self._files, start, count, find_documents=self._find_documents)
