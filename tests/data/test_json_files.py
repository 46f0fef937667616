"""JSON lines and arrays by number; bad rows are named."""

import random
import threading
import time
from pathlib import Path

import pytest

from tests.data.tiny_data import documents, json_lines, texts, write
from titan.config.errors import UserError
from titan.data.documents import BadRow


def test_wish_localdata_jsonl(tmp_path: Path) -> None:
    write(tmp_path, {"data/1.jsonl": '{"text": "a", "n": 1}\n\n{"text": "b"}', "data/0.jsonl": '{"text": "zero"}\r\n'})
    assert texts(documents("json", tmp_path / "data/*.jsonl")) == ["zero", "a", "b"]
    assert texts(documents("json", tmp_path)) == ["zero", "a", "b"]
    with pytest.raises(BadRow, match=r"1\.jsonl:3: no key 'n' \(training\.text_field\); its keys: text"):
        documents("json", tmp_path / "data/1.jsonl", text_field="n")[1]


@pytest.mark.parametrize("content", ['[{"text": "a"}, {"text": "b"}]', '  {"text": "a"}\n\n{"text": "b"}\n'])
def test_wish_localdata_json_array_or_lines(tmp_path: Path, content: str) -> None:
    for mark in ("", "\ufeff"):
        write(tmp_path, {"data.json": mark + content})
        assert texts(documents("json", tmp_path / "data.json")) == ["a", "b"]


def test_random_access_over_many_files(tmp_path: Path) -> None:
    """More files than are kept open, from threads at the same time."""
    rows = {f"{i:03}.jsonl": [f"{i}-{j}" for j in range(i % 4)] for i in range(150)}
    write(tmp_path, {name: json_lines(content) for name, content in rows.items()})
    opened = documents("json", tmp_path)
    expected = [row for name in sorted(rows) for row in rows[name]]
    wrong: list[int] = []

    def read(seed: int) -> None:
        for i in random.Random(seed).sample(range(len(expected)), len(expected)):
            if opened[i] != expected[i]:
                wrong.append(i)

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    for i in (-1, len(expected)):
        with pytest.raises(IndexError):
            opened[i]


def test_large_index_is_quick(tmp_path: Path) -> None:
    write(tmp_path, {"a.jsonl": json_lines([f"row {i} " + "x" * 100 for i in range(100_000)])})
    start = time.perf_counter()
    opened = documents("json", tmp_path)
    assert time.perf_counter() - start < 5
    assert len(opened) == 100_000
    assert opened[99_999].startswith("row 99999 ")


BAD_LINES = {
    b'{"text": "\xff\xfe"}': "not UTF-8: .*0xff in position 10",
    b'{"text": "a\\ud800b"}': "'text' can't be written as UTF-8: .*surrogates not allowed",
    b'{"text": "a"': "broken JSON: .* at column 13",
    b'["a"]': "a JSON list, not an object",
    b'"a"': "a JSON str, not an object",
    b'{"txt": "a", "id": 1}': r"no key 'text' \(training.text_field\); its keys: txt, id",
    b"{}": "its keys: none",
    b'{"text": 5}': "'text' is int, not a string",
    b'{"text": null}': "'text' is null, not a string",
    b"[" * 100_000: "broken JSON",
    b'{"text": ' + b"9" * 5000 + b"}": "broken JSON|not a string",
    b"\x00": "broken JSON",
}


@pytest.mark.parametrize("line", BAD_LINES)
def test_tok_bad_utf8_and_other_bad_rows(tmp_path: Path, line: bytes) -> None:
    good = b'{"text": "good"}\n'
    write(tmp_path, {"file.jsonl": good + b"\n" + line + b"\n" + good})
    opened = documents("json", tmp_path)
    assert len(opened) == 3
    with pytest.raises(BadRow, match=BAD_LINES[line]) as caught:
        opened[1]
    assert caught.value.where == "file.jsonl:3"
    assert opened[0] == opened[2] == "good"


def test_bad_elements_of_an_array(tmp_path: Path) -> None:
    write(tmp_path, {"a.json": r'[{"text": "a"}, 7, {"text": "\udc00"}]'})
    opened = documents("json", tmp_path)
    for i, reason in ((1, "a JSON int"), (2, "surrogates")):
        with pytest.raises(BadRow, match=rf"^a.json\[{i}\]: .*{reason}"):
            opened[i]


def test_json_that_is_none(tmp_path: Path) -> None:
    write(tmp_path, {"a.json": "text,n\na,1\n", "b.json": '[{"text": "a"}, {"text"'})
    with pytest.raises(UserError, match=r"a\.json isn't JSON: it starts with b'text,n"):
        documents("json", tmp_path / "a.json")
    with pytest.raises(UserError, match=r"b\.json starts as a JSON array but can't be read: .*column"):
        documents("json", tmp_path / "b.json")


def test_data_tiny_one_line(tmp_path: Path) -> None:
    assert texts(documents("json", write(tmp_path, {"a.jsonl": '{"text": "x"}'}))) == ["x"]
