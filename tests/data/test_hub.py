"""Hub datasets, from a local folder: each document once, in an order that resumes exactly."""

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.data.tiny_data import json_lines, write
from titan.config.errors import UserError
from titan.config.job_config import Training
from titan.data import hub
from titan.data.documents import BadRow, DocumentStream, StreamedDocuments
from titan.data.sources import open_documents

pytestmark = pytest.mark.usefixtures("offline")


def streamed(path: Path, **settings: Any) -> StreamedDocuments:
    opened = open_documents(Training(dataset="someone/data", dataset_path=str(path), **settings))
    assert isinstance(opened, StreamedDocuments)
    return opened


@pytest.fixture(params=["jsonl", "parquet"])
def hub_folder(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three shards of 15, 16 and 17 documents, in blocks of 5."""
    import datasets

    monkeypatch.setattr(hub, "_BLOCK", 5)
    for shard in range(3):
        rows = [f"{shard}-{row}" for row in range(15 + shard)]
        if request.param == "jsonl":
            write(tmp_path, {f"data-{shard}.jsonl": json_lines(rows)})
        else:
            datasets.Dataset.from_dict({"text": rows}).to_parquet(tmp_path / f"data-{shard}.parquet")
    return tmp_path


ALL_ROWS = [f"{shard}-{row}" for shard in range(3) for row in range(15 + shard)]


def stream(opened: StreamedDocuments, number: int, count: int, epoch: int = 0, shuffle: bool = True) -> DocumentStream:
    return opened.open(number, count, epoch, seed=5, shuffle=shuffle)


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("count", [1, 2, 3, 4, 7])
def test_data_file_order_streams(hub_folder: Path, count: int, shuffle: bool) -> None:
    """Every document is in exactly one stream, in every epoch, also with more streams than shards."""
    opened = streamed(hub_folder)
    assert opened.num_shards == 3
    for epoch in (0, 1):
        parts = [list(stream(opened, number, count, epoch, shuffle)) for number in range(count)]
        assert sorted(row for part in parts for row in part) == sorted(ALL_ROWS)
        assert all(parts)


def test_stream_order(hub_folder: Path) -> None:
    opened = streamed(hub_folder)
    assert list(stream(opened, 0, 1, shuffle=False)) == list(stream(opened, 0, 1, 1, shuffle=False)) == ALL_ROWS
    orders = [list(stream(opened, 0, 1, epoch)) for epoch in range(3)]
    assert orders[0] == list(stream(opened, 0, 1, 0))
    assert len({tuple(order) for order in [*orders, ALL_ROWS]}) == 4
    assert list(opened.open(0, 1, 0, seed=6, shuffle=True)) != orders[0]


@pytest.mark.parametrize(("epoch", "shuffle"), [(0, False), (2, True)])
@pytest.mark.parametrize(("number", "count"), [(0, 1), (1, 2), (3, 7)])
def test_stream_resumes_exactly(hub_folder: Path, number: int, count: int, epoch: int, shuffle: bool) -> None:
    """From every document on; with a second stop after the first resume; through JSON."""
    opened, anew = streamed(hub_folder), streamed(hub_folder)
    whole = list(stream(opened, number, count, epoch, shuffle))
    straight = stream(opened, number, count, epoch, shuffle)
    for done in range(len(whole) + 1):
        state = json.loads(json.dumps(straight.state_dict()))
        resumed = stream(opened, number, count, epoch, shuffle)
        resumed.load_state_dict(state)
        again = [next(resumed) for _ in range(min(3, len(whole) - done))]
        twice = stream(anew, number, count, epoch, shuffle)
        twice.load_state_dict(resumed.state_dict())
        assert again + list(twice) == whole[done:], done
        if done < len(whole):
            assert next(straight) == whole[done]
    with pytest.raises(StopIteration):
        next(straight)
    with pytest.raises(StopIteration):
        next(straight)


def test_stream_refuses_another_stream_s_position(hub_folder: Path) -> None:
    opened = streamed(hub_folder)
    state = stream(opened, 0, 2).state_dict()
    for other in (stream(opened, 1, 2), stream(opened, 0, 3), stream(opened, 0, 2, 1), stream(opened, 0, 2, 0, False)):
        with pytest.raises(ValueError, match="isn't one of the stream"):
            other.load_state_dict(state)


def test_stream_bad_rows(tmp_path: Path) -> None:
    write(tmp_path, {"a.jsonl": '{"text": "a"}\n{"text": null}\n{"text": "b"}\n'})
    rows = stream(streamed(tmp_path), 0, 1, shuffle=False)
    assert next(rows) == "a"
    before = rows.state_dict()
    for _ in range(2):
        with pytest.raises(BadRow, match="someone/data shard 0 row 1: 'text' is null"):
            next(rows)
        assert list(rows) == ["b"]
        rows.load_state_dict(before)


def test_hub_mistakes(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"training.dataset = 'nobody/nothing' .*split 'train'.*When offline"):
        open_documents(Training(dataset="nobody/nothing"))
    with pytest.raises(UserError, match=r"'allenai/c4' \(from allenai/c4, subset en"):
        open_documents(Training(dataset="c4"))
    write(tmp_path, {"a.jsonl": json_lines(["a"])})
    with pytest.raises(UserError, match=r"Bad split: dev. Available splits: \['train'\]"):
        streamed(tmp_path, dataset_split="dev")
    with pytest.raises(UserError, match=r"subset fr, .*'fr' not found"):
        streamed(tmp_path, dataset_subset="fr")
    with pytest.raises(UserError, match=r"text_field = 'body' isn't a column of someone/data, which has text"):
        streamed(tmp_path, text_field="body")
    with pytest.raises(ValueError, match="stream 2 of 2"):
        stream(streamed(tmp_path), 2, 2)


def test_hub_damaged_shard_is_named(tmp_path: Path) -> None:
    write(tmp_path, {"a.jsonl": json_lines(["a"]), "b.jsonl": json_lines(["b"])})
    opened = streamed(tmp_path)
    write(tmp_path, {"b.jsonl": '{"text": '})
    assert next(stream(opened, 0, 2, shuffle=False)) == "a"
    with pytest.raises(UserError, match="someone/data: shard 1 can't be read after row 0"):
        next(stream(opened, 1, 2, shuffle=False))


def test_c4_from_a_local_copy(tmp_path: Path) -> None:
    write(tmp_path, {"a.jsonl": json_lines(["a"])})
    opened = open_documents(Training(dataset="c4", dataset_path=str(tmp_path)))
    assert isinstance(opened, StreamedDocuments)
    assert opened.name == "allenai/c4"
    assert list(stream(opened, 0, 1)) == ["a"]


# --- a network that fails


class FlakyRows:
    """What `datasets` is to a stream: rows with a position, whose network fails at random places."""

    def __init__(self, rows: list[dict[str, Any]], failures: Callable[[], BaseException | None]) -> None:
        self.rows, self.failures, self.next = rows, failures, 0

    def __iter__(self) -> Iterator[dict[str, Any]]:
        while self.next < len(self.rows):
            if (failure := self.failures()) is not None:
                raise failure
            self.next += 1
            yield self.rows[self.next - 1]

    def state_dict(self) -> dict[str, Any]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.next = state["next"]


def busy(status: int) -> Exception:
    import requests

    response = requests.Response()
    response.status_code = status
    return requests.HTTPError(f"{status} from the hub", response=response)


def flaky_stream(
    monkeypatch: pytest.MonkeyPatch, failures: Callable[[], BaseException | None], shuffle: bool = True
) -> tuple[DocumentStream, list[float]]:
    """A stream of two shards of 23 rows in blocks of 5, and the waits between its attempts."""
    waits: list[float] = []
    monkeypatch.setattr(hub, "_BLOCK", 5)
    monkeypatch.setattr(hub.time, "sleep", waits.append)
    monkeypatch.setattr(
        hub._HubDocuments,
        "shard",
        lambda documents, shard, part, parts: FlakyRows([{"text": f"{shard}-{row}"} for row in range(23)], failures),
    )

    class Source:
        num_shards = 2

    documents = hub._HubDocuments(Source(), "text", "someone/data", ())
    return documents.open(0, 1, 0, seed=1, shuffle=shuffle), waits


def test_hub_retry_loses_and_repeats_nothing(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    calm, _ = flaky_stream(monkeypatch, lambda: None)
    expected = list(calm)
    assert sorted(expected) == sorted(f"{shard}-{row}" for shard in range(2) for row in range(23))
    for seed in range(10):
        draw = random.Random(seed)

        def failure(draw: random.Random = draw) -> BaseException | None:
            kinds = [ConnectionResetError("reset"), TimeoutError("slow"), busy(503), busy(429)]
            return draw.choice(kinds) if draw.random() < 0.05 else None

        rows, waits = flaky_stream(monkeypatch, failure)
        found: list[str] = []
        while len(found) < len(expected):  # and with a resume behind every few documents
            found += [next(rows) for _ in range(min(3, len(expected) - len(found)))]
            state = rows.state_dict()
            rows, more = flaky_stream(monkeypatch, failure)
            rows.load_state_dict(state)
            waits += more
        assert found == expected
        assert next(rows, None) is None
    assert "can't be read after row" in caplog.text and "tried again in" in caplog.text


def test_hub_retry_backs_off_and_gives_up(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, waits = flaky_stream(monkeypatch, lambda: ConnectionResetError("unplugged"))
    with pytest.raises(
        UserError, match=r"someone/data: shard \d can't be read after row 0: ConnectionResetError: unpl"
    ):
        next(rows)
    assert len(waits) == 6
    assert all(0.5 * longest <= wait <= longest for wait, longest in zip(waits, hub._RETRY_SECONDS, strict=True))
    assert sum(hub._RETRY_SECONDS) < 100


def test_hub_retry_is_for_what_may_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    for error in (busy(404), busy(403), ValueError("broken file"), FileNotFoundError("no such file")):
        rows, waits = flaky_stream(monkeypatch, lambda error=error: error)  # type: ignore[misc]
        with pytest.raises(UserError, match="can't be read after row 0"):
            next(rows)
        assert waits == []
