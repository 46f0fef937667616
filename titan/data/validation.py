"""The windows of a validation set: the same ones in every round and every layout, the last one however short it is."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch

from titan.config.errors import UserError
from titan.config.job_config import JobConfig, Training
from titan.data.loader import Microbatch
from titan.data.packing import PackedStream
from titan.data.readers import BadRowPolicy, open_reader
from titan.data.sources import open_documents
from titan.data.tokenizer import Tokenizer, document_tokens
from titan.models.layers.head import IGNORED


class Rows(NamedTuple):
    """A rank's part of a validation set.

    Attributes:
        microbatches: as many of the same shape on every rank; what windows there aren't is IGNORED.
        bytes_per_token: of the text that was read for them, in UTF-8, over its tokens.
    """

    microbatches: list[Microbatch]
    bytes_per_token: float


def validation_text(job: JobConfig) -> Training:
    """The [training] section as validation reads text: once, in order, from its own dataset where one is named."""
    own = job.validation
    changes: dict[str, object] = {
        "dataset_path": own.dataset_path,
        "dataset_split": own.dataset_split,
        "seq_len": own.seq_len,
        "local_batch_size": own.local_batch_size,
    }
    changes = {key: value for key, value in changes.items() if value is not None}
    if own.dataset is not None:  # the training set's place means nothing to another dataset
        changes = {"dataset_path": None, "dataset_subset": None, **changes, "dataset": own.dataset}
    return dataclasses.replace(job.training, **changes, infinite=False, shuffle=False)  # type: ignore[arg-type]


def read_rows(
    settings: Training, tokenizer: Tokenizer, windows: int | None, batch_rank: int, batch_degree: int
) -> Rows:
    """Read a validation set and keep this rank's rows. Every rank reads all of it, and keeps an even share.

    Args:
        settings: as `validation_text` gives them.
        windows: how many of the first windows make the set; None for all.
        batch_rank, batch_degree: this rank's place among those that read different rows.

    Raises:
        UserError: the dataset isn't there, or has not even two tokens.
    """
    text = _Text(settings, tokenizer)
    mine: list[np.ndarray] = []
    count = 0
    for window in text.windows():
        if count == windows:
            break
        if count % batch_degree == batch_rank:
            mine.append(window)
        count += 1
    if count == 0:
        raise UserError(f"the validation set ({settings.dataset}) has {text.tokens} token(s); a loss needs two")
    size = settings.local_batch_size
    unit = size * batch_degree
    rows = -(-count // unit) * size
    table = np.full((rows, settings.seq_len + 1), IGNORED, dtype=np.int64)
    for row, window in zip(table, mine, strict=False):
        row[: len(window)] = window
    whole = torch.from_numpy(table)
    batches = [Microbatch(part[:, :-1].clamp(min=0), part[:, 1:].contiguous()) for part in whole.split(size)]
    return Rows(batches, text.bytes / text.tokens)


class _Text:
    """Windows of a text that is read once, and how long it was."""

    def __init__(self, settings: Training, tokenizer: Tokenizer) -> None:
        self.bytes = self.tokens = 0
        self._settings = settings
        self._tokenizer = tokenizer

    def windows(self) -> Iterator[np.ndarray]:
        """`seq_len + 1` tokens each, as in training; the last one has what is left."""
        try:
            source = open_documents(self._settings)
        except UserError as error:
            raise UserError(f"the validation set can't be read: {error}") from error
        reader = open_reader(source, self._settings, BadRowPolicy(self._settings.bad_rows), 0, 1, seed=0)
        stream = PackedStream(reader, self._encode, self._settings.seq_len)
        while (window := stream.next_window()) is not None:
            yield window
        if len(rest := stream.rest()) > 1:
            yield rest

    def _encode(self, text: str) -> np.ndarray:
        tokens = document_tokens(self._tokenizer, text)
        self.bytes += len(text.encode())
        self.tokens += len(tokens)
        return tokens
