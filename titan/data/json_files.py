"""JSON files: an object a line, or one array of objects; a document is the text in one field of an object."""

import codecs
import functools
import json
from collections.abc import Callable
from pathlib import Path

from titan.config.errors import UserError
from titan.config.job_config import Training
from titan.data.documents import BadRow, Documents, require_text
from titan.data.files import ending, files_fingerprint, find_files
from titan.data.text_files import LineRows, OpenFile, RowDocuments, Rows, decode


def open_json(training: Training) -> Documents:
    """The JSON files at `training.dataset_path`. Raises UserError as `find_files`, and for a file that isn't JSON."""
    files = find_files(training)
    parts = [_open_rows(where, file, training.text_field) for where, file in files]
    return RowDocuments(parts, "json", files_fingerprint(files, "json", training.text_field))


def _open_rows(where: str, file: Path, field: str) -> Rows:
    """A file of an object a line, or of one array: the first character tells, where the ending leaves it open."""
    if ending(file) not in (".jsonl", ".ndjson"):
        with file.open("rb") as opened:
            start = opened.read(4096).removeprefix(codecs.BOM_UTF8).lstrip()
        if start.startswith(b"["):
            return _ArrayRows(where, file, field)
        if start and not start.startswith(b"{"):
            raise UserError(
                f"{file} isn't JSON: it starts with {start[:16]!r}; expected an array, or an object a line."
            )
    return LineRows(where, file, functools.partial(_parse_line, field))


class _ArrayRows:
    """The elements of a JSON file that is one array. They are held in memory."""

    def __init__(self, where: str, file: Path, field: str) -> None:
        self._where = where
        self._field = field
        try:
            self._rows = json.loads(file.read_bytes().decode("utf-8-sig"))
        except (ValueError, RecursionError) as error:
            raise UserError(f"{file} starts as a JSON array but can't be read: {error}") from error

    def __len__(self) -> int:
        return len(self._rows)

    def read(self, i: int, open_file: Callable[[Path], OpenFile]) -> str:
        return _text_of(self._rows[i], self._field, f"{self._where}[{i}]")


def _parse_line(field: str, raw: bytes, where: str) -> str:
    try:
        row = json.loads(decode(raw, where))
    except json.JSONDecodeError as error:  # its own text says "line 1", of the one line that it saw
        raise BadRow(where, f"broken JSON: {error.msg} at column {error.colno}") from None
    except (ValueError, RecursionError) as error:
        raise BadRow(where, f"broken JSON: {error}") from None
    return _text_of(row, field, where)


def _text_of(row: object, field: str, where: str) -> str:
    """The text of a parsed row."""
    if not isinstance(row, dict):
        raise BadRow(where, f"a JSON {type(row).__name__}, not an object")
    if field not in row:
        raise BadRow(where, f"no key {field!r} (training.text_field); its keys: {', '.join(row) or 'none'}")
    return require_text(row[field], field, where)
