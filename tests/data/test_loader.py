"""The order of the data: a function of the seed and the step, exact after every resume, whatever the layout."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.distributed.world import Worlds
from titan.config.errors import UserError
from titan.config.job_config import Training
from titan.data.documents import BadRow
from titan.data.loader import DataLoader, number_of_streams
from titan.data.packing import PackedStream
from titan.data.readers import BadRowPolicy, IndexedReader
from titan.data.sources import Source, open_documents
from titan.data.tokenizer import build_tokenizer, document_tokens

BYTES = build_tokenizer(None)


class Listed:
    """Documents from a list; None is a row that can't be read."""

    def __init__(self, texts: list[str | None], seconds: float = 0.0) -> None:
        self.texts, self.seconds = texts, seconds
        self.name, self.fingerprint = "listed", f"{len(texts)} texts"

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, i: int) -> str:
        time.sleep(self.seconds)
        if (text := self.texts[i]) is None:
            raise BadRow(f"listed:{i + 1}", "broken on purpose")
        return text


def reader(texts: list[str | None], **settings: Any) -> IndexedReader:
    training = Training(**({"shuffle": False} | settings))
    return IndexedReader(Listed(texts), training, BadRowPolicy(training.bad_rows), 0, 1, seed=0)


def letters(text: str) -> np.ndarray:
    """A token a character, no BOS and EOS: positions are easy to see."""
    return np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int32)


def windows(stream: PackedStream, most: int = 10**6) -> list[str]:
    found: list[str] = []
    while len(found) < most and (window := stream.next_window()) is not None:
        found.append(bytes(window.tokens.astype(np.uint8)).decode())
    return found


ODD = ["a" * 7, "b" * 11, "c" * 13, "d", "", "e" * 40, "f" * 3]


def test_windows_overlap_by_one_token_and_lose_none() -> None:
    text = "".join(ODD)
    for seq_len in (1, 3, 16, 75):
        found = windows(PackedStream(reader(ODD, infinite=False), letters, seq_len))
        assert len(found) == (len(text) - 1) // seq_len
        assert found == [text[i * seq_len : (i + 1) * seq_len + 1] for i in range(len(found))]


def test_data_buffer_resume() -> None:
    """A resume at every window of three epochs: leftover tokens are neither lost nor repeated."""
    straight = PackedStream(reader(ODD), letters, 16)
    expected = windows(straight, 15)
    for done in range(1, 15):
        first = PackedStream(reader(ODD), letters, 16)
        windows(first, done)
        resumed = PackedStream(reader(ODD), letters, 16)
        resumed.load_state_dict(first.state_dict())
        assert resumed.state_dict() == first.state_dict()  # before anything is read
        assert windows(resumed, 15 - done) == expected[done:]
        assert resumed.state_dict() == straight.state_dict()


def test_data_long_doc() -> None:
    document = "".join(chr(97 + i % 26) for i in range(10 * 16 + 3))
    found = windows(PackedStream(reader([document], infinite=False), letters, 16))
    assert found[0] + "".join(window[1:] for window in found[1:]) == document[: len(found) * 16 + 1]
    assert len(found) == 10


def test_one_long_document_costs_no_more_than_many_short_ones() -> None:
    """A text file may be one document of gigabytes: a window must not copy what is left of it."""
    seconds = []
    for documents in (["x" * 2_000_000], ["x" * 2_000] * 1_000):
        stream = PackedStream(reader(documents, infinite=False), letters, 256)
        start = time.process_time()
        while stream.next_window() is not None:
            pass
        seconds.append(time.process_time() - start)
    assert seconds[0] < 5 * seconds[1]


def test_data_doc_border_windows_know_the_parts_of_their_documents() -> None:
    """Also of one that began windows before, and after a resume in its middle."""
    for seq_len in (1, 3, 16):
        stream = PackedStream(reader(ODD, infinite=False), letters, seq_len)
        while True:
            resumed = PackedStream(reader(ODD, infinite=False), letters, seq_len)
            resumed.load_state_dict(stream.state_dict())
            if (window := stream.next_window()) is None:
                break
            text = bytes(window.tokens.astype(np.uint8)).decode()
            assert window.lengths == [len(list(same)) for _, same in itertools.groupby(text)]
            again = resumed.next_window()
            assert again is not None and again.lengths == window.lengths
        assert sum(stream.rest().lengths) == len(stream.rest().tokens) <= seq_len


