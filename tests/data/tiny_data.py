"""Small local datasets for tests."""

import json
from pathlib import Path
from typing import Any

from titan.config.job_config import Training
from titan.data.documents import Documents
from titan.data.sources import open_documents


def documents(dataset: str, path: Path | str | None, **settings: Any) -> Documents:
    opened = open_documents(Training(dataset=dataset, dataset_path=None if path is None else str(path), **settings))
    assert isinstance(opened, Documents)
    return opened


def texts(opened: Documents) -> list[str]:
    return [opened[i] for i in range(len(opened))]


def write(folder: Path, contents: dict[str, str | bytes]) -> Path:
    for name, content in contents.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content.encode() if isinstance(content, str) else content)
    return folder


def json_lines(rows: list[str]) -> str:
    return "".join(json.dumps({"text": row}) + "\n" for row in rows)
