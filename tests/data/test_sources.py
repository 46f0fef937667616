"""Which dataset a name opens; names that open none."""

from pathlib import Path

import pytest

from tests.data.tiny_data import documents, texts, write
from titan.config.errors import UserError
from titan.config.job_config import Training
from titan.data.sources import open_documents, register_dataset


def test_unknown_dataset(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"'jsno' isn't a dataset. Did you mean json\?.*python_stdlib.*owner/name"):
        open_documents(Training(dataset="jsno"))
    path = write(tmp_path, {"a.jsonl": "{}"}) / "a.jsonl"
    with pytest.raises(UserError, match=r"a\.jsonl' is a path. Give it as training.dataset_path"):
        open_documents(Training(dataset=str(path)))


def test_registered_dataset() -> None:
    class Squares:
        name = "squares"
        fingerprint = "1"

        def __len__(self) -> int:
            return 3

        def __getitem__(self, i: int) -> str:
            return str(i * i)

    register_dataset("test_squares", lambda training: Squares())
    assert texts(documents("test_squares", None)) == ["0", "1", "4"]
    with pytest.raises(ValueError, match="exists already"):
        register_dataset("test_squares", lambda training: Squares())
    with pytest.raises(ValueError, match="exists already"):
        register_dataset("json", lambda training: Squares())
    with pytest.raises(UserError, match="Did you mean test_squares"):
        documents("test_square", None)


@pytest.mark.parametrize(
    ("dataset", "name", "content"),
    [
        ("json", "a.jsonl", ""),
        ("json", "a.jsonl", "\n \n"),
        ("json", "a.json", "[]"),
        ("json", "a.json", ""),
        ("text", "a.txt", ""),
    ],
)
def test_data_tiny_no_document(tmp_path: Path, dataset: str, name: str, content: str) -> None:
    write(tmp_path, {name: content})
    with pytest.raises(UserError, match=rf"training.dataset = '{dataset}' has 0 documents .*{name}.*split 'train'"):
        documents(dataset, tmp_path / name)
