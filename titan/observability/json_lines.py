"""Files of one JSON object a line, which a kill may cut off anywhere."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """The whole lines with a `step`, in order; none when there is no such file."""
    if path.exists():
        with path.open("rb") as file:
            for line in file:
                if (row := _row(line)) is not None:
                    yield row


def drop_after(path: Path, last_step: int) -> None:
    """Keep only whole lines up to a step. A kill leaves the file as it was or as it should be, nothing between."""
    temporary = path.with_name(path.name + ".tmp")
    with path.open("rb") as old, temporary.open("wb") as new:
        new.writelines(line for line in old if (row := _row(line)) is not None and row["step"] <= last_step)
        new.flush()
        os.fsync(new.fileno())
    temporary.replace(path)


def set_aside(path: Path) -> None:
    """Rename a file to the first free `<stem>.N<suffix>`; one that is empty or missing is left."""
    if not path.exists() or path.stat().st_size == 0:
        return
    candidates = (path.with_name(f"{path.stem}.{number}{path.suffix}") for number in itertools.count(1))
    path.rename(next(candidate for candidate in candidates if not candidate.exists()))


def _row(line: bytes) -> dict[str, Any] | None:
    if not line.endswith(b"\n"):  # the kill came in the middle of the line
        return None
    try:
        row = json.loads(line)
        return row if isinstance(row["step"], int) else None
    except (ValueError, KeyError, TypeError):  # not a line of ours, or damaged
        return None
