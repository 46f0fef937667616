"""Arrow tables, memory-mapped: parquet files, and what `save_to_disk` of the datasets library wrote."""

import glob
import itertools
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from titan.config.errors import UserError
from titan.config.job_config import Training
from titan.data.documents import BadRow, Documents, locate, require_text
from titan.data.files import files_fingerprint, find_files


def open_parquet(training: Training) -> Documents:
    """The parquet files at `training.dataset_path`.

    Raises:
        UserError: as `find_files`, or a file can't be read or lacks the text column.
    """
    import datasets
    import pyarrow.parquet

    files = find_files(training)
    rows = []
    for where, file in files:
        try:
            metadata = pyarrow.parquet.ParquetFile(file)
        except pyarrow.ArrowInvalid as error:
            raise UserError(f"{file} can't be read as parquet: {error}") from error
        require_column(str(file), metadata.schema_arrow.names, training.text_field)
        rows.append((where, metadata.metadata.num_rows))
    try:
        table = datasets.load_dataset(
            "parquet", data_files=[glob.escape(str(file)) for _, file in files], split="train"
        )
    except Exception as error:  # whatever datasets or Arrow make of a file whose columns differ, a full disk, …
        raise UserError(f"{training.dataset_path} can't be read as parquet: {root_cause(error)}") from error
    fingerprint = files_fingerprint(files, "parquet", training.text_field)
    return _TableDocuments(table, training.text_field, "parquet", fingerprint, rows)


def is_saved(training: Training) -> bool:
    """Whether `training.dataset_path` is a folder for `open_saved`."""
    if not training.dataset_path:
        return False
    folder = Path(training.dataset_path).expanduser()
    return (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file()


def open_saved(training: Training) -> Documents:
    """A folder that `Dataset.save_to_disk` or `DatasetDict.save_to_disk` wrote; of the latter, the configured split.

    Raises:
        UserError: it can't be read, or has no such split or text column.
    """
    import datasets

    folder, split = Path(training.dataset_path or "").expanduser(), training.dataset_split
    if (folder / "dataset_dict.json").is_file():
        if not (folder / split).is_dir():
            splits = json.loads((folder / "dataset_dict.json").read_bytes())["splits"]
            raise UserError(f"training.dataset_split = {split!r}, but {folder} has {', '.join(splits)}.")
        folder = folder / split
    try:
        table = datasets.load_from_disk(folder)
    except Exception as error:  # whatever datasets or Arrow make of a damaged folder
        raise UserError(f"{folder} can't be read as a saved dataset: {root_cause(error)}") from error
    parts = [Path(part["filename"]) for part in table.cache_files]
    fingerprint = files_fingerprint([(part.name, part) for part in parts], "saved", len(table), training.text_field)
    return _TableDocuments(table, training.text_field, training.dataset, fingerprint, [(folder.name, len(table))])


class _TableDocuments:
    """A column of a memory-mapped table.

    Args:
        table: a `datasets.Dataset`.
        field: its text column.
        name, fingerprint: see `Documents`.
        files: the names of the files that its rows come from, in order, and how many rows each has.
    """

    def __init__(self, table: Any, field: str, name: str, fingerprint: str, files: list[tuple[str, int]]) -> None:
        require_column(name, table.column_names, field)
        self._column = table.select_columns([field])
        self._field = field
        self._files = [where for where, _ in files]
        self._ends = list(itertools.accumulate(rows for _, rows in files))
        self.name = name
        self.fingerprint = fingerprint

    def __len__(self) -> int:
        return len(self._column)

    def __getitem__(self, i: int) -> str:
        file, row = locate(i, self._ends)
        where = f"{self._files[file]} row {row}"
        try:
            value = self._column[i][self._field]
        except UnicodeDecodeError as error:
            raise BadRow(where, f"not UTF-8: {error}") from None
        return require_text(value, self._field, where)


def require_column(name: str, columns: Iterable[str], field: str) -> None:
    """Raise UserError when the text field is none of a table's columns."""
    if field not in columns:
        raise UserError(
            f"training.text_field = {field!r} isn't a column of {name}, which has {', '.join(columns) or 'none'}."
        )


def root_cause(error: BaseException) -> str:
    """The innermost reason of an exception, in a line: datasets wraps the telling one in a general one."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {str(error).strip()}"