def test_tok_double_bos_first_window_has_exactly_one() -> None:
    stream = PackedStream(reader(["hello", "you"]), lambda text: document_tokens(BYTES, text), 11)
    window = stream.next_window()
    assert window is not None
    assert window.tokens.tolist() == [256, *b"hello", 257, 256, *b"you", 257]


def test_epochs_are_shuffled_anew_and_hold_each_document_once() -> None:
    texts: list[str | None] = [f"{i:03}" for i in range(100)]
    source = reader(texts, shuffle=True)
    epochs = [[next(source) for _ in range(100)] for _ in range(3)]
    assert all(sorted(epoch) == texts for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert epochs[0] != texts


def test_streams_share_an_epoch_without_overlap() -> None:
    texts: list[str | None] = [f"{i:03}" for i in range(101)]
    training = Training(infinite=False)
    found: list[str] = []
    for stream in range(4):
        part = IndexedReader(Listed(texts), training, BadRowPolicy("skip"), stream, 4, seed=7)
        found += _drain(part)
    assert sorted(found) == texts


def _drain(part: IndexedReader) -> list[str]:
    found = []
    while True:
        try:
            found.append(next(part))
        except StopIteration:
            return found


def test_bad_rows_are_named_and_left_out_or_refused(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("WARNING", logger="titan"):
        assert _drain(reader(["a", None, "b"], infinite=False)) == ["a", "b"]
    assert "listed:2: broken on purpose" in caplog.text
    strict = reader(["a", None, "b"], infinite=False, bad_rows="stop")
    assert next(strict) == "a"
    with pytest.raises(UserError, match=r"listed:2: broken on purpose.*bad_rows"):
        next(strict)


def test_data_tiny_without_any_usable_text_is_an_error_not_a_loop() -> None:
    with pytest.raises(UserError, match="'listed' has no usable document"):
        next(reader(["", None, ""]))


@pytest.mark.parametrize(
    ("documents", "batch", "infinite", "expected"),
    [
        (1, 8, True, 1),
        (16, 8, True, 2),
        (64, 8, True, 8),
        (10_000, 12, True, 12),
        (70, 12, True, 6),
        (10_000, 8, False, 1),
    ],
)
def test_number_of_streams(documents: int, batch: int, infinite: bool, expected: int) -> None:
    assert number_of_streams(Listed(["x"] * documents), batch, infinite=infinite) == expected


# --- several ranks


def texts_for(count: int) -> list[str | None]:
    return ["".join(chr(97 + (i * 7 + j) % 26) for j in range(5 + i * 13 % 40)) for i in range(count)]


def open_loader(source: Source, training: Training, batch: int) -> DataLoader:
    """This rank's loader of global batches of bytes."""
    return DataLoader(
        source,
        BYTES,
        training,
        seed=3,
        global_batch=batch,
        batch_rank=dist.get_rank(),
        batch_degree=dist.get_world_size(),
        group=dist.group.WORLD,
    )


def make_loader(texts: list[str | None], local: int, batch: int, prefetch: int = 2, **settings: Any) -> DataLoader:
    training = Training(**({"seq_len": 16, "local_batch_size": local} | settings))
    training.dataloader.prefetch_factor = prefetch
    return open_loader(Listed(texts), training, batch)


def whole_steps(loader: DataLoader, count: int) -> list[list[list[int]]]:
    """The global batches of some steps: rows of tokens and the last label."""
    steps = []
    for _ in range(count):
        batches = loader.next_step()
        if batches is None:
            break
        rows = torch.cat([torch.cat([b.tokens, b.labels[:, -1:]], dim=1) for b in batches])
        parts = [torch.empty_like(rows) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, rows)
        steps.append(torch.cat(parts).tolist())
    return steps


def take(
    documents: int, local: int, counts: list[int], state: Any = None, **settings: Any
) -> tuple[list[Any], dict[str, Any]]:
    """Some steps, resumed anew before each further count; then the position."""
    steps = []
    for count in counts:
        loader = make_loader(texts_for(documents), local, 8, **settings)
        if state is not None:
            loader.load_state_dict(state)
        steps += whole_steps(loader, count)
        state = loader.state_dict()
        loader.close()
    return steps, state


@pytest.mark.parametrize("documents", [3, 30, 200])  # one stream, a few, one for each row
def test_data_reshard_resume_and_second_resume(worlds: Worlds, documents: int) -> None:
    """Same rows on 1, 2, 4 ranks, with accumulation, across epochs, after resumes on other numbers of ranks."""
    straight, end = worlds(1).run(take, documents, 8, [12])[0]
    assert len({str(step) for step in straight}) == 12
    for ranks, local in ((2, 4), (2, 1), (4, 2), (4, 1)):
        assert worlds(ranks).run(take, documents, local, [12])[0] == (straight, end)
    first, state = worlds(4).run(take, documents, 2, [4])[0]
    second, state = worlds(2).run(take, documents, 1, [1, 3], state)[0]
    third, state = worlds(1).run(take, documents, 8, [4], state)[0]
    assert first + second + third == straight
    assert state == end


def test_prefetching_changes_nothing(worlds: Worlds) -> None:
    loaded = [worlds(2).run(take, 30, 2, [3, 3], prefetch=prefetch)[0] for prefetch in (0, 1, 5)]
    assert loaded[0] == loaded[1] == loaded[2]


def position_after(steps: int, put_back: bool) -> Any:
    loader = make_loader(texts_for(30), 2, 8)
    for _ in range(steps):
        loader.next_step()
    if put_back:
        loader.put_back()
    state = loader.state_dict()
    loader.close()
    return state


def test_a_step_that_is_put_back_counts_as_unread(worlds: Worlds) -> None:
    """Such as one that was read when the run was asked to end."""
    for steps in (1, 3):
        assert worlds(2).run(position_after, steps, True) == worlds(2).run(position_after, steps - 1, False)


def until_the_end(documents: int) -> tuple[list[int], int]:
    """Steps until all ranks agree that the data ended."""
    from titan.training.step import agree_on_step

    loader = make_loader(texts_for(documents), 1, 4, infinite=False)
    totals = []
    while not (agreed := agree_on_step(loader.next_step(), 1, stop=False)).data_ended:
        totals.append(agreed.valid_tokens)
    assert agree_on_step(loader.next_step(), 1, stop=False).data_ended
    return totals, sum(len(text) + 2 for text in texts_for(documents))


def test_data_finite_end(worlds: Worlds) -> None:
    for ranks in (1, 2, 4):
        for totals, tokens in worlds(ranks).run(until_the_end, 9):
            assert len(totals) == (tokens - 1) // 16 // 4
            assert set(totals) == {4 * 16}


def refused(change: dict[str, Any], documents: int = 30, batch: int = 8) -> str:
    _, state = take(30, 8, [1])
    loader = make_loader(texts_for(documents), batch, batch, **change)
    try:
        loader.load_state_dict(state)
    except UserError as error:
        return str(error)
    return ""


def test_a_position_of_other_data_is_refused(worlds: Worlds) -> None:
    run: Callable[..., list[str]] = worlds(1).run
    assert run(refused, {}) == [""]
    assert "documents:" in run(refused, {}, documents=31)[0]
    assert "shuffle: True then, False now" in run(refused, {"shuffle": False})[0]
    assert "it is 3, nearest: 2" in run(refused, {}, batch=3)[0]
    assert run(refused, {}, batch=4) == [""]


def background_error() -> str:
    loader = make_loader(["a" * 100, None] * 40, 2, 4, bad_rows="stop")
    try:
        whole_steps(loader, 50)
    except UserError as error:
        return str(error)
    return ""


def test_an_error_of_the_background_thread_reaches_the_loop(worlds: Worlds) -> None:
    assert all("broken on purpose" in text for text in worlds(2).run(background_error))


def test_data_file_order(worlds: Worlds, tmp_path: Path) -> None:
    """Every file is read exactly once an epoch, whatever order the folder lists them in."""
    for name in ("b", "e", "a", "d", "c"):
        (tmp_path / f"{name}.txt").write_text(name * 20)
    for ranks in (1, 2, 4):
        (found,) = set(worlds(ranks).run(_letters_of_an_epoch, str(tmp_path)))
        assert found == "".join(sorted(letter * 20 for letter in "abcde"))


def _letters_of_an_epoch(folder: str) -> str:
    training = Training(dataset="text", dataset_path=folder, seq_len=1, local_batch_size=1, infinite=False)
    loader = DataLoader(
        open_documents(training),
        BYTES,
        training,
        seed=0,
        global_batch=dist.get_world_size(),
        batch_rank=dist.get_rank(),
        batch_degree=dist.get_world_size(),
        group=dist.group.WORLD,
    )
    rows = [token for step in whole_steps(loader, 10**6) for row in step for token in row[1:]]
    return "".join(sorted(chr(token) for token in rows if token < 256))
