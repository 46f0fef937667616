"""Windows of tokens as the rows that a model takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from titan.data.packing import Window
from titan.models.layers.head import IGNORED


class Microbatch(NamedTuple):
    """Rows that one forward pass takes: `labels[b, s]` is the token after `tokens[b, s]`. All `[B, S]`, int64.

    Attributes:
        positions: of the tokens; None where they are 0 … S − 1.
        documents: the number of each token's document; None when a token sees all that came before it.
    """

    tokens: torch.Tensor
    labels: torch.Tensor
    positions: torch.Tensor | None = None
    documents: torch.Tensor | None = None

    def split(self, rows: int) -> list[Microbatch]:
        """Microbatches of so many rows each."""
        parts = [[None] * -(-len(self.tokens) // rows) if part is None else part.split(rows) for part in self]
        return [Microbatch(*part) for part in zip(*parts, strict=True)]

    def pinned(self) -> Microbatch:
        """The same in pinned memory."""
        positions, documents = (
            None if part is None else part.pin_memory() for part in (self.positions, self.documents)
        )
        return Microbatch(self.tokens.pin_memory(), self.labels.pin_memory(), positions, documents)


def lay_out(windows: Sequence[Window], seq_len: int, *, document_mask: bool) -> Microbatch:
    """A row for each window. What it lacks of `seq_len + 1` tokens is padding, whose labels are IGNORED.

    Args:
        document_mask: keep documents apart. Each part of a document within a window then has positions from 0, and
            the label of its last token is IGNORED; padding is a document of its own.
    """
    tokens = np.zeros((len(windows), seq_len + 1), dtype=np.int64)
    labels = np.full_like(tokens, IGNORED)
    for row, window in enumerate(windows):
        tokens[row, : len(window.tokens)] = labels[row, : len(window.tokens)] = window.tokens
    if not document_mask:
        return Microbatch(*_tensors(tokens[:, :-1], labels[:, 1:]))
    documents, positions = np.empty_like(tokens), np.empty_like(tokens)
    for row, window in enumerate(windows):
        lengths = np.array([*window.lengths, seq_len + 1 - len(window.tokens)])
        documents[row] = np.arange(len(lengths)).repeat(lengths)
        positions[row] = np.arange(seq_len + 1) - (lengths.cumsum() - lengths).repeat(lengths)
    labels[:, 1:][documents[:, 1:] != documents[:, :-1]] = IGNORED
    return Microbatch(*_tensors(tokens[:, :-1], labels[:, 1:], positions[:, :-1], documents[:, :-1]))


def _tensors(*tables: np.ndarray) -> list[torch.Tensor]:
    return [torch.from_numpy(np.ascontiguousarray(table)) for table in tables]
