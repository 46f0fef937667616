"""Best-fit packing: each token but a document's first is a target once, little is padded, and a resume is exact."""

from __future__ import annotations

import json
import random
from collections import Counter
from typing import Any

import numpy as np
import pytest

from tests.data.test_loader import BYTES, letters, reader, texts_for
from tests.data.test_workers import take
from tests.distributed.world import Worlds
from titan.config.job_config import Training
from titan.data import best_fit as module
from titan.data.best_fit import BestFitStream, best_fit, cut
from titan.data.microbatch import lay_out
from titan.data.packing import Window
from titan.data.readers import BadRowPolicy, open_reader
from titan.data.sources import open_documents
from titan.data.tokenizer import document_tokens
from titan.models.layers.head import IGNORED

Texts = list[str | None]


def stream(texts: Texts, seq_len: int = 16, key: int | None = None, **settings: Any) -> BestFitStream:
    return BestFitStream(reader(texts, **settings), letters, seq_len, key)


def windows(source: BestFitStream, most: int = 10**6) -> list[Window]:
    found: list[Window] = []
    while len(found) < most and (taken := source.take(1, range(1))) is not None:
        found += taken
    return found


def parts(found: list[Window]) -> list[str]:
    """The parts of documents, as text."""
    texts = []
    for window in found:
        ends = np.cumsum(window.lengths)
        assert ends[-1] == len(window.tokens)
        texts += [bytes(part.astype(np.uint8)).decode() for part in np.split(window.tokens, ends[:-1])]
    return texts


def test_data_long_doc_is_cut_with_an_overlap_of_one() -> None:
    for length in (10 * 16 + 3, 10 * 16 + 1, 10 * 16, 17, 16, 2):
        document = np.arange(length, dtype=np.int32)
        pieces = cut(document, 16)
        assert all(2 <= len(piece) <= 17 for piece in pieces)
        assert [token for piece in pieces for token in piece[1:].tolist()] == list(range(1, length))
        assert all(len(piece) == 17 for piece in pieces[:-1])
    assert [piece.tolist() for piece in cut(np.array([7]), 16)] == [[7]]
    assert cut(np.empty(0), 16) == []


def test_the_longest_piece_first_where_it_leaves_the_least_room() -> None:
    assert best_fit([6, 3, 4, 10, 3, 7], 10) == [[0, 2], [1, 5], [3], [4]]
    assert best_fit([], 10) == []
    for seed in range(20):
        draw = random.Random(seed)
        lengths = [draw.randint(1, 50) for _ in range(300)]
        bins = best_fit(lengths, 50)
        assert sorted(piece for held in bins for piece in held) == list(range(300))
        assert all(sum(lengths[piece] for piece in held) <= 50 for held in bins)
        # Best fit decreasing needs at most 11/9 of the fewest bins, and 4 more (Johnson, 1973).
        assert len(bins) <= 11 / 9 * -(-sum(lengths) // 50) + 4


@pytest.mark.parametrize("key", [None, 5])
def test_every_token_but_a_documents_first_is_a_target_once(key: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_BLOCK_WINDOWS", 4)
    texts: Texts = [*texts_for(40), "z" * (10 * 16 + 3)]
    found = windows(stream(texts, key=key, infinite=False))
    assert max(len(window.tokens) for window in found) <= 17
    targets = Counter("".join(part[1:] for part in parts(found)))
    assert targets == Counter("".join(text[1:] for text in texts if text))
    short = [text for text in texts if text and len(text) <= 17]
    assert Counter(short) <= Counter(parts(found))  # whole


def test_windows_come_in_the_order_of_documents_unless_they_are_shuffled() -> None:
    texts: Texts = [f"{number:02}" * 6 for number in range(60)]
    in_order = windows(stream(texts, infinite=False))
    assert parts(in_order) == texts
    shuffled = windows(stream(texts, key=5, infinite=False))
    assert parts(shuffled) != texts and sorted(parts(shuffled)) == texts


def as_lists(found: list[Window]) -> list[Any]:
    return [(window.tokens.tolist(), window.lengths) for window in found]


@pytest.mark.parametrize("key", [None, 5])
def test_data_buffer_resume_of_blocks(key: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """At every window of several blocks and epochs, and twice."""
    monkeypatch.setattr(module, "_BLOCK_WINDOWS", 3)
    texts = texts_for(9)
    straight = stream(texts, key=key)
    expected = as_lists(windows(straight, 40))
    for done in range(40):
        first = stream(texts, key=key)
        windows(first, done)
        second = stream(texts, key=key)
        second.load_state_dict(json.loads(json.dumps(first.state_dict())))
        assert second.state_dict() == first.state_dict()
        third = stream(texts, key=key)
        third.load_state_dict(second.state_dict())
        assert as_lists(windows(third, 40 - done)) == expected[done:]
        assert third.state_dict() == straight.state_dict()


@pytest.mark.parametrize("documents", [3, 60])  # one stream, a few
def test_data_workers_and_ranks_with_best_fit(worlds: Worlds, documents: int) -> None:
    texts, own = texts_for(documents), {"packing": "best_fit"}
    straight, end = worlds(1).run(take, texts, 8, [(0, 9)], **own)[0]
    assert worlds(2).run(take, texts, 2, [(2, 9)], **own)[0] == (straight, end)
    first, state = worlds(2).run(take, texts, 4, [(2, 4)], **own)[0]
    second, state = worlds(1).run(take, texts, 8, [(3, 5)], state, **own)[0]
    assert (first + second, state) == (straight, end)


def test_data_finite_end_pads_the_last_windows() -> None:
    texts = texts_for(20)
    found = windows(stream(texts, infinite=False))
    batch = lay_out(found, 16, document_mask=True)
    assert int((batch.labels != IGNORED).sum()) == sum(len(text) - 1 for text in texts if text)


def test_padding_of_python_stdlib_is_little() -> None:
    """0.23 % of 300 windows of 512 tokens."""
    training = Training(seq_len=512)
    source = open_reader(open_documents(training), training, BadRowPolicy("skip"), 0, 1, seed=0)
    packed = BestFitStream(source, lambda text: document_tokens(BYTES, text), 512, key=0)
    found = windows(packed, 300)
    padding = 1 - sum(len(window.tokens) for window in found) / (len(found) * 513)
    assert 0 < padding < 0.01
