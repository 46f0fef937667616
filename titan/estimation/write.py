"""Files that settings of [estimation] name."""

from __future__ import annotations

from pathlib import Path

from titan.config.errors import UserError


def write_text(key: str, target: str, text: str) -> None:
    """Write a file that a setting names.

    Raises:
        UserError: it can't be written.
    """
    try:
        Path(target).expanduser().write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f'{key} = "{target}": {error.strerror}') from error
