"""Parquet files and saved datasets by row; null rows and missing columns are named."""

import shutil
from pathlib import Path

import pytest

from tests.data.tiny_data import documents, texts, write
from titan.config.errors import UserError
from titan.data.documents import BadRow

pytestmark = pytest.mark.usefixtures("offline")


@pytest.fixture
def parquet(tmp_path: Path) -> Path:
    import pyarrow as pa
    import pyarrow.parquet

    for name, values in (("b", ["b0", None, "b2"]), ("a", ["a0"]), ("sub/c", ["c0"])):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        pyarrow.parquet.write_table(
            pa.table({"text": pa.array(values, pa.string()), "n": list(range(len(values)))}),
            tmp_path / f"{name}.parquet",
        )
    return tmp_path


def test_wish_localdata_parquet(parquet: Path) -> None:
    opened = documents("parquet", parquet)
    assert len(opened) == 5
    assert [opened[i] for i in (0, 1, 3, 4)] == ["a0", "b0", "b2", "c0"]
    with pytest.raises(BadRow, match=r"^b.parquet row 1: 'text' is null"):
        opened[2]
    assert texts(documents("parquet", parquet / "a.parquet")) == ["a0"]
    with pytest.raises(UserError, match=r"text_field = 'body' isn't a column of .*a.parquet, which has text, n"):
        documents("parquet", parquet, text_field="body")
    with pytest.raises(BadRow, match="'n' is int"):
        documents("parquet", parquet, text_field="n")[0]


def test_parquet_name_with_wildcards(parquet: Path) -> None:
    shutil.copy(parquet / "a.parquet", parquet / "x[1].parquet")
    assert texts(documents("parquet", parquet / "x[1].parquet")) == ["a0"]


def test_parquet_broken(tmp_path: Path) -> None:
    write(tmp_path, {"a.parquet": "no parquet at all"})
    with pytest.raises(UserError, match=r"a.parquet can't be read as parquet"):
        documents("parquet", tmp_path)


@pytest.mark.parametrize("kind", ["text", "json", "parquet"])
def test_wish_localdata_save_to_disk(tmp_path: Path, kind: str) -> None:
    import datasets

    table = datasets.Dataset.from_dict({"text": ["a", "b"], "body": ["c", None]})
    table.save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"train": table, "test": table.select([1])}).save_to_disk(tmp_path / "dict")
    assert texts(documents(kind, tmp_path / "one")) == ["a", "b"]
    assert texts(documents(kind, tmp_path / "dict")) == ["a", "b"]
    assert texts(documents(kind, tmp_path / "dict", dataset_split="test")) == ["b"]
    with pytest.raises(BadRow, match="one row 1: 'body' is null"):
        documents(kind, tmp_path / "one", text_field="body")[1]
    with pytest.raises(UserError, match=r"dataset_split = 'dev', but .* has train, test"):
        documents(kind, tmp_path / "dict", dataset_split="dev")
    with pytest.raises(UserError, match=r"isn't a column of .*, which has text, body"):
        documents(kind, tmp_path / "one", text_field="nope")
