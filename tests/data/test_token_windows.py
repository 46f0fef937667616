"""Windows of token files: all of them, once an epoch, in an order that one number is a position in."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.data.test_loader import open_loader, whole_steps
from tests.data.test_prepare import BYTES, prepared, rows_file
from tests.distributed.world import Worlds
from titan.config.errors import UserError
from titan.config.job_config import Training
from titan.data.loader import DataLoader
from titan.data.packing import PackedStream
from titan.data.readers import BadRowPolicy, open_reader
from titan.data.sources import open_documents, open_source
from titan.data.token_files import TokenFiles
from titan.data.token_windows import TokenWindows, windows_of
from titan.data.tokenizer import document_tokens


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shards of about 1,300 tokens."""
    place = tmp_path_factory.mktemp("prepared")
    rows_file(place, [f"{i} " * (i * 7 % 23 + 1) for i in range(150)])
    prepared(place / "rows.jsonl", place / "tokens", shard_tokens=1000)
    return place


def windows(files: TokenFiles, seq_len: int = 16, **settings: Any) -> TokenWindows:
    return TokenWindows(files, seq_len, **({"shuffle": True, "infinite": True, "seed": 3} | settings))


def take(stream: TokenWindows, count: int) -> list[list[int]]:
    taken = stream.take(count, range(count))
    assert taken is not None
    return [window.tokens.tolist() for window in taken]


def test_in_order_they_are_those_that_text_is_packed_to(folder: Path) -> None:
    """As a run on the text itself makes them, with one stream and without a shuffle; the last partial one left out."""
    training = Training(dataset="json", dataset_path=str(folder / "rows.jsonl"), shuffle=False, infinite=False)
    files = TokenFiles(folder / "tokens")
    for seq_len in (1, 16, 333):
        reader = open_reader(open_documents(training), training, BadRowPolicy("skip"), 0, 1, 0)
        packed = PackedStream(reader, lambda text: document_tokens(BYTES, text), seq_len)
        stream = windows(files, seq_len, shuffle=False, infinite=False)
        count = windows_of(files, seq_len)
        assert count * seq_len + 1 <= len(files) < (count + 1) * seq_len + 1
        expected = packed.take(count, range(count))
        assert expected is not None
        assert take(stream, count) == [window.tokens.tolist() for window in expected]
        with_documents = windows(files, seq_len, shuffle=False, infinite=False, find_documents=True)
        found = with_documents.take(count, range(count))
        assert found is not None
        assert [window.lengths for window in found] == [window.lengths for window in expected]
        assert all(sum(window.lengths) == seq_len + 1 for window in expected)
        assert packed.take(1, range(1)) is None
        assert stream.take(1, range(1)) is None


def test_every_epoch_has_each_window_once_in_an_order_of_its_own(folder: Path) -> None:
    files = TokenFiles(folder / "tokens")
    count = windows_of(files, 16)
    in_order = take(windows(files, shuffle=False), count)
    stream = windows(files)
    epochs = [take(stream, count) for _ in range(3)]
    assert all(sorted(epoch) == sorted(in_order) for epoch in epochs)
    assert all(one != other for one, other in itertools.combinations([in_order, *epochs], 2))
    assert take(windows(files, seed=4), count) != epochs[0]


def test_a_position_is_one_number_and_unwanted_windows_are_passed(folder: Path) -> None:
    files = TokenFiles(folder / "tokens")
    count = windows_of(files, 16)
    straight = take(windows(files), count + 20)
    for start in (0, 1, count - 3, count, count + 5):  # also over the end of an epoch
        stream = windows(files)
        stream.load_state_dict(json.loads(json.dumps({"window": start})))
        part = stream.take(10, range(2, 7))
        assert part is not None
        assert [window.tokens.tolist() for window in part] == straight[start + 2 : start + 7]
        assert stream.state_dict() == {"window": start + 10}


# --- several ranks


def make_loader(folder: str, local: int, batch: int, workers: int = 0, **settings: Any) -> DataLoader:
    training = Training(
        **({"dataset": "tokens", "dataset_path": folder, "seq_len": 16, "local_batch_size": local} | settings)
    )
    training.dataloader.num_workers = workers
    return open_loader(open_source(training, BYTES), training, batch)


def steps(folder: str, local: int, counts: list[int], state: Any = None, **settings: Any) -> tuple[list[Any], Any]:
    found = []
    for count in counts:
        loader = make_loader(folder, local, 8, **settings)
        if state is not None:
            loader.load_state_dict(state)
        found += whole_steps(loader, count)
        state = loader.state_dict()
        loader.close()
    return found, state


def test_data_reshard_resume_of_token_files(worlds: Worlds, folder: Path) -> None:
    tokens = str(folder / "tokens")
    straight, end = worlds(1).run(steps, tokens, 8, [90])[0]  # over an epoch's end
    assert end["streams"] == [{"window": 720}]
    assert 8 * len(straight) > windows_of(TokenFiles(folder / "tokens"), 16)
    for ranks, local in ((2, 4), (4, 1)):
        assert worlds(ranks).run(steps, tokens, local, [90])[0] == (straight, end)
    first, state = worlds(4).run(steps, tokens, 2, [30])[0]
    second, state = worlds(2).run(steps, tokens, 1, [1, 29], state)[0]
    third, state = worlds(1).run(steps, tokens, 4, [30], state)[0]
    assert first + second + third == straight
    assert state == end


def refused(folder: str, state: Any, **settings: Any) -> str:
    loader = make_loader(folder, 8, 8, **settings)
    try:
        loader.load_state_dict(state)
    except UserError as error:
        return str(error)
    return ""


def test_a_position_with_other_windows_is_refused(worlds: Worlds, folder: Path) -> None:
    tokens = str(folder / "tokens")
    _, state = worlds(1).run(steps, tokens, 8, [2])[0]
    assert worlds(1).run(refused, tokens, state) == [""]
    assert "seq_len: 16 then, 32 now" in worlds(1).run(refused, tokens, state, seq_len=32)[0]
    assert "shuffle: True then" in worlds(1).run(refused, tokens, state, shuffle=False)[0]


def test_finite_token_files_end_on_all_ranks_after_the_last_whole_step(worlds: Worlds, folder: Path) -> None:
    tokens = str(folder / "tokens")
    count = windows_of(TokenFiles(folder / "tokens"), 16)
    for ranks, local in ((1, 8), (4, 2)):
        for found, _ in worlds(ranks).run(steps, tokens, local, [10**4], infinite=False):
            assert len(found) == count // 8


def test_reading_touches_only_what_is_wanted(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = TokenFiles(folder / "tokens")
    read: list[tuple[int, int]] = []

    def counting(start: int, count: int) -> np.ndarray:
        read.append((start, count))
        return TokenFiles.read(files, start, count)

    monkeypatch.setattr(files, "read", counting)
    windows(files, shuffle=False).take(100, range(50, 52))
    assert read == [(50 * 16, 17), (51 * 16, 17)]
