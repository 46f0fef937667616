"""Which files a path names, in which order, and what is refused."""

import glob
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.data.tiny_data import documents, json_lines, texts, write
from titan.config.errors import UserError
from titan.config.job_config import Training
from titan.data.files import find_files, matching_paths


def test_wish_localdata_relative_path_and_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, {"data/a.txt": "A"})
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    expected = documents("text", tmp_path / "data").fingerprint
    for path in ("data", "data/", "./data", "~/data", "data/*", "dat?/*"):
        assert texts(documents("text", path)) == ["A"]
    assert documents("text", "data").fingerprint == expected


def test_data_file_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The order is that of the names, each file once, whatever order the file system lists them in."""
    names = [f"{folder}{i}.jsonl" for folder in ("", "b/", "a/") for i in range(5)]
    write(tmp_path, {name: json_lines([name]) for name in names})
    os.symlink(tmp_path, tmp_path / "a" / "upwards")
    plain_walk, plain_glob = os.walk, glob.iglob

    def shuffled_walk(folder: Path, **options: Any) -> Iterator[tuple[str, list[str], list[str]]]:
        for parent, folders, files in plain_walk(folder, **options):
            random.shuffle(folders)
            random.shuffle(files)
            yield parent, folders, files

    monkeypatch.setattr(os, "walk", shuffled_walk)
    monkeypatch.setattr(glob, "iglob", lambda *a: 2 * random.sample(found := list(plain_glob(*a)), len(found)))
    fingerprints = set()
    for seed in range(3):
        random.seed(seed)
        opened = documents("json", tmp_path)
        assert texts(opened) == sorted(names)
        fingerprints.add(opened.fingerprint)
        matched = documents("json", tmp_path / "**" / "*.jsonl")
        assert (texts(matched), matched.fingerprint) == (sorted(names), opened.fingerprint)
    assert len(fingerprints) == 1


def test_a_glob_finds_what_a_walk_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Links upwards aren't followed, any number of them; a file with several names is read under the plainest."""
    monkeypatch.chdir(tmp_path)
    write(tmp_path, {"data/a/b/one.txt": "1", "data/two.txt": "2", "data/.hidden/no.txt": "", "data/.no.txt": ""})
    for i in range(8):  # two of them are enough to keep glob itself busy for years
        os.symlink("..", f"data/a/up{i}")
    os.symlink("../../two.txt", "data/a/b/again.txt")
    os.symlink("a", "data/z")
    for pattern, names in {
        "data/**/*.txt": ["a/b/one.txt", "two.txt"],
        "data/**": ["a/b/one.txt", "two.txt"],
        "**/data/**/b/*.txt": ["data/a/b/again.txt", "data/a/b/one.txt"],
        "data/*/**/*.txt": ["a/b/again.txt", "a/b/one.txt"],
        "data/a/b/**/*.txt": ["again.txt", "one.txt"],
        "data/*/*/*.txt": ["a/b/again.txt", "a/b/one.txt"],
        "data/**/nothing": [],
    }.items():
        for place in (Path(), tmp_path):
            found = list(matching_paths(str(place / pattern)))
            if not names:
                assert found == []
                continue
            files = find_files(Training(dataset="text", dataset_path=str(place / pattern)))
            assert [name for name, _ in files] == names, pattern
            assert {file for _, file in files} <= set(found)


def test_fingerprint(tmp_path: Path) -> None:
    """Of names, sizes and what is read; not of place and age."""
    write(tmp_path, {"a/x.jsonl": json_lines(["one"]), "b/x.jsonl": json_lines(["two"])})
    os.utime(tmp_path / "b/x.jsonl", (1, 1))
    first = documents("json", tmp_path / "a").fingerprint
    assert documents("json", tmp_path / "b").fingerprint == first
    assert documents("json", tmp_path / "a", text_field="other").fingerprint != first
    write(tmp_path, {"b/y.jsonl": json_lines(["three"])})
    assert documents("json", tmp_path / "b").fingerprint != first


@pytest.mark.parametrize("kind", ["text", "json", "parquet"])
def test_data_tiny_no_match(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    for path in ("empty", "missing", "empty/*.jsonl"):
        with pytest.raises(
            UserError, match=rf"dataset_path = '{path.replace('*', '[*]')}' matches no {kind} file"
        ) as caught:
            documents(kind, path)
        assert str(tmp_path / path) in str(caught.value)
    with pytest.raises(UserError, match=rf"training.dataset = '{kind}' needs training.dataset_path"):
        documents(kind, None)


@pytest.mark.parametrize(
    ("dataset", "name", "fix"),
    [
        ("text", "a.jsonl", "Set training.dataset = 'json'"),
        ("text", "a.parquet", "Set training.dataset = 'parquet'"),
        ("json", "a.parquet", "Set training.dataset = 'parquet'"),
        ("json", "a.txt", "Set training.dataset = 'text'"),
        ("parquet", "a.jsonl", "Set training.dataset = 'json'"),
        ("json", "a.jsonl.gz", "Decompress it first"),
        ("text", "a.zst", "Decompress it first"),
    ],
)
def test_wish_localdata_wrong_dataset_name(tmp_path: Path, dataset: str, name: str, fix: str) -> None:
    write(tmp_path, {name: "{}"})
    for path in (name, "a*"):
        with pytest.raises(UserError, match=fix) as caught:
            documents(dataset, tmp_path / path)
        assert name in str(caught.value)


def test_compressed_files_in_a_folder_are_not_left_out(tmp_path: Path) -> None:
    write(tmp_path, {"a.jsonl": json_lines(["a"]), "b.jsonl.gz": b"\x1f\x8b"})
    with pytest.raises(UserError, match=r"b\.jsonl\.gz is compressed"):
        documents("json", tmp_path)
