"""Windows as rows: where labels, positions and documents come from."""

from __future__ import annotations

import numpy as np
import torch

from titan.data.microbatch import Microbatch, lay_out
from titan.data.packing import Window
from titan.models.layers.head import IGNORED

EOS = 9
WINDOWS = [
    Window(np.array([1, EOS, 2, 3, 4, EOS, 5], dtype=np.int32), [4, 3]),  # an EOS within the first document
    Window(np.array([6, 7, 8, 1], dtype=np.int32), [1, 3]),  # the rest is padding
    Window(np.array([1, 2, 3, 4, 5, 6, 7], dtype=np.int32), [6, 1]),  # a document begins with the last token
    Window(np.empty(0, dtype=np.int32), []),
]


def rows(table: torch.Tensor | None) -> list[list[int]]:
    assert table is not None and table.dtype == torch.int64 and table.is_contiguous()
    return table.tolist()


def test_data_doc_border_comes_from_lengths_not_from_ids() -> None:
    batch = lay_out(WINDOWS, 6, document_mask=True)
    no = IGNORED
    assert rows(batch.tokens) == [[1, EOS, 2, 3, 4, EOS], [6, 7, 8, 1, 0, 0], [1, 2, 3, 4, 5, 6], [0] * 6]
    assert rows(batch.labels) == [[EOS, 2, 3, no, EOS, 5], [no, 8, 1, no, no, no], [2, 3, 4, 5, 6, no], [no] * 6]
    assert rows(batch.positions) == [[0, 1, 2, 3, 0, 1], [0, 0, 1, 2, 0, 1], [0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5]]
    assert rows(batch.documents) == [[0, 0, 0, 0, 1, 1], [0, 1, 1, 1, 2, 2], [0] * 6, [0] * 6]


def test_without_the_mask_every_token_has_the_next_one_as_its_label() -> None:
    batch = lay_out(WINDOWS, 6, document_mask=False)
    no = IGNORED
    assert rows(batch.tokens) == [[1, EOS, 2, 3, 4, EOS], [6, 7, 8, 1, 0, 0], [1, 2, 3, 4, 5, 6], [0] * 6]
    assert rows(batch.labels) == [[EOS, 2, 3, 4, EOS, 5], [7, 8, 1, no, no, no], [2, 3, 4, 5, 6, 7], [no] * 6]
    assert batch.positions is None and batch.documents is None


def test_split_keeps_rows_together() -> None:
    for mask in (False, True):
        whole = lay_out(WINDOWS, 6, document_mask=mask)
        parts = whole.split(3)
        assert [len(part.tokens) for part in parts] == [3, 1]
        for name, table in zip(Microbatch._fields, whole, strict=True):
            tables = [getattr(part, name) for part in parts]
            assert tables == [None, None] if table is None else torch.equal(torch.cat(tables), table)
